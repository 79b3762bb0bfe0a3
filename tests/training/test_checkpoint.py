"""Runs that are interrupted and go on, bit for bit; damaged files; folders that are taken, full or read-only."""

import os
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.images import draw_folder
from helpers.runs import DEEP, QUICK, kill_at, outcome, resumed

from immunization import Result, run
from immunization.config import compose
from immunization.data.pixels import sklearn_digits
from immunization.errors import ConfigError, DataError
from immunization.methods import Method
from immunization.results.collect import collect
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.tracker import Tracker
from immunization.training import checkpoint

pytestmark = pytest.mark.trains

BATCHES = ("method.epochs=3", "method.batch_size=20")
FAST = ("model.channels_last=true", "model.amp=bfloat16", "dtype=float32")


# --- Going on, bit for bit --------------------------------------------------------------------------------------------


# A patience of 4 lasts beyond the step of the cut, whatever the scores.
@pytest.mark.parametrize(
    "options",
    [
        (*BATCHES, "method.balance=true", "model.init=random", "scheduler=multistep", "scheduler.milestones=[0.3,0.7]"),
        ("method.epochs=9", "optimizer=nesterov", "dtype=float32", "scheduler=warmup_cosine"),
        ("method.epochs=9", "scheduler=plateau", "scheduler.patience=1", "optimizer=sgd", "optimizer.lr=1e-6"),
        ("method=imma", "method.epochs=9"),
        ("method=opt_kappa", "method.epochs=30", "method.patience=4", "method.form=log"),
        ("method=learning_curve", "method.epochs=9", "method.patience=4", "dataset.val_fraction=0.2"),
        ("method=r_ill_only", "method.epochs=9", "method.max_accuracy_drop=0.5", "dataset.val_fraction=0.2"),
    ],
    ids=["batches", "float32", "plateau", "imma", "patience", "learning_curve", "accuracy"],
)
def test_linear_runs_go_on(options, tmp_path, monkeypatch, cut):
    whole, again = resumed([*QUICK, *options], tmp_path, monkeypatch, cut)
    assert whole == again


@pytest.mark.parametrize(
    "options",
    [
        ("method=condition_number", "method.batch_size=16"),
        pytest.param(("method=condition_number", "method.epochs=2", "log_every=1"), marks=pytest.mark.slow),
        pytest.param(("method=imma", "method.epochs=2"), marks=pytest.mark.slow),
        pytest.param(("method=learning_curve", "method.epochs=9"), marks=pytest.mark.slow),
    ],
)
def test_nets_go_on(options, tmp_path, monkeypatch, cut):
    whole, again = resumed([*DEEP, *options], tmp_path, monkeypatch, cut)
    assert whole == again


@pytest.mark.parametrize("speed", [FAST, pytest.param((), marks=pytest.mark.slow)], ids=["fast", "plain"])
def test_nets_on_augmented_images_go_on_in_the_middle_of_a_pass(speed, tmp_path, monkeypatch, cut):
    """The images of the pass are read again, and the same augmentations drawn."""
    primary = draw_folder(tmp_path / "p", 2, 20, 4, 0)
    harmful = draw_folder(tmp_path / "h", 2, 12, 4, 1)
    options = [
        *("dataset=image_folders", "model=timm", "model.name=test_resnet", "model.pretrained=false", "tracker=none"),
        *("+model.arguments.num_classes=2", "method=condition_number", "method.epochs=2", "method.batch_size=5"),
        *(f"dataset.primary_root={primary}", f"dataset.harmful_root={harmful}", "dataset.augment=true", "log_every=1"),
        *("dataset.size=32", "evaluation=[rir]", f"dataset.cache={tmp_path / 'cache'}", "figures=false"),
        *speed,
    ]
    whole, again = resumed(options, tmp_path, monkeypatch, cut, at=3, every=2)
    assert whole == again


def test_a_run_in_which_the_method_remembers_something_of_its_own(tmp_path, monkeypatch, cut):
    cfg = compose([*QUICK, "method.epochs=9", "checkpoint.every=3"])
    cfg.trusted = [__name__]
    cfg.method = {"_target_": f"{__name__}.Momentum", "epochs": 9}
    run(cfg, folder=tmp_path / "whole")
    cut(4)
    with pytest.raises(KeyboardInterrupt):
        run(cfg, folder=tmp_path / "cut")
    monkeypatch.undo()
    cfg.resume = True
    run(cfg, folder=tmp_path / "cut")
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "cut")


class Momentum(Method):
    """Remembers the last loss."""

    last = 0.0

    def step(self, model, primary, harmful):
        loss = self.pair.primary.loss(model(primary.x), primary.y)
        self.last, before = loss.item(), self.last
        return {"loss": loss * (1 + before)}

    def state_dict(self):
        return super().state_dict() | {"last": self.last}


