"""What an attack costs: where it stops, who pays for the search, and a bar in which theta_I has no part."""

from dataclasses import dataclass, replace

import pytest
import torch
from helpers.matrices import gaussian
from helpers.victims import classes, victim_of
from torch import Tensor

from immunization.attacks import (
    LBFGS,
    Adam,
    Attack,
    AttackCurve,
    ClosedFormProbe,
    Inapplicable,
    LogisticProbe,
    Momentum,
    run_attacks,
)
from immunization.attacks.outcome import cost, reached
from immunization.data.task import Split, Task
from immunization.evaluation import LearningCurves
from immunization.runs.verdict import verdict

pytestmark = pytest.mark.trains

EYE = torch.eye(6, dtype=torch.float64)


def curve(val: list[float], test: list[float], path: bool = True) -> AttackCurve:
    flops = 10.0 ** torch.arange(1, len(val) + 1, dtype=torch.float64)
    val, test = (torch.tensor(x, dtype=torch.float64) for x in (val, test))
    return AttackCurve(torch.arange(1, len(val) + 1), flops, val, test, path=path)


def test_where_to_stop_is_seen_on_validation_rows_and_what_is_learned_on_test_rows():
    assert reached(curve([0.2, 0.5, 0.9, 0.9], [0.9, 0.9, 0.5, 0.9]), 0.8) is None  # who stops at the best has 0.5
    assert reached(curve([0.2, 0.85, 0.9, 0.9], [0.2, 0.3, 0.9, 0.9]), 0.8) == 1
    assert reached(curve([0.2, 0.5, 0.6, 0.6], [0.2, 0.3, 0.9, 0.9]), 0.8) == 2  # a bar that is never seen


def test_the_cost_of_a_training_lies_between_its_points():
    assert cost(curve([0.2, 0.6, 1.0], [0.2, 0.6, 1.0]), 0.8) == pytest.approx(10**2.5)
    assert cost(curve([0.2, 0.6, 1.0], [0.2, 0.6, 1.0], path=False), 0.8) == 1000
    assert cost(curve([0.9, 0.9], [0.9, 0.9]), 0.8) == 10
    assert cost(curve([0.2, 0.3], [0.2, 0.9]), 0.8) == 100
    assert cost(curve([0.9, 0.9], [0.1, 0.1]), 0.8) is None


def test_the_search_is_paid_for_and_what_all_settings_share_only_once():
    victim = victim_of(classes(), EYE)
    assert ClosedFormProbe().run(victim, "baseline").others == 0
    single, several = (Adam(steps=4, rates=rates).run(victim, "baseline") for rates in ([0.1], [0.01, 0.1, 1.0]))
    shared = victim.flops_per_row("baseline") * len(victim.task.train)
    assert single.others == 0
    assert several.others == pytest.approx(2 * (several.flops[-1].item() - shared))


@dataclass
class Scripted(Attack, group="attack.scripted"):
    """Reaches what it is told with the baseline, and on theta_I nothing, in one of two ways."""

    steps: int = 1
    reaches: float = 0.9
    fails: str = "diverged"

    tries = "reaches"

    def __post_init__(self) -> None:
        self.settings = [0.1]

    def trains_all(self, victim) -> bool:
        return True

    def run(self, victim, stage) -> AttackCurve:
        if stage == "immunized" and self.fails == "blind":
            raise Inapplicable("all features are the same")
        value = torch.nan if stage == "immunized" else self.reaches
        return replace(curve([value], [value]), setting=0.1, diverged=() if value == value else (0.1,))


@pytest.mark.parametrize("fails", ["diverged", "blind"])
def test_who_fails_on_theta_i_alone_still_counts_in_the_bar(fails):
    victim = victim_of(classes(), EYE)
    assert victim.task.chance == pytest.approx(1 / 3)
    measures = run_attacks({"it": Scripted(reaches=1.0, fails=fails)}, victim)
    assert measures.metrics["attack/worst/bar"] == pytest.approx(1 / 3 + 0.9 * 2 / 3)
    assert measures.metrics["attack/worst/successful"] == 0
    assert measures.metrics["attack/worst/flops_baseline"] == 10
    assert measures.metrics["attack/worst/flops_ratio"] is None
    expected = victim.task.chance if fails == "blind" else None
    assert measures.metrics["attack/it/final"] == expected
    assert measures.metrics["attack/worst/fine_tuned"] == (fails == "blind")  # who diverges has tuned nothing
    assert ("attacks_blind" in measures.flags) is (fails == "blind")


def test_the_price_is_told_with_the_search_and_without_and_for_several_bars():
    def compressed(kappa: float) -> Tensor:
        return torch.logspace(0, -torch.tensor(kappa).log10().item(), 6, dtype=torch.float64).diag()

    attack = Momentum(steps=512, rates=[0.1, 0.3, 1.0])
    measures = run_attacks({"probe": attack}, victim_of(classes(), compressed(30.0)))
    values = measures.metrics
    assert values["attack/worst/flops_ratio"] > 1
    assert values["attack/probe/cost"] == values["attack/worst/flops"] < values["attack/probe/cost_searched"]
    assert values["attack/worst/flops_searched"] == values["attack/probe/cost_searched"]
    ratio = values["attack/worst/flops_searched"] / values["attack/worst/flops_searched_baseline"]
    assert values["attack/worst/flops_ratio_searched"] == ratio
    prices = measures.curves["attack/worst/price"]
    assert prices["x"] == sorted(prices["x"])
    assert values["attack/worst/flops_ratio"] in prices["y"]
    said = " ".join(verdict([measures]))
    price = values["attack/worst/flops_ratio_searched"]
    assert f"{price:.3g} times with the search for settings" in said


@pytest.mark.parametrize(("few", "named"), [(8, True), (50, False)])
def test_a_bar_that_the_most_frequent_class_passes_is_named(few, named):
    y = (torch.arange(100) >= few).long()
    part = Split(0.5 * y[:, None] + gaussian(100, 3, seed=0), y)
    victim = victim_of(Task("uneven", part, part, part, classes=2), torch.eye(3, dtype=torch.float64))
    measures = run_attacks({"probe": ClosedFormProbe()}, victim)
    measures.merge(LearningCurves()(victim.comparison))
    flags = {"attacks_passed_by_majority", "passed_by_majority_harmful"}
    assert flags & set(measures.flags) == (flags if named else set())


def test_probes_without_an_intercept_fall_short_of_the_most_frequent_class():
    """One row in ten is of a class that a hyperplane away from 0 tells apart."""
    x = gaussian(1500, 6, seed=0)
    task = Task("uneven", *map(Split, x.split(500), (x[:, 0] > 1.28).long().split(500)), classes=2)
    attacks = {"ridge": ClosedFormProbe(), "lbfgs": LBFGS(steps=20), "logistic": LogisticProbe()}
    measures = run_attacks(attacks, victim_of(task, EYE))
    finals = {name: measures.metrics[f"attack/{name}/final"] for name in attacks}
    assert max(finals["ridge"], finals["lbfgs"]) < 0.75 < task.majority - 0.1 < 0.95 < finals["logistic"]
    assert measures.flags["attacks_below_majority"].endswith("no intercept: ridge, lbfgs")
    assert "attacks_passed_by_majority" not in measures.flags  # the bar lies above it
