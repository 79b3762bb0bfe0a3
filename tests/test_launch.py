"""The command line: what it prints, its exit code, and one clear line for every mistake of a user."""

import gzip
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.data_files import MNIST, matrices, mnist, table, with_nan, zeros
from helpers.repository import ROOT
from hydra.core.global_hydra import GlobalHydra

from immunization import Result, config, run
from immunization.__main__ import start
from immunization.data import pixels
from immunization.results import run_figures
from immunization.runs.tracker import history

pytestmark = pytest.mark.trains

QUICK = ("tracker=none", "evaluation=[rir]")
Cli = Callable[..., str]


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys) -> Cli:
    """`python launch.py <overrides>` in this process, which must fail: the message without its "error: ".

    The run folder is `tmp_path`/run.
    """
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(run_figures, "draw", lambda result, folder: [])

    def call(*overrides: str, code: int = 1) -> str:
        monkeypatch.setattr(sys, "argv", ["launch.py", *QUICK, f"hydra.run.dir={tmp_path / 'run'}", *overrides])
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as end:
            start()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        said = captured.err if code != 1 else end.value.code  # Python prints a text and exits with 1
        assert code == 1 or end.value.code == code
        assert said.startswith("error: ")
        return said.removeprefix("error: ").rstrip("\n")

    return call


def launched(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """A process of its own."""
    environment = {**os.environ, "WANDB_MODE": "offline"}
    environment.pop("HYDRA_FULL_ERROR", None)
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


# --- Processes --------------------------------------------------------------------------------------------------------


def test_a_mistake_prints_one_line_and_exits_with_1(tmp_path):
    done = launched(*QUICK, "method=magic", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"error: Could not find 'method/magic'[^\n]*\n", done.stderr)


def test_help_is_quick_as_it_imports_nothing_heavy():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['launch.py', '--help']\n"
        "try: runpy.run_path('launch.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'pandas', 'matplotlib', 'wandb', 'timm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("dataset ", "house_prices", "condition_number", "optimizer", "seed=0"):
        assert text in done.stdout


# --- Mistakes in options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.lamda_P=1", "there is no key method.lamda_P; allowed here are .*lambda_P, lambda_H"),
        ("sed=1", "there is no key sed; allowed here are .*seed"),
        ("+method.lamda_P=1", "method: .*'lamda_P'.* does not take that key"),
        ("attack.adam.steps=3", r"there is no key attack; choose it first, attack=\[adam\]"),
        ("suite.images=3", r"there is no key suite.images; choose a numbered suite first, such as attack=\[standard\]"),
        ("dataset.primary=1", "dataset.primary=1, dataset.harmful=1: .*choose different ones from 0 to 9"),
        ("dataset.primary=10", "dataset.primary must be an integer of at least 0 and at most 9, not 10"),
        ("method.lambda_P=-1", "method.lambda_P must be a finite number of at least 0, not -1"),
        ("method.lambda_P=much", "method.lambda_P must be a finite number of at least 0, not 'much'"),
        ("method.batch_size=100000", r"method.batch_size=100000 is above the \d+ training rows .*; lower it"),
        ("optimizer.lr=-0.1", "optimizer.lr must be a finite number above 0, not -0.1"),
        ("method=null", "give every group=... the name of an option"),
        ("method=learning_curv", "; did you mean learning_curve or learning_curve_net; available for method: clamp, "),
        ("name=${name}", r"^name: its value leads back to itself; look at the values with \$\{...\}$"),
        ("dataset.harmful=${nope}", "^dataset.harmful: Interpolation key 'nope' not found; look at the values with"),
    ],
)
def test_options(cli, override, message):
    said = cli(override)
    assert re.search(message, said)
    assert "\n" not in said


def test_key_of_a_list(cli):
    assert cli("attack=[standard]", "suite.images.x=9") == (
        "a list has no key 'x'; give all of it, as in suite.images=[5,20]"
    )


def test_a_multirun_whose_folder_leads_back_to_itself(cli, capsys):
    assert cli("-m", "seed=1,2", "name=${name}").startswith("hydra.sweep.dir: its value leads back to itself")
    assert "Warning" not in capsys.readouterr().err


