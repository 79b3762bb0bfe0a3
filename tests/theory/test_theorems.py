"""The statements of arXiv 2505.23760 on singular values and both regularizers: what holds, what does not, what instead.

`docs/theory.md` takes its figures from here and names the tests. Statements are quoted by their number in the paper;
those of Theorem A.1 (Nenov et al., 2024) and of corrected theorems stand in the docstring of the test.
"""

import math

import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from helpers.regularizers import r_ill, r_well
from helpers.spectra import ceiling, denominator_of, kappa, random_fractions, random_spectra, ratio, tensor
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.theory import spectrum

fraction = st.floats(0.01, 1.0)  # of the largest admissible step


def positive_definite(size, seed, decades=2.0):
    root = with_spectrum(torch.logspace(0, -decades / 2, size, dtype=torch.float64), size, size, seed)
    return root.T @ root


def hessian_spectrum(k, theta):
    """Singular values of theta^T K theta, as this project has them from features."""
    return spectrum.singular_values(torch.linalg.cholesky(k).T @ theta) ** 2


def proposition_3_2(k, theta):
    """The right-hand side of Eq. 10: sum_j (sigma_i(theta) <u_i, q_j> sqrt(gamma_j))^2, descending."""
    u, sigma, _ = torch.linalg.svd(theta)
    gamma, q = torch.linalg.eigh(k)
    return ((sigma[:, None] * (u.T @ q)) ** 2 @ gamma.clamp(min=0)).sort(descending=True).values


def test_proposition_3_2_is_false():
    """K = [[2, 1], [1, 2]], theta = diag(2, 1): the singular values are 5 +- sqrt(13), the formula says 8 and 2."""
    k, theta = tensor([2.0, 1.0], [1.0, 2.0]), torch.diag(tensor(2.0, 1.0))
    assert_close(hessian_spectrum(k, theta), tensor(5 + math.sqrt(13), 5 - math.sqrt(13)))
    assert_close(hessian_spectrum(k, theta), tensor(8.606, 1.394), rtol=0, atol=1e-3)
    assert_close(proposition_3_2(k, theta), tensor(8.0, 2.0))


@given(size=st.integers(2, 6), seed=seeds)
def test_proposition_3_2_gives_a_diagonal_of_the_hessian(size, seed):
    """Corrected: Eq. 10 is the diagonal of V^T H V, so the spectrum majorizes it (Schur), and it understates kappa."""
    k, theta = positive_definite(size, seed), gaussian(size, size, seed=seed + 9)
    formula, truth = proposition_3_2(k, theta), hessian_spectrum(k, theta)
    assert (formula.cumsum(0) <= truth.cumsum(0) * (1 + 1e-10)).all()
    assert_close(formula.sum(), truth.sum())
    assert formula[0] / formula[-1] <= truth[0] / truth[-1] * (1 + 1e-9)


@given(size=st.integers(2, 6), seed=seeds)
def test_proposition_3_2_holds_for_shared_singular_vectors(size, seed):
    """The proposition is right where the left singular vectors of theta are eigenvectors of K."""
    q = orthonormal(size, size, seed)
    k = q * torch.logspace(1, -1, size, dtype=torch.float64) @ q.T
    theta = q * torch.linspace(3, 1, size, dtype=torch.float64) @ orthonormal(size, size, seed + 1).T
    assert_close(proposition_3_2(k, theta), hessian_spectrum(k, theta))


def test_aligned_singular_vectors_can_be_immunized():
    """K_P = diag(100, 1), K_H = diag(2, 1), theta = diag(.1, 1): kappa_P goes from 100 to 1, kappa_H from 2 to 50."""
    k_p, k_h, theta = (torch.diag(tensor(*d)) for d in ((100.0, 1.0), (2.0, 1.0), (0.1, 1.0)))
    assert (kappa(k_p), kappa(k_h)) == pytest.approx((100, 2))
    assert (kappa(theta @ k_p @ theta), kappa(theta @ k_h @ theta)) == pytest.approx((1, 50))
    immunization_ratio = spectrum.rir(k_h.sqrt() @ theta, k_h.sqrt(), k_p.sqrt() @ theta, k_p.sqrt())["rir"]
    assert immunization_ratio == pytest.approx(2500)
    assert immunization_ratio == pytest.approx(ceiling(k_p, k_h))


