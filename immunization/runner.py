"""One run: data -> model and frozen baseline -> method -> evaluation -> result, figures and table."""

from __future__ import annotations

import copy
import errno
import json
import logging
import math
import os
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from immunization.compute import distributed, randomness
from immunization.config import build, check, compose, slug
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError, DataError, Diverged, Preempted, UserError
from immunization.evaluation import Comparison, Measures
from immunization.methods import Method, PairedBatches, Progress, Unmodified, train
from immunization.models import Model
from immunization.results import model_card, run_figures
from immunization.results.screen import line, show
from immunization.runs import environment, files
from immunization.runs.result import Result
from immunization.runs.resume import CONFIG, ROWS, WEIGHTS, completed, result_settings
from immunization.runs.tracker import Recorder, Tracker
from immunization.theory import spectrum
from immunization.training import checkpoint
from immunization.training.checkpoint import Checkpointer, Stop
from immunization.training.loaders import LoaderBatches, batches_of
from immunization.training.optimization import optimizer_of, scheduler_of

log = logging.getLogger("immunization")

RUN_LOG = "run.log"
ARRAYS = "arrays.safetensors"

LOG_LINES = 40
"""Lines of metrics.jsonl a run writes by default."""

SMALL = 256
"""Up to this many features one thread is faster than several."""


class Parts(NamedTuple):
    """What a run is made of: the tasks as they are measured and as they are trained on; `start` holds theta_0."""

    method: Method
    model: Model
    pair: TaskPair
    training: TaskPair
    start: dict[str, Tensor]


def run(
    config: DictConfig | Iterable[str] = (),
    folder: str | Path | None = None,
    overrides: Iterable[str] | None = None,
    quiet: bool = False,
) -> Result:
    """Run one experiment and return its Result, which also stands in the run folder as result.json.

    `config` is a composed configuration, or a list of overrides as on the command line (`["dataset=mnist"]`). `folder`
    is the run folder, by default outputs/<name>/<time>. With `resume=true` a completed run of the same configuration
    in it is returned as it is, and an interrupted one goes on from its checkpoint; a completed run is never written
    over. `quiet`, for the jobs of a sweep, prints one line instead of the table and draws figures only with
    `figures=true`. Raises UserError for a mistake in the configuration or
    the data, after a result.json with status `failed` was written; Preempted, an exit with code 143, on SIGTERM, after
    a checkpoint was written.
    """
    if not isinstance(config, DictConfig):
        overrides = list(config)
        config = compose(overrides)
    if folder is None:
        folder = Path("outputs") / slug(config.name) / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    folder = Path(folder)
    method, model = (config[key]._target_.rpartition(".")[2] for key in ("method", "model"))
    result = Result(seed=config.seed, dataset=config.dataset.name, model=model, method=method, folder=folder)
    with randomness.deterministic(config.deterministic), distributed.group(config.device):
        if distributed.rank():
            return _follow(config, result)
        return _lead(config, list(overrides or ()), result, quiet)


def _lead(config: DictConfig, overrides: list[str], result: Result, quiet: bool) -> Result:
    """The run itself: its folder, its files and what is shown."""
    folder = result.folder
    trackers: list[Tracker] = []
    with _at_work(folder), Stop().listening() as stop:
        if before := completed(config, folder):
            distributed.agree(None)
            print(f"{folder.name}: completed before, nothing to do (resume=true)", flush=True)
            return before
        settings = result_settings(OmegaConf.to_container(config, resolve=True))
        state = checkpoint.read(folder, settings) if config.resume else None
        distributed.agree(folder)
        try:
            _execute(config, overrides, result, trackers, state, stop)
        except BaseException as error:
            error = _without_room(error, folder)
            result.fail(error)
            with suppress(OSError):  # which would hide the error itself
                result.write(folder)
            log.error("%s", result.error, exc_info=not isinstance(error, UserError | Preempted))
            for tracker in trackers:
                tracker.close(failed=True)
            raise error from error.__cause__
        _present(config, result, trackers, quiet)
    return result


