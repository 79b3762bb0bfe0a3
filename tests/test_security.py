"""What a configuration, a data file or a name from elsewhere may not do."""

import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_files import IMAGES, Trap, image_pair
from helpers.made_runs import make_run
from helpers.repository import ROOT
from helpers.runs import DEEP
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import immunization
from immunization import run
from immunization.__main__ import start
from immunization.config import build, compose, slug
from immunization.errors import ConfigError, DataError
from immunization.results.collect import collect
from immunization.results.page import summarize
from immunization.runs.filenames import CHECKPOINT

QUICK = ("tracker=none", "evaluation=[rir]", "dataset.max_samples=20", "figures=false")


NET = (
    *("dataset=digits_deep", "dataset.primary=[0,1]", "dataset.harmful=[4,5]", "dataset.benign=null", "model=timm"),
    *("model.name=test_resnet", "model.pretrained=false", "model.arguments={in_chans: 1, num_classes: 2}"),
    *("method=identity", "dtype=float32", "tracker=none", "evaluation=[rir]", "figures=false"),
)


@pytest.fixture
def trap(tmp_path) -> Iterator[Callable[[Path], None]]:
    """Writes a pickle that holds code in the place of a file; in the end none of it must have run."""
    ran = tmp_path / "ran"
    code = pickle.dumps(Trap(ran), protocol=2)  # that of torch.save
    pickle.loads(code)
    assert ran.exists(), "the trap does not work"
    ran.unlink()
    yield lambda path: path.write_bytes(code)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.bin", "net.ckpt", "net.safetensors"])
@pytest.mark.parametrize("zipped", [False, True], ids=["pickle", "torch.save"])
def test_weights_that_hold_code_are_refused(name, zipped, trap, tmp_path):
    trap(tmp_path / name)
    if zipped:
        torch.save({"weight": Trap(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(ConfigError, match=re.escape(name)):
        run([*NET, f"model.checkpoint={tmp_path / name}"], folder=tmp_path / "run")


@pytest.mark.parametrize(
    "options", [(*NET, "model.reference={file}"), (*QUICK, "method=identity", "model.checkpoint={file}")]
)
def test_a_reference_or_theta_that_holds_code_is_refused(options, trap, tmp_path):
    trap(tmp_path / "net.safetensors")
    with pytest.raises((ConfigError, DataError), match=r"net\.safetensors"):
        run([option.replace("{file}", str(tmp_path / "net.safetensors")) for option in options], tmp_path / "run")


@pytest.mark.parametrize("kind", ["pickle", "array"])
def test_arrays_that_hold_code_are_refused(kind, trap, tmp_path):
    trap(tmp_path / "data.npz")
    if kind == "array":
        array = np.array([Trap(tmp_path / "ran")], dtype=object)
        np.savez(tmp_path / "data.npz", primary_x=array, primary_y=array, harmful_x=array, harmful_y=array)
    with pytest.raises(DataError, match=r"data\.npz"):
        run([*QUICK[:2], "dataset=arrays", f"dataset.path={tmp_path / 'data.npz'}"], folder=tmp_path / "run")


@pytest.mark.parametrize("name", ["immunized.safetensors", "splits.safetensors", "result.json", "config.yaml"])
def test_a_run_folder_that_holds_code_is_not_believed(name, trap, tmp_path, capsys):
    """The weights are not loaded, and going on does the run again."""
    folder = tmp_path / "run"
    first = run([*QUICK, "method=identity"], folder=folder)
    trap(folder / name)
    if name == "immunized.safetensors":
        with pytest.raises(DataError, match=name):
            immunization.load(folder)
    again = run([*QUICK, "method=identity", "resume=true"], folder=folder)
    assert "the run is done again" in capsys.readouterr().err
    assert again.metrics == first.metrics


def test_a_configuration_that_names_python_objects_is_not_believed(tmp_path):
    folder, ran = tmp_path / "run", tmp_path / "ran"
    run([*QUICK, "method=identity"], folder=folder)
    with (folder / "config.yaml").open("a") as file:
        file.write(f"evil: !!python/object/apply:os.mkdir [{ran}]\n")
    (problem,) = collect([folder]).problems
    assert "config.yaml" in problem.message
    run([*QUICK, "method=identity", "resume=true"], folder=folder)
    assert not ran.exists()


@pytest.mark.trains
def test_a_checkpoint_that_holds_code_is_not_believed(trap, tmp_path, cut, capsys, monkeypatch):
    options = [*QUICK, "method.epochs=3", "checkpoint.every=1"]
    cut(2)
    with pytest.raises(KeyboardInterrupt):
        run(options, folder=tmp_path / "run")
    monkeypatch.undo()
    trap(tmp_path / "run" / CHECKPOINT)
    assert run([*options, "resume=true"], folder=tmp_path / "run").status == "completed"
    assert "starts from the beginning" in capsys.readouterr().err


@pytest.mark.trains
def test_a_kept_net_that_holds_code_is_fitted_again(trap, tmp_path, capsys):
    options = [*DEEP, "method=identity", "model.fit_epochs=1"]
    options.append(f"model.cache={tmp_path / 'cache'}")
    first = run(options, folder=tmp_path / "first")
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    trap(path)
    assert run(options, folder=tmp_path / "again").metrics == first.metrics
    assert "the net is fitted again" in capsys.readouterr().err


def test_kept_activations_that_hold_code_are_computed_again(trap, tmp_path, capsys):
    image_pair(tmp_path)
    options = [option.replace("{tmp}", str(tmp_path)) for option in (*QUICK[:2], "figures=false", *IMAGES)]
    first = run(options, folder=tmp_path / "first")
    for path in (tmp_path / "c").glob("*/*"):
        trap(path)
    assert run(options, folder=tmp_path / "again").metrics == first.metrics
    assert "are damaged" in capsys.readouterr().err


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
        start()
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
        start()
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
    own = (ROOT / "immunization" / "results" / "base.html").read_text()
    assert page.count("<script") == own.count("<script")
    assert "<img" not in page
    assert "&lt;script&gt;" in page
