"""The theorems of arXiv 2505.23760: what holds, what does not (with counter-examples), and what holds instead.

`docs/theory.md` takes its figures from here and names the tests. Statements are quoted by their number in the paper;
those of Theorem A.1 (Nenov et al., 2024) and of corrected theorems stand in the docstring of the test.
"""

import math

import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.theory import regularizers, spectrum

SAMPLES = 100_000  # random spectra of every statement that is checked by arithmetic on the spectrum alone

quick = settings(max_examples=30)
fraction = st.floats(0.01, 1.0)  # of the largest admissible step


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def kappa(gram):
    """Ratio of the extreme eigenvalues of a positive definite matrix."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    return (eigenvalues[-1] / eigenvalues[0]).item()


def positive_definite(size, seed, decades=2.0):
    root = with_spectrum(torch.logspace(0, -decades / 2, size, dtype=torch.float64), size, size, seed)
    return root.T @ root


def inverse_root(gram):
    eigenvalues, vectors = torch.linalg.eigh(gram)
    return vectors * eigenvalues.rsqrt() @ vectors.T


def random_spectra(size):
    """[SAMPLES, size] descending, over up to eight decades, with nearly flat ones among them."""
    generator = torch.Generator().manual_seed(size)
    spread = 8 * torch.rand(SAMPLES, 1, generator=generator, dtype=torch.float64) ** 3 + 1e-3
    logs = spread * (torch.rand(SAMPLES, size, generator=generator, dtype=torch.float64) - 0.5)
    return 10 ** logs.sort(-1, descending=True).values


def random_fractions(size):
    return torch.rand(SAMPLES, generator=torch.Generator().manual_seed(size + 1), dtype=torch.float64).clamp(min=1e-3)


def ratio(sigma):
    """kappa of each row; infinite where a step took a value exactly to zero."""
    sigma = sigma.abs()
    return sigma.max(-1).values / sigma.min(-1).values


def r_well_of(sigma):
    return sigma[..., 0] ** 2 / 2 - sigma.square().mean(-1) / 2


def denominator_of(sigma):
    """1 / R_ill of full-rank spectra: half of (mean square minus smallest square)."""
    return (sigma.square().mean(-1) - sigma[..., -1] ** 2) / 2


# --- Section 3: singular values of the Hessian ------------------------------------------------------------------------


def proposition_3_2(k, theta):
    """The right-hand side of Eq. 10: sum_j (sigma_i(theta) <u_i, q_j> sqrt(gamma_j))^2, descending."""
    u, sigma, _ = torch.linalg.svd(theta)
    gamma, q = torch.linalg.eigh(k)
    return ((sigma[:, None] * (u.T @ q)) ** 2 @ gamma.clamp(min=0)).sort(descending=True).values


def test_proposition_3_2_is_false():
    """K = [[2, 1], [1, 2]], theta = diag(2, 1): the singular values are 5 +- sqrt(13), the formula says 8 and 2."""
    k, theta = tensor([2.0, 1.0], [1.0, 2.0]), torch.diag(tensor(2.0, 1.0))
    assert_close(torch.linalg.svdvals(theta.T @ k @ theta), tensor(5 + math.sqrt(13), 5 - math.sqrt(13)))
    assert_close(torch.linalg.svdvals(theta.T @ k @ theta), tensor(8.606, 1.394), rtol=0, atol=1e-3)
    assert_close(proposition_3_2(k, theta), tensor(8.0, 2.0))


@quick
@given(size=st.integers(2, 6), seed=seeds)
def test_proposition_3_2_gives_a_diagonal_of_the_hessian(size, seed):
    """Corrected: Eq. 10 is the diagonal of V^T H V, so the spectrum majorizes it (Schur), and it understates kappa."""
    k, theta = positive_definite(size, seed), gaussian(size, size, seed=seed + 9)
    formula, truth = proposition_3_2(k, theta), torch.linalg.svdvals(theta.T @ k @ theta)
    assert (formula.cumsum(0) <= truth.cumsum(0) * (1 + 1e-10)).all()
    assert_close(formula.sum(), truth.sum())
    assert formula[0] / formula[-1] <= truth[0] / truth[-1] * (1 + 1e-9)


@quick
@given(size=st.integers(2, 6), seed=seeds)
def test_proposition_3_2_holds_for_shared_singular_vectors(size, seed):
    """It is right where the left singular vectors of theta are eigenvectors of K."""
    q = orthonormal(size, size, seed)
    k = q * torch.logspace(1, -1, size, dtype=torch.float64) @ q.T
    theta = q * torch.linspace(3, 1, size, dtype=torch.float64) @ orthonormal(size, size, seed + 1).T
    assert_close(proposition_3_2(k, theta), torch.linalg.svdvals(theta.T @ k @ theta))


def test_aligned_singular_vectors_can_be_immunized():
    """K_P = diag(100, 1), K_H = diag(2, 1), theta = diag(.1, 1): kappa_P goes from 100 to 1, kappa_H from 2 to 50."""
    k_p, k_h, theta = (torch.diag(tensor(*d)) for d in ((100.0, 1.0), (2.0, 1.0), (0.1, 1.0)))
    assert (kappa(k_p), kappa(k_h)) == pytest.approx((100, 2))
    assert (kappa(theta @ k_p @ theta), kappa(theta @ k_h @ theta)) == pytest.approx((1, 50))
    immunization_ratio = spectrum.rir(k_h.sqrt() @ theta, k_h.sqrt(), k_p.sqrt() @ theta, k_p.sqrt())["rir"]
    assert immunization_ratio == pytest.approx(2500)
    assert immunization_ratio == pytest.approx(ceiling(k_p, k_h))


# --- Theorem A.1: R_well ----------------------------------------------------------------------------------------------


@quick
@given(sigma=spectra(), seed=seeds)
def test_theorem_a1_1_and_2(sigma, seed):
    """(1) R_well(S) >= 0, and 0 only at kappa = 1. (2) log kappa(S) <= p R_well(S) / sigma_p^2 at full rank."""
    value = regularizers.r_well(with_spectrum(sigma, 10, len(sigma), seed)).item()
    assert value > 0
    assert math.log(sigma[0] / sigma[-1]) <= len(sigma) * value / sigma[-1].item() ** 2 * (1 + 1e-9)


@quick
@given(scale=st.floats(1e-3, 1e3), size=st.integers(1, 8), seed=seeds)
def test_theorem_a1_1_at_kappa_one(scale, size, seed):
    """Full rank is needed: diag(1, 0), whose kappa by the pseudo-inverse is 1, has R_well = 1/4."""
    assert regularizers.r_well(torch.diag(tensor(1.0, 0.0))).item() == 0.25
    assert regularizers.r_well(scale * orthonormal(9, size, seed)).item() == pytest.approx(0, abs=1e-14 * scale**2)


def after_descent(function, s, eta):
    """S - eta grad R(S)."""
    leaf = s.clone().requires_grad_()
    return s - eta * torch.autograd.grad(function(leaf), leaf)[0]


def a1_bound(sigma):
    """Steps up to which sigma_1 stays the largest: (s_1 - s_2) / ((1 - 1/p) s_1 + s_2/p); at least 1 - s_2/s_1."""
    p = sigma.shape[-1]
    return (sigma[..., 0] - sigma[..., 1]) / ((1 - 1 / p) * sigma[..., 0] + sigma[..., 1] / p)


@quick
@given(sigma=spectra(), share=fraction, seed=seeds)
def test_theorem_a1_3_and_4(sigma, share, seed):
    """(3) With sigma_1 simple the gradient is sigma_1 u_1 v_1^T - S/p: descent moves singular values only,
    sigma_1 (1 - eta (1 - 1/p)) and sigma_i (1 + eta/p). (4) It lowers kappa for every step up to `a1_bound`."""
    p, eta = len(sigma), share * a1_bound(sigma).item()
    moved = after_descent(regularizers.r_well, with_spectrum(sigma, 10, p, seed), eta)
    expected = torch.cat([sigma[:1] * (1 - eta * (1 - 1 / p)), sigma[1:] * (1 + eta / p)])
    assert_close(torch.linalg.svdvals(moved), expected.sort(descending=True).values, rtol=1e-8, atol=1e-10)
    assert ratio(expected) < ratio(sigma)


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_a1_4_on_many_spectra(size):
    sigma = random_spectra(size)
    assert (a1_bound(sigma) >= 1 - sigma[:, 1] / sigma[:, 0] - 1e-12).all()
    eta = (random_fractions(size) * a1_bound(sigma))[:, None]
    moved = torch.cat([sigma[:, :1] * (1 - eta * (1 - 1 / size)), sigma[:, 1:] * (1 + eta / size)], dim=1)
    distinct = a1_bound(sigma) > 1e-9
    assert (ratio(moved) < ratio(sigma))[distinct].all()


# --- R_well in power means --------------------------------------------------------------------------------------------

powers = st.sampled_from([4, 6, 10, 18, 64])


def power_mean(sigma, p):
    return sigma.max() if p == math.inf else sigma.max() * (sigma / sigma.max()).pow(p).mean() ** (1 / p)


@quick
@given(sigma=spectra(2, 8), seed=seeds, p=powers, factor=st.integers(1, 8))
def test_power_means_are_ordered_and_vanish_at_kappa_one(sigma, seed, p, factor):
    """0 <= R_p <= R_q <= R_inf <= R_p + (1 - k^(-2/p)) sigma_1^2 / 2 over the same k = rank; 0 where all agree."""
    k = len(sigma)
    s = with_spectrum(sigma, k + 3, k + 1, seed)
    lower, higher, limit = (regularizers.r_well(s, k, q).item() for q in (p, p * factor, math.inf))
    top = sigma.max().item() ** 2
    assert -1e-12 * top <= lower <= higher + 1e-12 * top
    assert higher <= limit + 1e-12 * top
    assert limit - lower <= (1 - k ** (-2 / p)) * top / 2 + 1e-12 * top
    assert lower == pytest.approx((power_mean(sigma, p) ** 2 / 2 - sigma.square().mean() / 2).item(), abs=1e-12 * top)
    flat = with_spectrum(torch.full_like(sigma, 3.0), k + 3, k + 1, seed)
    assert regularizers.r_well(flat, k, p).item() == pytest.approx(0, abs=1e-12)
    assert regularizers.r_well(s, k, 2).item() == pytest.approx(0, abs=1e-12 * top)


@quick
@given(sigma=spectra(2, 8), seed=seeds, p=powers)
def test_a_small_power_mean_certifies_a_small_kappa(sigma, seed, p):
    """log kappa(S) <= sqrt(2 k R_p) sigma_1 / sigma_k^2."""
    k = len(sigma)
    value = regularizers.r_well(with_spectrum(sigma, k + 2, k, seed), k, p).clamp(min=0)
    rounding = 1e-7 * sigma.max() ** 2 / sigma.min() ** 2  # of the difference of two squares, under a root
    bound = (2 * k * value).sqrt() * sigma.max() / sigma.min() ** 2 + rounding
    assert math.log(sigma.max() / sigma.min()) <= bound


@quick
@given(sigma=spectra(2, 6, decades=2.0), seed=seeds, p=powers, share=fraction)
def test_steps_on_power_means_lower_kappa(sigma, seed, p, share):
    """sigma_1 falls and sigma_k rises; up to the step at which the order changes, so does kappa fall."""
    assume(sigma.max() > 1.001 * sigma.min())
    k, mean = len(sigma), power_mean(sigma, p)
    slope = (mean * (sigma / mean).pow(p - 1) - sigma) / k
    assert slope[0] > 0 > slope[-1]
    s = with_spectrum(sigma, k + 2, k, seed).requires_grad_()
    (gradient,) = torch.autograd.grad(regularizers.r_well(s, k, p), s)
    gaps, speeds = sigma[:-1] - sigma[1:], slope[:-1] - slope[1:]
    closing = speeds > 0
    eta = share * (gaps[closing] / speeds[closing]).min().item() if closing.any() else share
    moved = torch.linalg.svdvals(s.detach() - eta * gradient)
    assert_close(moved, sigma - eta * slope, rtol=1e-7, atol=1e-9 * sigma.max().item())
    assert moved[0] / moved[-1] <= sigma[0] / sigma[-1] * (1 + 1e-9)


# --- Theorem 4.1: R_ill -----------------------------------------------------------------------------------------------


def test_theorem_4_1_1_is_false():
    """It says that R_ill = 0 iff kappa is infinite. But diag(1, e) has R_ill -> 4 as e -> 0 and kappa -> infinity, and
    R_ill(c diag(2, 1)) -> 0 at kappa = 2 as c grows: R_ill can be lowered by inflating the features alone."""
    for e in (1e-2, 1e-4, 1e-8):
        assert regularizers.r_ill(torch.diag(tensor(1.0, e)), rank=2).item() == pytest.approx(4, rel=2 * e**2 + 1e-12)
    base = regularizers.r_ill(torch.diag(tensor(2.0, 1.0))).item()
    for c in (1e2, 1e4, 1e6):
        inflated = c * torch.diag(tensor(2.0, 1.0))
        assert regularizers.r_ill(inflated).item() == pytest.approx(base / c**2)
        assert spectrum.condition_number(inflated) == pytest.approx(4)  # of F^T F: kappa(S) = 2


@quick
@given(sigma=spectra(), seed=seeds)
def test_theorem_4_1_1_corrected(sigma, seed):
    """2k/(k-1) <= sigma_1^2 (1 - kappa^-2) R_ill <= 2k: R_ill tends to 0 only as sigma_1 tends to infinity."""
    k = len(sigma)
    value = regularizers.r_ill(with_spectrum(sigma, 10, 9, seed), rank=k).item()
    scaled = value * sigma[0].item() ** 2 * (1 - (sigma[-1] / sigma[0]).item() ** 2)
    assert 2 * k / (k - 1) * (1 - 1e-8) <= scaled <= 2 * k * (1 + 1e-8)


@quick
@given(sigma=spectra(), seed=seeds)
def test_theorem_4_1_2(sigma, seed):
    """1 / log kappa <= sigma_1^2 R_ill holds, and certifies no kappa above e^(1/2), however large kappa is."""
    bound = 1 / (sigma[0].item() ** 2 * regularizers.r_ill(with_spectrum(sigma, 10, 9, seed), rank=len(sigma)).item())
    assert bound * (1 - 1e-8) <= math.log(sigma[0] / sigma[-1])
    assert bound <= 0.5


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_1_2_on_many_spectra(size):
    sigma = random_spectra(size)
    bound = denominator_of(sigma) / sigma[:, 0] ** 2
    assert (bound <= (sigma[:, 0] / sigma[:, -1]).log() * (1 + 1e-9)).all()
    assert (bound <= 0.5).all()


@quick
@given(sigma=spectra(), share=st.floats(0.01, 0.99), seed=seeds)
def test_theorem_4_1_3_and_4(sigma, share, seed):
    """(3) Eq. 13: descent moves singular values only, sigma_k (1 - eta c (1 - 1/k)) and sigma_i (1 + eta c / k) with
    c = R_ill^2. (4) It raises kappa for every step below k / ((k - 1) c)."""
    k, s = len(sigma), with_spectrum(sigma, 10, 9, seed)
    c = regularizers.r_ill(s, rank=k).item() ** 2
    x = share * k / (k - 1)  # eta c
    moved = after_descent(lambda m: regularizers.r_ill(m, rank=k), s, x / c)
    expected = torch.cat([sigma[:-1] * (1 + x / k), sigma[-1:] * (1 - x * (1 - 1 / k))])
    assert_close(torch.linalg.svdvals(moved)[:k], expected, rtol=1e-8, atol=1e-9 * sigma[0].item())
    assert ratio(expected) > ratio(sigma)


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_1_4_on_many_spectra(size):
    sigma, x = random_spectra(size), (random_fractions(size) * size / (size - 1))[:, None]
    moved = torch.cat([sigma[:, :-1] * (1 + x / size), sigma[:, -1:] * (1 - x * (1 - 1 / size))], dim=1)
    assert (ratio(moved) > ratio(sigma)).all()


# --- Theorems 4.2 and 4.3: steps in theta -----------------------------------------------------------------------------


@quick
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


def well_bound(sigma):
    """Corrected 4.3 (1): (sqrt(s_1) - sqrt(s_2)) / (2 ((1 - 1/D) s_1^1.5 + s_2^1.5 / D))."""
    d, first, second = sigma.shape[-1], sigma[..., 0], sigma[..., 1]
    return (first.sqrt() - second.sqrt()) / (2 * ((1 - 1 / d) * first**1.5 + second**1.5 / d))


def ill_bound(sigma):
    """Corrected 4.3 (2), for x = eta R_ill^2: 1 / (s_k (1 - 2/k)), k > 2; for k = 2 there is no bound."""
    k = sigma.shape[-1]
    return 1 / (sigma[..., -1] * (1 - 2 / k)) if k > 2 else 1 / sigma[..., -1]


@quick
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
    x = torch.diag(sigma.sqrt())  # the same with this project's gradient, theta = I
    leaf = torch.eye(2, dtype=torch.float64, requires_grad=True)
    (step,) = torch.autograd.grad(regularizers.r_well_of_features(x @ leaf, leaf), leaf)
    assert spectrum.condition_number(x @ (leaf - 0.24 * step).detach()) == pytest.approx(240.25)
    assert well_bound(sigma).item() == pytest.approx(1 / 9)  # the corrected bound


def test_theorem_4_3_2_is_false():
    """s = (5 nine times, 4): the bound of the paper is 5 R'^2 with R' = (s_k^2 - ||H||_F^2 / k) / 2, and a step of
    .35 R'^2 takes kappa from 1.25 down to 1.01. (Its 1 - 2 s_k / k is dimensionally wrong, negative at s_k > k/2.)"""
    sigma = tensor(*[5.0] * 9, 4.0)
    paper = 1 / (1 - 2 * 4 / 10)
    assert paper == pytest.approx(5)
    assert ratio(sigma).item() == 1.25
    assert ratio(ill_step(sigma, 0.35)).item() == pytest.approx(1.0142, abs=1e-4)
    x = torch.diag(sigma.sqrt())  # the same with this project's gradient, theta = I
    leaf = torch.eye(10, dtype=torch.float64, requires_grad=True)
    (step,) = torch.autograd.grad(regularizers.r_ill_of_features(x @ leaf, 10, leaf), leaf)
    moved = x @ (leaf - 0.35 * denominator_of(sigma) ** 2 * step).detach()
    assert spectrum.condition_number(moved) == pytest.approx(1.0142, abs=1e-4)
    assert ill_bound(sigma).item() == pytest.approx(0.3125)  # the corrected bound, in units of R'^2


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_3_1_corrected(size):
    """For every step up to `well_bound` kappa(H_P) falls: the singular values keep their order."""
    sigma = random_spectra(size)
    bound = well_bound(sigma)
    distinct = bound * sigma[:, 0] > 1e-9
    moved = well_step(sigma, (random_fractions(size) * bound)[:, None])
    assert (ratio(moved) < ratio(sigma))[distinct].all()
    at_bound = well_step(sigma, bound[:, None])
    assert_close(at_bound[:, 0], at_bound[:, 1])  # beyond it, the second value overtakes


