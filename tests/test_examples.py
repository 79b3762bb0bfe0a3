"""The files of examples/ run by the commands beside them, do what they say, and are what the documents quote."""

import csv
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent

import numpy as np
import pytest
import torch
from helpers.repository import ROOT
from helpers.victims import noisy_classes, victim_of
from hydra.core.global_hydra import GlobalHydra
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from immunization import Result
from immunization.__main__ import start
from immunization.config import build, compose
from immunization.runs import files
from immunization.runs.filenames import ROWS
from immunization.runs.tracker import history

pytestmark = pytest.mark.trains

FILES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
CONFIGS = {path.stem: path for path in (ROOT / "examples" / "conf").glob("*/*.yaml")}
README = (ROOT / "examples" / "README.md").read_text()
COMMANDS = {
    name: shlex.split(line, comments=True)[2:]
    for line, name in re.findall(r"^(python launch\.py .*'trusted=\[(\w+)\]'.*)$", README, re.M)
}


@pytest.fixture(autouse=True)
def _as_the_readme_says() -> Iterator[None]:
    """In the repository, with PYTHONPATH=examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend("examples")
        yield


def launch(name: str, folder: Path, *more: str) -> Result:
    """The result of an example's command; `more` are options, in the place of those for the same keys."""
    keys = [option.partition("=")[0] for option in more]
    command = [word for word in COMMANDS[name] if word.partition("=")[0] not in keys]
    quiet = [] if name == "csv_tracker" else ["tracker=none"]
    options = [*command, *more, *quiet, "figures=false", f"hydra.run.dir={folder}"]
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["launch.py", *options])
        start()
    return Result.read(folder)


