"""Whether what a run is asked to maximize is measured by it at all, found out before the run."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from immunization.errors import ConfigError


def check_objective(objective: str, evaluations: Mapping[str, object], attacks: Collection[str]) -> None:
    """Raise ConfigError for an `objective` that none of these evaluations and attacks measures.

    An evaluation says in `names` what it measures, as patterns; one without them, a user's own, may measure anything.
    """
    if objective.startswith("undetermined/"):
        return
    names = [name for evaluation in evaluations.values() for name in getattr(evaluation, "names", ("*",))]
    if attacks:
        names += [f"attack{of}/{name}/*" for name in (*attacks, "worst") for of in ("", "_unseen*", "_harmful*")]
    if not any(fnmatchcase(objective, name) for name in names):
        close = ", ".join(get_close_matches(objective, dict.fromkeys(names), 5, 0.0)) or "none"
        raise ConfigError(
            f"objective={objective}: no chosen evaluation or attack measures that; the closest are: {close}"
        )