@pytest.mark.parametrize("size", [2, 3, 8, 30])
def test_theorem_4_3_2_corrected(size):
    """For every step up to `ill_bound`, kappa(H_H) rises (infinite where a step takes sigma_k exactly to 0)."""
    sigma = random_spectra(size)
    x = (random_fractions(size) * ill_bound(sigma))[:, None]
    distinct = sigma[:, 0] / sigma[:, -1] > 1 + 1e-6
    assert (ratio(ill_step(sigma, x)) > ratio(sigma))[distinct].all()


def test_theorem_4_3_2_has_no_bound_for_two_values():
    sigma = random_spectra(2)
    for x in (1e-3, 1.0, 1e6):
        assert (ratio(ill_step(sigma, x / sigma[:, -1:])) > ratio(sigma))[sigma[:, 0] / sigma[:, 1] > 1 + 1e-6].all()


# --- The ceiling of the relative immunization ratio -------------------------------------------------------------------


def ceiling(k_p, k_h):
    """kappa(M) kappa(K_P) / kappa(K_H), M = K_P^-1/2 K_H K_P^-1/2, over the non-zero eigenvalues."""
    root = inverse_root(k_p)
    rank = torch.linalg.matrix_rank(k_h, hermitian=True)
    of_m, of_h = (torch.linalg.eigvalsh(m).flip(0)[:rank] for m in (root @ k_h @ root, k_h))
    return (of_m[0] / of_m[-1]).item() * kappa(k_p) / (of_h[0] / of_h[-1]).item()


