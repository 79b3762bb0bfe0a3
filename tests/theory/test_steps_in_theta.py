"""Theorems 4.2 and 4.3: gradients in theta, and what preconditioned steps do to the spectrum (see `docs/theory.md`)."""

import math

import pytest
import torch
from helpers.matrices import gaussian, seeds, spectra, with_spectrum
from helpers.spectra import denominator_of, random_fractions, random_spectra, ratio, tensor
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.theory import regularizers, spectrum


@given(rows=st.integers(3, 12), size=st.integers(2, 6), seed=seeds)
def test_theorem_4_2(rows, size, seed):
    """For H = theta^T K theta of rank k, grad_theta R_well(H) = 2 K theta (s_1 v_1 v_1^T - H/D) and grad_theta R_ill(H)
    = 2 K theta (s_k v_k v_k^T - H/k) R_ill^2: what backpropagation through the features X theta gives."""
    x, theta = gaussian(rows, size, seed=seed), gaussian(size, size, seed=seed + 1).requires_grad_()
    k, hessian = min(rows, size), (theta.T @ x.T @ x @ theta).detach()
    sigma, v = (m.flip(-1) for m in torch.linalg.eigh(hessian))
    denominator = denominator_of(sigma[:k]).item()
    assume(denominator > 1e-6 * sigma[0] ** 2)

    def expected(i, share):
        return 2 * x.T @ x @ theta.detach() @ (sigma[i] * torch.outer(v[:, i], v[:, i]) - hessian / share)

    for value, formula in (
        (regularizers.r_well_of_features(x @ theta), expected(0, size)),
        (regularizers.r_ill_of_features(x @ theta, k), expected(k - 1, k) / denominator**2),
    ):
        (found,) = torch.autograd.grad(value, theta)
        assert_close(found, formula, rtol=1e-6, atol=1e-8 * formula.abs().max().item())


def well_step(sigma, eta):
    """Spectrum of H after theta - eta K^-1 grad R_well(H)."""
    d = sigma.shape[-1]
    return torch.cat(
        [
            sigma[..., :1] * (1 - 2 * eta * (1 - 1 / d) * sigma[..., :1]) ** 2,
            sigma[..., 1:] * (1 + 2 * eta * sigma[..., 1:] / d) ** 2,
        ],
        dim=-1,
    )


def ill_step(sigma, x):
    """Spectrum of H after theta - eta K^-1 grad R_ill(H), x = eta R_ill^2."""
    k = sigma.shape[-1]
    return torch.cat(
        [
            sigma[..., :-1] * (1 + 2 * x * sigma[..., :-1] / k) ** 2,
            sigma[..., -1:] * (1 - 2 * x * (1 - 1 / k) * sigma[..., -1:]) ** 2,
        ],
        dim=-1,
    )


