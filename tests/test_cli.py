"""The command line before a run: help, version, and arguments that are written in another way than Hydra's."""

import re
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.commands import launched

from immunization import __version__, cli, run
from immunization.checks import CONF
from immunization.errors import ConfigError
from immunization.models import weights
from immunization.runs.environment import command_of


def said(*arguments: str, status: int = 1) -> str:
    """What `python -m immunization <arguments>` prints in one line."""
    ended = launched(*arguments, cwd=Path())
    assert ended.returncode == status
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def shown() -> str:
    return said("--help", status=0)


def test_help_says_what_this_is_with_examples(shown):
    assert shown.startswith("Model immunization: ")
    for text in ("== Examples ==", "immunize -m method=condition_number,opt_kappa", "sweeps=seeds", "--config-dir"):
        assert text in shown
    assert "powered by Hydra" not in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_help_lists_what_there_is_to_choose_and_no_more(shown):
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra", "hparams"}
    listed = {line.split()[0]: line for line in shown.splitlines() if re.match(r"[a-z_.]+ {2,}\w", line)}
    assert groups <= set(listed)
    assert "hparams" not in shown
    assert "digits*" in listed["dataset"]
    assert "paper/table1_closest" in shown
    assert "table1_closest/" not in shown
    top = {
        key for key, value in yaml.safe_load((CONF / "config.yaml").read_text()).items() if not isinstance(value, dict)
    }
    for key in {*top - {"defaults"}, "checkpoint.every"}:
        assert re.search(rf"^{key}(=\S+)? {{2,}}\w", shown, re.M), key


def test_help_lists_options_of_a_folder_of_ones_own(tmp_path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").touch()
    assert re.search(r"\bmine,", said("--help", "--config-dir", str(tmp_path), status=0))


def test_a_key_of_another_method_is_refused_with_those_that_have_it():
    shown = said("method=forget", "method.combine=worst")
    assert "; method=clamp and condition_number and encoderlock and imma and learning_curve and " in shown


@pytest.mark.parametrize("group", ["model", "optimizer"])
def test_a_run_without_a_group_that_it_needs_is_refused(group, tmp_path):
    assert f"error: {group} names no class: choose {group}=<option>" in said(f"~{group}", f"hydra.run.dir={tmp_path}")


def test_version_is_that_of_this_package():
    assert said("--version", status=0) == f"immunization {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        (["evaluation=[foo]"], "evaluation"),
        (["attack=[foo]"], "attack"),
        (["method=foo"], "method"),
        (["experiment=paper/foo"], "experiment/paper"),
        (["experiment=papr/foo"], "experiment"),
        (["--method", "x"], "method"),
        (["--method=x"], "method"),
    ],
)
def test_options_are_listed_in_one_line(arguments, group):
    options = ", ".join(sorted(path.stem for path in (CONF / group).glob("*.yaml")))
    assert re.fullmatch(rf"error: [^\n]*; available for {group}: {options}\n", said(*arguments))


def test_options_of_a_folder_of_ones_own_are_listed_too(tmp_path, monkeypatch):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").touch()
    for given in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["immunize", "tracker=none", *given, "method=x"])
        with pytest.raises(SystemExit, match=r"available for method: .*, mine, "):
            cli.cli()


def test_flags_may_stand_between_overrides():
    shown = said("dataset.primary=3", "--cfg", "job", "tracker=none", "-p", "dataset", "seed=4", status=0)
    assert "primary: 3" in shown
    assert said("seed=4", "--cfg", "job", "tracker=none", status=0).count("seed: 4") == 1


def test_a_key_with_dashes_is_shown_without():
    assert said("--seed", "3") == "error: --seed: write seed=<value> without dashes\n"
    assert said("--optimizer.lr=3").startswith("error: --optimizer.lr=3: write optimizer.lr=<value> without dashes")


def test_the_hub_is_tried_once_and_shortly(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="the Hugging Face hub does not answer"):
        weights.create("resnet10t", None, True, {})
    assert time.perf_counter() - started < 20  # of which 60 are what its client would take


@pytest.mark.parametrize(
    ("program", "start"),
    [
        ("/venv/bin/immunize", "immunize"),
        ("/a/immunization/__main__.py", "python -m immunization"),
        ("/a/launch.py", "python launch.py"),
    ],
)
def test_the_command_of_a_run_however_it_was_started(tmp_path, program, start):
    (tmp_path / "environment.json").write_text(f'{{"command": "/usr/bin/python {program} seed=1"}}')
    assert command_of(tmp_path) == f"{start} seed=1"


def test_numbers_in_the_place_of_options_are_refused(tmp_path, capsys):
    for words in ("method=closed_form", ["evaluation=[5]"], ["attack=[5]"], ["evaluation=5"], [5]):
        with pytest.raises(ConfigError, match=r"takes the name of an option|must be a list of words"):
            run(words)
    with pytest.raises(ConfigError, match=r"^method takes the name of one option, method=<option>, and no list"):
        run(["method=[imma]"])
    ended = launched("evaluation=[5]", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: every group=... takes the name of an option")
    assert "Traceback" not in ended.stderr