@given(sigma=spectra(), seed=seeds)
def test_theorem_a1_1_and_2(sigma, seed):
    """(1) R_well(S) >= 0, and 0 only at kappa = 1. (2) log kappa(S) <= p R_well(S) / sigma_p^2 at full rank."""
    value = r_well(with_spectrum(sigma, 10, len(sigma), seed)).item()
    assert value > 0
    assert math.log(sigma[0] / sigma[-1]) <= len(sigma) * value / sigma[-1].item() ** 2 * (1 + 1e-9)


@given(scale=st.floats(1e-3, 1e3), size=st.integers(1, 8), seed=seeds)
def test_theorem_a1_1_at_kappa_one(scale, size, seed):
    """Full rank is needed: diag(1, 0), whose kappa by the pseudo-inverse is 1, has R_well = 1/4."""
    assert r_well(torch.diag(tensor(1.0, 0.0))).item() == 0.25
    assert r_well(scale * orthonormal(9, size, seed)).item() == pytest.approx(0, abs=1e-14 * scale**2)


def after_descent(function, s, eta):
    """S - eta grad R(S)."""
    leaf = s.clone().requires_grad_()
    return s - eta * torch.autograd.grad(function(leaf), leaf)[0]


def assert_is_the_step(regularizer, sigma, eta, moved):
    """Descent with this project's gradient takes diag(sigma) where the formula says, for every 5000th row."""
    for before, step, after in zip(sigma[::5000], eta[::5000, 0], moved[::5000], strict=True):
        values = torch.linalg.svdvals(after_descent(regularizer, torch.diag(before), step))
        assert_close(values, after.abs().sort(descending=True).values, rtol=1e-7, atol=1e-12 * before[0].item())


def a1_bound(sigma):
    """Steps up to which sigma_1 stays the largest: (s_1 - s_2) / ((1 - 1/p) s_1 + s_2/p); at least 1 - s_2/s_1."""
    p = sigma.shape[-1]
    return (sigma[..., 0] - sigma[..., 1]) / ((1 - 1 / p) * sigma[..., 0] + sigma[..., 1] / p)


@given(sigma=spectra(), share=fraction, seed=seeds)
def test_theorem_a1_3_and_4(sigma, share, seed):
    """(3) With sigma_1 simple the gradient is sigma_1 u_1 v_1^T - S/p: descent moves singular values only,
    sigma_1 (1 - eta (1 - 1/p)) and sigma_i (1 + eta/p). (4) It lowers kappa for every step up to `a1_bound`."""
    p, eta = len(sigma), share * a1_bound(sigma).item()
    moved = after_descent(r_well, with_spectrum(sigma, 10, p, seed), eta)
    expected = torch.cat([sigma[:1] * (1 - eta * (1 - 1 / p)), sigma[1:] * (1 + eta / p)])
    assert_close(torch.linalg.svdvals(moved), expected.sort(descending=True).values, rtol=1e-8, atol=1e-10)
    assert ratio(expected) < ratio(sigma)


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_a1_4_on_many_spectra(size):
    sigma = random_spectra(size)
    assert (a1_bound(sigma) >= 1 - sigma[:, 1] / sigma[:, 0] - 1e-12).all()
    eta = (random_fractions(size) * a1_bound(sigma))[:, None]
    moved = torch.cat([sigma[:, :1] * (1 - eta * (1 - 1 / size)), sigma[:, 1:] * (1 + eta / size)], dim=1)
    assert_is_the_step(r_well, sigma, eta, moved)
    distinct = a1_bound(sigma) > 1e-9
    assert (ratio(moved) < ratio(sigma))[distinct].all()


