"""What a model is worth, and how much of it a defense takes away."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.runs import DEEP
from helpers.victims import net_victim, zeroed
from torch.testing import assert_close

from immunization import run
from immunization.attacks import (
    Attack,
    AttackCurve,
    BlockProbe,
    Inapplicable,
    Neighbours,
    RandomNet,
    RawInputs,
    Suite,
    Undo,
    Victim,
    run_attacks,
    run_transfer,
)
from immunization.attacks.worth import Draw, at, best, budgets, put, worth
from immunization.errors import ConfigError
from immunization.evaluation.measures import Measures
from immunization.theory.statistics import Estimate

pytestmark = pytest.mark.usefixtures("few_patches")

ROWS = 400


def hits(accuracy: float, seed: int, draws: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(draws, ROWS, generator=generator) < accuracy).double()


def curve(val: list[float], scores: torch.Tensor, flops: list[float]) -> AttackCurve:
    flops = torch.tensor(flops, dtype=torch.float64)
    return AttackCurve(torch.arange(1, len(val) + 1), flops, torch.tensor(val), scores.mean(1), scores=scores)


def test_no_defense_removes_nothing_and_an_erased_model_everything():
    before, without = hits(0.8, 0), hits(0.3, 1)
    assert worth(before, before, without).removed.value == 0
    assert worth(before, without, without).removed.value == 1
    assert_close(worth(before, without, without).worth.value, (before - without).mean().item())


def test_one_test_row_says_nothing():
    found = worth(torch.ones(3, 1), torch.ones(3, 1), torch.zeros(3, 1))
    assert (found.worth.value, found.worth.low, found.removed) == (1, -math.inf, None)


def test_a_few_rows_that_agree_are_no_proof():
    few, many = (worth(torch.ones(1, n), torch.ones(1, n), torch.zeros(1, n)) for n in (3, 600))
    assert few.worth.low < 0 < few.worth.value
    assert (few.lost.low, few.lost.high) == (0, 0)
    assert many.worth.low > 0.99


def test_where_the_model_is_worth_nothing_no_defense_is_measured():
    assert worth(hits(0.5, 0), hits(0.2, 1), hits(0.5, 2)).removed is None


@pytest.mark.parametrize(("draws", "spread"), [(1, 0.0), (3, 0.1)])
def test_intervals_cover_what_is_true(draws, spread):
    """93 to 97 % of 95 %, of rows and attackers' draws that are both drawn anew."""
    generator, inside, repetitions = torch.Generator().manual_seed(0), 0, 1000

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = torch.tensor([1.8, 0.5, -1.8], dtype=torch.float64)
    many = torch.sigmoid(logits[:, None] + normal(3, 400_000) + spread * normal(3, 400_000)).mean(1)
    truth = ((many[0] - many[1]) / (many[0] - many[2])).item()
    for _ in range(repetitions):
        chances = torch.sigmoid(logits[:, None, None] + normal(3, 1, ROWS) + spread * normal(3, draws, 1))
        found = worth(*torch.bernoulli(chances, generator=generator)).removed
        inside += found.low <= truth <= found.high
    assert 0.93 <= inside / repetitions <= 0.97


def test_an_interval_that_is_given_covers_what_is_true_though_few_rows_choose():
    """Whoever has theta_I should leave it aside, which removes 1; with 20 validation rows, some do not see it."""
    generator, inside, given, misled = torch.Generator().manual_seed(0), 0, 0, 0
    guess, chances = torch.zeros(ROWS, dtype=torch.float64), torch.tensor([0.95, 0.7, 0.8], dtype=torch.float64)
    for _ in range(1000):
        val = torch.bernoulli(chances[:, None].expand(-1, 20), generator=generator).mean(1)
        scores = torch.bernoulli(chances[:, None, None].expand(-1, 1, ROWS), generator=generator)
        groups = [[curve([own], rows, [1.0])] for own, rows in zip(val.tolist(), scores, strict=True)]
        found = at([Draw(*groups)], guess, public=False)
        given += found.removed is not None
        inside += found.removed is not None and found.removed.low <= 1 <= found.removed.high
        misled += found.removed is None and found.worth.low > 0
    assert given > 500
    assert misled > 0.1 * given  # their intervals lie above it
    assert inside >= 0.97 * given


