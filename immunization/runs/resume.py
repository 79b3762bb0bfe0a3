"""Which configuration keys decide the numbers of a run, and whether a folder already holds the completed run."""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from immunization.errors import ConfigError, DataError, UserError
from immunization.runs import files
from immunization.runs.filenames import ATTACKS, CHECKPOINT, CONFIG, ENVIRONMENT, ROWS, WEIGHTS
from immunization.runs.numbers import changed
from immunization.runs.result import Result

log = logging.getLogger(__name__)

BOOKKEEPING = (
    *("baselines", "cache", "checkpoint", "data_root", "deterministic", "entity", "figures", "log_every", "name"),
    *("objective", "published", "resume", "tags", "threads", "tracker", "trusted"),
)
"""Keys that decide where and how a run is shown or saved, but no number in its result."""

INPUTS = "inputs"  # the key of environment.json under which a run says what it was made of beside its configuration
SAME = 1e-6  # numbers that stand for rows of data differ by so much from one machine to another
KEPT = (CHECKPOINT, ATTACKS)  # files of an unfinished run that hold work of its own


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration that a run folder holds; raises DataError where there is none to read."""
    path = folder / CONFIG
    content = files.read_yaml(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a configuration; it was cut off or edited")
    return content


def literal(content: dict[str, Any]) -> DictConfig:
    """Somebody else's plain configuration as one of OmegaConf, in which a text with `${...}` is no more than text."""

    def escaped(leaf: Any) -> Any:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", leaf) if isinstance(leaf, str) else leaf

    return OmegaConf.create(changed(content, escaped))


def result_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plain configuration that decides the numbers of the run; a key that is null counts as absent."""
    kept = _without_nulls({key: value for key, value in config.items() if key not in BOOKKEEPING})
    for group in ("dataset", "model"):
        if isinstance(options := kept.get(group), dict):
            kept[group] = {key: value for key, value in options.items() if key not in ("root", "download", "cache")}
    return kept


def _without_nulls(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }


def completed(
    folder: Path, settings: Mapping[str, Any] | None, inputs: Callable[[], Mapping[str, Any]] = dict
) -> Result | None:
    """The result in `folder` if that is a completed run of the very configuration `settings` and the same `inputs`.

    None if the run has to be done: it was not completed, or its files are damaged (a warning names them). Weights that
    are gone, and inputs that cannot be read now, leave a result as it is, with a warning. Raises DataError for one of
    other inputs, and ConfigError for one of another configuration and, without `settings` (no resume=true), for any,
    also an interrupted.
    """
    try:
        result = Result.read(folder)
        if result.status == "completed" and settings is not None:
            before = read_config(folder)
            for name in (WEIGHTS, ROWS):
                if (folder / name).exists():
                    files.read_tensors(folder / name)
    except DataError as error:
        if (folder / Result.file).exists():
            log.warning("%s; the run is done again", error)
        result = None
    if result is None or result.status != "completed":
        if settings is None and (kept := [name for name in KEPT if (folder / name).exists()]):
            raise ConfigError(
                f"{folder} holds an interrupted run ({', '.join(kept)}); resume=true continues it; another folder "
                "(hydra.run.dir=...), or this one once it is deleted, starts a new run"
            )
        return None
    if settings is None:
        raise ConfigError(
            f"{folder} holds a completed run; resume=true with its configuration loads it, another folder "
            "(hydra.run.dir=...) starts a new run"
        )
    if differing := different(result_settings(before), result_settings(settings)):
        raise ConfigError(
            f"{folder} holds a completed run of another configuration ({', '.join(differing)}); another folder "
            "(hydra.run.dir=..., with -m hydra.sweep.dir=...) starts a new one"
        )
    if not (folder / WEIGHTS).exists():
        log.warning(
            "%s is missing; the result is kept, and a run in another folder makes the weights again", folder / WEIGHTS
        )
    if recorded_inputs(folder):
        try:
            now = inputs()
        except Exception as error:  # whatever a data set of anybody's raises
            reason = f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            log.warning("%s: its inputs cannot be read now; the result is kept: %s", folder, reason)
        else:
            check_inputs(folder, now)
    return result


def recorded_inputs(folder: Path) -> dict[str, Any]:
    """What the run in a folder was made of; {} where it does not say so."""
    try:
        inputs = json.loads((folder / ENVIRONMENT).read_text())[INPUTS]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return inputs if isinstance(inputs, dict) else {}


def check_inputs(folder: Path, now: Mapping[str, Any]) -> None:
    """Raise DataError, which names them, where inputs of the run in a folder have another content `now`.

    One that is not there any more is only warned of.
    """
    before = recorded_inputs(folder)
    if gone := [name for name in before if name not in now]:
        log.warning("%s: no longer there: %s; the result is kept", folder, ", ".join(gone))
    if other := differing_inputs(before, now):
        raise DataError(
            f"{folder} does not match this run any more: the content of {', '.join(other)} has changed. It stays "
            "as it is; another folder (hydra.run.dir=..., with -m hydra.sweep.dir=...) runs on what is there now"
        )


def differing_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the inputs of two runs that have another content in the second; what one of them lacks is left out."""
    now = files.plain(now)
    return [name for name in before if name in now and not _same(before[name], now[name])]


def _same(before: object, now: object) -> bool:
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(map(_same, before, now))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=SAME, abs_tol=SAME * min(1.0, abs(before)))
    return before == now


def different(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: before -> now` of everything in which two plain configurations differ."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        a, b, name = before.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += different(a, b, f"{name}.")
        elif a != b:
            changes.append(f"{name}: {a} -> {b}")
    return changes
