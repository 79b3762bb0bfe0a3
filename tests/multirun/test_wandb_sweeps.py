"""W&B's own `sweeps` library, which its server runs, takes the sweep files, and stops runs that fall behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.installed import install
from helpers.repository import ROOT
from omegaconf import OmegaConf

from immunization.config import compose

FILES = sorted((ROOT / "sweeps" / "wandb").glob("*.yaml"))

ASK = """
import json, sys
import sweeps
from sweeps import RunState, SweepRun, next_run, stop_runs
from sweeps.config import schema_violations_from_proposed_config as violations

config = json.loads(sys.stdin.read())
run = next_run(config, [])
parameters = json.loads(json.dumps(run.config, default=float))
answer = {"violations": [str(v) for v in violations(config)], "config": parameters}
if "early_terminate" in config:
    def curve(name, end, state, length):
        history = [{config["metric"]["name"]: 1 + end * step / 43} for step in range(length)]
        return SweepRun(name=name, state=state, history=history, config={})
    runs = [curve(f"done{end}", end, RunState.finished, 44) for end in range(6)]
    runs += [curve("bad", 0.5, RunState.running, 10), curve("good", 9, RunState.running, 10)]
    runs += [curve("young", 0.5, RunState.running, 9)]
    answer["stopped"] = [run.name for run in stop_runs(config, runs)]
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps")
    install(folder, "--target", str(folder), "jsonschema", "jsonref")
    install(folder, "--target", str(folder), "--no-deps", "sweeps")  # its NumPy is an older one, and works with ours
    return folder


def overrides(content: dict, config: dict) -> list[str]:
    """What an agent puts behind `immunize`."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args  # 2 s

    command = content["command"]
    fixed = command[command.index("immunize") + 1 :]
    values = create_sweep_command_args({"args": config})["args_no_hyphens"]
    assert fixed[-1] == "${args_no_hyphens}"
    return [*fixed[:-1], *values]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_library_takes_every_file_and_stops_what_falls_behind(path, library):
    content = yaml.safe_load(path.read_text())
    environment = os.environ | {"PYTHONPATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        input=json.dumps(content),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["violations"] == []
    assert answer.get("stopped", ["bad"]) == ["bad"]
    config = compose(overrides(content, answer["config"]))
    assert config.method._target_.endswith("ConditionNumber")
    for key, value in answer["config"].items():
        assert OmegaConf.select(config, key) == value["value"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_when_it_ends_and_replaces_no_group(path):
    """A parameter `method` would take the place of all settings of the method in W&B's configuration of the run."""
    content = yaml.safe_load(path.read_text())
    assert content["run_cap"] > 0
    assert ("early_terminate" in content) == (content["metric"]["name"] == "rir")  # the only one known while it runs
    groups = {option.name for option in (ROOT / "conf").iterdir() if option.is_dir()}
    assert not groups & set(content["parameters"])
    plain, swept = (
        compose(["method=condition_number"]).method,
        compose(overrides(content, {key: {"value": 1} for key in content["parameters"]})).method,
    )
    assert (swept.epochs, swept.balance, swept.lambda_P) == (plain.epochs, plain.balance, 1)