def optimal(k_p, k_h, rank, target, seed):
    """K_P^-1/2 Q Delta R with kappa(Delta^2) = target * kappa(K_P), spread over the first `rank` directions."""
    root = inverse_root(k_p)
    q = torch.linalg.eigh(root @ k_h @ root).eigenvectors.flip(-1)
    size, spread = len(k_p), math.sqrt(target * kappa(k_p))
    delta = torch.ones(size, dtype=torch.float64)
    delta[:rank] = torch.logspace(math.log10(spread), 0, rank, dtype=torch.float64)
    return root @ q * delta @ orthonormal(size, size, seed)


@st.composite
def pairs(draw):
    """Roots X_P [D + 2, D] of full rank and X_H [N, D] of rank 2 to D."""
    size, seed = draw(st.integers(2, 6)), draw(seeds)
    scales = torch.logspace(0, draw(st.floats(0, 1.5)), size, dtype=torch.float64)
    return gaussian(size + 2, size, seed=seed) * scales, gaussian(draw(st.integers(2, size)), size, seed=seed + 1)


@quick
@given(pair=pairs(), seed=seeds, decades=st.floats(0, 2))
def test_no_map_exceeds_the_ceiling(pair, seed, decades):
    """kappa(H_H) <= kappa(M) kappa(H_P), hence RIR <= RIR*, for every invertible theta."""
    x_p, x_h = pair
    size = x_p.shape[1]
    theta = with_spectrum(torch.logspace(0, -decades, size, dtype=torch.float64), size, size, seed)
    found = spectrum.rir(x_h @ theta, x_h, x_p @ theta, x_p)["rir"]
    assert found <= ceiling(x_p.T @ x_p, x_h.T @ x_h) * (1 + 1e-6)