powers = st.sampled_from([4, 6, 10, 18, 64])


def power_mean(sigma, p):
    return sigma.max() if p == math.inf else sigma.max() * (sigma / sigma.max()).pow(p).mean() ** (1 / p)


@given(sigma=spectra(2, 8), seed=seeds, p=powers, factor=st.integers(1, 8))
def test_power_means_are_ordered_and_vanish_at_kappa_one(sigma, seed, p, factor):
    """0 <= R_p <= R_q <= R_inf <= R_p + (1 - k^(-2/p)) sigma_1^2 / 2 over the same k = rank; 0 where all agree."""
    k = len(sigma)
    s = with_spectrum(sigma, k + 3, k + 1, seed)
    lower, higher, limit = (r_well(s, k, q).item() for q in (p, p * factor, math.inf))
    top = sigma.max().item() ** 2
    assert -1e-12 * top <= lower <= higher + 1e-12 * top
    assert higher <= limit + 1e-12 * top
    assert limit - lower <= (1 - k ** (-2 / p)) * top / 2 + 1e-12 * top
    assert lower == pytest.approx((power_mean(sigma, p) ** 2 / 2 - sigma.square().mean() / 2).item(), abs=1e-12 * top)
    flat = with_spectrum(torch.full_like(sigma, 3.0), k + 3, k + 1, seed)
    assert r_well(flat, k, p).item() == pytest.approx(0, abs=1e-12)
    assert r_well(s, k, 2).item() == pytest.approx(0, abs=1e-12 * top)


@given(sigma=spectra(2, 8), seed=seeds, p=powers)
def test_a_small_power_mean_certifies_a_small_kappa(sigma, seed, p):
    """log kappa(S) <= sqrt(2 k R_p) sigma_1 / sigma_k^2."""
    k = len(sigma)
    value = r_well(with_spectrum(sigma, k + 2, k, seed), k, p).clamp(min=0)
    rounding = 1e-7 * sigma.max() ** 2 / sigma.min() ** 2  # of the difference of two squares, under a root
    bound = (2 * k * value).sqrt() * sigma.max() / sigma.min() ** 2 + rounding
    assert math.log(sigma.max() / sigma.min()) <= bound


@given(sigma=spectra(2, 6, decades=2.0), seed=seeds, p=powers, share=fraction)
def test_steps_on_power_means_lower_kappa(sigma, seed, p, share):
    """sigma_1 falls and sigma_k rises; up to the step at which the order changes, so does kappa fall."""
    assume(sigma.max() > 1.001 * sigma.min())
    k, mean = len(sigma), power_mean(sigma, p)
    slope = (mean * (sigma / mean).pow(p - 1) - sigma) / k
    assert slope[0] > 0 > slope[-1]
    s = with_spectrum(sigma, k + 2, k, seed).requires_grad_()
    (gradient,) = torch.autograd.grad(r_well(s, k, p), s)
    gaps, speeds = sigma[:-1] - sigma[1:], slope[:-1] - slope[1:]
    closing = speeds > 0
    eta = share * (gaps[closing] / speeds[closing]).min().item() if closing.any() else share
    moved = torch.linalg.svdvals(s.detach() - eta * gradient)
    assert_close(moved, sigma - eta * slope, rtol=1e-7, atol=1e-9 * sigma.max().item())
    assert moved[0] / moved[-1] <= sigma[0] / sigma[-1] * (1 + 1e-9)