def test_validation_rows_that_choose_badly_are_told():
    """They find all of them equal, so that the attacker with theta_I counts, who is worse than the one without."""
    guess = torch.full((ROWS,), 0.1, dtype=torch.float64)
    before, after, without = (curve([1.0], hits(a, i), [1.0]) for i, a in enumerate((0.9, 0.2, 0.6)))
    found = at([Draw([before], [after], [without], [after], {"half": [after]})], guess, public=False)
    assert (found.after, found.removed) == (after.test, None)
    assert found.ceiling == found.partial["half"][1] == Estimate(1, 1, 1)  # nothing removes more than everything
    measures = Measures()
    put(found, measures, "unseen", rows=50)
    assert measures.reasons["ceiling_unseen/worth_attained"] == "how much is removed is unknown"
    put(found, measures, "unseen", 5, rows=50)
    assert measures.metrics["worth_unseen/removed"] is measures.metrics["worth_unseen/removed_5"] is None
    assert "with 5 images of each class" in measures.reasons["worth_unseen/removed_5"]
    assert measures.metrics["worth_unseen/lost"] == pytest.approx(found.before - found.after)
    assert list(measures.flags) == ["worth_misled_unseen"]
    told = f"theta_I by 50 validation rows has {found.after:.3f}, the best without the model {found.without:.3f}"
    assert told in measures.flags["worth_misled_unseen"]
    noisy = at([Draw([before], [curve([1.0], hits(0.6, 3), [1.0])], [without])], guess, public=False)
    assert noisy.removed.low < 1 < noisy.removed.high  # it may lie above by chance


def test_attackers_are_chosen_on_validation_rows_within_the_budget():
    poor, good = hits(0.4, 0)[0], hits(0.9, 1)[0]
    lucky = curve([0.9], good[None], [5.0])
    seen = curve([0.2, 0.95], torch.stack([good, poor]), [1.0, 10.0])
    guess = torch.full((ROWS,), 0.1, dtype=torch.float64)
    assert torch.equal(best([lucky, seen], guess), poor)  # which test rows would not have chosen
    assert torch.equal(best([lucky, seen], guess, budget=9), good)
    assert torch.equal(best([lucky, seen], guess, budget=0.5), guess)


@pytest.mark.parametrize("flops", [1234567.0, 3.0, 0.0])
def test_the_cheapest_attacker_has_enough_operations_at_the_first_point(flops):
    found = [curve([0.5], hits(0.75, 0), [cost]) for cost in (flops, 1e9)]
    grid = budgets([Draw(found, found, found[1:])])
    assert (grid[0], grid[-1]) == (max(flops, 1.0), 1e9)
    assert grid == sorted(grid)


def test_who_has_a_model_may_leave_it_aside_or_take_the_public_one():
    guess = torch.full((ROWS,), 0.1, dtype=torch.float64)
    before, after, without = (
        curve([scores.mean()], scores, [1.0]) for scores in (hits(a, i) for i, a in enumerate((0.8, 0.1, 0.3)))
    )
    draw = Draw([before], [after], [without])
    assert at([draw], guess, public=False).removed.value == 1
    assert at([draw], guess, public=True).removed.value == 0


def test_no_defense_of_a_part_removes_more_than_its_ceiling():
    guess = torch.full((ROWS,), 0.1, dtype=torch.float64)
    before, after, without, left = (
        curve([scores.mean()], scores, [1.0]) for scores in (hits(a, i) for i, a in enumerate((0.8, 0.55, 0.2, 0.5)))
    )
    found = at([Draw([before, left], [after, left], [without], [left])], guess, public=False)
    assert_close(found.ceiling.value, ((before.test - left.test) / (before.test - without.test)).item())
    assert found.ceiling.low < found.ceiling.value < found.ceiling.high
    measures = Measures()
    put(found, measures, "harmful", 5)
    assert measures.metrics["ceiling/worth_5"] == found.ceiling.value
    attained = found.removed.value / found.ceiling.value
    assert measures.metrics["ceiling/worth_attained_5"] == attained < 1
    shallow = at([Draw([before], [before], [without], [before])], guess, public=False)
    put(shallow, measures, "harmful")
    assert measures.metrics["ceiling/worth"] == 0
    assert "serves as well" in measures.reasons["ceiling/worth_attained"]
    assert at([Draw([before], [after], [without])], guess, public=False).ceiling is None


def test_the_ceiling_of_every_part_of_the_net():
    guess = torch.full((ROWS,), 0.1, dtype=torch.float64)
    before, without, half = (
        curve([scores.mean()], scores, [1.0]) for scores in (hits(a, i) for i, a in enumerate((0.8, 0.2, 0.6)))
    )
    draw = Draw([before], [before], [without], partial={"half": [half], "nothing": []})
    measures = Measures()
    put(at([draw], guess, public=False), measures, "harmful", 5)
    values = measures.metrics
    assert_close(values["ceiling/partial_half_5"], ((before.test - half.test) / (before.test - without.test)).item())
    assert (
        values["ceiling/partial_half_low_5"] < values["ceiling/partial_half_5"] < values["ceiling/partial_half_high_5"]
    )
    assert values["worth/partial_half_5"] == half.test
    assert values["ceiling/partial_nothing_5"] == 1
    assert values["worth/removed_5"] == 0
    assert "ceiling/worth_5" not in values
    assert not at([draw], guess, public=True).partial