@quick
@given(pair=pairs(), seed=seeds, share=st.floats(0, 1))
def test_the_ceiling_is_attained_at_any_primary_ratio(pair, seed, share):
    """K_P^-1/2 Q Delta R reaches RIR* for every (ii) in [1/kappa(K_P), 1], rank-deficient K_H included."""
    x_p, x_h = pair
    k_p, k_h = x_p.T @ x_p, x_h.T @ x_h
    target = kappa(k_p) ** (share - 1)
    theta = optimal(k_p, k_h, len(x_h), target, seed)
    found = spectrum.rir(x_h @ theta, x_h, x_p @ theta, x_p)
    assert found["ratio_primary"] == pytest.approx(target, rel=1e-6)
    assert found["rir"] == pytest.approx(ceiling(k_p, k_h), rel=1e-6)


def test_shared_inputs_admit_no_immunization():
    """K_P = K_H: RIR is 1 whatever theta is, and so is the ceiling."""
    x, theta = gaussian(9, 4, seed=0), gaussian(4, 4, seed=1)
    assert spectrum.rir(x @ theta, x, x @ theta, x)["rir"] == 1
    assert ceiling(x.T @ x, x.T @ x) == pytest.approx(1)


@quick
@given(stretch=st.floats(1, 1e4), seed=seeds)
def test_ratio_is_unbounded_outside_the_primary_range(stretch, seed):
    """n in the null space of K_P but not of K_H: theta = I + (t - 1) n n^T leaves H_P and stretches kappa(H_H) by at
    least t^2 n^T K_H n / lambda_1(K_H) (rank(K_H) >= 2)."""
    x_p, x_h = gaussian(3, 5, seed=seed), gaussian(8, 5, seed=seed + 1)
    n = torch.linalg.svd(x_p).Vh[-1]
    theta = torch.eye(5, dtype=torch.float64) + (stretch - 1) * torch.outer(n, n)
    assert_close(x_p @ theta, x_p)
    lower = stretch**2 * (x_h @ n).square().sum() / torch.linalg.matrix_norm(x_h, 2) ** 2
    assert spectrum.condition_number(x_h @ theta, rank=5) >= lower.item() * (1 - 1e-6)