def test_a_gpu_that_is_not_there(cli, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device=cuda" in (said := cli("device=cuda"))
    assert "use device=auto or device=cpu" in said


def test_a_diverging_loss_keeps_the_last_good_numbers(tmp_path, cli):
    said = cli("optimizer=sgd", "optimizer.lr=3", "method.epochs=500", "dataset.max_samples=20", "log_every=1")
    assert "lower optimizer.lr" in said
    result, curves = Result.read(tmp_path / "run"), history(tmp_path / "run")
    assert (result.status, result.error) == ("failed", said)
    assert len(curves["rir"]["y"]) > 1
    for name in ("loss", "rir", "kappa_harmful", "kappa_primary"):
        assert result.metrics[name] == curves[name]["y"][-1] is not None
    log = (tmp_path / "run" / "run.log").read_text()
    assert "ERROR" in log
    assert "Traceback" not in log  # a user's mistake


@pytest.mark.parametrize("folder", ["{tmp}/file/run", "/proc/run", "{tmp}/circle", "{tmp}/circle/run"])
def test_folders_that_cannot_be_written(tmp_path, cli, folder):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    folder = folder.format(tmp=tmp_path)
    said = cli(f"hydra.run.dir={folder}")
    assert folder in said
    assert "hydra.run.dir=" in said


@pytest.mark.parametrize("key", ["baselines", "published"])
@pytest.mark.parametrize(
    ("folder", "why"), [("{tmp}/circle", "Too many levels of symbolic links"), ("/proc/x", "No such file or directory")]
)
def test_a_folder_of_shared_work_that_cannot_be_made(tmp_path, cli, monkeypatch, key, folder, why):
    monkeypatch.setattr("immunization.runner.assemble", lambda _: pytest.fail("this is found too late"))
    (tmp_path / "circle").symlink_to("circle")
    folder = folder.format(tmp=tmp_path)
    said = cli("dataset.max_samples=20", "method=identity", "attack=[standard]", f"{key}={folder}")
    kind = "folder" if key == "baselines" else "file"
    assert said == f"{key}={folder}: {why}; give a {kind} that can be made and written, or null"


def test_published_curves_that_are_damaged(tmp_path, cli, monkeypatch):
    """They are other people's work, and stay as they are."""
    monkeypatch.setattr("immunization.runner.assemble", lambda _: pytest.fail("this is found too late"))
    (path := tmp_path / "track.safetensors").write_bytes(b"version https://git-lfs")
    said = cli("dataset.max_samples=20", "method=identity", "attack=[standard]", f"published={path}")
    assert said.startswith(f"{path} cannot be read: ")
    assert path.read_bytes() == b"version https://git-lfs"


def test_a_mode_that_wandb_does_not_have(cli, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "dryrn")
    said = cli("tracker=wandb", "dataset.max_samples=20")
    assert said == "WANDB_MODE must be one of online, offline, disabled, shared, dryrun, run, not 'dryrn'"


@pytest.mark.parametrize("error", [ZeroDivisionError, ValueError])
def test_a_fault_of_the_program_shows_its_traceback(cli, monkeypatch, error):
    def fault(*_):
        raise error("not the user's")

    monkeypatch.setattr("immunization.methods.ConditionNumber.step", fault)
    with pytest.raises(error, match="not the user's"):
        cli("dataset.max_samples=20")


def test_ctrl_c_names_the_folder_and_how_to_go_on(tmp_path, cli, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("immunization.methods.ConditionNumber.step", interrupt)
    said = cli("dataset.max_samples=20", code=130)
    assert said == f"interrupted: the same command with hydra.run.dir={tmp_path / 'run'} resume=true goes on"
    result = Result.read(tmp_path / "run")
    assert (result.status, result.error) == ("interrupted", "interrupted")


def test_an_objective_that_nothing_measures_is_refused_before_the_run(cli, tmp_path):
    said = cli("objective=rri", "method=identity", "dataset.max_samples=20")
    assert re.fullmatch(r"objective=rri: no chosen evaluation or attack measures that; the closest are: rir, .*", said)
    assert Result.read(tmp_path / "run").metrics == {}


def test_an_objective_that_could_not_be_measured(cli, tmp_path):
    said = cli("objective=test/rri", "method=identity", "dataset.max_samples=20")
    assert re.fullmatch(
        r"objective=test/rri: this run has no measure of that name; the closest are: test/rir, .* complete\)", said
    )
    assert Result.read(tmp_path / "run").status == "completed"


def test_a_process_of_torchrun_that_measures_nothing_ends_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    words = [*QUICK, f"hydra.run.dir={tmp_path}", "objective=test/rri", "method=identity", "dataset.max_samples=20"]
    monkeypatch.setattr(sys, "argv", ["launch.py", *words])
    GlobalHydra.instance().clear()
    start()
    assert "no measure" not in capsys.readouterr().err


def test_a_hydra_application_around_keeps_its_state(tmp_path):
    from hydra import compose, initialize_config_dir

    (tmp_path / "own.yaml").write_text("a: 1")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert config.compose(["seed=3"]).seed == 3
        assert compose("own").a == 1
    assert not GlobalHydra.instance().is_initialized()


def test_terminals_without_greek_letters(tmp_path, cli, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["launch.py", *QUICK, f"hydra.run.dir={tmp_path / 'run'}", "method=identity"])
    start()
    terminal.flush()
    assert b"RIR" in terminal.buffer.getvalue()
    assert Result.read(tmp_path / "run").status == "completed"


@pytest.mark.parametrize("threads", ["4,2", "many", ""])
def test_threads_by_nesting_level_or_nonsense(threads, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    run([*QUICK, "method=identity", "dataset.max_samples=20", "figures=false"], folder=tmp_path)
    assert Result.read(tmp_path).status == "completed"


# --- Mistakes in data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"harmful_x": with_nan()}, r"'harmful_x' in .*pair.npz holds 1 NaN .* \[7, 1\]; clean or drop"),
        ({"primary_y": np.zeros(40, int)}, "'primary_y' in .*pair.npz .*one class only.*two classes or more"),
        ({"primary_y": np.full(40, "a")}, "pair.npz cannot be read .* 'primary_y' holds <U1; number classes 0, 1, "),
        ({"primary_x": np.ones((40, 3))}, r"task 'primary': every input feature is constant .* \(rank 0\); give it"),
    ],
)
def test_arrays(tmp_path, cli, changes, message):
    np.savez(tmp_path / "pair.npz", **matrices(**changes))
    said = cli("dataset=arrays", f"dataset.path={tmp_path / 'pair.npz'}", "method.epochs=1")
    assert re.search(message, said)
    assert "\n" not in said
    assert Result.read(tmp_path / "run").error == said


@pytest.mark.parametrize("folder", ["runs/0_seed=1,lr=2", "Läufe/a", "runs/a(1)"])
def test_a_folder_that_hydra_cannot_read_says_how_it_is_quoted(tmp_path, cli, folder):
    said = cli("experiment=audit", f"model.checkpoint={folder}")
    quoted = f"model.checkpoint='{folder}'"
    assert said.endswith(f'needs two pairs of quotes: "{quoted}"')
    assert f"{folder} not found" in cli("experiment=audit", quoted)


def test_an_optimizer_of_several_losses_a_step_is_refused(cli):
    chosen = ("optimizer=sgd", "optimizer._target_=torch.optim.LBFGS", "~optimizer.momentum", "~optimizer.weight_decay")
    assert "computes several losses a step" in cli(*chosen, "dataset.max_samples=20")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "harmful.csv .*No such file"),
        (table(header="a,b,price"), "harmful.csv lacks the column target; set dataset.target to one of a, b, price"),
        (
            table(first="near,0,0"),
            "harmful.csv, data row 1, column a: 'near' is no number, and 39 other values are: correct",
        ),
        (table()[:-14], "harmful.csv, line 41: 2 fields, the header has 3; .*cut off"),
        (table()[:-3], "harmful.csv does not end with a line break"),
        ("", "harmful.csv .*Too many levels of symbolic links"),
    ],
    ids=["absent", "no target", "text", "cut between fields", "cut in a field", "circle"],
)
def test_csv_files(tmp_path, cli, text, message):
    (tmp_path / "primary.csv").write_text(table())
    if text:
        (tmp_path / "harmful.csv").write_text(text)
    elif text is not None:
        (tmp_path / "harmful.csv").symlink_to("harmful.csv")
    paths = [f"dataset.{role}_csv={tmp_path / role}.csv" for role in ("primary", "harmful")]
    said = cli("dataset=arrays", *paths, "method.epochs=1")
    assert re.search(message, said)
    assert "\n" not in said