def _follow(config: DictConfig, result: Result) -> Result:
    """What the other processes of a distributed training do: their share of the features, and no file."""
    own = result.folder.resolve()
    try:
        result.folder = distributed.agree()
        if own != result.folder:
            with suppress(OSError):
                own.rmdir()  # Hydra made it, named by its own time
        if result.folder is None:
            return result
        settings = result_settings(OmegaConf.to_container(config, resolve=True))
        state = checkpoint.read(result.folder, settings) if config.resume else None
        check(config)
        method, model, _, training, _ = prepare(config)
        keeper = Checkpointer(result.folder, {}, Stop(), seconds=None)
        immunize(config, method, model, training, Monitor(model, training, result, []), keeper, state)
        result.status = "completed"
    except (UserError, RuntimeError) as error:  # the first process meets it too, or is no more: it has the word
        raise SystemExit(1) from error
    return result


def _execute(
    config: DictConfig,
    overrides: list[str],
    result: Result,
    trackers: list[Tracker],
    state: dict[str, Any] | None,
    stop: Stop,
) -> None:
    """Everything up to a completed result.json. `state` is that of the checkpoint to go on from."""
    folder = result.folder
    settings = OmegaConf.to_container(config, resolve=True)
    files.write(folder / CONFIG, OmegaConf.to_yaml(config, resolve=True))
    files.write(folder / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(overrides)))
    check(config)
    device = device_of(config)
    if config.tracker is not None:
        tracker = build(config, "tracker")
        tracker.run_id = state["tracker"] if state else None
        tracker.start(folder, settings, name=folder.name, group=config.name, tags=list(config.tags or ()))
        trackers.append(tracker)

    method, model, pair, training, start = prepare(config)
    result.about, result.method, result.model = pair.about, method.name, model.name
    environment.write(folder, device)
    log.info("%s: %s", pair.name, pair.about)

    _clear(folder, state)
    trackers.insert(0, Recorder(folder, state["recorder"] if state else None))
    started = time.perf_counter()
    keeper = Checkpointer(folder, result_settings(settings), stop, **config.checkpoint)
    earlier = immunize(config, method, model, training, Monitor(model, training, result, trackers), keeper, state)
    result.seconds["immunize"] = earlier + time.perf_counter() - started
    distributed.leave()
    model = model.for_measurement()
    files.write_tensors(folder / WEIGHTS, {**model.export(), **pair.tensors}, model.metadata())
    if origins := pair.origins:
        sources = {name: origin.source for name, origin in origins.items()}
        files.write_tensors(folder / ROWS, {name: origin.rows for name, origin in origins.items()}, sources)

    started = time.perf_counter()
    comparison = Comparison(pair, model)
    measures = evaluate(config, comparison)
    for name, reason in method.flags.items():
        measures.flag(name, reason)
    if method.undetermined:
        measures.withhold("undetermined", method.undetermined)
    result.seconds["evaluate"] = time.perf_counter() - started
    if config.get("attack"):
        started = time.perf_counter()
        measures.merge(attack(config, model, comparison, start))
        result.seconds["attack"] = time.perf_counter() - started
    result.metrics, result.reasons = measures.metrics, measures.reasons
    result.curves, result.flags = measures.curves, measures.flags
    if measures.arrays:
        files.write_tensors(folder / ARRAYS, measures.arrays)
    if facts := model.metadata():
        model_card.write(folder, result, config, json.loads(facts["immunization"]))
    result.status = "completed"
    result.write(folder)
    keeper.path.unlink(missing_ok=True)