def test_a_run_killed_after_its_training_measures_the_same(tmp_path, monkeypatch):
    options = [*QUICK, "method=learning_curve", "method.epochs=6"]
    run(options, folder=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run([*options, "checkpoint.every=4"], folder=tmp_path / "cut")
    monkeypatch.setattr(Method, "step", None)
    monkeypatch.setattr("immunization.methods.LearningCurve.step", None)  # no step is left
    run([*options, "resume=true"], folder=tmp_path / "cut")
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "cut")


class Numbered(Tracker):
    """Gives its run a number, or goes on with the one it is told, as W&B does."""

    runs: list[str] = []  # noqa: RUF012

    def start(self, folder, config, name, group, tags):
        self.run_id = self.run_id or f"run{len(self.runs)}"
        self.runs.append(self.run_id)


def _cut_and_resumed(tracker, folder, monkeypatch, cut):
    """A run with a tracker of this module, interrupted after step 4 and resumed from its checkpoint of step 3."""
    cfg = compose([*QUICK, "method.epochs=9", "checkpoint.every=3"])
    cfg.trusted, cfg.tracker = [__name__], {"_target_": f"{__name__}.{tracker.__name__}"}
    cut(4)
    with pytest.raises(KeyboardInterrupt):
        run(cfg, folder=folder)
    monkeypatch.undo()
    cfg.resume = True
    run(cfg, folder=folder)


def test_the_run_of_a_tracker_goes_on(tmp_path, monkeypatch, cut):
    _cut_and_resumed(Numbered, tmp_path, monkeypatch, cut)
    assert Numbered.runs == ["run0", "run0"]


class Renewed(Tracker):
    """Begins a new run whenever it starts, as W&B does without a server."""

    steps: list[list[int]] = []  # noqa: RUF012

    def start(self, folder, config, name, group, tags):
        self.run_id = f"run{len(self.steps)}"
        self.steps.append([])

    def log(self, step, metrics):
        self.steps[-1].append(step)


def test_a_new_run_of_a_tracker_gets_the_steps_before_the_checkpoint_too(tmp_path, monkeypatch, cut):
    _cut_and_resumed(Renewed, tmp_path, monkeypatch, cut)
    assert Renewed.steps == [[0, 1, 2, 3, 4], [*range(10)]]


def test_short_runs_write_no_checkpoint_and_the_clock_bounds_its_share(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(checkpoint.Checkpointer, "write", lambda self, step, state: written.append(step))
    run([*QUICK, "method.epochs=5"], folder=tmp_path / "default")
    assert not written
    run([*QUICK, "method.epochs=5", "checkpoint.seconds=1e-9"], folder=tmp_path / "always")
    assert written[:5] == [1, 2, 3, 4, 5]
    monkeypatch.undo()
    keeper = checkpoint.Checkpointer(tmp_path, {}, checkpoint.Stop(), seconds=1e-9)
    keeper.write(1, lambda: time.sleep(0.01) or {})
    assert keeper.due - time.monotonic() > 0.9  # 1 % of the time from now on


@pytest.mark.parametrize(
    "options",
    [[*QUICK, "method.epochs=5"], pytest.param([*DEEP, "method=condition_number"], marks=pytest.mark.slow)],
    ids=["linear", "net"],
)
def test_two_deterministic_runs_agree_bit_for_bit(options, tmp_path):
    def asked() -> int:
        return torch.get_deterministic_debug_mode()

    torch.set_deterministic_debug_mode("warn")
    before = asked()
    for name in ("a", "b"):
        run([*options, "deterministic=true"], folder=tmp_path / name)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    assert asked() == before
    torch.set_deterministic_debug_mode("default")


# --- What may not be mixed up -----------------------------------------------------------------------------------------


NINE = (*QUICK, "method.epochs=9")


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory) -> Path:
    """The folder of a run of 9 steps that was cut after step 4, with a checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("cut") / "half"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(4, patch)
        with pytest.raises(KeyboardInterrupt):
            run([*NINE, "checkpoint.every=3"], folder=folder)
    return folder


@pytest.fixture
def half(cut_short, tmp_path) -> Path:
    return Path(shutil.copytree(cut_short, tmp_path / "half"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple:
    """What that run comes to without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(NINE, folder=folder)
    return outcome(folder)


def test_a_checkpoint_of_another_configuration_is_refused(half):
    before = {path.name: path.read_bytes() for path in half.iterdir() if path.suffix != ".log"}
    with pytest.raises(ConfigError, match=r"another configuration \(seed: 0 -> 1, .*to start a new run"):
        run([*NINE, "seed=1", "resume=true"], folder=half)
    assert before == {path.name: path.read_bytes() for path in half.iterdir() if path.suffix != ".log"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "text"])