def test_house_prices(tmp_path, cli):
    options = ("dataset=house_prices", f"dataset.root={tmp_path}", "dataset.download=false", "method.epochs=1")
    said = cli(*options)
    assert re.search(r"train\.csv does not exist: get train\.csv from .* and set dataset\.root", said)
    (tmp_path / "train.csv").write_text("Id,MSZoning\n1,RL\n2,RM\n")
    assert re.search(r"train\.csv lacks the columns MSSubClass, ", cli(*options))


def test_an_idx_file_that_unpacks_to_too_much(tmp_path, cli, monkeypatch):
    monkeypatch.setattr(pixels, "LARGEST", 60 * 28 * 28)  # without the header's 16 bytes
    mnist(tmp_path)
    said = cli(*(option.replace("{tmp}", str(tmp_path)) for option in MNIST))
    assert re.search(r"train-images-idx3-ubyte.gz is truncated or corrupted \(it holds more than 47,040 bytes", said)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(zeros(60, 28, 28))[:-9],
            "train-images.* is truncated or corrupted",
        ),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(zeros(60)[:-5]), "t10k-labels.* is truncated or corrupted"),
        ("t10k-labels-idx1-ubyte.gz", None, r"t10k-labels-idx1-ubyte\[\.gz\] does not exist: put"),
    ],
    ids=["cut", "short", "absent"],
)
def test_mnist(tmp_path, cli, name, content, message):
    mnist(tmp_path, name, content)
    said = cli(*(option.replace("{tmp}", str(tmp_path)) for option in MNIST))
    assert re.search(message, said)
    assert "\n" not in said
    assert Result.read(tmp_path / "run").status == "failed"
