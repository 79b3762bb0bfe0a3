"""One run from Python: its folder, its numbers, and computing them again."""

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_info, threadpool_limits
from torch.testing import assert_close

import immunization
from immunization import Result, data, run
from immunization.checks import CONF
from immunization.config import compose
from immunization.errors import ConfigError, DataError
from immunization.experiment import assemble
from immunization.runs.tracker import history
from immunization.theory import spectrum

pytestmark = pytest.mark.trains

SMALL = ("tracker=none", "dataset.max_samples=40", "method.epochs=4", "evaluation.norm_ratio.steps=20")
QUICK = (*SMALL[:3], "evaluation=[rir]")
METHODS = sorted(
    {path.stem for path in (CONF / "method").glob("*.yaml")} - {"forget_blocks"}
)  # which reads blocks of a net
SINGLE = ("closed_form", "condition_number", "identity", "learning_curve", "ntl")
"""Methods that are tried in float32, too, one of each kind: of a formula, none, of a spectrum, of a curve, a rival."""
FILES = {
    "config.yaml",
    "overrides.yaml",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "immunized.safetensors",
    "splits.safetensors",
    "run.log",
    "norm_ratio.png",
    "spectra.png",
    "learning_curves.png",
    "history.png",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Result:
    """A completed run with a benign task; no test changes its folder."""
    return run(
        [*SMALL, "dataset.benign=2", "seed=3", "method.hold_primary=null"],
        folder=tmp_path_factory.mktemp("runs") / "done",
    )


def strict(path: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_folder_holds_everything(done):
    assert {path.name for path in done.folder.iterdir()} >= FILES
    for path in done.folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    log = (done.folder / "run.log").read_text()
    assert "digits" in log
    assert "ERROR" not in log


def test_the_configuration_written_is_the_one_that_ran(done):
    overrides = [*SMALL, "dataset.benign=2", "seed=3", "method.hold_primary=null"]
    assert OmegaConf.load(done.folder / "overrides.yaml") == overrides
    written = OmegaConf.load(done.folder / "config.yaml")
    assert written == OmegaConf.create(OmegaConf.to_container(compose(overrides), resolve=True))
    assert "${" not in (done.folder / "config.yaml").read_text()


def test_what_is_undetermined_is_withheld_and_kept_apart(tmp_path, no_figures):
    """RIR of these pairs has no bound, and opt_kappa in logarithms looks for it."""
    options = ["method=opt_kappa", "method.form=log", "method.epochs=5", "tracker=none"]
    metrics = run([*options], tmp_path / "unbounded").metrics
    for name in ("rir", "ratio_primary", "kappa_harmful", "test/rir", "authors/ratio_harmful"):
        assert metrics[name] is None
        assert metrics[f"undetermined/{name}"] > 0
    assert metrics["kappa_harmful_baseline"] > 0 < metrics["steps_ratio/harmful"]
    result = Result.read(tmp_path / "unbounded")
    assert "undetermined" in result.flags
    assert "unbounded" in result.reasons["rir"]
    bounded = run([*options, "dataset.common_range=true"], tmp_path / "bounded")
    assert bounded.metrics["rir"] > 1
    assert "undetermined" not in bounded.flags


def test_environment(done):
    environment = strict(done.folder / "environment.json")
    assert environment["device"] == "cpu" or environment["device"].startswith("cuda")
    assert {"time", "command", "git", "python", "packages", "threads"} <= set(environment)


def test_threads_are_of_torch_and_every_other_blas_has_one(tmp_path, no_figures, monkeypatch):
    def of_blas() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    def assembled(experiment, taken=assemble):
        parts = taken(experiment)
        seen.append((torch.get_num_threads(), of_blas()))
        return parts

    seen: list[tuple[int, set[int]]] = []
    monkeypatch.setattr("immunization.runner.assemble", assembled)
    with threadpool_limits(2, user_api="blas"):
        assert of_blas() == {2}
        run([*SMALL, "threads=2"], tmp_path)
    assert seen == [(2, {1})]


def test_history_has_every_term_at_every_logged_step(done):
    curves = history(done.folder)
    always = {"kappa_primary", "kappa_harmful", "ratio_primary", "ratio_harmful", "rir"}
    assert set(curves) == always | {"loss", "task_loss", "r_well", "r_ill", "lr"}
    for name, curve in curves.items():
        assert curve["x"] == ([0, 1, 2, 3, 4] if name in always else [1, 2, 3, 4])
    assert curves["rir"]["y"][0] == pytest.approx(1)
    assert curves["rir"]["y"][-1] == pytest.approx(done.metrics["rir"], rel=1e-6)
    assert curves["kappa_harmful"]["y"][0] == pytest.approx(done.metrics["kappa_harmful_baseline"], rel=1e-6)


def test_about_forty_lines_a_run_by_default_and_log_every_as_asked(tmp_path, no_figures):
    run([*QUICK, "method.epochs=200"], folder=tmp_path / "default")
    assert history(tmp_path / "default")["rir"]["x"] == list(range(0, 201, 5))
    run([*QUICK, "method.epochs=20", "log_every=8"], folder=tmp_path / "chosen")
    assert history(tmp_path / "chosen")["rir"]["x"] == [0, 8, 16, 20]


def test_folders_of_runs_started_together_differ(tmp_path, monkeypatch, no_figures):
    monkeypatch.chdir(tmp_path)
    results = [run([*QUICK, "method=identity", "name=../a b"]) for _ in range(2)]
    folders = [result.folder.resolve() for result in results]
    assert len(set(folders)) == 2
    for folder in folders:
        assert folder.parent == tmp_path / "outputs" / "a-b"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{6}", folder.name)


def test_the_folder_that_an_override_names_is_used(tmp_path, monkeypatch, no_figures):
    monkeypatch.chdir(tmp_path)
    result = run([*QUICK, "method=identity", "seed=5", "hydra.run.dir=mine/${name}-${seed}"])
    assert result.folder == Path("mine/digits-5")
    assert Result.read(tmp_path / "mine" / "digits-5").status == "completed"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "folder", "message"),
    [
        (["hydra.run.dir=a"], "b", "hydra.run.dir=a and folder='b' are both given"),
        (["hydra.sweep.dir=a"], None, "hydra.sweep.dir=a works only on the command line"),
        (["hydra/launcher=basic"], "b", "hydra/launcher=basic works only on the command line"),
    ],
)
def test_options_of_hydra_that_would_do_nothing_are_refused(words, folder, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        run([*QUICK, *words], folder=folder)
    assert not any(tmp_path.iterdir())


def test_result_has_the_documented_content(done):
    content = strict(done.folder / "result.json")
    assert (content["schema"], content["status"], content["seed"]) == (2, "completed", 3)
    assert (content["dataset"], content["model"], content["method"]) == ("digits", "linear", "condition_number")
    assert set(content["seconds"]) == {"immunize", "evaluate"}
    assert all(seconds > 0 for seconds in content["seconds"].values())
    names = {"rir", "ratio_harmful", "ratio_primary"}
    names |= {f"authors/{name}" for name in names} | {f"test/{name}" for name in names}
    names |= {f"kappa_{role}{suffix}" for role in ("harmful", "primary") for suffix in ("", "_baseline")}
    names |= {"rank_harmful", "rank_primary", "ceiling/rir", "ceiling/attained"}
    names |= {f"definition/{part}" for part in ("a", "b", "c", "immunized")}
    names |= {f"primary/{name}{suffix}" for name in ("loss", "accuracy") for suffix in ("", "_baseline")}
    names |= {f"steps_ratio/{role}" for role in ("harmful", "primary", "benign")} | {"rfd/harmful"}
    assert names <= set(content["metrics"])
    assert all(value is None or isinstance(value, int | float) for value in content["metrics"].values())
    assert all(content["metrics"][f"definition/{part}"] in (0, 1) for part in ("a", "b", "c", "immunized"))
    missing = {name for name, value in content["metrics"].items() if value is None}
    assert missing | set(content["flags"]) <= set(content["reasons"])
    curves = {f"norm_ratio/{role}{state}" for role in ("primary", "harmful") for state in ("", "/baseline")}
    assert curves | {"probe/harmful"} <= set(content["curves"])
    for curve in content["curves"].values():
        assert set(curve) == {"x", "y"}
        assert len(curve["x"]) == len(curve["y"])


def test_the_file_is_the_result_that_was_returned(done):
    read = Result.read(done.folder)
    assert read.folder == done.folder
    assert read.as_dict() == done.as_dict()


def test_the_preparation_of_the_data_is_stated(done):
    assert done.about["classes"] == {"primary": 0, "harmful": 1, "benign": 2}
    assert "one_vs_rest" in done.about["protocol"]
    assert done.about["rows"]["primary"]["train"] == 80


def test_every_figure_can_be_computed_again_from_the_saved_tensors(done):
    """theta, mean and std, applied to scikit-learn's pixels, give RIR and both kappas, on training and test rows."""
    saved = load_file(done.folder / "immunized.safetensors")
    assert {"theta", "omega", "mean", "std"} == set(saved)
    pair = data.digits(seed=3, max_samples=40, benign=2)
    known = {row.tobytes() for row in load_digits().data}

    def inputs(role: str, split: str) -> torch.Tensor:
        """The rows of a split, found among the pixels as published, then normalized by what the run saved."""
        x = getattr(pair.tasks[role], split).x
        pixels = (16 * (x * saved["std"] + saved["mean"])).round()
        assert all(row.numpy().tobytes() in known for row in pixels)
        return (pixels / 16 - saved["mean"]) / saved["std"]

    for prefix, split in (("", "train"), ("test/", "test")):
        harmful, primary = inputs("harmful", split), inputs("primary", split)
        ranks = {role: len(spectrum.compress(x)) for role, x in (("harmful", harmful), ("primary", primary))}
        kappa = {
            "kappa_harmful": spectrum.condition_number(harmful @ saved["theta"], ranks["harmful"]),
            "kappa_primary": spectrum.condition_number(primary @ saved["theta"], ranks["primary"]),
            "kappa_harmful_baseline": spectrum.condition_number(harmful, ranks["harmful"]),
            "kappa_primary_baseline": spectrum.condition_number(primary, ranks["primary"]),
        }
        for name, value in kappa.items():
            assert done.metrics[prefix + name] == pytest.approx(value, rel=1e-6)
        ratio = kappa["kappa_harmful"] / kappa["kappa_harmful_baseline"]
        assert done.metrics[f"{prefix}ratio_harmful"] == pytest.approx(ratio, rel=1e-6)
        rir = ratio / kappa["kappa_primary"] * kappa["kappa_primary_baseline"]
        assert done.metrics[f"{prefix}rir"] == pytest.approx(rir, rel=1e-6)

    x, y = inputs("primary", "test"), pair.primary.test.y
    correct = (x @ saved["theta"] @ saved["omega"][0] > 0) == (y > 0)
    assert done.metrics["primary/head_accuracy"] == pytest.approx(correct.double().mean().item())


def test_what_the_user_sees(capsys, tmp_path, no_figures):
    run(SMALL, folder=tmp_path)
    out, err = capsys.readouterr()
    for text in ("condition_number", "RIR", "Definition 3.1", "accuracy", "seconds", "run folder"):
        assert text in out
    assert "Traceback" not in out + err


@pytest.mark.parametrize("options", [(), ("model.init=random", "method.batch_size=8")], ids=["exact", "random"])
def test_a_seed_means_the_same_numbers(options, tmp_path, no_figures):
    first, again, other = (
        run([*QUICK, *options, f"seed={seed}"], folder=tmp_path / str(i)) for i, seed in enumerate((1, 1, 2))
    )
    assert first.metrics == again.metrics
    assert first.curves == again.curves
    assert first.metrics["rir"] != other.metrics["rir"]
    tensors = [load_file(result.folder / "immunized.safetensors")["theta"] for result in (first, again, other)]
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((method, "float64") for method in METHODS),
        *(pytest.param(method, "float32", marks=[] if method in SINGLE else pytest.mark.slow) for method in METHODS),
    ],
)
def test_every_method_runs(method, dtype, tmp_path, no_figures):
    options = [f"method={method}", f"dtype={dtype}"]
    result = run([*QUICK, *options], folder=tmp_path)
    assert (result.status, result.method) == ("completed", method)
    assert result.metrics["rir"] > 0
    theta = load_file(tmp_path / "immunized.safetensors")["theta"]
    assert theta.dtype == torch.float64
    assert torch.equal(theta, theta.float().double()) == (dtype == "float32" or method == "identity")
    if method == "identity":
        for name in ("rir", "ratio_harmful", "ratio_primary", "authors/rir", "test/rir"):
            assert result.metrics[name] == pytest.approx(1)


