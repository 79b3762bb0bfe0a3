"""The ceiling of RIR, and the linear map that attains it (docs/theory.md, section 6)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from immunization.checks import NonNegative, checked
from immunization.errors import ConfigError, DataError, DegenerateSpectrum
from immunization.theory import spectrum
from immunization.theory.probe import Probe

LARGEST_RIDGE = 6.0
"""log10 of a ridge at which every K is as good as a multiple of I."""
BISECTIONS = 30

Spread = Literal["geometric", "linear", "step"]


@checked("optimal_map")
def optimal_map(
    root_p: Tensor,
    root_h: Tensor,
    primary_ratio: float = 1.0,
    ridge: NonNegative = 0.0,
    spread: Spread = "geometric",
    generator: torch.Generator | None = None,
) -> Tensor:
    """An invertible map A [D, D] in float64 that attains the largest RIR, for features with K = root^T root.

    `root_p` and `root_h` [m, D] are R factors or compressed roots of both tasks' features. A = K_P^-1/2 Q Delta R with
    Q the eigenvectors of M = K_P^-1/2 K_H K_P^-1/2, descending. Delta falls from Delta_1 to Delta_k, k = rank(M), and
    is constant from there on: kappa(H_P) = (Delta_1 / Delta_k)^2 = `primary_ratio` kappa(K_P), kappa(H_H) = kappa(M)
    kappa(H_P). In between it falls evenly in the logarithm (`geometric`), evenly (`linear`), or at once after the first
    half (`step`); RIR is the same. R is a random rotation drawn by `generator`, or I for None. The primary features
    keep their mean square.

    `ridge` (relative to the largest eigenvalue) is added to both K before. Ratio (ii) is then at most the larger one of
    `primary_ratio` and 1/kappa(K_P + ridge), since kappa(H_P) <= kappa(Delta^2) max_i f_i / min_i f_i with f_i =
    lambda_i / (lambda_i + ridge lambda_1).

    Directions outside of range(K_P) keep their length and stay orthogonal to the rest: no primary probe sees them. If
    K_H reaches there, RIR has no maximum, and A is optimal for K_H projected onto range(K_P).

    Raises ConfigError for a `primary_ratio` outside of [1/kappa(K_P), 1] or a negative `ridge`, DataError for roots of
    different width, DegenerateSpectrum for a root that is zero or not finite.
    """
    if root_p.shape[1] != root_h.shape[1]:
        raise DataError(f"the tasks have different numbers of features: {root_p.shape[1]} and {root_h.shape[1]}")
    kappa, s_p, v_p = _spectrum(root_p, 0.0, "primary")
    lowest = 1 / kappa
    if not lowest * (1 - 1e-9) <= primary_ratio <= 1:
        raise ConfigError(
            f"primary_ratio={primary_ratio} is not in [1/kappa(K_P), 1] = [{lowest:.6g}, 1], the values of ratio "
            "(ii) that satisfy condition (b); give a value in it"
        )
    if ridge:
        kappa, s_p, v_p = _spectrum(root_p, ridge, "primary")
    _, s_h, v_h = _spectrum(root_h, ridge, "harmful")

    p, h = len(s_p), len(s_h)
    cosines = v_h[:h] @ v_p[:p].T
    _, _, q = spectrum.svd(s_h[:, None] * cosines / s_p, full_matrices=True)  # Q^T, all p rows
    k = h if p == len(v_p) else int((torch.linalg.svdvals(cosines) > spectrum.EPS**0.5).sum())
    delta = _spread(k, p, math.sqrt(max(primary_ratio * kappa, 1.0)), spread).to(s_p)
    inside = v_p[:p].T / s_p @ q.T * delta
    inside *= root_p.double().norm() / (root_p.double() @ inside).norm()
    a = torch.cat([inside, v_p[p:].T], 1)
    if generator is None:
        return a
    return a @ rotation(len(a), generator).to(a)


def rotation(size: int, generator: torch.Generator | None = None) -> Tensor:
    """A random rotation R [D, D] in float64, drawn by `generator`, or by torch's global one."""
    return nn.init.orthogonal_(torch.empty(size, size, dtype=torch.float64), generator=generator)


