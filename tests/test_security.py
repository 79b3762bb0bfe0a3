"""What a configuration, a data file or a name from elsewhere may not do."""

import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import launched
from helpers.data_files import IMAGES, Trap, image_pair
from helpers.made_runs import make_run
from helpers.repository import ROOT
from helpers.runs import DEEP
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import immunization
from immunization import run
from immunization.__main__ import start
from immunization.config import KINDS, build, compose, slug, target_of
from immunization.errors import ConfigError, DataError
from immunization.experiment import resolve
from immunization.results.collect import collect
from immunization.results.page import summarize
from immunization.runs import files
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.origin import audited
from immunization.runs.resume import literal, read_config

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
    kept = [path for path in (tmp_path / "c").rglob("*.safetensors") if path.is_file()]
    for path in kept:
        trap(path)
    assert kept
    assert run(options, folder=tmp_path / "again").metrics == first.metrics
    assert "are damaged" in capsys.readouterr().err


NESTED = "this key takes values and no class"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"_target_": "os.system"}, "not from a trusted package"),
        ({"_target_": "builtins.eval"}, "not from a trusted package"),
        ({"_target_": "immunizationx.Evil"}, "not from a trusted package"),
        ({"_target_": "immunization.methodsx.Evil"}, "not from a trusted package"),
        ({"_target_": "torch.os.system"}, "not from a trusted package"),
        ({"_target_": "immunization.compute.machine.os.system"}, "not from a trusted package"),
        ({"_target_": "immunization.run"}, "not from a trusted package"),
        ({"_target_": "torch.load"}, "not from a trusted package"),
        ({"_target_": "immunization.methods.base.os.system"}, "there is no module immunization.methods.base.os"),
        ({"_target_": "immunization.methods.base.copy"}, "has no copy"),
        ({"_target_": "immunization.methods.base.math"}, "expected a subclass of immunization.methods.Method"),
        ({"_target_": "immunization.methods.base.TaskPair"}, "expected a subclass of immunization.methods.Method"),
        ({"_target_": "immunization.methods.combined"}, "expected a subclass of immunization.methods.Method"),
        (
            {"_target_": "immunization.methods.LearningCurve", "epochs": 1, "horizon": {"_target_": "os.system"}},
            rf"method\.horizon\._target_=os\.system: {NESTED}",
        ),
        (
            {"_target_": "immunization.methods.LearningCurve", "epochs": 1, "horizon": [{"_target_": "os.system"}]},
            rf"method\.horizon\[0\]\._target_=os\.system: {NESTED}",
        ),
        (
            {"_target_": "immunization.methods.LearningCurve", "horizon": {"x": {"_target_": "torch.optim.SGD"}}},
            rf"method\.horizon\.x\._target_=torch\.optim\.SGD: {NESTED}",
        ),
    ],
)
def test_code_from_elsewhere_is_refused(method, message):
    config = compose()
    config.method = method
    with pytest.raises(ConfigError, match=message):
        build(config, "method")


CLASSES = {
    "dataset": "immunization.data.digits",
    "model": "immunization.models.Linear",
    "method": "immunization.methods.Identity",
    "optimizer": "torch.optim.SGD",
    "scheduler": "torch.optim.lr_scheduler.StepLR",
    "evaluation.one": "immunization.evaluation.StartRatio",
    "attack.one": "immunization.attacks.LinearProbe",
    "suite": "immunization.attacks.Suite",
    "tracker": "immunization.runs.wandb_tracker.Wandb",
}


def group_of(key: str, target: str) -> dict[str, object]:
    """A configuration in which `key` names `target`, which is code of the user's own."""
    group, _, name = key.partition(".")
    node = {"_target_": target}
    return {group: {name: node} if name else node, "trusted": ["immunization", "torch", "own_code"]}


@pytest.mark.parametrize("key", CLASSES)
def test_a_group_takes_what_is_of_its_kind_alone(key):
    """Of the user's own code, too: a trusted module holds what it imports, and functions that were meant for more."""
    assert {group.partition(".")[0] for group in CLASSES} == KINDS.keys()
    for other, target in CLASSES.items():
        if other == key:
            assert target_of(group_of(key, target), key)
        else:
            with pytest.raises(ConfigError, match="expected a"):
                target_of(group_of(key, target), key)
    for target in ("immunization.run", "immunization.load", "torch.load", "torch.nn.Linear"):
        with pytest.raises(ConfigError, match="expected a"):
            target_of(group_of(key, target), key)


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ("os.system", r"scheduler\.schedulers\[0\]\._target_=os\.system: not from a trusted package"),
        ("torch.optim.lr_scheduler.Optimizer", r"schedulers\[0\]\._target_=.*: expected a subclass of .*LRScheduler"),
    ],
)
def test_what_a_scheduler_consists_of_are_schedulers(nested, message):
    config = compose(["scheduler=warmup_cosine"])
    assert target_of(config, "scheduler")
    config.scheduler.schedulers[0]._target_ = nested
    with pytest.raises(ConfigError, match=message):
        target_of(config, "scheduler")