def prepare(config: DictConfig) -> Parts:
    """Data, method and model of a run, from its seed; sets the threads."""
    device = device_of(config)
    randomness.seed(config.seed)
    _threads(config.threads, None)
    data = build(config, "dataset").to(device, torch.float64)
    method: Method = build(config, "method") if config.immunize else Unmodified()
    with distributed.main_process_first():
        model: Model = build(config, "model", pair=data.to(device, getattr(torch, config.dtype)))
        model, pair = model.read_tasks(data, method.folds)
    _threads(config.threads, None if pair.primary.width else pair.dim)
    if distributed.size() > 1 and (method.alone or not pair.primary.width):
        raise ConfigError(
            f"method={method.name} on {model.name} is not trained by several processes: nets whose layers are trained "
            "are, by any method but imma; start it without torchrun"
        )
    training = pair.to(device, model.dtype)
    if method.epochs:  # a process's first optimizer imports torch's compiler, seconds that are not the method's
        torch.optim.SGD([torch.zeros(1)])
    start = copy.deepcopy(model.extractor.state_dict()) if config.get("attack") else {}
    return Parts(method, model, pair, training, start)


def _present(config: DictConfig, result: Result, trackers: list[Tracker], quiet: bool) -> None:
    """Figures, trackers and the screen: the result stands, and nothing that fails here makes it a failed one."""
    pictures: list[Path] = []
    with _without_harm("the figures cannot be drawn"):
        if config.figures or (config.figures is None and not quiet):
            pictures = run_figures.draw(result, result.folder)
    if any(name.startswith("attack/") for name in result.metrics):
        with _without_harm("the report cannot be written"):
            from immunization.results import page  # pandas and more, not for runs without attacks

            page.audit(result.folder)
    for tracker in trackers:
        with _without_harm("a tracker failed at the end"):
            tracker.finish(result, pictures)
        tracker.close(failed=False)
    with _without_harm("the table cannot be printed"):
        if quiet:
            print(line(result), flush=True)
        else:
            show(result)


@contextmanager
def _without_harm(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning("%s (%s: %s); the result is complete", what, type(error).__name__, error)


def _clear(folder: Path, state: dict[str, Any] | None) -> None:
    """Remove what an unfinished run left and the one that begins, or goes on from `state`, will write at its end."""
    names = (Result.file, WEIGHTS, ROWS, ARRAYS, model_card.FILE, *([] if state else [checkpoint.FILE]))
    for path in (*(folder / name for name in names), *folder.glob(f".*{files.PART}")):
        path.unlink(missing_ok=True)


def _without_room(error: BaseException, folder: Path) -> BaseException:
    """An error of a full or read-only disk in words of its own; any other one as it is."""
    if not isinstance(error, OSError) or error.errno not in (*files.NO_ROOM, errno.EROFS, errno.EACCES):
        return error
    message = ConfigError(
        f"{error.filename or folder}: {error.strerror}; make room there, or choose another disk with hydra.run.dir=... "
        "(what was written before is intact)"
    )
    message.__cause__ = error
    return message


def immunize(
    config: DictConfig,
    method: Method,
    model: Model,
    pair: TaskPair,
    monitor: Monitor,
    keeper: Checkpointer,
    state: dict[str, Any] | None,
) -> float:
    """Train `model` in place by `method`, with a progress bar on a terminal and `monitor` every `log_every` steps.

    `keeper` writes checkpoints; `state` is that of the one to go on from, whose seconds are returned.
    """
    method.setup(model, pair)
    batches = batches_of(model, pair, method.batch_size, torch.Generator().manual_seed(config.seed))
    total = method.epochs * batches.steps_per_epoch
    every = log_interval(config, pair, total)
    monitor.period = batches.steps_per_epoch if pair.primary.width else 1
    if state is None:
        monitor(0, {})
    if total:
        optimizer = optimizer_of(config, model.groups())
        scheduler = scheduler_of(config, optimizer, total)
        distributed.attach(model.extractor, optimizer)
        training = Training(method, model, optimizer, scheduler, batches, monitor)
        if state:
            training.load_state_dict(state)
            log.info("going on after step %d", training.progress.step)
        with tqdm(total=total, initial=training.progress.step, desc=method.name, unit="step", disable=None) as bar:

            def on_step(step: int, terms: dict[str, Tensor]) -> None:
                bar.update()
                if step % every == 0 or step == total or (step % monitor.period == 0 and monitor.period > 1):
                    values = monitor(step, terms)
                    shown = {name: f"{values[name]:.3g}" for name in ("loss", "rir", "lr") if name in values}
                    bar.set_postfix(shown, refresh=False)
                keeper(step, training.state_dict)

            try:
                with keeper.stop.training():
                    train(method, model, batches, optimizer, on_step, training.progress, scheduler)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"the GPU has no memory for method.batch_size={method.batch_size}; lower it, or use dtype=float32, "
                    "fewer trained layers (model.trainable), or device=cpu"
                ) from error
        keeper.finish(training.progress.step, training.state_dict)
    method.finish(model)
    return state["seconds"] if state else 0.0


