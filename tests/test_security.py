"""What a configuration, a data file or a name from elsewhere may not do."""

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.made_runs import make_run
from helpers.repository import ROOT
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import launch
from immunization import run
from immunization.config import build, compose, slug
from immunization.errors import ConfigError, DataError
from immunization.models.weights import load_weights
from immunization.results.collect import collect
from immunization.results.page import summarize

QUICK = ("tracker=none", "evaluation=[rir]", "dataset.max_samples=20", "figures=false")


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled():
    """The only readers of formats that can hold code are told not to run it."""
    source = {path: path.read_text() for path in [*(ROOT / "immunization").rglob("*.py"), ROOT / "launch.py"]}
    for path, text in source.items():
        assert not re.search(r"\b(pickle|cPickle|dill|cloudpickle|shelve|joblib)\b\.?\s*(load|import)", text), path
        assert not re.search(r"^\s*(import|from) (pickle|dill|shelve|marshal)\b", text, re.M), path
        assert not re.search(r"\b(eval|exec)\(", text.replace(".eval(", "")), path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call
        for call in re.findall(r"np\.load\([^)]*\)", text):
            assert "allow_pickle=False" in call
        for call in re.findall(r"read_pickle|yaml\.(?:unsafe_load|full_load|Loader|UnsafeLoader)\b", text):
            raise AssertionError(f"{path}: {call}")


def test_weights_that_hold_code_are_refused(tmp_path):
    torch.save({"weight": Trap(tmp_path / "ran")}, tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=r"net\.pt cannot be read"):
        load_weights(torch.nn.Linear(2, 2), tmp_path / "net.pt")
    assert not (tmp_path / "ran").exists()


def test_arrays_that_hold_code_are_refused(tmp_path):
    trap = np.array([Trap(tmp_path / "ran")], dtype=object)
    np.savez(tmp_path / "data.npz", primary_x=trap, primary_y=trap, harmful_x=trap, harmful_y=trap)
    with pytest.raises(DataError, match=r"data\.npz"):
        run([*QUICK[:2], "dataset=arrays", f"dataset.path={tmp_path / 'data.npz'}"], folder=tmp_path / "run")
    (tmp_path / "data.npz").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(DataError, match=r"data\.npz"):
        run([*QUICK[:2], "dataset=arrays", f"dataset.path={tmp_path / 'data.npz'}"], folder=tmp_path / "run2")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"_target_": "os.system"}, "not from a trusted package"),
        ({"_target_": "builtins.eval"}, "not from a trusted package"),
        ({"_target_": "immunizationx.Evil"}, "not from a trusted package"),
        ({"_target_": "torch.os.system"}, "it comes from posix, which is not a trusted package"),
        ({"_target_": "immunization.compute.machine.os.system"}, "it comes from posix"),
        ({"_target_": "immunization.runs.folder.OmegaConf.load"}, "it comes from omegaconf"),
        ({"_target_": "torch.load"}, "of torch and timm only classes"),
        ({"_target_": "torch.hub.load"}, "of torch and timm only classes"),
        (
            {"_target_": "immunization.methods.LearningCurve", "epochs": 1, "horizon": {"_target_": "os.system"}},
            r"method\.horizon\._target_=os\.system: not from a trusted package",
        ),
        (
            {"_target_": "immunization.methods.LearningCurve", "epochs": 1, "horizon": [{"_target_": "os.system"}]},
            r"method\.horizon\[0\]\._target_=os\.system",
        ),
    ],
)
def test_code_from_elsewhere_is_refused(method, message):
    config = compose()
    config.method = method
    with pytest.raises(ConfigError, match=message):
        build(config, "method")


def test_a_malicious_experiment_file(tmp_path, monkeypatch, capsys):
    """It names code, and declares that code as trusted."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    ran = tmp_path / "ran"
    content = {"method": {"_target_": "subprocess.call", "args": ["touch", str(ran)]}, "trusted": ["subprocess"]}
    (folder / "evil.yaml").write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(content)))
    arguments = ["--config-dir", str(tmp_path / "conf"), "experiment=evil", f"hydra.run.dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments, *QUICK])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit, match=r"trusted=\['subprocess'\] stands in a configuration file"):
        launch.cli()
    assert not ran.exists()


@pytest.mark.parametrize("target", ["subprocess.call", "os.system", "subprocess.Popen"])
def test_code_in_what_hydra_itself_builds(target, tmp_path, monkeypatch):
    """Callbacks, launchers and sweepers: Hydra's own policy, the reason for the oldest version that is taken."""
    folder, ran = tmp_path / "conf" / "experiment", tmp_path / "ran"
    folder.mkdir(parents=True)
    arguments = {"command": f"touch {ran}"} if target == "os.system" else {"args": ["touch", str(ran)]}
    content = {"hydra": {"callbacks": {"x": {"_target_": target, **arguments}}}}
    (folder / "evil.yaml").write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(content)))
    options = ["--config-dir", str(tmp_path / "conf"), "experiment=evil", f"hydra.run.dir={tmp_path / 'run'}", *QUICK]
    monkeypatch.setattr(sys, "argv", ["launch.py", *options])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit, match="blocklisted"):
        launch.cli()
    assert not ran.exists()


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/passwd", "..", "a/../../b", ".hidden", "x" * 500, "\0", "a\nb"]
)
def test_names_stay_below_the_output_folder(name, tmp_path, monkeypatch):
    """Also those of runs, which are the first folder below outputs/."""
    monkeypatch.chdir(tmp_path)
    safe = slug(name)
    assert "/" not in safe
    assert not safe.startswith(".")
    assert len(safe) <= 150
    if "\0" not in name:
        config = compose([*QUICK, "method=identity", "evaluation=[]"])
        config.name = name
        folder = run(config).folder.resolve()
        assert folder.parent.parent == tmp_path / "outputs"
    assert [path.name for path in tmp_path.iterdir()] in (["outputs"], [])


def test_the_report_escapes_what_it_shows(tmp_path):
    """Method, data set, flags, reasons, errors, folders and commands are shown as text."""
    from immunization.runs.result import Result

    evil = "<script>alert(1)</script>"
    for i in range(3):
        folder = make_run(tmp_path / f"{i}<img src=x onerror=alert(1)>", lambdas=(1.0, 10.0**i), rir=2.0 + i)
        result = Result.read(folder)
        result.method = result.dataset = result.model = evil
        result.flags, result.reasons = [evil], {evil: evil, "rir": evil}
        if i == 2:
            result.status, result.error = "failed", evil
        result.write(folder)
    summarize(collect([tmp_path]), tmp_path, "rir")
    page = (tmp_path / "report.html").read_text()
    own = (ROOT / "immunization" / "results" / "report.html").read_text()
    assert page.count("<script") == own.count("<script")
    assert "<img" not in page
    assert "&lt;script&gt;" in page