# --- Learning curves: what an attacker meets --------------------------------------------------------------------------


def gradient_descent(features, y, steps):
    """Weights after each of `steps` steps of size 1/lambda_1 on ||F w - y||^2 / 2 from w = 0."""
    hessian, b = features.T @ features, features.T @ y
    weights, rate = torch.zeros_like(b), 1 / torch.linalg.eigvalsh(hessian)[-1]
    for _ in range(steps):
        weights = weights - rate * (hessian @ weights - b)
        yield weights


def excess(features, y, weights):
    """||F w - F w*||^2, twice the excess training loss."""
    best = features @ torch.linalg.lstsq(features, y).solution
    return (features @ weights - best).square().sum().item()


@quick
@given(rows=st.integers(3, 20), size=st.integers(1, 8), outputs=st.integers(1, 3), seed=seeds)
def test_excess_loss_in_closed_form(rows, size, outputs, seed):
    """excess(t) = sum_i |c_i|^2 (1 - lambda_i / lambda_1)^(2t), c = U^T Y."""
    features, y = gaussian(rows, min(rows, size), seed=seed), gaussian(rows, outputs, seed=seed + 1)
    u, sigma, _ = torch.linalg.svd(features, full_matrices=False)
    c = (u.T @ y).square().sum(-1)
    for t, weights in enumerate(gradient_descent(features, y, 12), start=1):
        closed = (c * (1 - (sigma / sigma[0]) ** 2) ** (2 * t)).sum().item()
        assert excess(features, y, weights) == pytest.approx(closed, rel=1e-6, abs=1e-10)