def log_interval(config: DictConfig, pair: TaskPair, steps: int) -> int:
    """Steps between two log lines of a training of `steps` steps."""
    cheap = pair.primary.width is not None or pair.dim <= SMALL  # else a log line costs more than a step
    return config.log_every or max(1, steps // (LOG_LINES if cheap else LOG_LINES // 2))


class Training:
    """What a checkpoint is made of: method, model, optimizer, scheduler, place in the data, random states, history."""

    def __init__(
        self,
        method: Method,
        model: Model,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        batches: PairedBatches | LoaderBatches,
        monitor: Monitor,
    ) -> None:
        self.parts = {"method": method, "optimizer": optimizer, "batches": batches, "monitor": monitor}
        if scheduler is not None:
            self.parts["scheduler"] = scheduler
        self.model, self.monitor = model, monitor
        self.progress, self.earlier, self.started = Progress(), 0.0, time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()} | {
            "model": checkpoint.kept_of(self.model),
            "progress": vars(self.progress),
            "random": randomness.states(),
            "recorder": self.monitor.trackers[0].state_dict(),
            "tracker": next((tracker.run_id for tracker in self.monitor.trackers if tracker.run_id), None),
            "seconds": self.earlier + time.perf_counter() - self.started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError where `state` does not fit, as the data or the weights have changed."""
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            checkpoint.load_into(self.model, state["model"])
            vars(self.progress).update(state["progress"])
            self.earlier = state["seconds"]
            randomness.restore(state["random"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.monitor.result.folder / checkpoint.FILE} does not fit this run ({error}): the data, the "
                "weights or the program have changed; resume=false starts afresh"
            ) from error


class Monitor:
    """Sends the terms of a step and the condition numbers of both Hessians to every tracker.

    A net's condition numbers take a pass over its data, so they are renewed every `period` steps, an epoch. The last
    numbers also stay in `result.metrics`, so that a run that fails later keeps them.
    """

    def __init__(self, model: Model, pair: TaskPair, result: Result, trackers: list[Tracker]) -> None:
        self.model, self.result, self.trackers = model, result, trackers
        self.tasks = {"primary": pair.primary, "harmful": pair.harmful}
        factors = {role: model.baseline_factor(role, task) for role, task in self.tasks.items()}
        self.baseline = {role: self._kappa(task, factors[role]) for role, task in self.tasks.items()}
        self.labels = {role: zlib.crc32(task.train.y.cpu().numpy()) for role, task in self.tasks.items()}
        self.kappa, self.period = self.baseline, 1

    @staticmethod
    def _kappa(task: Task, factor: Tensor) -> float:
        return spectrum.condition_number_of(torch.linalg.svdvals(factor), task.rank)

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self.baseline, "labels": self.labels, "kappa": self.kappa, "metrics": self.result.metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the data, as far as their spectra and labels show it, are not those of `state`."""
        before, now = state["baseline"], self.baseline
        if state["labels"] != self.labels or not all(math.isclose(before[r], now[r], rel_tol=1e-6) for r in now):
            raise ValueError("the inputs, features or labels are others than before")
        self.kappa = state["kappa"]
        self.result.metrics.update(state["metrics"])

    def __call__(self, step: int, terms: Mapping[str, Tensor]) -> dict[str, float]:
        """Log one line and return its numbers; raises Diverged where theta overflows."""
        if step % self.period == 0 and (step or self.period == 1):
            factors = {role: self.model.factor(task) for role, task in self.tasks.items()}
            if not all(torch.isfinite(factor.square().sum()) for factor in factors.values()):
                raise Diverged(f"theta overflows at step {step}; lower optimizer.lr or the weights in method.*")
            self.kappa = {role: self._kappa(task, factors[role]) for role, task in self.tasks.items()}
        kappa = self.kappa
        ratio = {role: kappa[role] / self.baseline[role] for role in kappa}
        values = {
            **{name: term.item() for name, term in terms.items()},
            **{f"kappa_{role}": value for role, value in kappa.items()},
            **{f"ratio_{role}": value for role, value in ratio.items()},
            "rir": ratio["harmful"] / ratio["primary"],
        }
        self.result.metrics.update(values)
        for tracker in self.trackers:
            tracker.log(step, values)
        return values


def evaluate(config: DictConfig, comparison: Comparison) -> Measures:
    """Every evaluation of the configuration; the baseline of a linear model is the raw inputs (Eq. 15)."""
    measures = Measures()
    for name in config.get("evaluation") or ():
        measures.merge(build(config, f"evaluation.{name}")(comparison))
    return measures


def attack(config: DictConfig, model: Model, comparison: Comparison, start: Mapping[str, Tensor]) -> Measures:
    """Every attack of the configuration on `model` and its baseline; `start` is the state dict of theta_0."""
    from immunization.attacks import Victim, run_attacks  # not loaded by runs without attacks

    attacks = {name: build(config, f"attack.{name}") for name in config.attack}
    return run_attacks(attacks, Victim(model, comparison, start))


def device_of(config: DictConfig) -> torch.device:
    """The device a run asks for, or gets; raises ConfigError where there is none."""
    choice = config.device
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; use device=auto or device=cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", distributed.local_rank()) if distributed.size() > 1 else torch.device("cuda")


def set_threads(number: int) -> None:
    """Threads of torch and of the BLAS that numpy and scipy bring, which does not ask torch for its number."""
    torch.set_num_threads(number)
    _blas().limit(limits=number, user_api="blas")


@cache
def _blas() -> ThreadpoolController:
    """The libraries in this process, which take 5 ms to find."""
    return ThreadpoolController()


def _threads(choice: int | None, dim: int | None) -> None:
    """Set the threads on purpose; OMP_NUM_THREADS, which launchers set, bounds the automatic choice."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number a nesting level
    cores = int(first) if first.isdecimal() and int(first) else os.cpu_count() or 1
    set_threads(choice or (1 if dim is not None and dim <= SMALL else cores))


@contextmanager
def _at_work(folder: Path) -> Iterator[None]:
    """Make the folder, keep other processes out of it, and write every message into its run.log.

    Warnings and worse go to the screen too.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / RUN_LOG)
    except OSError as error:
        raise ConfigError(
            f"the run folder cannot be written ({error}); choose another one, hydra.run.dir=..."
        ) from error
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    file.handleError = lambda record: None  # a full disk is found, and reported, where it matters
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(logging.WARNING)
    screen.addFilter(lambda record: record.levelno < logging.ERROR)  # errors are raised, and shown by the caller
    log.setLevel(logging.INFO)
    propagate, log.propagate = log.propagate, False
    for handler in (file, screen):
        log.addHandler(handler)
    try:
        with files.locked(folder / RUN_LOG):
            yield
    finally:
        for handler in (file, screen):
            log.removeHandler(handler)
        log.propagate = propagate
        with suppress(OSError):
            file.close()