@pytest.fixture
def own_code(tmp_path, monkeypatch) -> Iterator[Path]:
    """A module `own_code` that leaves a file when it is imported, and `built` when its evaluation is made."""
    code = f"""
from pathlib import Path
from shutil import rmtree
from immunization.evaluation import Comparison, Measures

Path({str(tmp_path)!r}, "imported").touch()

class Mine:
    def __init__(self) -> None:
        Path({str(tmp_path)!r}, "built").touch()

    def __call__(self, comparison: Comparison) -> Measures:
        return Measures()

def rows(seed=0):
    ...

def nothing() -> None:
    ...
"""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_code.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield tmp_path
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize("key", CLASSES)
def test_a_module_that_is_not_trusted_is_not_imported(key, own_code):
    with pytest.raises(ConfigError, match="not from a trusted package"):
        target_of(group_of(key, "own_code.Mine") | {"trusted": []}, key)
    assert not (own_code / "imported").exists()
    target_of(group_of("evaluation.one", "own_code.Mine"), "evaluation.one")
    assert (own_code / "imported").exists()


def test_what_ones_own_module_imports_is_not_ones_own(own_code):
    """Functions that say nothing of what they return are taken where they were written for the group."""
    assert target_of(group_of("dataset", "own_code.rows"), "dataset")
    for name in ("rmtree", "Path", "Comparison", "nothing"):
        with pytest.raises(ConfigError, match="expected a function, or a class with a __call__, annotated -> TaskPair"):
            target_of(group_of("dataset", f"own_code.{name}"), "dataset")
    with pytest.raises(ConfigError, match="expected a subclass of"):
        target_of(group_of("method", "own_code.rows"), "method")


@pytest.mark.parametrize(("group", "target"), [("model", "os.system"), ("scheduler", "torch.load"), ("tracker", "x.Y")])
def test_nothing_is_built_before_everything_is_checked(group, target, own_code):
    config = compose(["tracker=none", "trusted=[own_code]"])
    config.evaluation = {"mine": {"_target_": "own_code.Mine"}}
    config[group] = {"_target_": target}
    with pytest.raises(ConfigError, match=f"{group}._target_={target}: not from a trusted package"):
        resolve(config)
    assert not (own_code / "built").exists()
    config[group] = compose(["tracker=none"])[group]
    resolve(config)
    assert (own_code / "built").exists()


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
    with pytest.raises(SystemExit, match=r"trusted=\['subprocess'\] is set in a configuration file"):
        start()
    assert not ran.exists()


MARKED = "${oc.env:IMMUNIZATION_MARKER}"
"""Would be the value of an environment variable, were it resolved."""


@pytest.fixture
def marker(monkeypatch) -> str:
    monkeypatch.setenv("IMMUNIZATION_MARKER", "value-of-the-variable")
    assert OmegaConf.create({"key": MARKED}).key == "value-of-the-variable"
    return "value-of-the-variable"


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("text", [MARKED, f"\\{MARKED}", f"a\\\\{MARKED}{{b}}$", "${", "${x", "\\", "$$"])
def test_text_of_other_peoples_configurations_is_text(text, marker):
    config = literal({"key": text, "list": [text], "number": 1.5, "none": None})
    assert OmegaConf.to_container(config, resolve=True) == {"key": text, "list": [text], "number": 1.5, "none": None}


def test_an_audit_resolves_nothing_in_the_folder_of_its_checkpoint(marker, tmp_path):
    folder, audit = tmp_path / "run", tmp_path / "audit"
    run([*QUICK, "method=identity"], folder=folder)
    config = read_config(folder)
    config["dataset"]["name"] = f"digits of {MARKED}"
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    result = run([*QUICK, "immunize=false", f"model.checkpoint={folder}"], folder=audit)
    assert read_config(audit)["dataset"]["name"] == f"digits of {MARKED}"
    assert "other_data" not in result.flags
    assert MARKED.encode() in written(audit)
    assert marker.encode() not in written(audit)
    with pytest.raises(ConfigError, match=re.escape(MARKED)) as caught:  # somebody else's folder is gone on with
        run([*QUICK, "method=identity", "resume=true"], folder=folder)
    assert marker not in str(caught.value)


def test_an_audit_resolves_nothing_in_the_header_of_its_weights(marker, tmp_path):
    config = compose(["dataset=digits_deep", "model=digits_net", "method=identity", "tracker=none"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    facts = {"architecture": MARKED, "arguments": {"drop_rate": MARKED}}
    files.write_weights(tmp_path / "immunized.safetensors", {"weight": torch.zeros(1)}, facts)
    audit = compose(["immunize=false", f"model.checkpoint={tmp_path}", "tracker=none", "method=identity"])
    with pytest.raises(DataError, match=re.escape(f"names the architecture '{MARKED}'")) as caught:
        audited(audit, [])
    assert marker not in str(caught.value)
    facts |= {"architecture": "test_vit"}
    files.write_weights(tmp_path / "immunized.safetensors", {"weight": torch.zeros(1)}, facts)
    model = OmegaConf.to_container(audited(audit, [])[0], resolve=True)["model"]
    assert (model["name"], model["arguments"]) == (facts["architecture"], facts["arguments"])


def test_what_can_run_code_says_so_where_it_is_offered(tmp_path):
    """Hydra itself is set up by files of --config-dir, which is not refused: a launcher of one's own is such a file."""
    done = launched("--help", cwd=tmp_path)
    for option in ("--config-dir", "trusted"):
        assert re.search(rf"^ *{option}.*full trust", done.stdout, re.MULTILINE)
    assert "**Both are full trust**" in (ROOT / "docs" / "components.md").read_text()


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
