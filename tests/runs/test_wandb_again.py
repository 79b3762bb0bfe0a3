"""`wandb_run=`: a run that is tracked offline is run again from its run folder."""

import json
import math
from pathlib import Path

import pytest
import yaml
from helpers.commands import launched
from helpers.versions import asks_once

from immunization import run
from immunization.errors import ConfigError, DataError
from immunization.runs.numbers import spelled, unspelled
from immunization.runs.result import Result
from immunization.runs.wandb_again import again, tracked_config

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> Path:
    """The offline run inside of its run folder."""
    folder = tmp_path_factory.mktemp("tracked")
    options = ["method.epochs=3", "method.lambda_P=0.25", "dataset.max_samples=40", "evaluation=[rir]", "seed=7"]
    run([*options, "figures=false", "tracker.mode=offline"], folder)
    (path,) = (folder / "wandb").glob("offline-run-*")
    return path


def test_the_configuration_is_the_one_of_the_run_folder(offline, monkeypatch):
    folder = offline.parents[1]
    (file,) = offline.glob("run-*.wandb")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert [tracked_config(str(path)) for path in (folder, offline.parent, offline, file)] == [config] * 4
    monkeypatch.chdir(offline.parent)
    assert tracked_config(offline.name) == config


def test_a_tracked_run_gives_the_same_numbers_again(offline, tmp_path):
    done = launched(f"wandb_run={offline}", "tracker=none", "name=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "again").iterdir()
    before, after = Result.read(offline.parents[1]), Result.read(folder)
    assert (after.metrics, after.seed) == (before.metrics, 7)


def test_values_can_be_changed_and_the_folder(offline):
    config, folder = again([f"wandb_run={offline}", "method.lambda_P=0.5", "hydra.run.dir=here"])
    assert (config.method.lambda_P, config.seed, folder) == (0.5, 7, Path("here"))


@pytest.mark.parametrize("argument", ["method=imma", "method.nonsense=3", "-m", "attack=[linear_probe]"])
def test_groups_and_unknown_keys_are_refused(offline, argument):
    with pytest.raises(ConfigError, match="only values of the tracked run"):
        again([f"wandb_run={offline}", argument])


def test_lists_can_be_changed_and_numbers_that_json_lacks_come_back(tmp_path):
    config = {"method": {"_target_": "m", "power": math.inf}, "dataset": {"name": "d", "weights": [1.0, -math.inf]}}
    text = json.dumps(spelled(config | {"trusted": []}), allow_nan=False)
    (tmp_path / "config.yaml").write_text(text + "\n")
    config, _ = again([f"wandb_run={tmp_path}", "trusted=[mine]"])
    assert (config.trusted, config.method.power, config.dataset.weights) == (["mine"], math.inf, [1.0, -math.inf])
    assert math.isnan(unspelled(spelled(math.nan)))


def test_code_of_others_is_trusted_on_the_command_line_alone(tmp_path):
    config = {"method": {"_target_": "evil.Method"}, "dataset": {"name": "d"}, "trusted": ["evil"], "seed": 0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = [f"wandb_run={tmp_path}"]
    with pytest.raises(ConfigError, match=r"trusted=.*command line"):
        run(*again(arguments), arguments)


def test_text_of_a_tracked_run_is_text(offline, tmp_path, monkeypatch):
    """Also where the run is tracked again: no value of an environment variable leaves the machine."""
    monkeypatch.setenv("IMMUNIZATION_MARKER", "value-of-the-variable")
    config = yaml.safe_load((offline.parents[1] / "config.yaml").read_text())
    text = "${oc.env:IMMUNIZATION_MARKER}"
    config |= {"tags": [text], "objective": text, "dataset": config["dataset"] | {"name": text}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = [f"wandb_run={tmp_path}", "method.epochs=1"]
    config, _ = again(arguments)
    done = run(config, tmp_path / "again", arguments)
    assert (done.dataset, done.verdict is not None) == (text, True)
    files = {path: path.read_bytes() for path in (tmp_path / "again").rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" and text.encode() in content for path, content in files.items())
    assert not [path for path, content in files.items() if b"value-of-the-variable" in content]


def test_what_cannot_be_read_is_one_line(tmp_path):
    for name in ("a/b/c/empty", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other" / "config.yaml").write_text("{seed: 3}\n")
    for name, message in {
        "a/b/c/empty": "no run folder, which has a config.yaml",
        "other": "none of immunization",
    }.items():
        with pytest.raises(DataError, match=message):
            tracked_config(str(tmp_path / name))


@asks_once
def test_a_run_that_is_nowhere_is_one_line(tmp_path):
    done = launched("wandb_run=no/such/run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: wandb_run=no/such/run: no such folder here, and W&B does not give run")
    assert done.stderr.count("\n") == 1
