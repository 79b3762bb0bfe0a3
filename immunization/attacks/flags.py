"""Flags over all attacks of a run. Each function names the attacks whose numbers say less than they seem to."""

from collections.abc import Callable, Iterable, Iterator

from immunization.attacks.outcome import Outcome, listed
from immunization.data.task import LEARNED, MARGIN
from immunization.runs.records import Stage
from immunization.theory.statistics import ROUNDING

PLACES: dict[Stage, str] = {"immunized": "theta_I", "baseline": "the baseline", "start": "theta_0"}


def diverged(outcome: Outcome) -> Iterator[str]:
    """On every stage, the settings that did not stay finite."""
    for stage, curve in outcome.curves.items():
        if curve.diverged:
            yield f"{outcome.name} on {PLACES[stage]} at {outcome.attack.setting_name} {listed(curve.diverged)}"


def at_chance(outcome: Outcome) -> Iterator[str]:
    """An attack that learns nothing from the baseline."""
    if not outcome.failed and outcome.at_chance:
        yield outcome.name


def blind(outcome: Outcome) -> Iterator[str]:
    """An attack that has something to learn from with the baseline, and nothing with theta_I."""
    if outcome.telling and outcome.blind:
        yield outcome.name


def below_chance(outcome: Outcome) -> Iterator[str]:
    """An attack that works on the baseline and is worse than guessing on theta_I."""
    if outcome.telling and outcome.after.test.max().item() < outcome.chance - MARGIN:
        yield outcome.name


def below_majority(outcome: Outcome) -> Iterator[str]:
    """An attack on uneven classes that is less accurate, on the baseline or theta_I, than guessing the largest one."""
    worst = min(outcome.before.final, outcome.after.final)
    if not outcome.failed and outcome.majority >= outcome.chance + MARGIN and worst < outcome.majority - ROUNDING:
        yield outcome.name


def capped(outcome: Outcome) -> Iterator[str]:
    """An attack that does not get there within its steps, and how many these are."""
    if outcome.capped:
        yield f"{outcome.name} ({outcome.after.steps[-1]})"


def edge(outcome: Outcome) -> Iterator[str]:
    """An attack that does not get there, with the smallest or the largest of its settings."""
    if outcome.capped and outcome.after.at_edge:
        yield f"{outcome.name} ({outcome.attack.setting_name} {outcome.after.setting:g})"


def not_converged(outcome: Outcome) -> Iterator[str]:
    """An attack that does not get there, and whose best validation measure came in the last octave of its steps."""
    val, late = outcome.after.val, outcome.after.steps > outcome.after.steps[-1] / 2
    if outcome.capped and not late.all() and val[late].max() > val[~late].max():
        yield outcome.name


MEANINGS: dict[Callable[[Outcome], Iterator[str]], str] = {
    diverged: "with these settings the numbers were not finite, which is no success of the defense",
    at_chance: "these attackers stay at chance on the baseline, too, so they say nothing about theta_I",
    blind: "these attackers read features of theta_I that are equal for all rows, so they guess",
    below_chance: "these attackers are worse than chance on theta_I, and inverting their answers would succeed",
    below_majority: "these attackers are less accurate, on the baseline or on theta_I, than who guesses the most "
    "frequent class of the test rows; on uneven classes this happens to linear probes, which have no intercept",
    capped: f"these attackers do not come {LEARNED:.0%} of the way from chance to their best on the baseline, so all "
    "their steps count",
    edge: "these attackers fail with the smallest or largest setting tried; a wider range may do better",
    not_converged: "these attackers fail, but were still getting better at their last step; more steps may do better",
}
"""Every flag, raised as `attacks_<name of the function>`, and what it means."""


def flags_of(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """The flags that hold for some attack, each with its meaning and these attacks."""
    outcomes = list(outcomes)
    found = {flag: [text for outcome in outcomes for text in flag(outcome)] for flag in MEANINGS}
    return {
        f"attacks_{flag.__name__}": f"{MEANINGS[flag]}: {', '.join(names)}" for flag, names in found.items() if names
    }