def test_theorem_4_1_1_is_false():
    """The claim: R_ill = 0 iff kappa is infinite. But diag(1, e) has R_ill -> 4 as e -> 0 and kappa -> infinity, and
    R_ill(c diag(2, 1)) -> 0 at kappa = 2 as c grows: to inflate the features is enough to lower R_ill."""
    for e in (1e-2, 1e-4, 1e-8):
        assert r_ill(torch.diag(tensor(1.0, e)), rank=2).item() == pytest.approx(4, rel=2 * e**2 + 1e-12)
    base = r_ill(torch.diag(tensor(2.0, 1.0))).item()
    for c in (1e2, 1e4, 1e6):
        inflated = c * torch.diag(tensor(2.0, 1.0))
        assert r_ill(inflated).item() == pytest.approx(base / c**2)
        assert spectrum.condition_number(inflated) == pytest.approx(4)  # of F^T F: kappa(S) = 2


@given(sigma=spectra(), seed=seeds)
def test_theorem_4_1_1_corrected(sigma, seed):
    """2k/(k-1) <= sigma_1^2 (1 - kappa^-2) R_ill <= 2k: R_ill tends to 0 only as sigma_1 tends to infinity."""
    k = len(sigma)
    value = r_ill(with_spectrum(sigma, 10, 9, seed), rank=k).item()
    scaled = value * sigma[0].item() ** 2 * (1 - (sigma[-1] / sigma[0]).item() ** 2)
    assert 2 * k / (k - 1) * (1 - 1e-8) <= scaled <= 2 * k * (1 + 1e-8)


@given(sigma=spectra(), seed=seeds)
def test_theorem_4_1_2(sigma, seed):
    """1 / log kappa <= sigma_1^2 R_ill holds, and certifies no kappa above e^(1/2), however large kappa is."""
    bound = 1 / (sigma[0].item() ** 2 * r_ill(with_spectrum(sigma, 10, 9, seed), rank=len(sigma)).item())
    assert bound * (1 - 1e-8) <= math.log(sigma[0] / sigma[-1])
    assert bound <= 0.5


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_1_2_on_many_spectra(size):
    sigma = random_spectra(size)
    bound = denominator_of(sigma) / sigma[:, 0] ** 2
    for row, expected in zip(sigma[::5000], bound[::5000], strict=True):
        assert_close(1 / (row[0] ** 2 * r_ill(torch.diag(row), rank=size)), expected, rtol=1e-7, atol=0)
    assert (bound <= (sigma[:, 0] / sigma[:, -1]).log() * (1 + 1e-9)).all()
    assert (bound <= 0.5).all()


@given(sigma=spectra(), share=st.floats(0.01, 0.99), seed=seeds)
def test_theorem_4_1_3_and_4(sigma, share, seed):
    """(3) Eq. 13: descent moves singular values only, sigma_k (1 - eta c (1 - 1/k)) and sigma_i (1 + eta c / k) with
    c = R_ill^2. (4) It raises kappa for every step below k / ((k - 1) c)."""
    k, s = len(sigma), with_spectrum(sigma, 10, 9, seed)
    c = r_ill(s, rank=k).item() ** 2
    x = share * k / (k - 1)  # eta c
    moved = after_descent(lambda m: r_ill(m, rank=k), s, x / c)
    expected = torch.cat([sigma[:-1] * (1 + x / k), sigma[-1:] * (1 - x * (1 - 1 / k))])
    assert_close(torch.linalg.svdvals(moved)[:k], expected, rtol=1e-8, atol=1e-9 * sigma[0].item())
    assert ratio(expected) > ratio(sigma)


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_1_4_on_many_spectra(size):
    sigma, x = random_spectra(size), (random_fractions(size) * size / (size - 1))[:, None]
    moved = torch.cat([sigma[:, :-1] * (1 + x / size), sigma[:, -1:] * (1 - x * (1 - 1 / size))], dim=1)
    eta = x * denominator_of(sigma)[:, None] ** 2
    assert_is_the_step(lambda s: r_ill(s, rank=size), sigma, eta, moved)
    assert (ratio(moved) > ratio(sigma)).all()