@quick
@given(rows=st.integers(2, 20), size=st.integers(1, 8), seed=seeds, scale=st.floats(-3, 3))
def test_doubling_is_gradient_descent(rows, size, seed, scale):
    """w_2t = w_t + P^t w_t with P = I - H/lambda_1 gives the weights after 2^j steps, singular H included; scaling the
    features leaves P, and with it the curve, as they are."""
    features, y = 10**scale * gaussian(rows, size, seed=seed), gaussian(rows, 2, seed=seed + 1)
    hessian, b = features.T @ features, features.T @ y
    largest = torch.linalg.eigvalsh(hessian)[-1]
    power, weights = torch.eye(size, dtype=torch.float64) - hessian / largest, b / largest
    stepwise = dict(enumerate(gradient_descent(features, y, 64), start=1))
    for j in range(7):
        assert_close(weights, stepwise[2**j], rtol=1e-9, atol=1e-11 / 10**scale)
        weights, power = weights + power @ weights, power @ power


def test_expected_curve_of_random_labels():
    """The mean of excess(t) over labels with E[c c^T] = I is ||P^t||_F^2 = sum_i (1 - lambda_i / lambda_1)^(2t)."""
    features = gaussian(12, 5, seed=0)
    sigma = torch.linalg.svdvals(features)
    p = torch.eye(5, dtype=torch.float64) - features.T @ features / sigma[0] ** 2
    u = torch.linalg.svd(features, full_matrices=False).U
    for t, curves in enumerate(
        zip(*(gradient_descent(features, u[:, [i]], 8) for i in range(5)), strict=True), start=1
    ):
        total = sum(excess(features, u[:, [i]], w) for i, w in enumerate(curves))
        assert total == pytest.approx(torch.linalg.matrix_power(p, t).square().sum().item(), abs=1e-10)


