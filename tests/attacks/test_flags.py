"""One case for every flag over the attacks of a run, and one next to it in which the flag stays away."""

import pytest
import torch
from torch import Tensor

from immunization.attacks import AttackCurve, LinearProbe
from immunization.attacks.flags import flags_of
from immunization.attacks.outcome import Outcome

WORKS = [0.5, 0.6, 0.8, 0.9, 0.9, 0.9]  # chance is 0.5, so the bar lies at 0.86
FAILS = [0.5, 0.6, 0.6, 0.6, 0.6, 0.6]


def curve(test: list[float], **facts: object) -> AttackCurve:
    """A curve over steps 1, 2, 3, ... whose validation measure is its test measure."""
    measure = torch.tensor(test, dtype=torch.float64)
    steps: Tensor = torch.arange(1, len(test) + 1)
    return AttackCurve(steps, 10.0 * steps, measure, measure, setting=0.3, **facts)


def raised(after: AttackCurve, before: AttackCurve | None = None, majority: float = 0.0) -> dict[str, str]:
    """Flags of one attack called `it`, and the words behind the meaning of each."""
    curves = {"immunized": after, "baseline": curve(WORKS) if before is None else before}
    found = flags_of([Outcome("it", LinearProbe(), 0.5, curves, majority)])
    return {flag: reason.rpartition(": ")[2] for flag, reason in found.items()}


def test_an_attack_that_works_raises_none():
    assert raised(curve(WORKS, at_edge=True)) == {}


def test_diverged():
    assert raised(curve(WORKS, diverged=(3.0, 10.0))) == {"attacks_diverged": "it on theta_I at learning rate 3, 10"}
    both = raised(curve([torch.nan] * 6, diverged=(1.0,)), curve(WORKS, diverged=(1.0,)))
    assert both == {"attacks_diverged": "it on theta_I at learning rate 1, it on the baseline at learning rate 1"}


@pytest.mark.parametrize(("best", "flags"), [(0.54, {"attacks_at_chance": "it"}), (0.56, {})])
def test_at_chance(best, flags):
    """Whatever it does on theta_I says nothing then."""
    assert raised(curve([0.3] * 6 if flags else WORKS, at_edge=True), curve([0.5, best])) == flags


@pytest.mark.parametrize(("best", "found"), [(0.44, True), (0.46, False)])
def test_below_chance(best, found):
    flags = raised(curve([0.4, *[best] * 5]))
    assert ("attacks_below_chance" in flags) is found
    assert flags["attacks_capped"] == "it (6)"


@pytest.mark.parametrize(("majority", "found"), [(0.9, False), (0.901, True), (0.54, False)])
def test_below_majority(majority, found):
    """On either stage; of classes that are almost even, chance says the same."""
    assert ("attacks_below_majority" in raised(curve(WORKS), majority=majority)) is found
    assert ("attacks_below_majority" in raised(curve(WORKS), curve([0.5, 0.6]), majority=majority)) is (majority > 0.6)
    assert ("attacks_below_majority" in raised(curve([0.5]), majority=majority)) is (majority > 0.6)
    assert "attacks_below_majority" not in raised(curve([torch.nan] * 6), majority=majority)


@pytest.mark.parametrize(("best", "found"), [(0.859, True), (0.86 - 1e-13, False)])
def test_capped(best, found):
    assert raised(curve([best] * 6)) == ({"attacks_capped": "it (6)"} if found else {})


def test_blind():
    """An attacker who guesses took no step."""
    guesses = curve([0.5])
    guesses.steps = torch.zeros(1)
    assert raised(guesses) == {"attacks_blind": "it"}


def test_edge():
    assert raised(curve(FAILS, at_edge=True)) == {"attacks_capped": "it (6)", "attacks_edge": "it (learning rate 0.3)"}
    assert "attacks_edge" not in raised(curve(FAILS))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0.5, 0.6, 0.6, 0.6, 0.6, 0.7], True),
        ([0.5, 0.6, 0.6, 0.7, 0.6, 0.6], True),  # the best is in the last octave
        ([0.5, 0.6, 0.7, 0.6, 0.6, 0.6], False),
        ([0.5, 0.7, 0.6, 0.6, 0.6, 0.7], False),
        ([0.7], False),  # too short to be told
        ([0.6, 0.7, 0.7, 0.7, 0.7], False),
    ],
)
def test_not_converged(values, found):
    assert ("attacks_not_converged" in raised(curve(values))) is found
    assert "attacks_not_converged" not in raised(curve([*values[:-1], 0.95]))  # it comes to the bar


def test_several_attacks_share_a_flag_that_says_what_it_means():
    curves = {"immunized": curve(FAILS), "baseline": curve(WORKS)}
    found = flags_of(Outcome(name, LinearProbe(), 0.5, curves) for name in ("one", "other"))
    assert list(found) == ["attacks_capped"]
    assert found["attacks_capped"] == (
        "these attackers do not come 90% of the way from chance to their best on the baseline, so all their steps "
        "count: one (6), other (6)"
    )