@pytest.mark.parametrize("dataset", ["arrays", "house_prices", "mnist", "fashion_mnist"])
def test_every_linear_data_set_runs(dataset, tmp_path, no_figures, request):
    """Regressions and classes; those with files of their own are skipped where these are absent."""
    if dataset == "arrays":
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(0)
        x = {f"{role}_x": torch.randn(60, 6, generator=generator) for role in ("primary", "harmful")}
        save_file({**x, **{f"{name[:-1]}y": v[:, 0].contiguous() for name, v in x.items()}}, tmp_path / "a.safetensors")
        options = [f"dataset.path={tmp_path / 'a.safetensors'}"]
    else:
        options = [f"dataset.root={request.getfixturevalue('data_dir') / dataset}", "dataset.download=false"]
        options += ["dataset.max_samples=30"] if "mnist" in dataset else []
    overrides = [f"dataset={dataset}", "tracker=none", "method.epochs=2", "evaluation=[rir,primary]", *options]
    try:
        result = run(overrides, folder=tmp_path / "run")
    except DataError as error:
        if "does not exist" not in str(error):
            raise
        pytest.skip(str(error))
    assert result.metrics["rir"] > 0
    assert f"primary/{'accuracy' if 'mnist' in dataset else 'r2'}" in result.metrics


