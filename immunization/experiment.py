"""A configuration as checked objects. Only this module reads a configuration."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf

from immunization.checks import CONF, AtLeastOne, Positive, Seed, check_arguments, check_value, read_yaml
from immunization.compute import keys, machine, randomness
from immunization.config import build, check_components, factory, target_of
from immunization.data.images import ImagePair
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.evaluation import Comparison, Measures
from immunization.methods import Method, Unmodified
from immunization.models import Model
from immunization.runs.filenames import weights_of
from immunization.runs.resume import BOOKKEEPING
from immunization.runs.tracker import Tracker
from immunization.terminal import importing
from immunization.training import assembly
from immunization.training.assembly import Debug, Parts
from immunization.training.checkpoint import Checkpointer
from immunization.training.optimization import scheduler_of


@dataclass(frozen=True)
class Experiment:
    """A configuration that was checked: its values, the objects it names, and factories of those that need others.

    `model` is called with the keyword `pair`, `optimizer` with parameters or groups of them, `scheduler` with an
    optimizer and the number of its steps. `settings` is the configuration itself, resolved, to be written down.
    """

    settings: dict[str, Any]
    dataset: Callable[[], TaskPair | ImagePair]
    model: Callable[..., Model]
    method: Callable[[], Method]
    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler | None] | None
    evaluation: dict[str, Callable[[Comparison], Measures]]
    attack: dict[str, Any]
    suite: Any
    tracker: Callable[[], Tracker] | None
    debug: Debug
    checkpoint: dict[str, Any]
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["float64", "float32"]
    seed: Seed
    harmful_samples: AtLeastOne | None
    baselines: str | None
    published: str | None
    threads: AtLeastOne | None
    log_every: AtLeastOne | None
    immunize: bool
    resume: bool
    figures: bool | None
    deterministic: bool
    objective: object


def resolve(config: DictConfig, overrides: Iterable[str] = (), tables: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment that a composed configuration asks for. Raises ConfigError, which names the key, for a mistake.

    `tables` are DataFrames in the place of their digests in `dataset.tables`.
    """
    _check_files(config)
    for key in sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{key} has no value; give {key}=<value>")
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    if not settings.get("attack") and isinstance(settings["suite"], dict) and "_target_" not in settings["suite"]:
        settings |= {"suite": None, "published": None}  # what an experiment says of its attackers, who were left out
    values = {field.name: settings.get(field.name) for field in fields(Experiment)}
    for key, remedy in (("suite", "; attack=[standard] brings its own"), ("checkpoint", "")):
        if values[key] and not isinstance(values[key], dict):
            raise ConfigError(f"{key} must be options, {key}.<name>=..., and not {values[key]!r}{remedy}")
    values |= {key: values[key] or {} for key in ("debug", "checkpoint", "evaluation", "attack")}
    for group, options in (("", Experiment), ("debug", Debug), ("checkpoint", Checkpointer)):
        check_arguments(options, values[group] if group else values, group)
    _check_together(settings)
    check_components(settings, without=() if values["immunize"] else ("method",))
    machine.device_of(settings["device"])  # a GPU that is not there is said so before the data are read
    for group in ("evaluation", "attack"):
        values[group] = {name: build(settings, f"{group}.{name}") for name in values[group]}
    if values["suite"]:
        values["suite"] = build(settings, "suite")
        if unknown := [name for name in values["suite"].benign if name not in values["attack"]]:
            known = ", ".join(values["attack"])
            raise ConfigError(f"suite.benign: {unknown[0]} is not one of the attacks of this run; choose from {known}")
    if any(override.startswith("objective=") for override in overrides):
        check_objective(str(values["objective"]), values["evaluation"], values["attack"])
    for group in ("tracker", "dataset", "model", "optimizer"):
        if values[group] is not None:
            values[group] = factory(settings, group)
    if tables:
        values["dataset"] = partial(values["dataset"], tables=tables)
    values["method"] = factory(settings, "method") if values["immunize"] else Unmodified
    if values["scheduler"] is not None:  # its lengths are shares of the training, whose steps are not known yet
        values["scheduler"] = partial(scheduler_of, settings)
    return Experiment(**values | {"settings": settings, "debug": Debug(**values["debug"])})


def _check_files(config: DictConfig) -> None:
    """Raise ConfigError where what a file says would silently be lost: local.yaml on a group, or a group's own file."""
    path = CONF / "local.yaml"  # it precedes the groups, which win over what it has of them
    own, known = (read_yaml("local") or {}, read_yaml("config")) if path.is_file() else ({}, {})
    for key in own:
        if key not in known:
            raise ConfigError(f"{path}: there is no key {key}; allowed are {', '.join(map(str, known))}")
    for group in ("experiment", "launcher", "sweeper", "sweeps"):
        if isinstance(ignored := config.get(group), DictConfig):
            raise ConfigError(
                f"{group}: a file of this group lacks the first line `# @package _global_`, without which what it sets "
                f"({', '.join(map(str, ignored))}) has no effect; add that line"
            )


