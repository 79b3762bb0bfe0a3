"""What attacks on frozen features cost, which of their settings they keep, and logistic regression by hand."""

import numpy as np
import pytest
import torch
from helpers.matrices import orthonormal, with_spectrum
from helpers.victims import noisy_classes, regression, victim_of
from sklearn.linear_model import LogisticRegression

from immunization.attacks import (
    LBFGS,
    ClosedFormProbe,
    ConjugateGradients,
    LinearProbe,
    LogisticProbe,
    Momentum,
    Neighbours,
    Undo,
    WhitenedProbe,
)
from immunization.attacks.base import step_grid
from immunization.data.task import Split, Task

N, D, C = 90, 6, 3
EXTRACT = N * 2 * D * D  # the map, applied to every training row
GRADIENT = 2 * (2 * N * D * C)  # F W and F^T (F W - Y), a multiplication and an addition each
SVD = 2 * N * D**2 + 22 * D**3
THETA = orthonormal(D, D, seed=3) * torch.logspace(0, -1, D, dtype=torch.float64)


@pytest.mark.parametrize(
    ("attack", "flops"),
    [
        (LinearProbe(steps=2), [EXTRACT + GRADIENT, EXTRACT + 2 * GRADIENT]),
        (LinearProbe(steps=1, scaling="standard"), [EXTRACT + 4 * N * D + GRADIENT]),
        (LinearProbe(steps=1, scaling="columns"), [EXTRACT + 4 * N * D + GRADIENT]),
        (LinearProbe(steps=1, samples=10), [30 * (2 * D * D) + 4 * 30 * D * C]),
        (ConjugateGradients(steps=2), [EXTRACT + GRADIENT, EXTRACT + 2 * GRADIENT]),
        (ClosedFormProbe(), [EXTRACT + SVD]),
        (WhitenedProbe(steps=1), [EXTRACT + SVD + GRADIENT]),
        (Undo(how="relearn", steps=1), [2 * EXTRACT + 2 * (2 * N) * D**2 + 22 * D**3 + GRADIENT]),
        (Undo(how="strip", steps=1), [EXTRACT + 2 * D * D**2 + 22 * D**3 + GRADIENT]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_operations_are_those_of_the_formulas(attack, flops):
    assert attack.run(victim_of(noisy_classes(), THETA), "immunized").flops.tolist() == flops


def test_iterations_cost_what_they_take():
    """A step of L-BFGS takes one gradient, and 8 operations a weight for each pair; logistic regression iterates."""
    victim = victim_of(noisy_classes(), THETA)
    taken = LBFGS(steps=4, memory=2).run(victim, "immunized").flops - EXTRACT
    pairs = torch.tensor([0, 1, 1 + 2, 1 + 2 + 2])
    assert taken.tolist() == pytest.approx((torch.arange(1, 5) * GRADIENT + 8 * D * C * pairs).tolist())
    logistic = LogisticProbe(strengths=[0.1]).run(victim, "immunized")
    assert logistic.flops.item() == EXTRACT + SVD + GRADIENT * logistic.steps.item()


def test_lbfgs_ends_after_as_many_steps_as_features():
    """It remembers as many pairs, also where kappa is 1e10; with fewer it takes more."""
    dim, level = 16, 1e-6
    x = with_spectrum(torch.logspace(0, -5, dim, dtype=torch.float64), 80, dim, seed=0)
    victim = victim_of(regression(x, torch.linalg.svd(x, full_matrices=False).U.sum(1)), torch.eye(dim).double())
    curve = LBFGS().run(victim, "immunized")
    assert curve.excess[curve.steps < 0.9 * dim].min() > level > curve.excess[curve.steps == dim].item()
    assert (LBFGS(memory=3).run(victim, "immunized").excess[curve.steps <= dim] > level).all()


def test_lbfgs_says_where_it_remembers_fewer(caplog, monkeypatch):
    monkeypatch.setattr("immunization.attacks.probes.ROOM", 4 * 16 * D * C)
    with caplog.at_level("INFO"):
        curve = LBFGS().run(victim_of(noisy_classes(), THETA), "immunized")
    assert "remembers 4 pairs" in caplog.text
    assert torch.equal(curve.excess, LBFGS(memory=4).run(victim_of(noisy_classes(), THETA), "immunized").excess)


@pytest.mark.parametrize("strength", [1e-3, 1.0])
def test_logistic_regression_is_scikit_learns_on_whitened_features(strength):
    """Whitened: the training features are sqrt(N) U, whatever the scale of the map."""
    task = noisy_classes()
    u, sigma, vh = np.linalg.svd((task.train.x @ THETA).numpy(), full_matrices=False)
    model = LogisticRegression(C=strength, max_iter=200).fit(N**0.5 * u, task.train.y.numpy())
    whitened = N**0.5 * (task.test.x @ THETA).numpy() @ vh.T / sigma
    for scale in (1.0, 1e-4):
        curve = LogisticProbe(strengths=[strength]).run(victim_of(task, scale * THETA), "immunized")
        assert curve.test.tolist() == [model.score(whitened, task.test.y.numpy())]
        assert curve.steps.tolist() == model.n_iter_.tolist()


def test_few_rows_for_logistic_regression():
    curve = LogisticProbe(samples=5, strengths=[1.0]).run(victim_of(noisy_classes(), THETA), "immunized")
    assert 1 / 3 < curve.test.item() < 1


@pytest.mark.parametrize(
    ("areas", "best", "edge"),
    [
        ([0.6, 0.9, 0.7], 1, False),
        ([0.9, 0.7, 0.6], 0, True),
        ([0.6, 0.7, 0.9], 2, True),
        ([0.6, 0.6, 0.6], 0, False),  # all are alike, a wider range promises nothing
        ([0.4, 0.2, 0.3], 0, False),  # all count as guessing
        ([torch.nan, 0.9, 0.7], 1, False),
        ([torch.nan, 0.7, 0.9], 2, True),
    ],
)
def test_the_best_setting_and_whether_it_is_the_last_of_those_tried(areas, best, edge):
    val = torch.tensor(areas, dtype=torch.float64)[:, None].expand(3, 4)
    curve = Momentum(rates=[0.1, 1.0, 10.0]).choose([1, 2, 4, 8], torch.arange(4), val, val + 1, 0.5)
    assert curve.setting == 10.0 ** (best - 1)
    assert curve.test.tolist() == [areas[best] + 1] * 4
    assert curve.diverged == tuple(s for s, area in zip([0.1, 1.0, 10.0], areas, strict=True) if area != area)
    assert curve.at_edge is False  # momentum is unstable beyond
    outer = LBFGS()
    outer.settings = [0.1, 1.0, 10.0]
    assert outer.choose([1, 2, 4, 8], torch.arange(4), val, val + 1, 0.5).at_edge is edge


def test_an_attacker_stops_at_the_first_maximum_on_validation_rows():
    curve = LinearProbe().choose(
        [1, 2, 4], torch.arange(3), torch.tensor([[0.6, 0.8, 0.8]]), torch.arange(3.0)[None], 0
    )
    assert curve.final == 1.0


def test_steps_are_measured_on_a_geometric_grid_that_ends_with_the_last():
    assert step_grid(10) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert step_grid(10, per_octave=1) == [1, 2, 4, 8, 10]
    assert step_grid(8, per_octave=1) == [1, 2, 4, 8]
    assert step_grid(1) == [1]


def test_the_condition_number_of_whitened_features():
    """(H + ridge)^-1/2 H (H + ridge)^-1/2 with eigenvalues 1 and 1/100."""
    x = orthonormal(50, 2, seed=0)
    task = Task("regression", *(Split(x, x.sum(1)) for _ in range(3)))
    victim = victim_of(task, torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64)))
    whitened = WhitenedProbe(ridges=[0.03])
    assert whitened.run(victim, "immunized").kappa.item() == pytest.approx((1 / 1.03) / (0.01 / 0.04))


def test_neighbours_do_not_see_the_size_of_features():
    task = noisy_classes()
    finals = [Neighbours().run(victim_of(task, s * torch.eye(6).double()), "immunized").final for s in (1.0, 1e-20)]
    assert finals[0] == finals[1]