def test_labels_and_not_kappa_decide_the_speed():
    """kappa = 1e8 with the labels on the first direction is learned in one step; kappa = 4 with the labels on the last
    one keeps (3/4)^2t of the excess. Spectra alone, and RIR with them, say the opposite."""
    u = orthonormal(9, 3, seed=0)
    ill, well = u * tensor(1.0, 1e-2, 1e-4), u * tensor(1.0, 0.8, 0.5)
    assert spectrum.condition_number(ill) == pytest.approx(1e8)
    assert spectrum.condition_number(well) == pytest.approx(4)
    after_ill = [excess(ill, u[:, :1], w) for w in gradient_descent(ill, u[:, :1], 10)]
    after_well = [excess(well, u[:, 2:], w) for w in gradient_descent(well, u[:, 2:], 10)]
    assert after_ill[0] == pytest.approx(0, abs=1e-20)
    assert after_well == pytest.approx([0.75 ** (2 * t) for t in range(1, 11)])


# --- What no invertible map can prevent -------------------------------------------------------------------------------


@quick
@given(seed=seeds, decades=st.floats(0, 4))
def test_direct_solvers_and_whitening_undo_any_invertible_map(seed, decades):
    """Least squares predicts the same through X theta as through X; whitened features have kappa = 1 again."""
    x, y, new = gaussian(12, 4, seed=seed), gaussian(12, 1, seed=seed + 1), gaussian(5, 4, seed=seed + 2)
    theta = with_spectrum(torch.logspace(0, -decades, 4, dtype=torch.float64), 4, 4, seed)
    features = x @ theta
    assert_close(
        new @ theta @ torch.linalg.lstsq(features, y).solution,
        new @ torch.linalg.lstsq(x, y).solution,
        rtol=1e-5,
        atol=1e-6,
    )
    whitened = features @ torch.linalg.inv(torch.linalg.qr(features).R)
    assert spectrum.condition_number(whitened) == pytest.approx(1)