def _check_together(settings: Mapping[str, Any]) -> None:
    """Rules that no single constructor can see."""
    if (lr := settings["optimizer"].get("lr")) is not None:
        check_value("optimizer.lr", lr, Positive)
    for key in ("tags", "trusted"):
        if not isinstance(value := settings.get(key) or [], list):
            raise ConfigError(f"{key} must be a list, [a,b] on the command line, not {value!r}")
    if settings["published"] and not settings["suite"]:
        raise ConfigError(
            "published has the curves of a numbered suite, and this run has none; choose one, such as attack=[standard]"
        )
    model, kind = settings["model"], target_of(settings, "model")
    precondition = settings["method"].get("precondition") if settings["immunize"] else None  # an audit's does nothing
    if precondition not in (None, "none") and not getattr(kind, "preconditioned", False):
        raise ConfigError(
            f"method.precondition={precondition} needs model=linear, because a deep net has no matrix K; for a net "
            "set method.precondition=none"
        )
    if model.get("bias") and precondition == "cancelled":
        raise ConfigError("method.precondition=cancelled needs model.bias=false; with a bias use ridge or pinv")
    if model.get("amp") == "bfloat16" and settings["dtype"] == "float64":
        raise ConfigError("model.amp=bfloat16 needs dtype=float32, because torch.autocast does not change float64")


def check_objective(objective: str, evaluations: Mapping[str, object], attacks: Collection[str]) -> None:
    """Raise ConfigError for an `objective` that none of these measures, as their `names` (patterns, if any) say."""
    if objective.startswith("undetermined/"):
        return
    names = [name for evaluation in evaluations.values() for name in getattr(evaluation, "names", ("*",))]
    if attacks:
        kinds = [f"attack{{}}/{name}/*" for name in (*attacks, "worst")]
        kinds += ["worth{}/*", "ceiling{}/worth*", "ceiling{}/partial_*", "reference{}/*"]
        names += [kind.format(of) for kind in kinds for of in ("", "_unseen*", "_harmful*")] + ["transfer_*/*"]
    if not any(fnmatchcase(objective, name) for name in names):
        close = ", ".join(get_close_matches(objective, dict.fromkeys(names), 5, 0.0)) or "none"
        raise ConfigError(
            f"objective={objective}: no chosen evaluation or attack measures that; the closest are: {close}"
        )


def read_data(experiment: Experiment) -> tuple[TaskPair | ImagePair, dict[str, Any]]:
    """The data of a run, from its seed, and its inputs: data, files and code of one's own, by content.

    Raises ConfigError for a function that returns no data, and what the data set raises.
    """
    randomness.seed(experiment.seed)
    data = experiment.dataset()
    if not isinstance(data, TaskPair | ImagePair):
        raise ConfigError(f"dataset: its function must return a TaskPair or an ImagePair, not {type(data).__name__}")
    deciding = {key: value for key, value in experiment.settings.items() if key not in BOOKKEEPING}
    inputs: dict[str, Any] = {f"dataset {split}": content for split, content in data.content.items()}
    inputs |= keys.named(deciding, weights_of)
    return data, inputs | {target: keys.key(code=code) for target, code in _own_code(deciding)}


def _own_code(settings: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each `_target_` that is neither of this package nor of the libraries, and its code."""
    for value in settings.values() if isinstance(settings, Mapping) else settings if isinstance(settings, list) else ():
        yield from _own_code(value)
    if isinstance(settings, Mapping) and isinstance(target := settings.get("_target_"), str):
        module, _, name = target.rpartition(".")
        if code := keys.code(*filter(None, [getattr(sys.modules.get(module), name, None)])):
            yield target, code


def assemble(experiment: Experiment) -> Parts:
    """Data, method and model of a run, from its seed; sets the threads."""
    machine.choose_threads(experiment.threads, None)
    data, inputs = read_data(experiment)
    data = experiment.debug.few(data)
    device, dtype = machine.device_of(experiment.device, data.dim), getattr(torch, experiment.dtype)
    parts = assembly.assemble(
        experiment.method(),
        experiment.model,
        data,
        device,
        dtype,
        attacked=bool(experiment.attack),
        samples=experiment.harmful_samples,
        seed=experiment.seed,
        inputs=inputs,
    )
    machine.choose_threads(experiment.threads, None if parts.model.trains_layers else parts.pair.dim)
    if parts.method.epochs:  # a process's first optimizer imports torch's compiler, seconds that are not the method's
        with importing("importing torch's optimizers"):
            torch.optim.SGD([torch.zeros(1)])
    return parts
