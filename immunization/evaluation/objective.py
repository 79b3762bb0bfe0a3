"""Whether what a run is asked to maximize is measured by it at all, found out before the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from omegaconf import DictConfig

from immunization.config import target_of
from immunization.errors import ConfigError


def check_objective(config: DictConfig, overrides: Iterable[str]) -> None:
    """Raise ConfigError for an `objective=` among `overrides` that no chosen evaluation or attack measures.

    An evaluation says in `names` what it measures, as patterns; one without them, a user's own, may measure anything.
    """
    objective = str(config.objective)
    if not any(override.startswith("objective=") for override in overrides) or objective.startswith("undetermined/"):
        return
    names = list(dict.fromkeys(_names(config)))
    if not any(fnmatchcase(objective, name) for name in names):
        close = ", ".join(get_close_matches(objective, names, 5, 0.0)) or "none"
        raise ConfigError(
            f"objective={objective}: no chosen evaluation or attack measures that; the closest are: {close}"
        )


def _names(config: DictConfig) -> Iterator[str]:
    for name in config.get("evaluation") or ():
        yield from getattr(target_of(config, f"evaluation.{name}"), "names", ("*",))
    if attacks := config.get("attack"):
        yield from (f"attack{of}/{name}/*" for name in (*attacks, "worst") for of in ("", "_unseen*", "_harmful*"))
