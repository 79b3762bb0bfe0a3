"""One run: data -> model and frozen baseline -> method -> evaluation -> attacks -> result, figures and table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from immunization.compute import distributed, machine, randomness
from immunization.config import build, check, compose, slug
from immunization.evaluation import Comparison, Measures
from immunization.evaluation.objective import check_objective
from immunization.models.weights import exported, rounding_flag
from immunization.results import model_card
from immunization.results.present import present
from immunization.runs import strict_json
from immunization.runs.filenames import ATTACKS, settings_file
from immunization.runs.folder import RunFolder, log, settings_of
from immunization.runs.heartbeat import heartbeat
from immunization.runs.origin import audited, data_flags
from immunization.runs.result import Result
from immunization.runs.resume import completed, refuse_interrupted
from immunization.terminal import doing, importing, waiting
from immunization.training import checkpoint
from immunization.training.checkpoint import Checkpointer
from immunization.training.monitor import Monitor
from immunization.training.session import TrainingSession, assemble, follow
from immunization.training.signals import Stop
from immunization.usage import explaining

Evaluation = Callable[[Comparison], Measures]

AFTERWARDS = "what was trained is kept: measure it with immunize=false device=cpu model.checkpoint=<this run's folder>"
"""What to do where memory ends after the training."""


@explaining()
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
    `figures=true`. Raises UserError for a mistake in the configuration or the data, after a result.json with status
    `failed` was written; KeyboardInterrupt on Ctrl-C, and Preempted, an exit with code 143, on SIGTERM, after a
    checkpoint was written.
    """
    if not isinstance(config, DictConfig):
        overrides = config if isinstance(config, str) else list(config)
        config = compose(overrides)
    if folder is None:
        folder = Path("outputs") / slug(config.name) / datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    folder, overrides = Path(folder), list(overrides or ())
    config = audited(config, overrides)
    alike = randomness.deterministic(config.deterministic), machine.full_precision()
    with alike[0], alike[1], distributed.group(config.device):
        if distributed.rank():
            return follow(config, folder)
        with RunFolder(config, folder, overrides) as run, Stop().listening() as stop:
            if before := completed(config, folder):
                distributed.agree(None)
                print(f"{folder.name}: completed before, nothing to do (resume=true)", flush=True)
                return before
            refuse_interrupted(config, folder)
            state = checkpoint.read(folder, settings_of(config)) if config.resume else None
            distributed.agree(folder)
            with run.recording(), heartbeat(aloud=not quiet and not sys.stderr.isatty()):
                execute(config, run, stop, state)
            present(config, run.result, run.trackers, quiet)
    return run.result


def execute(config: DictConfig, run: RunFolder, stop: Stop, state: Mapping[str, Any] | None) -> None:
    """Everything up to a completed result.json. `state` is that of the checkpoint to go on from."""
    run.begin()
    check(config)
    check_objective(config, run.overrides)
    machine.device_of(config.device)  # a GPU that is not there is said so before the data are read
    # what is wrong with their options is said before anything is loaded
    evaluations, attacks = chosen(config, "evaluation"), chosen(config, "attack")
    with importing("starting the tracker"):
        run.track(state)
    with waiting("preparing data, model and optimizer"):
        parts = assemble(config)
    method, model, pair = parts.method, parts.model, parts.pair
    for one in attacks.values():
        for task in pair.attacked.values():
            one.check(task, model)
    run.result.about, run.result.method, run.result.model = pair.about, method.name, model.name
    log.info("%s: %s", pair.name, pair.about)

    run.record(parts.device, state)
    keeper = Checkpointer(run.path, settings_of(config), stop, **config.checkpoint)
    monitor = Monitor(model, parts.trained_on, run.result, run.trackers)
    session = TrainingSession(config, parts, monitor, keeper, run.recorder, state)
    with doing(session.where):
        session.fit()
    run.result.seconds["immunize"] = session.seconds
    distributed.leave()
    model = model.for_measurement()
    rows = {split: origin.rows for split, origin in pair.origins.items()}
    sources = {split: origin.source for split, origin in pair.origins.items()}
    weights, facts = exported(model, pair.primary)
    run.keep({**weights, **pair.tensors}, facts, rows, sources)

    comparison = Comparison(pair, model, parts.start or None)
    with run.timed("evaluate"), waiting("measuring"), machine.gpu_memory("the measures", AFTERWARDS):
        measures = evaluate(evaluations, comparison)
    for name, reason in (method.flags | data_flags(config)).items():
        measures.flag(name, reason)
    if reason := rounding_flag(facts):
        measures.flag("outputs_rounded", reason)
    if method.undetermined:
        measures.withhold("undetermined", method.undetermined)
    if attacks:
        from immunization.attacks import KeptCurves, Victim, run_attacks  # not loaded by runs without attacks

        with run.timed("attack"), machine.gpu_memory("the attacks", AFTERWARDS):
            for role in pair.attacked:
                victim = Victim(model, comparison, parts.start, role)
                settings = OmegaConf.to_container(config.attack, resolve=True)
                kept = KeptCurves(run.path / ATTACKS, settings, victim, config.baselines)
                measures.merge(run_attacks(attacks, victim, kept))
    run.result.about = run.result.about | measures.about
    for role in pair.attacked:
        found = measures.about.get("attackers" if role == "harmful" else f"attackers_{role}", {})
        for name, settings in found.items():
            strict_json.write(run.path / settings_file(name, role), settings)
    run.result.metrics, run.result.reasons = measures.metrics, measures.reasons
    run.result.curves, run.result.flags = measures.curves, measures.flags
    if facts:
        model_card.write(run.path, facts, model_card.recipe(method.name, config.method, config.seed), run.result)
    run.finish(measures.arrays)


def evaluate(evaluations: Mapping[str, Evaluation], comparison: Comparison) -> Measures:
    """What all evaluations measure; the baseline of a linear model is the raw inputs (Eq. 15)."""
    measures, own = Measures(), []
    for evaluation in evaluations.values():
        found = evaluation(comparison)
        measures.merge(found)
        own += [] if type(evaluation).__module__.startswith("immunization.") else found.metrics
    if own:
        measures.about["own_measures"] = own
    return measures


def chosen(config: DictConfig, group: Literal["evaluation", "attack"]) -> dict[str, Any]:
    """Every evaluation, or attack, of the configuration, by name."""
    return {name: build(config, f"{group}.{name}") for name in config.get(group) or ()}
