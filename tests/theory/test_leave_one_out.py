"""Leave-one-out predictions of ridge regression against refitting without each row, and their gradient."""

import pytest
import torch
from helpers.matrices import gaussian, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.theory.probe import leave_one_out

RIDGES = (1e-6, 1e-4, 1e-2, 0.1)


def refitted(features: torch.Tensor, targets: torch.Tensor, ridge: float) -> torch.Tensor:
    """Fit N times, each without one row; the means and sigma_1 are those of all rows."""
    z, y = features - features.mean(0), targets - targets.mean(0)
    penalty = (ridge**0.5 * torch.linalg.svdvals(z)[0]) * torch.eye(z.shape[1], dtype=z.dtype)
    found = []
    for row in range(len(z)):
        kept = torch.arange(len(z)) != row
        stacked = torch.cat([z[kept], penalty]), torch.cat([y[kept], y.new_zeros(z.shape[1], y.shape[1])])
        q, r = torch.linalg.qr(stacked[0])  # no Gram matrix: a solution by other means
        found.append(z[row] @ torch.linalg.solve_triangular(r, q.mT @ stacked[1], upper=True))
    return torch.stack(found)


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize(("rows", "columns"), [(20, 5), (12, 12), (8, 30)])
def test_it_is_refitting_without_each_row(rows, columns, ridge):
    x, y = gaussian(rows, columns, seed=0) + 3, gaussian(rows, 4, seed=1)
    assert_close(leave_one_out(x, y, [ridge])[0], refitted(x, y, ridge), rtol=1e-7, atol=1e-7)


@given(seed=seeds, rows=st.integers(2, 12), columns=st.integers(1, 12), outputs=st.integers(1, 3),
       ridge=st.floats(-5, 1), scale=st.floats(-3, 3))  # fmt: skip
def test_it_is_refitting_for_any_shape_ridge_and_scale(seed, rows, columns, outputs, ridge, scale):
    x, y = gaussian(rows, columns, seed=seed), gaussian(rows, outputs, seed=seed + 1)
    found = leave_one_out(10**scale * x, y, [10**ridge])[0]
    assert_close(found, refitted(x, y, 10**ridge), rtol=1e-6, atol=1e-6 * y.abs().max().item())


@pytest.mark.parametrize(("rows", "columns"), [(9, 3), (5, 7)])
def test_its_gradient_is_that_of_finite_differences(rows, columns):
    x, y = gaussian(rows, columns, seed=2).requires_grad_(), gaussian(rows, 2, seed=3)
    assert torch.autograd.gradcheck(lambda x: leave_one_out(x, y, [1e-3, 0.1]), [x])


@pytest.mark.parametrize(("rows", "columns"), [(9, 3), (5, 7)])
def test_no_scale_of_the_features_matters(rows, columns):
    """The gradient has no part along the features."""
    x, y = gaussian(rows, columns, seed=2), gaussian(rows, 2, seed=3)
    assert_close(leave_one_out(1e-6 * x, y, RIDGES), leave_one_out(x, y, RIDGES), rtol=1e-8, atol=1e-10)
    centered = (x - x.mean(0)).requires_grad_()
    (slope,) = torch.autograd.grad(leave_one_out(centered, y, RIDGES).square().sum(), centered)
    assert (slope * centered).sum().abs() < 1e-8 * slope.norm() * centered.norm()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_features_predict_nothing(value):
    x = torch.full((6, 3), value, requires_grad=True)
    found = leave_one_out(x, gaussian(6, 2, seed=0), RIDGES)
    found.sum().backward()
    assert found.shape == (4, 6, 2)
    assert not found.any()
    assert not x.grad.any()


def test_rows_without_information_predict_nothing():
    """Means of the other rows alone would predict the opposite of each row's class."""
    x = torch.zeros(6, 2, dtype=torch.float64)
    x[0, 0] = 1.0  # sigma_1 > 0, and nothing else
    found = leave_one_out(x, torch.eye(3, dtype=torch.float64).repeat(2, 1), [1e9])
    assert found.abs().max() < 1e-8


@pytest.mark.parametrize("rows", [8, 300])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(rows, bad):
    features = torch.randn(rows, 4)
    features[0, 0] = bad
    with pytest.raises(torch.linalg.LinAlgError, match="NaN, infinite"):
        leave_one_out(features, torch.randn(rows, 2), [0.01])