def bounded_map(
    root_p: Tensor,
    root_h: Tensor,
    bound: float,
    primary_ratio: float = 1.0,
    ridge: float = 0.0,
    spread: Spread = "geometric",
    generator: torch.Generator | None = None,
) -> Tensor:
    """`optimal_map` with the least ridge, from `ridge` on, at which the condition number of A is at most `bound`.

    A larger ridge takes K_P, and so A, nearer to a multiple of a rotation. A attains the ceiling of the regularized K,
    not necessarily the largest RIR that the bound allows.
    """

    def excess(candidate: float) -> float:
        sigma = torch.linalg.svdvals(optimal_map(root_p, root_h, primary_ratio, candidate, spread))
        return (sigma[0] / sigma[-1]).item() / bound

    if excess(ridge) <= 1:
        return optimal_map(root_p, root_h, primary_ratio, ridge, spread, generator)
    low, high = math.log10(max(ridge, spectrum.EPS)), LARGEST_RIDGE
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(10**middle) > 1 else (low, middle)
    return optimal_map(root_p, root_h, primary_ratio, 10**high, spread, generator)


def nearest_bounded(a: Tensor, bound: float) -> Tensor:
    """The matrix nearest to `a` [D, D] in the Frobenius norm with sigma_1 / sigma_D <= `bound`.

    Its singular values are those of `a`, clipped to [floor, bound floor]; the floor changes them least in the sum of
    squares. `a` itself where it is within the bound.
    """
    u, sigma, vh = spectrum.svd(a)
    near = sigma.cpu()  # on a GPU every comparison below would wait
    if near[0] <= bound * near[-1]:
        return a
    low, high = near[-1], near[0] / bound
    for _ in range(2 * BISECTIONS):
        floor = (low + high) / 2
        slope = (floor - near).clamp(min=0).sum() - bound * (near - bound * floor).clamp(min=0).sum()
        low, high = (low, floor) if slope > 0 else (floor, high)
    return u * near.clamp(high, bound * high).to(sigma, non_blocking=True) @ vh


def conditioned(theta: Tensor, root: Tensor, bound: float, raised: bool = True) -> Tensor:
    """A map [D, D] near theta with kappa(H) <= `bound` for the Hessian of features root theta, `root` [k, D] of rank k.

    The singular values of root theta are clipped from below (`raised`) or from above; its singular vectors stay, and
    with them all that theta does where root theta is zero. Not finite where root theta has no rank k.
    """
    _, sigma, vh = spectrum.svd(root @ theta)
    spread = math.sqrt(bound) * (1 - 1e-9)
    clipped = sigma.clamp(min=sigma[0] / spread) if raised else sigma.clamp(max=sigma[-1] * spread)
    return theta + (theta @ vh.T * (clipped / sigma - 1)) @ vh


def _spectrum(root: Tensor, ridge: float, name: str) -> tuple[float, Tensor, Tensor]:
    """kappa and the singular values [k] of K^1/2 with its relative ridge, and all right singular vectors [D, D]."""
    root = root.double()
    if not torch.isfinite(root).all():
        raise DegenerateSpectrum(f"the {name} features hold NaN or infinite values; their spectrum does not exist")
    _, sigma, vh = spectrum.svd(root, full_matrices=True)
    k = spectrum.numerical_rank(sigma, root.shape)
    if not k:
        raise DegenerateSpectrum(f"the {name} features are all zero (rank 0): there is nothing to immunize")
    if ridge:
        padded = torch.cat([sigma, sigma.new_zeros(len(vh) - len(sigma))])
        sigma, k = (padded.square() + ridge * sigma[0] ** 2).sqrt(), len(vh)
    return spectrum.condition_number_of(sigma, k), sigma[:k], vh


def _spread(k: int, size: int, top: float, spread: Spread) -> Tensor:
    """Delta [size], descending from `top` to 1 over the first k entries, 1 from there on (all 1 for k < 2)."""
    delta = torch.ones(size, dtype=torch.float64)
    if k < 2:
        return delta
    if spread == "geometric":
        delta[:k] = torch.logspace(math.log10(top), 0, k, dtype=torch.float64)
    elif spread == "linear":
        delta[:k] = torch.linspace(top, 1, k, dtype=torch.float64)
    else:
        delta[: k // 2] = top
    return delta


def relative_condition_number(primary: Probe, harmful: Probe) -> float:
    """kappa(M) of M = K_P^-1/2 K_H K_P^-1/2 over its rank(K_H) largest eigenvalues.

    These are the squared singular values of S_H V_H^T V_P S_P^-1, so that no Gram matrix loses digits.
    """
    sigma = torch.linalg.svdvals(harmful.sigma[:, None] * (harmful.vectors.T @ primary.vectors) / primary.sigma)
    return spectrum.condition_number_of(sigma, min(len(sigma), len(harmful.sigma)))
