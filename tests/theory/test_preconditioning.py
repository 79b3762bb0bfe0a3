"""Preconditioned gradients: K cancelled, with a ridge, and by the pseudo-inverse."""

import pytest
import torch
from helpers.autograd import gradient, r_ill_by_autograd, r_well_by_autograd
from helpers.matrices import gaussian
from torch.testing import assert_close

from immunization.errors import DegenerateSpectrum
from immunization.theory import regularizers
from immunization.theory.regularizers import preconditioned_product


def each_regularizer(rank):
    return {
        "r_well": (regularizers.r_well_of_features, lambda h: r_well_by_autograd(h)),
        "r_ill": (
            lambda f, theta=None: regularizers.r_ill_of_features(f, rank, theta),
            lambda h: r_ill_by_autograd(h, rank),
        ),
    }


@pytest.mark.parametrize("name", ["r_well", "r_ill"])
@pytest.mark.parametrize("rows", [20, 6])
def test_cancelled_gradient_is_the_inverse_of_k_times_autograds(name, rows):
    """K^-1 grad_theta R(theta^T K theta), K^-1 by a solve, against 2 theta (...), in which K has cancelled."""
    x, theta = gaussian(rows, 6, seed=1), gaussian(6, 6, seed=2)
    exact, naive = each_regularizer(6)[name]
    k = x.T @ x
    (plain,) = gradient(lambda t: naive(t.T @ k @ t), theta)
    (found,) = gradient(lambda t: exact(x @ t, t), theta)
    assert_close(found, torch.linalg.solve(k, plain), rtol=1e-6, atol=1e-7 * found.abs().max().item())


@pytest.mark.parametrize("name", ["r_well", "r_ill"])
@pytest.mark.parametrize("rows", [20, 4])
def test_ridge_and_pseudo_inverse_of_a_regularizer(name, rows):
    """Gradients through `preconditioned_product`: (K + r I)^-1 grad and K^+ grad, for regular and singular K."""
    x, theta = gaussian(rows, 6, seed=1), gaussian(6, 6, seed=2)
    exact, naive = each_regularizer(min(rows, 6))[name]
    k = x.T @ x
    (plain,) = gradient(lambda t: naive(t.T @ k @ t), theta)
    inverses = {
        "ridge": torch.linalg.inv(k + 0.3 * torch.eye(6, dtype=k.dtype)),
        "pinv": torch.linalg.pinv(k, hermitian=True),
    }
    for mode, inverse in inverses.items():
        (found,) = gradient(lambda t, m=mode: exact(preconditioned_product(x, t, m, ridge=0.3)), theta)
        assert_close(found, inverse @ plain, rtol=1e-6, atol=1e-7 * found.abs().max().item())


@pytest.mark.parametrize("rows", [20, 5, 3, 2])
@pytest.mark.parametrize("ridge", [1e-4, 0.3, 100.0])
def test_the_side_of_the_outputs_whatever_the_number_of_rows(rows, ridge):
    """The released code's grad K^-1: few rows take a shorter way, which gives the same."""
    x, theta, weights = gaussian(rows, 7, seed=1), gaussian(7, 7, seed=2), gaussian(rows, 7, seed=3)
    (found,) = gradient(lambda t: (preconditioned_product(x, t, "ridge", ridge, "output") * weights).sum(), theta)
    expected = x.T @ weights @ torch.linalg.inv(x.T @ x + ridge * torch.eye(7, dtype=x.dtype))
    assert_close(found, expected, rtol=1e-7, atol=1e-9 * expected.abs().max().item())
    with pytest.raises(DegenerateSpectrum, match=r"raise ridge"):
        gradient(lambda t: preconditioned_product(x[:2], t, "ridge", 1e-30, "output").sum(), theta)


@pytest.mark.parametrize("name", ["r_well", "r_ill"])
def test_pseudo_inverse_projects_the_cancelled_gradient(name):
    """Singular K: K^+ grad = Pi 2 theta (...), Pi the projector on range(K); both move H = theta^T K theta alike."""
    x, theta = gaussian(4, 6, seed=1), gaussian(6, 6, seed=2)
    exact, _ = each_regularizer(4)[name]
    (cancelled,) = gradient(lambda t: exact(x @ t, t), theta)
    (projected,) = gradient(lambda t: exact(preconditioned_product(x, t, "pinv")), theta)
    assert_close(projected, torch.linalg.pinv(x) @ x @ cancelled)
    assert_close(x @ projected, x @ cancelled)


@pytest.mark.parametrize("rows", [20, 4])
def test_preconditioned_product_of_any_upstream(rows):
    """Forward x theta; backward the gradient x^T g times the inverse on either side; x receives none."""
    x, theta, upstream = gaussian(rows, 5, seed=1), gaussian(5, 5, seed=2), gaussian(rows, 5, seed=3)
    k, plain = x.T @ x, x.T @ upstream
    inverse = torch.linalg.inv(k + 2 * torch.eye(5, dtype=k.dtype))
    expected = {
        ("none", "input"): plain,
        ("ridge", "input"): inverse @ plain,
        ("ridge", "output"): plain @ inverse,
        ("pinv", "input"): torch.linalg.pinv(k, hermitian=True) @ plain,
    }
    for (mode, side), gradient_expected in expected.items():
        leaf = theta.clone().requires_grad_()
        product = preconditioned_product(x, leaf, mode, ridge=2.0, side=side)
        assert_close(product, x @ theta)
        product.backward(upstream)
        assert_close(leaf.grad, gradient_expected)


@pytest.mark.parametrize(("mode", "side"), [("cancelled", "input"), ("pinv", "output")])
def test_preconditioners_that_do_not_exist_are_refused(mode, side):
    with pytest.raises(ValueError, match=mode if mode == "cancelled" else side):
        preconditioned_product(gaussian(5, 3, seed=1), gaussian(3, 3, seed=2), mode, side=side)


@pytest.mark.parametrize("rows", [20, 4], ids=["K", "push-through"])
def test_singular_k_without_ridge_is_named(rows):
    x = gaussian(rows, 2, seed=1) @ gaussian(2, 5, seed=2)
    theta = gaussian(5, 5, seed=3).requires_grad_()
    with pytest.raises(DegenerateSpectrum, match=r"K is singular and ridge=0 too small"):
        preconditioned_product(x, theta, "ridge", ridge=0.0)