def test_every_component_has_an_example_with_a_configuration_and_a_command():
    assert len(FILES) == 6
    assert FILES.keys() == CONFIGS.keys() == COMMANDS.keys()
    assert {path.parent.name for path in CONFIGS.values()} == {
        "dataset", "model", "method", "attack", "evaluation", "tracker"
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_examples_import_what_the_folders_of_the_package_export(name):
    imported = re.findall(r"^(?:from|import) (immunization[\w.]*)", FILES[name].read_text(), re.M)
    assert imported
    assert all(module.count(".") <= 1 for module in imported)


def test_the_components_page_quotes_the_examples():
    page = (ROOT / "docs" / "components.md").read_text()
    quoted = re.findall(r"```python\n(.*?)```", page, re.S)
    for name, path in FILES.items():
        source = path.read_text()
        assert any(block in source or indent(block, " " * 4) in source for block in quoted), name
    assert len(quoted) == len(FILES)
    (configured,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "_target_" in block)
    assert configured in [path.read_text() for path in CONFIGS.values()]
    assert all(f"../examples/{name}.py" in page for name in FILES)
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert any(block in FILES["primary_only"].read_text() for block in readme)


def test_the_data_set_has_other_digits_in_either_task(tmp_path):
    result = launch("digit_halves", tmp_path, "evaluation=[rir]", "method.epochs=30")
    assert result.dataset == "digit_halves"
    assert result.metrics["rir"] > 1
    digits, rows = load_digits().target, files.read_tensors(tmp_path / ROWS)[0]
    for role, own in {"primary": range(5), "harmful": range(5, 10)}.items():
        assert set(digits[torch.cat([rows[f"{role}/{split}"] for split in ("train", "val", "test")])]) == set(own)
    taken = torch.cat(list(rows.values()))
    assert len(taken) == len(taken.unique()) == len(digits)


def test_the_model_starts_as_the_baseline_and_is_trained(tmp_path):
    result = launch("residual_mlp", tmp_path)
    assert result.model == "residualmlp"
    assert history(tmp_path)["ratio_harmful"]["y"][0] == pytest.approx(1, rel=1e-6)
    assert result.metrics["steps_ratio/harmful"] > 10
    assert result.metrics["steps_ratio/primary"] <= 1


def test_the_method_conditions_the_primary_task(tmp_path):
    """RIR rises, and the harmful task is easier than before: no immunization, as Definition 3.1 says."""
    result = launch("primary_only", tmp_path)
    assert result.metrics["ratio_primary"] < result.metrics["ratio_harmful"] < 1 < result.metrics["rir"]
    assert result.metrics["definition/immunized"] == 0


def test_the_method_takes_nets(tmp_path):
    more = ("experiment=digits_deep", "dataset.size=16", "method.batch_size=64", "method.epochs=2", "evaluation=[rir]")
    more += ("dataset.primary=[0,1]", "dataset.harmful=[4,5]", "dataset.benign=null")
    launch("primary_only", tmp_path, *more)
    uneven = history(tmp_path)["uneven"]["y"]
    assert uneven[-1] < uneven[0]


def test_the_attack_is_not_slowed(tmp_path):
    metrics = launch("kernel_smoother", tmp_path, "evaluation=[rir]", "method.epochs=60", "optimizer.lr=2e-2").metrics
    assert metrics["attack/kernel_smoother/final"] > 0.9 > metrics["attack/linear_probe/final"]


def test_the_attack_with_a_narrow_kernel_is_the_nearest_neighbour():
    task = noisy_classes()
    victim = victim_of(task, torch.diag(torch.logspace(0, -1, task.dim, dtype=torch.float64)))
    attack = import_module("kernel_smoother").KernelSmoother(bandwidths=[1e-3])
    split = {name: victim.features("immunized", name).numpy() for name in ("train", "test")}
    nearest = KNeighborsClassifier(1).fit(split["train"], task.train.y)
    assert attack.run(victim, "immunized").final == nearest.score(split["test"], task.test.y)


def test_the_evaluation_measures_the_inputs_and_the_features(tmp_path):
    metrics = launch("participation_ratio", tmp_path, "method=identity").metrics
    inputs = build(compose(), "dataset").harmful.train.x.numpy()
    eigenvalues = np.linalg.eigvalsh(inputs.T @ inputs)
    expected = eigenvalues.sum() ** 2 / np.square(eigenvalues).sum()
    for name in ("participation/harmful", "participation/harmful_baseline"):
        assert metrics[name] == pytest.approx(expected)


def test_the_tracker_writes_what_is_logged_and_measured(tmp_path):
    result = launch("csv_tracker", tmp_path, "evaluation=[rir]", "method.epochs=5")
    lines = list(csv.reader((tmp_path / "metrics.csv").open()))
    assert lines[0] == ["step", "name", "value"]
    for name, curve in history(tmp_path).items():
        assert [(int(s), float(v)) for s, n, v in lines[1:] if s and n == name] == list(
            zip(*curve.values(), strict=True)
        )
    assert {name: float(value) for step, name, value in lines if not step} == result.metrics


def test_the_tracker_goes_on_after_an_interruption(tmp_path, monkeypatch, cut):
    more = ("evaluation=[rir]", "method.epochs=6", "log_every=1", "checkpoint.every=3")

    def numbers(folder: Path) -> dict[tuple[str, str], str]:
        return {(step, name): value for step, name, value in csv.reader((folder / "metrics.csv").open())}

    launch("csv_tracker", tmp_path / "whole", *more)
    cut(5)
    with pytest.raises(SystemExit):
        launch("csv_tracker", tmp_path / "cut", *more)
    monkeypatch.undo()
    launch("csv_tracker", tmp_path / "cut", *more, "resume=true")
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_the_tracker_never_fails_a_run(tmp_path, capsys):
    (tmp_path / "metrics.csv").mkdir()
    result = launch("csv_tracker", tmp_path, "evaluation=[rir]", "method.epochs=1")
    assert result.status == "completed"
    assert "metrics.csv: Is a directory; the run goes on" in capsys.readouterr().err