def step_in_theta(regularizer, sigma, eta):
    """kappa and spectrum of H after theta = I moves by -eta times this project's gradient; H was diag(sigma)."""
    x = torch.diag(sigma.sqrt())
    theta = torch.eye(len(sigma), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(regularizer(x @ theta, theta), theta)
    moved = (x @ (theta - eta * gradient)).detach()
    return spectrum.condition_number(moved), spectrum.singular_values(moved) ** 2


def assert_is_the_step(regularizer, sigma, eta, moved):
    """The step with this project's gradient is that of the formula, for every 5000th row."""
    for before, step, after in zip(sigma[::5000], eta[::5000, 0], moved[::5000], strict=True):
        values = step_in_theta(regularizer, before, step)[1]
        assert_close(values, after.sort(descending=True).values, rtol=1e-6, atol=1e-12 * after.max().item())


def well_bound(sigma):
    """Corrected 4.3 (1): (sqrt(s_1) - sqrt(s_2)) / (2 ((1 - 1/D) s_1^1.5 + s_2^1.5 / D))."""
    d, first, second = sigma.shape[-1], sigma[..., 0], sigma[..., 1]
    return (first.sqrt() - second.sqrt()) / (2 * ((1 - 1 / d) * first**1.5 + second**1.5 / d))


def r_ill_of(rank):
    return lambda features, theta: regularizers.r_ill_of_features(features, rank, theta)


def ill_bound(sigma):
    """Corrected 4.3 (2), for x = eta R_ill^2: 1 / (s_k (1 - 2/k)), k > 2; for k = 2 there is no bound."""
    k = sigma.shape[-1]
    return 1 / (sigma[..., -1] * (1 - 2 / k)) if k > 2 else 1 / sigma[..., -1]


@given(sigma=spectra(2, 6), eta=st.floats(1e-3, 1.0), seed=seeds)
def test_preconditioned_steps_move_the_spectrum_as_stated(sigma, eta, seed):
    """Both steps, taken with the gradients of this project, leave the eigenvectors of H and give these eigenvalues."""
    size = len(sigma)
    x = gaussian(12, size, seed=seed)
    theta = torch.linalg.pinv(x) @ with_spectrum(sigma.sqrt(), 12, size, seed + 1)  # any theta ...
    features = x @ theta
    sigma = torch.linalg.eigvalsh(features.T @ features).flip(0)  # ... and its spectrum
    assume((sigma[:-1] / sigma[1:]).min() > 1.0005 and sigma[0] / sigma[-1] < 1e6)

    def stepped(regularizer, eta):
        leaf = theta.clone().requires_grad_()
        moved = x @ (theta - eta * torch.autograd.grad(regularizer(x @ leaf, leaf), leaf)[0])
        return torch.linalg.svdvals(moved) ** 2

    well = eta / sigma[0].item()
    assert_close(
        stepped(regularizers.r_well_of_features, well),
        well_step(sigma, well).sort(descending=True).values,
        rtol=1e-6,
        atol=1e-9 * sigma[0].item(),
    )
    ill, d = eta / sigma[0].item(), denominator_of(sigma).item()
    assert_close(
        stepped(lambda f, leaf: regularizers.r_ill_of_features(f, size, leaf), ill * d**2),
        ill_step(sigma, ill).sort(descending=True).values,
        rtol=1e-6,
        atol=1e-9 * sigma[0].item(),
    )


def test_theorem_4_3_1_is_false():
    """s = (4, 1), D = 2: the bound of the paper is .5, and a step of .24 takes kappa from 4 to 240."""
    sigma = tensor(4.0, 1.0)
    paper = min(1 / ((1 - 1 / 2) * 4), (math.sqrt(4 * 1) - 1) / (2 / 2 * 1**2))
    assert paper == 0.5
    assert ratio(well_step(sigma, 0.24)).item() == pytest.approx(240.25)
    assert step_in_theta(regularizers.r_well_of_features, sigma, 0.24)[0] == pytest.approx(240.25)
    assert well_bound(sigma).item() == pytest.approx(1 / 9)  # the corrected bound


def test_theorem_4_3_2_is_false():
    """s = (5 nine times, 4): the bound of the paper is 5 R'^2 with R' = (s_k^2 - ||H||_F^2 / k) / 2, and a step of
    .35 R'^2 takes kappa from 1.25 down to 1.01. (Its 1 - 2 s_k / k is dimensionally wrong, negative at s_k > k/2.)"""
    sigma = tensor(*[5.0] * 9, 4.0)
    paper = 1 / (1 - 2 * 4 / 10)
    assert paper == pytest.approx(5)
    assert ratio(sigma).item() == 1.25
    assert ratio(ill_step(sigma, 0.35)).item() == pytest.approx(1.0142, abs=1e-4)
    eta = 0.35 * denominator_of(sigma) ** 2
    assert step_in_theta(r_ill_of(10), sigma, eta)[0] == pytest.approx(1.0142, abs=1e-4)
    assert ill_bound(sigma).item() == pytest.approx(0.3125)  # the corrected bound, in units of R'^2


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_3_1_corrected(size):
    """For every step up to `well_bound` kappa(H_P) falls: the singular values keep their order."""
    sigma = random_spectra(size)
    bound = well_bound(sigma)
    distinct = bound * sigma[:, 0] > 1e-9
    eta = (random_fractions(size) * bound)[:, None]
    moved = well_step(sigma, eta)
    assert_is_the_step(regularizers.r_well_of_features, sigma, eta, moved)
    assert (ratio(moved) < ratio(sigma))[distinct].all()
    at_bound = well_step(sigma, bound[:, None])
    assert_close(at_bound[:, 0], at_bound[:, 1])  # beyond it, the second value overtakes


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_3_2_corrected(size):
    """For every step up to `ill_bound`, kappa(H_H) rises (infinite where a step takes sigma_k exactly to 0)."""
    sigma = random_spectra(size)
    x = (random_fractions(size) * ill_bound(sigma))[:, None]
    moved = ill_step(sigma, x)
    assert_is_the_step(r_ill_of(size), sigma, x * denominator_of(sigma)[:, None] ** 2, moved)
    distinct = sigma[:, 0] / sigma[:, -1] > 1 + 1e-6
    assert (ratio(moved) > ratio(sigma))[distinct].all()


def test_theorem_4_3_2_has_no_bound_for_two_values():
    sigma = random_spectra(2)
    for share in (1e-3, 1.0, 1e6):
        x = share / sigma[:, -1:]
        moved = ill_step(sigma, x)
        assert_is_the_step(r_ill_of(2), sigma, x * denominator_of(sigma)[:, None] ** 2, moved)
        assert (ratio(moved) > ratio(sigma))[sigma[:, 0] / sigma[:, 1] > 1 + 1e-6].all()
