"""One run: data -> model and frozen baseline -> method -> evaluation -> attacks -> result, pictures and table."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from immunization.checks import snake_case
from immunization.compute import distributed, machine, randomness
from immunization.config import check_trust, compose, run_folder, slug, target_name
from immunization.errors import BusyError, ConfigError, OtherEnded, UserError
from immunization.evaluation import Comparison, Measures, evaluate
from immunization.experiment import Experiment, assemble, read_data, resolve
from immunization.models.weights import exported, original, rounding_flag
from immunization.multirun.ahead import Ahead
from immunization.results import model_card
from immunization.results.screen import present
from immunization.runs import files
from immunization.runs.filenames import ATTACKS, REFUSED, settings_file
from immunization.runs.folder import RunFolder, in_words, log
from immunization.runs.origin import audited, moved
from immunization.runs.records import of_role
from immunization.runs.result import Result
from immunization.runs.resume import completed
from immunization.terminal import doing, heartbeat, importing, waiting
from immunization.training import checkpoint
from immunization.training.assembly import Parts
from immunization.training.checkpoint import Checkpointer
from immunization.training.session import Monitor, TrainingSession
from immunization.training.signals import Stop
from immunization.usage import explaining

AFTERWARDS = "what was trained is kept: measure it with immunize=false device=cpu model.checkpoint=<this run's folder>"
"""What to do where memory ends after the training."""


@explaining()
@machine.full_precision()
@machine.same_threads()
@randomness.isolated_rng()
@torch.enable_grad()
def run(
    config: DictConfig | Iterable[str] = (),
    folder: str | Path | None = None,
    overrides: Iterable[str] | None = None,
    quiet: bool = False,
    tables: Mapping[str, Any] | None = None,
    ahead: Ahead | None = None,
) -> Result:
    """Run one experiment and return its Result, which is also written to result.json in the run folder.

    `config` is a composed configuration, or a list of overrides as on the command line (`["dataset=mnist"]`). `folder`
    is the run folder, by default that of an override `hydra.run.dir=`, or else `outputs/<name>/<time>`. With
    `resume=true` a completed run of the same configuration in it is returned, and an interrupted one goes on from its
    checkpoint. `quiet`, for the jobs of a sweep, prints one line instead of the table and draws pictures only with
    `figures=true`.

    `tables` are the DataFrames of dataset=arrays by task, `{"primary": frame, "harmful": frame}`. The run folder holds
    their digests, by which `resume=true` knows them. `ahead` is what a multirun trained before this job's turn.

    Raises UserError for a mistake in the configuration or the data, after writing a result.json with status `failed`.
    Raises KeyboardInterrupt on Ctrl-C and Preempted, an exit with code 143, on SIGTERM, both after a checkpoint.
    """
    if not isinstance(config, DictConfig):
        if config is None:
            raise ConfigError("run: give a list of overrides, such as ['method=closed_form']")
        overrides = config if isinstance(config, str) else [*config, *_digests(tables)]
        config = compose(overrides)
        folder = run_folder(overrides, folder)
    elif tables:
        raise ConfigError("run: tables go with a list of overrides, run(['dataset=arrays', ...], tables=...)")
    elif overrides is not None:
        check_trust(config, overrides)
    folder = Path(folder or Path("outputs", slug(config.name), f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"))
    overrides = list(overrides or ())
    config, flags = audited(config, overrides)
    with randomness.deterministic(config.deterministic), distributed.group(config.device):
        result = Result(*_identity(config), folder=folder)
        run = RunFolder(result)
        settings = OmegaConf.to_container(config, resolve=True) if config.resume else None
        if distributed.rank():
            return follow(config, run, settings, tables)
        with run, Stop().listening() as stop:
            if before := completed(folder, settings, lambda: read_data(resolve(config, overrides))[1]):
                distributed.agree(None)
                print(f"{folder.name}: completed before, nothing to do (resume=true)", flush=True)
                return before
            state = checkpoint.read(folder, settings)
            distributed.agree(folder)
            with run.recording(), stop.unmasked(), heartbeat(aloud=not quiet and not sys.stderr.isatty()):
                run.begin(config, overrides)
                experiment, parts = train(config, overrides, run, stop, state, tables, quiet, ahead)
                measure(experiment, parts, run, moved(config, parts.inputs, parts.pair.origins) | flags)
            present(run.result, run.trackers, quiet, experiment.figures, experiment.objective)
    return run.result


def follow(
    config: DictConfig, run: RunFolder, settings: Mapping[str, Any] | None, tables: Mapping[str, Any] | None
) -> Result:
    """The part of the other processes of a distributed training: their share of the features, and no file."""
    own = run.path.resolve()
    try:
        run.result.folder = distributed.agree()
        if own != run.path:
            with suppress(OSError):
                own.rmdir()  # Hydra made it, named by its own time
        if run.path is not None:
            train(config, (), run, Stop(), checkpoint.read(run.path, settings), tables)
            run.result.status = "completed"
    except OtherEnded:
        raise
    except (UserError, RuntimeError) as error:  # the first process meets the same error and reports it
        raise SystemExit(1) from error
    return run.result


def train(
    config: DictConfig,
    overrides: Iterable[str],
    run: RunFolder,
    stop: Stop,
    state: dict[str, Any] | None,
    tables: Mapping[str, Any] | None = None,
    quiet: bool = True,
    ahead: Ahead | None = None,
) -> tuple[Experiment, Parts]:
    """The experiment, and its parts with the model immunized. `state` is that of the checkpoint to go on from.

    Unless `quiet`, the classes of each task are printed, with the output that means each. What was prepared and
    trained `ahead` is taken as it is.
    """
    ready = ahead.take(tuple(overrides)) if ahead and state is None else None
    experiment = ready.experiment if ready else resolve(config, overrides, tables)
    leads = not distributed.rank()
    tracker = experiment.tracker() if leads and experiment.tracker else None  # a mistake in its options is said now
    if experiment.attack:
        from immunization.attacks import check_places  # not loaded by runs without attacks

        check_places(experiment.baselines, experiment.published)
    with waiting("preparing data, model and optimizer"):
        parts = ready.parts if ready else assemble(experiment)
    for attack in experiment.attack.values():
        attack.check(parts.model)
    if experiment.suite and experiment.suite.benign and not parts.pair.benign_tasks:
        raise ConfigError("suite.benign needs a benign task, and the data have none; name one, or set suite.benign=[]")
    run.result.about, run.result.method, run.result.model = parts.pair.about, parts.method.name, parts.model.name
    log.info("%s: %s", parts.pair.name, parts.pair.about)
    if tracker is not None:  # only here, as a run whose data are missing has nothing to track
        with importing("starting the tracker"):
            run.track(tracker, experiment.settings, state)
    if leads:
        run.record(parts.device, state, parts.inputs)
        table = run.tabulate({role: rows for role, task in parts.pair.tasks.items() if (rows := task.rows_of_classes)})
        if table and not quiet:
            print(*table, "", sep="\n", flush=True)
        if experiment.immunize is False or parts.method.epochs:
            run.keep_original(*original(parts.model))
    if ready:
        ready.deliver(run.result, run.trackers)
        return experiment, parts
    options = experiment.checkpoint if leads else {"seconds": None}
    session = TrainingSession(
        parts,
        experiment.optimizer,
        experiment.scheduler,
        experiment.seed,
        Monitor(parts.model, parts.trained_on, run.result, run.trackers),
        Checkpointer(run.path, experiment.settings, stop, **options),
        state,
        experiment.log_every,
        experiment.debug,
    )
    with doing(session.where):
        session.fit()
    run.result.seconds["immunize"] = session.seconds
    distributed.leave()
    return experiment, parts


def measure(experiment: Experiment, parts: Parts, run: RunFolder, flags: dict[str, str]) -> None:
    """What follows the training, up to a completed result.json; `flags` has a reason for each."""
    method, pair, model, start = parts.method, parts.pair, parts.model.for_measurement(), parts.start
    weights, facts = exported(model, pair.primary)
    run.keep({**weights, **pair.tensors}, facts, pair.origins)

    comparison = Comparison(pair, model, start or None)
    with run.timed("evaluate"), waiting("measuring"), machine.gpu_memory("the measures", AFTERWARDS):
        measures = evaluate(experiment.evaluation, comparison)
    for name, reason in (method.flags | flags).items():
        measures.flag(name, reason)
    if reason := rounding_flag(facts):
        measures.flag("outputs_rounded", reason)
    if method.undetermined:
        measures.withhold("undetermined", method.undetermined)
    if experiment.attack:
        with run.timed("attack"), machine.gpu_memory("the attacks", AFTERWARDS):
            measures.merge(attacked(experiment, comparison, start, run.path / ATTACKS))
    run.result.take(measures)
    for role in pair.attacked:
        for name, settings in measures.about.get(of_role("attackers", role), {}).items():
            files.write_json(run.path / settings_file(name, role), settings)
    if facts:
        made = model_card.recipe(method.name, experiment.settings["method"], experiment.seed)
        model_card.write(run.path, facts, made, run.result)
    run.finish(measures.arrays)


def attacked(
    experiment: Experiment, comparison: Comparison, start: Mapping[str, Tensor], kept: Path | None = None
) -> Measures:
    """What all attacks measure, on every task that they are for; `start` is theta_0, `kept` a file of done curves."""
    from immunization.attacks import KeptCurves, Suite, Victim, run_attacks, run_transfer  # not loaded by other runs

    measures, pair, suite = Measures(), comparison.pair, experiment.suite or Suite(version="")
    benign = pair.benign_tasks if suite.benign else {}
    for role in (*pair.attacked, *benign):
        victim = Victim(comparison.model, comparison, start, role, suite.most)
        shared = experiment.baselines, experiment.published
        curves = kept and KeptCurves(kept, experiment.settings["attack"], victim, *shared, version=suite.version)
        run_all = run_transfer if role in benign else run_attacks
        measures.merge(run_all(experiment.attack, victim, curves, experiment.suite))
    return measures


def _digests(tables: Mapping[str, Any] | None) -> list[str]:
    """The override that names DataFrames by their content."""
    if not tables:
        return []
    from immunization.data.tables import digest

    return [f"dataset.tables={{{','.join(f'{name}:{digest(name, frame)}' for name, frame in tables.items())}}}"]


def _identity(config: DictConfig) -> tuple[int, str, str, str]:
    """Seed, data set, model and method of a run, with which its `Result` begins. Raises ConfigError."""
    names = (snake_case(target_name(config, group)) for group in ("model", "method"))
    return config.seed, config.dataset.name, *names


def record_failure(config: DictConfig, folder: Path, error: Exception) -> str:
    """Write result.json, if there is none, for a job that failed without a RunFolder; what to say of it in one line."""
    if isinstance(error, BusyError):  # whose folder this is
        return str(error)
    error = in_words(error, folder)
    if Result.completed_in(folder):  # which stays; the multirun reads why
        files.write(folder / REFUSED, str(error))
    if not (folder / Result.file).exists():
        try:
            result = Result(*_identity(config))
        except (ConfigError, OmegaConfBaseException):  # what is wrong may be among these very keys
            result = Result(0, *["unknown"] * 3)
        result.fail(error)
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder)
    return str(error)