@pytest.fixture(scope="module")
def victim(colors):
    return net_victim(colors, zeroed, "test_resnet", "layer4")


def test_a_run_says_what_is_removed_at_few_images(victim):
    few = {"samples": 5, "mirrored": False, "ridges": [0.01, 0.1]}
    attacks = {"near": Neighbours(), "raw": RawInputs(**few)}
    attacks |= {"blocks": BlockProbe(enlarged=False, **few), "random": RandomNet(enlarged=False, **few)}
    suite = Suite(version="test-1", images=[2, 100], draws=2)
    measures = run_attacks(attacks, victim, suite=suite)
    values = measures.metrics
    assert measures.about["suite"] == {"version": "test-1", "theta_0": "secret"}
    assert "worth_undetermined" in measures.flags  # colors stand in the pixels themselves
    assert values["worth/without"] > 0.9
    assert values["worth/removed_100"] is None
    assert "more than 100" in measures.reasons["worth/removed_100"]
    assert 0 < values["worth/before_2"] <= 1
    assert not any("@" in name for name in measures.metrics)  # of those with few images there is nothing else


def test_where_no_reference_applies_nobody_is_given_few_images(victim, monkeypatch):
    def refuse(self, victim, stage):
        raise Inapplicable("not here")

    monkeypatch.setattr(RawInputs, "run", refuse)
    seen = []
    near = Neighbours.run
    monkeypatch.setattr(Neighbours, "run", lambda self, *args: seen.append(self.samples) or near(self, *args))
    measures = run_attacks({"near": Neighbours(), "raw": RawInputs()}, victim, suite=Suite(version="x", images=[2]))
    assert set(seen) == {None}
    assert not any(name.startswith("worth/") for name in measures.metrics)


def test_without_an_attacker_who_lacks_the_model_there_is_no_worth(victim):
    assert not any(name.startswith("worth/") for name in run_attacks({"near": Neighbours()}, victim).metrics)
    named = run_attacks({"near": Neighbours()}, victim, suite=Suite(version="test-1", images=[2]))
    assert named.about["suite"]["version"] == "test-1"
    assert not any(name.startswith("worth/") for name in named.metrics)


@pytest.mark.parametrize("theta_0", ["secret", "public"])
def test_a_secret_theta_0_is_not_what_an_attacker_goes_back_to(victim, theta_0):
    """A map behind a net gives its rows away; the trained layers of one do not."""
    suite, attacks = Suite(version="test-1", theta_0=theta_0), {"undo": Undo(steps=8), "near": Neighbours()}
    measures = run_attacks(attacks, victim, suite=suite)
    assert (measures.metrics["attack/undo/final"] is None) is (theta_0 == "secret")
    assert ("suite.theta_0=secret" in measures.reasons.get("attack/undo/final", "")) is (theta_0 == "secret")
    assert measures.metrics["attack/near/final"] is not None
    assert not Undo().needs_theta_0(net_victim(victim.model.images, lambda model: None, "test_resnet", "fold"))


