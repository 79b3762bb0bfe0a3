"""What makes a probe slow, and what a slow probe tells (docs/theory.md, section 8)."""

import math

import pytest
import torch
from helpers.comparisons import eye
from helpers.matrices import gaussian, orthonormal, seeds
from hypothesis import given
from hypothesis import strategies as st

from immunization.theory.probe import Probe

steps = st.integers(1, 5000)
ROWS, DIM = 30, 8


def squeezed(basis, s, seed):
    return (eye(DIM) - (1 - s) * basis @ basis.T) @ orthonormal(DIM, DIM, seed=seed)


@given(seed=seeds, m=st.integers(1, 7), s=st.floats(1e-4, 0.5), t=steps, inside=st.booleans())
def test_squeezed_directions_are_learned_slowly(seed, m, s, t, inside):
    x, y = gaussian(ROWS, DIM, seed=seed), gaussian(ROWS, 1, seed=seed + 1)
    b = x.T @ y
    drawn = gaussian(DIM, m, seed=seed + 2)
    basis = torch.linalg.qr(torch.cat([b, drawn], 1)[:, :m] if inside else drawn).Q
    theta = squeezed(basis, s, seed + 3)
    probe = Probe.of(x @ theta, y)
    moved = (basis.T @ theta @ probe.weights(torch.tensor([float(t)]))[0]).norm()
    along = (theta.T @ b).norm()
    outside, within = (b - basis @ (basis.T @ b)).norm(), (basis.T @ b).norm()
    assert along.item() == pytest.approx(math.hypot(outside.item(), s * within.item()), rel=1e-9)
    assert moved <= s * t / probe.sigma[0] ** 2 * along * (1 + 1e-9)


def test_a_large_ridge_leaves_the_sign_to_see():
    """Squeezing X^T Y itself leaves a first step that is small and right; a finite ridge leaves one that is not."""
    x = gaussian(400, DIM, seed=0) * torch.tensor([4.0, 3, 1, 1, 1, 1, 1, 1])
    y = torch.sign(x[:, 2:3] + 0.2 * x[:, 0:1] + 0.1 * gaussian(400, 1, seed=1))
    b, k = x.T @ y, x.T @ x

    def accuracy(direction):
        theta = squeezed(direction / direction.norm(), 1e-6, 3)
        first = Probe.of(x @ theta, y, rank=DIM).weights(torch.tensor([1.0]))[0]
        return (torch.sign(x @ theta @ first) == y).double().mean()

    seen = accuracy(b) - 0.5
    assert seen == (torch.sign(x @ b) == y).double().mean() - 0.5 > 0.2
    assert accuracy(torch.linalg.solve(k + torch.linalg.eigvalsh(k)[-1] * eye(DIM), b)) - 0.5 < seen / 2


@given(seed=seeds, t=steps)
def test_a_slow_probe_has_its_labels_below(seed, t):
    theta = orthonormal(DIM, DIM, seed=seed) * torch.logspace(0, -2, DIM).double()
    probe = Probe.of(gaussian(ROWS, DIM, seed=seed + 1) @ theta, gaussian(ROWS, 1, seed=seed + 2))
    energy = probe.coefficients.square().sum(1)
    missed = 1 - probe.excess(torch.tensor([float(t)]))[0] / energy.sum()
    below = probe.sigma.square() < probe.sigma[0] ** 2 / t
    assert energy[below].sum() >= (1 - missed / (1 - math.exp(-2)) - 1e-12) * energy.sum()


def test_squeezed_directions_hold_their_share_of_other_labels():
    x, m = gaussian(200, DIM, seed=0), 3
    probe = Probe.of(x @ squeezed(orthonormal(DIM, m, seed=1), 1e-4, 2), gaussian(200, 4000, seed=3))
    share = probe.coefficients[-m:].square().sum() / probe.coefficients.square().sum()
    assert share.item() == pytest.approx(m / DIM, abs=0.01)