def test_column_scaling_undoes_a_diagonal_map_but_not_a_rotated_one():
    """Why theta ends in a random rotation R: the spectrum is the same, the shortcut of diagonal attackers is gone."""
    x = orthonormal(40, 6, seed=0)
    theta = torch.diag(torch.logspace(0, -3, 6, dtype=torch.float64))
    rotated = theta @ orthonormal(6, 6, seed=1)

    def scaled(features):
        return spectrum.condition_number(features / features.norm(dim=0))

    assert spectrum.condition_number(x @ theta) == pytest.approx(1e6)
    assert spectrum.condition_number(x @ rotated) == pytest.approx(1e6)
    assert scaled(x @ theta) == pytest.approx(1)
    assert scaled(x @ rotated) > 1e4


def test_authors_ratio_is_moved_by_inflating_the_features():
    """Rank-deficient features, doubled: ratios (i) and (ii) of the released code are 4, the rank-aware ones 1."""
    x_p, x_h = gaussian(10, 30, seed=0), gaussian(10, 30, seed=1)
    authors = spectrum.rir(2 * x_h, x_h, 2 * x_p, x_p, conditioning="authors")
    assert (authors["ratio_harmful"], authors["ratio_primary"]) == pytest.approx((4, 4), rel=1e-4)
    assert spectrum.rir(2 * x_h, x_h, 2 * x_p, x_p)["ratio_harmful"] == pytest.approx(1)