class Plain(Attack):
    """An attack of somebody's own: with a constructor, and without scores of test rows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(steps=1, seed=seed)

    tries = "own"
    own = (0.1,)

    def run(self, victim, stage) -> AttackCurve:
        one = torch.ones(1, dtype=torch.float64)
        return AttackCurve(torch.ones(1), one, one, one, setting=0.1)


def test_attacks_without_scores_have_no_part_in_the_worth(victim):
    suite = Suite(version="test-1", images=[2])
    measures = run_attacks({"plain": Plain(), "raw": RawInputs(mirrored=False)}, victim, suite=suite)
    assert measures.metrics["attack/plain/final"] == 1
    for name in ("theta_0", "lost", "removed"):
        assert measures.reasons[f"worth/{name}"] == "no attacker with the model ran"
    assert measures.reasons["worth/removed_2"] == "no attacker takes so few images"


class Guess(Plain):
    """Whoever has no model guesses."""

    reference = True

    def run(self, victim, stage) -> AttackCurve:
        return replace(curve([0.0], torch.zeros(1, len(victim.task.test)), [1.0]), setting=0.0)


class Reader(Guess):
    """Reads half of the rows right with theta_0 and none with theta_I."""

    reference = False

    def run(self, victim, stage) -> AttackCurve:
        right = (torch.arange(len(victim.task.test)) % 2 == 0) & self.learns(stage)
        return replace(curve([right.double().mean()], right.double()[None], [1.0]), setting=0.0)

    def learns(self, stage) -> bool:
        return stage == "baseline"


class Trainer(Reader):
    """Learns as much on either net, and trains it."""

    trains = True

    def learns(self, stage) -> bool:
        return True


def test_who_trains_has_the_first_draw_and_counts_in_all(victim):
    attacks = {"reads": Reader(), "trains": Trainer(), "guess": Guess()}
    suite = Suite(version="test-1", images=[2], draws=3)
    assert run_attacks(attacks, victim, suite=suite).metrics["worth/removed_2"] == 0
    del attacks["trains"]
    assert run_attacks(attacks, victim, suite=suite).metrics["worth/removed_2"] == 1


@pytest.mark.parametrize("theta_0", ["secret", "public"])
def test_benign_tasks_are_learned_as_the_harmful_one_is(colors, theta_0):
    """What is lost there; who has theta_0 already is no honest user of theta_I. Nothing of it counts as an attack."""
    pair = replace(colors, tasks=colors.tasks | {"benign": colors.tasks["harmful"]})
    of_harmful = net_victim(pair, zeroed, "test_resnet", "layer4")
    victim = Victim(of_harmful.model, of_harmful.comparison, of_harmful.start, "benign")
    attacks = {"near": Neighbours(), "other": Neighbours(), "guess": Guess()}
    suite = Suite(version="test-1", images=[2], draws=2, theta_0=theta_0, benign=["near"])
    values = run_transfer(attacks, victim, None, suite).metrics
    for end in ("", "_2"):
        before, after, lost = (values[f"transfer_benign/{key}{end}"] for key in ("before", "after", "lost"))
        assert before > 0.5 > after
        assert lost == pytest.approx(before - after)
    assert values["transfer_benign/lost_low"] <= values["transfer_benign/lost"] <= values["transfer_benign/lost_high"]
    assert all(name.startswith("transfer_benign/") for name in values)
    alone = run_transfer({"near": Neighbours()}, victim, None, suite)
    assert alone.metrics == {"transfer_benign/lost": None}
    assert "without the model" in alone.reasons["transfer_benign/lost"]
    nobody = run_transfer({"guess": Guess()}, victim, None, suite)
    assert nobody.metrics["transfer_benign/lost"] is None
    assert nobody.reasons["transfer_benign/lost"] == "no attacker with the model ran"


def test_attackers_may_have_some_of_the_images_only(colors):
    """All they read are those: features and images belong to the same rows."""
    whole = net_victim(colors, lambda _: None, "test_resnet", "layer4")
    few = Victim(whole.model, whole.comparison, whole.start, most=2)
    rows = whole.task.few(2, seed=0)
    assert len(few.task.train) == 2 * whole.task.classes < len(whole.task.train)
    assert torch.equal(few.task.train.y, whole.task.train.y[rows])
    assert torch.equal(few.features("baseline", "train"), whole.features("baseline", "train")[rows])
    images, labels = few.images("train")
    assert torch.equal(images, whole.images("train")[0][rows])
    assert torch.equal(labels, few.task.train.y)


@pytest.mark.trains
def test_benign_tasks_are_learned_by_attackers_of_the_run(tmp_path):
    suite = "suite={_target_: immunization.attacks.Suite, version: test-1, benign: [nobody]}"
    with pytest.raises(
        ConfigError, match=r"suite\.benign: nobody is not one of the attacks of this run; choose from neighbours"
    ):
        run([*DEEP, "method=identity", "attack=[neighbours]", suite], tmp_path)
    with pytest.raises(ConfigError, match=r"suite\.benign needs a benign task"):
        run([*DEEP, "method=identity", "attack=[neighbours]", suite.replace("nobody", "neighbours")], tmp_path)


def test_a_budget_names_what_it_leaves_out(victim, monkeypatch):
    """Attackers without the model come first; the clock moves on by a minute whenever it is looked at."""
    minutes = iter(range(1000))
    monkeypatch.setattr("immunization.attacks.suite.time.monotonic", lambda: 60.0 * next(minutes))
    suite = Suite(version="test-1", images=[2], draws=2, minutes=3)
    few = {"mirrored": False, "ridges": [0.1]}
    measures = run_attacks({"near": Neighbours(), "raw": RawInputs(**few)}, victim, suite=suite)
    left = "raw with 2 images, draw 2, near"
    assert measures.flags["suite_cut_short"] == f"suite.minutes=3: {left}"
    assert measures.about["suite"]["changed"] == [f"without what suite.minutes=3 left no time for: {left}"]
    assert "suite.minutes=3 were over" in measures.reasons.values()


def test_a_budget_that_suffices_changes_nothing(victim):
    attacks = {"near": Neighbours(), "raw": RawInputs(mirrored=False, ridges=[0.1])}
    suites = [Suite(version="test-1", images=[2], minutes=minutes) for minutes in (60, None)]
    some, all_ = (run_attacks(attacks, victim, suite=suite) for suite in suites)
    assert (some.flags, some.about, some.metrics) == (all_.flags, all_.about, all_.metrics)
