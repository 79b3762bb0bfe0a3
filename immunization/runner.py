"""One run: data -> model and frozen baseline -> method -> evaluation -> result, figures and table."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from immunization import environment, figures, model_card, spectral
from immunization.config import build, check, compose, slug
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError, Diverged, UserError
from immunization.evaluation import Comparison, Measures
from immunization.evaluation.deep import compare
from immunization.methods import Method, batches_of, train
from immunization.models import Model
from immunization.result import Result
from immunization.results.table import line, show
from immunization.resume import completed
from immunization.tracking import Recorder, Tracker

log = logging.getLogger("immunization")

LOG_LINES = 40
"""Lines of metrics.jsonl a run writes by default."""

SMALL = 256
"""Up to this many features one thread is faster than several."""


def run(
    config: DictConfig | Iterable[str] = (),
    folder: str | Path | None = None,
    overrides: Iterable[str] | None = None,
    quiet: bool = False,
) -> Result:
    """Run one experiment and return its Result, which also stands in the run folder as result.json.

    `config` is a composed configuration, or a list of overrides as on the command line (`["dataset=mnist"]`). `folder`
    is the run folder, by default outputs/<name>/<time>; with `resume=true` a completed run of the same configuration
    in it is returned as it is. `quiet`, for the jobs of a sweep, prints one line instead of the table and draws figures
    only with `figures=true`. Raises UserError for a mistake in the configuration or the data, after a result.json with
    status `failed` was written.
    """
    if not isinstance(config, DictConfig):
        overrides = list(config)
        config = compose(overrides)
    if folder is None:
        folder = Path("outputs") / slug(config.name) / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    folder = Path(folder)
    if config.resume and (before := completed(config, folder)):
        print(f"{folder.name}: completed before, nothing to do (resume=true)", flush=True)
        return before
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(folder)
    except OSError as error:
        raise ConfigError(
            f"the run folder cannot be written ({error}); choose another one, hydra.run.dir=..."
        ) from error
    method, model = (config[key]._target_.rpartition(".")[2] for key in ("method", "model"))
    result = Result(seed=config.seed, dataset=config.dataset.name, model=model, method=method, folder=folder)
    trackers: list[Tracker] = [recorder]
    with _run_log(folder):
        try:
            _execute(config, list(overrides or ()), result, trackers, quiet)
        except BaseException as error:
            result.fail(error)
            result.write(folder)
            log.error("%s", result.error, exc_info=not isinstance(error, UserError))
            raise
        finally:
            for tracker in trackers:
                tracker.close(failed=result.status == "failed")
    if quiet:
        print(line(result), flush=True)
    else:
        show(result)
    return result


def _execute(config: DictConfig, overrides: list[str], result: Result, trackers: list[Tracker], quiet: bool) -> None:
    folder = result.folder
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    OmegaConf.save(OmegaConf.create(overrides), folder / "overrides.yaml")
    check(config)
    device = _device(config.device)
    if config.tracker is not None:
        tracker = build(config, "tracker")
        settings = OmegaConf.to_container(config, resolve=True)
        tracker.start(folder, settings, name=folder.name, group=config.name, tags=list(config.tags or ()))
        trackers.append(tracker)

    _seed(config.seed)
    _threads(config.threads, None)
    data = build(config, "dataset").to(device, torch.float64)
    environment.write(folder, device)
    method: Method = build(config, "method")
    model: Model = build(config, "model", pair=data.to(device, getattr(torch, config.dtype)))
    model, pair = model.prepare(data, method.folds)
    _threads(config.threads, None if pair.primary.width else pair.dim)
    result.about = pair.about
    log.info("%s: %s", pair.name, pair.about)
    training = pair.to(device, model.dtype)
    if method.epochs:  # a process's first optimizer imports torch's compiler, seconds that are not the method's
        torch.optim.SGD([torch.zeros(1)])
    result.method, result.model = method.name, model.name
    start = copy.deepcopy(model.extractor.state_dict()) if config.get("attack") else {}

    started = time.perf_counter()
    immunize(config, method, model, training, Monitor(model, training, result, trackers))
    result.seconds["immunize"] = time.perf_counter() - started
    model = model.exact()
    save_file({**model.export(), **pair.tensors}, folder / "immunized.safetensors", metadata=model.metadata())

    started = time.perf_counter()
    comparison = compare(pair, model)
    measures = evaluate(config, comparison)
    for name, reason in method.flags.items():
        measures.flag(name, reason)
    result.seconds["evaluate"] = time.perf_counter() - started
    if config.get("attack"):
        started = time.perf_counter()
        measures.merge(attack(config, model, comparison, start))
        result.seconds["attack"] = time.perf_counter() - started
    result.metrics, result.reasons = measures.metrics, measures.reasons
    result.curves, result.flags = measures.curves, measures.flags
    if measures.arrays:
        save_file(measures.arrays, folder / "arrays.safetensors")
    result.status = "completed"
    result.write(folder)
    if facts := model.metadata():
        model_card.write(folder, result, config, json.loads(facts["immunization"]))
    pictures = figures.draw(result, folder) if config.figures or (config.figures is None and not quiet) else []
    for tracker in trackers:
        tracker.finish(result, pictures)


def immunize(config: DictConfig, method: Method, model: Model, pair: TaskPair, monitor: Monitor) -> None:
    """Train `model` in place by `method`, with a progress bar on a terminal and `monitor` every `log_every` steps."""
    method.setup(model, pair)
    batches = batches_of(model, pair, method.batch_size, torch.Generator().manual_seed(config.seed))
    total = method.epochs * batches.steps_per_epoch
    cheap = pair.primary.width is not None or pair.dim <= SMALL  # else a log line costs more than a step
    every = config.log_every or max(1, total // (LOG_LINES if cheap else LOG_LINES // 2))
    monitor.period = batches.steps_per_epoch if pair.primary.width else 1
    monitor(0, {})
    if total:
        try:
            optimizer = build(config, "optimizer")(model.groups())
        except (TypeError, ValueError) as error:  # torch's way to refuse a value
            raise ConfigError(f"optimizer: {error}") from error
        with tqdm(total=total, desc=method.name, unit="step", disable=None) as bar:

            def on_step(step: int, terms: dict[str, Tensor]) -> None:
                bar.update()
                if step % every == 0 or step == total or (step % monitor.period == 0 and monitor.period > 1):
                    values = monitor(step, terms)
                    bar.set_postfix(loss=f"{values['loss']:.3g}", rir=f"{values['rir']:.3g}", refresh=False)

            try:
                train(method, model, batches, optimizer, on_step)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"the GPU has no memory for method.batch_size={method.batch_size}; lower it, or use dtype=float32, "
                    "fewer trained layers (model.trainable), or device=cpu"
                ) from error
    method.finish(model)


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
        self.kappa, self.period = self.baseline, 1

    @staticmethod
    def _kappa(task: Task, factor: Tensor) -> float:
        return spectral.condition_number_of(torch.linalg.svdvals(factor), task.rank)

    def __call__(self, step: int, terms: dict[str, Tensor]) -> dict[str, float]:
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
    from immunization.attacks import Victim, assault  # not loaded by runs without attacks

    attacks = {name: build(config, f"attack.{name}") for name in config.attack}
    return assault(attacks, Victim(model, comparison, start))


def _device(choice: str) -> torch.device:
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; use device=auto or device=cpu")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _threads(choice: int | None, dim: int | None) -> None:
    """Set torch's threads on purpose; OMP_NUM_THREADS, which launchers set, bounds the automatic choice."""
    cores = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    torch.set_num_threads(choice or (1 if dim is not None and dim <= SMALL else cores))


@contextmanager
def _run_log(folder: Path) -> Iterator[None]:
    """run.log in the folder gets every message; warnings and worse go to the screen too."""
    file = logging.FileHandler(folder / "run.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(logging.WARNING)
    screen.addFilter(lambda record: record.levelno < logging.ERROR)  # errors are raised, and shown by the caller
    log.setLevel(logging.INFO)
    propagate, log.propagate = log.propagate, False
    for handler in (file, screen):
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, screen):
            log.removeHandler(handler)
        log.propagate = propagate
        file.close()