def test_a_damaged_checkpoint_is_named_and_the_run_starts_again(half, damage, whole, capsys):
    path = half / CHECKPOINT
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(
        {"cut": content[:-100], "flipped": content, "emptied": b"", "text": b"not a checkpoint at all"}[damage]
    )
    run([*NINE, "resume=true"], folder=half)
    assert CHECKPOINT in (said := capsys.readouterr().err)
    assert "starts from the beginning" in said
    assert outcome(half) == whole


def test_an_altered_history_is_named(half):
    path = half / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1', '"step": 7'))
    with pytest.raises(DataError, match=r"metrics\.jsonl was changed since the checkpoint; .*start a new run"):
        run([*NINE, "resume=true"], folder=half)


def test_other_data_under_the_same_configuration_are_named(half, monkeypatch):
    pixels, labels = sklearn_digits()
    monkeypatch.setattr("immunization.data.pixels.sklearn_digits", lambda: (pixels + (pixels == 3), labels))
    with pytest.raises(DataError, match=r"does not match this run any more: the content of dataset"):
        run([*NINE, "resume=true"], folder=half)


@pytest.mark.parametrize("resume", ["false", "true"])
def test_a_completed_run_is_never_written_over(tmp_path, resume):
    run([*QUICK, "method.epochs=2"], folder=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="holds a completed run"):
        run([*QUICK, "method.epochs=2", "seed=1", f"resume={resume}"], folder=tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


# --- Signals ----------------------------------------------------------------------------------------------------------


def test_signals_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run([*QUICK, "method.epochs=2"], folder=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def test_whoever_listened_before_decides_what_follows_the_checkpoint(tmp_path, monkeypatch):
    """As launchers of clusters do, which put the job back into the queue on SIGUSR2."""
    heard = []
    monkeypatch.setattr(checkpoint.Checkpointer, "write", lambda self, step, state: heard.append(step))
    step = Method.epoch_end
    monkeypatch.setattr(
        Method,
        "epoch_end",
        lambda self, model, epoch: os.kill(os.getpid(), signal.SIGUSR2) if epoch == 2 else step(self, model, epoch),
    )
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append("requeued"))
    try:
        run([*QUICK, "method.epochs=5"], folder=tmp_path)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [4, "requeued"]


@pytest.mark.parametrize(
    ("number", "countdown", "code", "status", "why"),
    [
        (signal.SIGTERM, 3, 143, "interrupted", ""),  # scancel: submitit's handler would let it pass
        (signal.SIGUSR2, 3, -1, "requeued", ""),
        (
            signal.SIGUSR2,
            -1,
            128 + signal.SIGUSR2,
            "interrupted",
            "Job not requeued because: timed-out too many times.",
        ),
    ],
)
def test_signals_of_slurm_under_submitit_end_the_run_after_its_checkpoint(
    tmp_path, monkeypatch, number, countdown, code, status, why
):
    job = pytest.importorskip("submitit.core.job_environment")
    environment = SimpleNamespace(global_rank=0, _requeue=lambda countdown: None)
    delayed = SimpleNamespace(function=print, _timeout_min=60, _timeout_countdown=countdown)
    handler = job.SignalHandler(environment, None, delayed)
    step = Method.epoch_end
    monkeypatch.setattr(
        Method,
        "epoch_end",
        lambda self, model, epoch: os.kill(os.getpid(), number) if epoch == 2 else step(self, model, epoch),
    )
    listens = handler.bypass if number == signal.SIGTERM else handler.checkpoint_and_try_requeue
    before = signal.signal(number, listens)
    try:
        with pytest.raises(SystemExit) as end:
            run([*QUICK, "method.epochs=5"], folder=tmp_path)
    finally:
        signal.signal(number, before)
    assert end.value.code == code
    result = Result.read(tmp_path)
    assert (result.status, result.interrupted) == (status, True)
    assert result.error == (f"{status}: {why}" if why else status)
    assert (tmp_path / CHECKPOINT).exists()
    (problem,) = collect([tmp_path]).problems
    assert (problem.kind, why in problem.message, "resume=true" in problem.message) == (status, True, True)


# --- Disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def limited():
    """Sets how large a file may become, as a full disk or a quota does."""

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 2000, 20_000])
def test_a_full_disk_is_said_and_nothing_written_before_is_lost(size, half, limited, capfd):
    """At any time: in config.yaml, in metrics.jsonl, in the weights."""
    kept = (half / CHECKPOINT).read_bytes()
    limited(size)
    with pytest.raises(ConfigError, match=r"half.*: .*; make room there, or .* hydra\.run\.dir"):
        run([*NINE, "resume=true"], folder=half)
    limited(resource.RLIM_INFINITY)
    assert "Traceback" not in capfd.readouterr().err
    assert (half / CHECKPOINT).read_bytes() == kept
    assert not list(half.glob(".*"))
    assert run([*NINE, "resume=true"], folder=half).status == "completed"
