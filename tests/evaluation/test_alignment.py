"""The ceiling of RIR, and the alignment of the tasks' spectra."""

import math

import pytest
import torch
from helpers.comparisons import compare, eye, f64, pair_of, task
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from immunization.data.task import TaskPair
from immunization.evaluation import (
    Alignment,
    Ceiling,
    Measures,
    RelativeRatio,
)

pytestmark = pytest.mark.trains


@st.composite
def definite_pairs(draw, deficient: bool = False) -> tuple[TaskPair, int]:
    """Random tasks over D inputs, K_P of full rank, K_H of full rank or, if `deficient`, of rank 2 to D - 1."""
    sigma = draw(spectra(3, 6, decades=1.5))
    dim, seed = len(sigma), draw(seeds)
    rank = draw(st.integers(2, dim - 1)) if deficient else dim
    other = draw(spectra(rank, rank, decades=1.5))
    return pair_of(with_spectrum(sigma, dim + 2, dim, seed), with_spectrum(other, dim + 2, dim, seed + 7)), seed


def ceiling_of(pair: TaskPair, theta: Tensor) -> dict[str, float | None]:
    comparison, measures = compare(pair, theta), Measures()
    for each in (Ceiling(), RelativeRatio()):
        measures.merge(each(comparison))
    return measures.metrics


@given(definite_pairs() | definite_pairs(deficient=True))
def test_no_theta_exceeds_the_ceiling(drawn):
    pair, seed = drawn
    for draw in range(5):
        theta = gaussian(pair.dim, pair.dim, seed=seed + 100 + draw)
        metrics = ceiling_of(pair, theta)
        assert metrics["rir"] <= metrics["ceiling/rir"] * (1 + 1e-6)


def test_the_ceiling_is_unbounded_outside_of_the_common_range():
    k_p = with_spectrum(f64([3.0, 2, 1]), 9, 6, seed=0)
    outside = torch.cat([k_p, gaussian(2, 6, seed=5)])
    measures = Ceiling()(compare(pair_of(k_p, outside), eye(6)))
    assert measures.metrics == {"ceiling/rir": None, "ceiling/attained": None}
    assert "2 of the 5 dimensions" in measures.reasons["ceiling/rir"]
    assert "dataset.common_range=true" in measures.reasons["ceiling/rir"]
    inside = Ceiling()(compare(pair_of(k_p, gaussian(8, 9, seed=5) @ k_p), eye(6)))
    assert inside.metrics["ceiling/rir"] >= 1 - 1e-9
    one = Ceiling()(compare(pair_of(k_p, gaussian(1, 6, seed=5)), eye(6)))
    assert one.metrics["ceiling/rir"] == pytest.approx(9)  # kappa(K_P): H_H of rank 1 has kappa 1 for every theta


def test_tasks_that_share_their_inputs_have_ceiling_one():
    k = with_spectrum(f64([3.0, 2, 1]), 9, 3, seed=0)
    measures = Ceiling()(compare(pair_of(k, 2 * k), gaussian(3, 3, seed=1)))
    assert measures.metrics["ceiling/rir"] == pytest.approx(1)
    assert "ceiling is 1" in measures.reasons["ceiling/attained"]


def test_a_ceiling_near_one_can_still_be_attained():
    primary = with_spectrum(f64([3.0, 2, 1]), 9, 3, seed=0)
    harmful = with_spectrum(f64([3.0, 2, 1.001]), 9, 3, seed=0)
    metrics = ceiling_of(pair_of(primary, harmful), eye(3))
    assert 1 + 1e-6 < metrics["ceiling/rir"] < 1.01
    assert metrics["ceiling/attained"] == pytest.approx(0, abs=1e-6)


def align(k_p: Tensor, k_h: Tensor, **options) -> Measures:
    return Alignment(**options)(compare(pair_of(k_p, k_h), eye(k_p.shape[1])))


def test_alignment_is_one_for_proportional_and_zero_for_reversed_spectra():
    k = with_spectrum(f64([4.0, 2, 1]), 9, 3, seed=0)
    same = align(k, 3 * k).metrics
    assert (same["alignment/score"], same["alignment/kernel"], same["alignment/kappa_M"]) == pytest.approx((1, 1, 1))
    assert same["alignment/principal_angle_max"] == pytest.approx(0, abs=1e-6)
    assert align(k, torch.linalg.pinv(k).T).metrics["alignment/score"] == pytest.approx(0, abs=1e-12)
    flat = align(k, eye(3))
    assert flat.metrics["alignment/score"] is None
    assert "equal" in flat.reasons["alignment/score"]


@given(seeds, spectra(3, 6), spectra(3, 6))
def test_alignment_is_a_share_that_no_common_rotation_changes(seed, p, h):
    dim = max(len(p), len(h))
    k_p, k_h, rotation = (
        with_spectrum(p, dim, dim, seed),
        with_spectrum(h, dim, dim, seed + 3),
        orthonormal(dim, dim, seed),
    )
    one, two = align(k_p, k_h).metrics, align(k_p @ rotation, k_h @ rotation).metrics
    for name in ("alignment/score", "alignment/kernel"):
        assert 0 <= one[name] <= 1
        assert two[name] == pytest.approx(one[name], abs=1e-6)


def test_principal_angles_of_two_known_planes():
    angle = 0.3
    turned = f64([[1, 0, 0], [0, math.cos(angle), math.sin(angle)]])
    plane = eye(3)[:2]
    weights = f64([[2.0], [1.0]])
    measures = align(weights * plane, weights * turned, energy=1.0)
    assert measures.curves["alignment/principal_angles"]["y"] == pytest.approx([0, angle], abs=1e-7)
    assert measures.metrics["alignment/principal_angle_mean"] == pytest.approx(angle / 2, abs=1e-7)
    assert measures.metrics["alignment/kappa_M"] is None
    cosines = measures.arrays["alignment/cosines"]
    torch.testing.assert_close(cosines, torch.diag(torch.tensor([1, math.cos(angle)])), atol=1e-6, rtol=0)
    # the first direction holds 4/5 of each trace
    assert align(weights * plane, weights * turned, energy=0.8).curves["alignment/principal_angles"]["x"] == [1]


def test_alignment_of_a_benign_task_is_the_correlation_of_the_logarithms():
    """Which is what may explain how far a benign task is slowed too (docs/theory.md)."""
    roots = {role: gaussian(9, 4, seed=seed) for seed, role in enumerate(("primary", "harmful", "benign"))}
    tasks = {role: task(x, torch.ones(9).double()) for role, x in roots.items()}
    metrics = Alignment()(compare(TaskPair("three", **tasks), eye(4))).metrics
    logs = {}
    for role, x in roots.items():
        values, vectors = torch.linalg.eigh(x.T @ x)
        logs[role] = vectors * (values.log() - values.log().mean()) @ vectors.T
    for name, a, b in (("benign_primary", "benign", "primary"), ("benign_harmful", "benign", "harmful")):
        rho = (logs[a] * logs[b]).sum() / (logs[a].norm() * logs[b].norm())
        assert metrics[f"alignment/{name}"] == pytest.approx((1 + rho.item()) / 2)
    tasks["benign"] = task(torch.linalg.pinv(roots["harmful"]).T, torch.ones(9).double())  # its eigenvalues inverted
    assert Alignment()(compare(TaskPair("three", **tasks), eye(4))).metrics["alignment/benign_harmful"] < 1e-12