def test_float32_is_close_to_float64(tmp_path, no_figures):
    single, double = (run([*QUICK, f"dtype={dtype}"], folder=tmp_path / dtype) for dtype in ("float32", "float64"))
    assert single.metrics["rir"] != double.metrics["rir"]
    for name, value in double.metrics.items():
        if not name.startswith("authors/"):  # noise of single precision is above their ridge
            assert single.metrics[name] == pytest.approx(value, rel=1e-2)


def test_a_linear_layer_with_a_bias_is_exported_with_it(tmp_path, no_figures):
    options = ("model.bias=true", "model.init=random", "method=released_condition_number", "method.batch_size=null")
    run([*QUICK, *options], folder=tmp_path)
    saved = load_file(tmp_path / "immunized.safetensors")
    assert saved["bias"].shape == (64,)
    assert saved["bias"].any()


def test_a_run_without_measures_still_leaves_theta(tmp_path, no_figures):
    result = run([*SMALL[:3], "evaluation=[]"], folder=tmp_path)
    assert (result.status, result.metrics) == ("completed", {})
    assert (tmp_path / "immunized.safetensors").is_file()


def test_the_tasks_in_the_common_range_are_saved_with_its_basis(tmp_path, no_figures):
    run([*QUICK, "dataset.common_range=true", "dataset.max_samples=60"], folder=tmp_path)
    saved = load_file(tmp_path / "immunized.safetensors")
    assert saved["basis"].shape == (64, len(saved["theta"]))
    assert_close(saved["basis"].T @ saved["basis"], torch.eye(len(saved["theta"]), dtype=torch.float64))


def test_the_python_interface():
    assert {"run", "Result", "condition_number", "rir"} <= set(immunization.__all__)
    assert issubclass(immunization.ConfigError, immunization.UserError)
    assert {"audit", "immunize", "load", "run", "rir", "__version__"} <= set(dir(immunization))
    assert all(getattr(immunization, name) for name in dir(immunization))
    assert immunization.run is run
    assert immunization.condition_number is spectrum.condition_number
    with pytest.raises(AttributeError, match="immunise"):
        immunization.immunise  # noqa: B018
