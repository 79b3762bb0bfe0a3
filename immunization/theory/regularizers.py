"""The regularizers R_well (Eq. 3, and in power means) and R_ill (Eq. 12), log kappa, and their exact gradients.

Of a general matrix S (paper, Sec. 4.1), and of a Hessian H = F^T F with gradients to the features F or to theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from scipy.linalg.blas import dtrmm
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum
from immunization.theory.eigenpairs import LANCZOS, extreme_eigenpair
from immunization.theory.spectrum import EPS, numerical_rank

WIDE = 0.85
"""Rows of a feature matrix over its columns, below which the Gram of its rows takes fewer operations."""

# --- Of a general matrix S (paper Sec. 4.1) ---------------------------------------------------------------------------


def _flat(denominator: Tensor | float, square: Tensor | float) -> bool:
    """Whether R_ill's denominator is rounding noise: k eps of the mean square, as in `numerical_rank`."""
    return not denominator > 4 * EPS * square


class _RWell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s: Tensor, rank: int, power: float) -> Tensor:
        u, sigma, vh = torch.linalg.svd(s, full_matrices=False)
        if power == math.inf:
            mean, slope = sigma[0], torch.zeros_like(sigma)
            slope[0] = sigma[0]
        else:
            share = sigma[:rank] / sigma[0]  # at most 1: no power overflows
            mean = sigma[0] * share.pow(power).mean() ** (1 / power)
            slope = torch.zeros_like(sigma)
            slope[:rank] = mean * (sigma[:rank] / mean).pow(power - 1) / rank
        ctx.save_for_backward(u * (slope - sigma / rank), vh)
        return mean**2 / 2 - sigma.square().sum() / (2 * rank)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:
        left, vh = ctx.saved_tensors
        return upstream * left @ vh, None, None


class _RIll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s: Tensor, rank: int) -> Tensor:
        u, sigma, vh = torch.linalg.svd(s, full_matrices=False)
        square = sigma.square().sum()
        if not square > 0:
            raise DegenerateSpectrum("the matrix is all zero (rank 0): its R_ill does not exist")
        denominator = square / (2 * rank) - sigma[rank - 1] ** 2 / 2
        if _flat(denominator, square):
            raise DegenerateSpectrum(
                f"R_ill is infinite: the {rank} non-zero singular values are all equal (kappa = 1)"
            )
        ctx.save_for_backward(s, u[:, rank - 1], sigma[rank - 1], vh[rank - 1], denominator)
        ctx.rank = rank
        return 1 / denominator

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None]:
        s, u, sigma, v, denominator = ctx.saved_tensors
        return upstream * (sigma * torch.outer(u, v) - s / ctx.rank) / denominator**2, None


def r_well(s: Tensor, rank: int | None = None, power: float = math.inf) -> Tensor:
    """R_well,p(S) = M_p^2 / 2 - M_2^2 / 2 with the power means M_p = (1/k sum_i sigma_i^p)^(1/p), i = 1..k = `rank`.

    Gradient U diag(M_p^(2-p) sigma^(p-1) / k - sigma / k) V^T. `power=inf`, by default with k = min(S.shape), is the
    paper's ||S||_2^2 / 2 - ||S||_F^2 / (2k) (Eq. 3), whose gradient sigma_1 u_1 v_1^T - S / k jumps where the largest
    singular values meet.
    """
    return _RWell.apply(s, rank or min(s.shape), power)


def r_ill(s: Tensor, rank: int | None = None) -> Tensor:
    """R_ill(S) = 1 / (||S||_F^2 / (2k) - sigma_k^2 / 2), k = `rank` (default: the numerical rank of S) (Eq. 12).

    Gradient (sigma_k u_k v_k^T - S / k) / denominator^2 (Eq. 13). Raises DegenerateSpectrum where all k singular values
    agree.
    """
    return _RIll.apply(s, rank or numerical_rank(torch.linalg.svdvals(s.detach()), tuple(s.shape)))


# --- Of a Hessian H = F^T F, differentiated to the features or to theta -----------------------------------------------


def gram(f: Tensor) -> Tensor:
    """f^T f [D, D] of f [N, D]; on a CPU by numpy, which leaves it to BLAS's syrk: half the operations of a product."""
    if f.device.type != "cpu":
        return f.mT @ f
    array = f.numpy()
    return torch.from_numpy(array.T @ array)


def _matrix_power(s: Tensor, exponent: int) -> Tensor:
    """S^exponent of a symmetric S by squaring, of which each is a `gram`."""
    if exponent < 2:
        return s if exponent else torch.eye(len(s), dtype=s.dtype, device=s.device)
    square = gram(_matrix_power(s, exponent // 2))
    return square @ s if exponent % 2 else square


def _norm(hessian: Tensor) -> float:
    norm = torch.linalg.vector_norm(hessian).item()
    if not math.isfinite(norm * norm):
        raise torch.linalg.LinAlgError("the Hessian of the features holds NaN, infinite or overflowing values")
    return norm


def r_well_slope(
    hessian: Tensor, rank: int, power: float = math.inf, divided: bool = False, weight: float = 1.0
) -> tuple[float, Tensor]:
    """R_well,p(H) and `weight` dR/dH = M_p^(2-p) H^(p-1) / k - H / k; for even p no eigenvalues are needed.

    `hessian` [n, n] is symmetric, float64, of rank k, and overwritten. `power=inf`: lambda_1 v_1 v_1^T - H / k.
    `divided`: the second is H^-1 dR/dH, in which the power of H is one less. Raises LinAlgError where H is not finite.
    """
    norm = _norm(hessian)
    if power == math.inf:
        largest, v = extreme_eigenpair(hessian, -1)
        return largest**2 / 2 - norm**2 / (2 * rank), _rank_one(hessian, largest, v, rank, divided, weight)
    if not norm > 0:
        return 0.0, hessian
    unit = hessian.div_(norm)  # eigenvalues of at most 1: no power overflows
    lower = _matrix_power(unit, int(power) - 2)
    upper = lower @ unit
    mean = (torch.dot(upper.flatten(), unit.flatten()).item() / rank) ** (1 / power)  # M_p / norm
    factor = weight / rank * mean ** (2 - power)
    if divided:
        slope = lower.mul(factor)
        slope.diagonal().sub_(weight / rank)
    else:
        slope = upper.mul_(norm * factor).sub_(unit, alpha=norm * weight / rank)
    return norm**2 * (mean**2 - 1 / rank) / 2, slope


def r_ill_slope(hessian: Tensor, rank: int, divided: bool = False, weight: float = 1.0) -> tuple[float, Tensor]:
    """R_ill(H) = 1/d, d = ||H||_F^2 / (2k) - lambda_k^2 / 2, and `weight` dR/dH = (lambda_k v_k v_k^T - H / k) / d^2.

    Arguments and errors as in `r_well_slope`; lambda_k is 0 where k exceeds the size of H. DegenerateSpectrum is raised
    where H is zero or all k eigenvalues agree.
    """
    norm = _norm(hessian)
    if not norm > 0:
        raise DegenerateSpectrum("the features are all zero (rank 0): R_ill of their Hessian does not exist")
    smallest, v = (0.0, hessian.new_zeros(len(hessian))) if rank > len(hessian) else extreme_eigenpair(hessian, -rank)
    denominator = norm**2 / (2 * rank) - smallest**2 / 2
    if _flat(denominator, norm**2):
        raise DegenerateSpectrum(
            f"R_ill is infinite: all {rank} non-zero eigenvalues of the harmful Hessian are equal (kappa = 1); "
            "start from another theta or leave R_ill out"
        )
    return 1 / denominator, _rank_one(hessian, smallest, v, rank, divided, weight / denominator**2)


def _rank_one(h: Tensor, eigenvalue: float, v: Tensor, rank: int, divided: bool, weight: float) -> Tensor:
    """`weight` (eigenvalue v v^T - H / k) in the memory of H, or H^-1 times that, weight (v v^T - I / k)."""
    if divided:
        torch.outer(v, v * weight, out=h).diagonal().sub_(weight / rank)
        return h
    return h.mul_(-weight / rank).addr_(v, v, alpha=weight * eigenvalue)


def hessian_slope(features: Tensor, slope_of: Callable[..., tuple[float, Tensor]]) -> tuple[float, Tensor]:
    """R(H) and dR/dH [D, D] of H = F^T F by the smaller Gram of F [N, D], float64; `slope_of` is a `r_*_slope`."""
    if len(features) < WIDE * features.shape[1]:
        value, divided = slope_of(gram(features.T), divided=True)
        return value, features.T @ divided @ features
    return slope_of(gram(features))


def triangular_product(triangle: Tensor, theta: Tensor) -> Tensor:
    """R theta of an upper trapezoidal R [k, D], k <= D: on a CPU the triangle costs half of a product (BLAS's trmm)."""
    if triangle.device.type != "cpu" or triangle.dtype != torch.float64 or len(triangle) <= LANCZOS:
        return triangle @ theta
    k = len(triangle)
    left, right = triangle[:, :k].contiguous().numpy(), theta[:k].contiguous().numpy()
    product = torch.from_numpy(dtrmm(1.0, left.T, right.T, side=1, lower=1).T)  # BLAS counts columns first
    return product if k == triangle.shape[1] else product.addmm_(triangle[:, k:], theta[k:])


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, gradients: tuple[Tensor, ...], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.gradients)


def with_gradients(value: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    """`value`, a scalar, with gradients computed by hand: leaf -> matrix."""
    return _WithGradients.apply(value, tuple(gradients.values()), *gradients)


class _HessianRegularizer(torch.autograd.Function):
    """R(H) of H = F^T F through the smaller one of its Grams.

    The gradient to F is 2 F dR/dH; with `theta`, it is the preconditioned K^-1 grad_theta R = 2 theta dR/dH, in which K
    has cancelled. dR/dH is a function f(H) with f(0) = 0, so that F f(F^T F) = f(F F^T) F.
    """

    @staticmethod
    def forward(ctx, features: Tensor, theta: Tensor | None, slope_of: Callable[..., tuple[float, Tensor]]) -> Tensor:
        f = features.detach().double()
        # the Gram that takes fewer operations: behind theta, the one of the samples needs a product more
        wide = len(f) < f.shape[1] if theta is None else 2 * len(f) < f.shape[1]
        value, slope = slope_of(gram(f.T if wide else f), divided=wide and theta is not None)
        ctx.save_for_backward(f, theta, slope)
        ctx.wide, ctx.dtype = wide, features.dtype
        return features.new_tensor(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        f, theta, slope = ctx.saved_tensors
        if theta is None:
            gradient = slope @ f if ctx.wide else f @ slope
        else:
            gradient = theta.double() @ f.T @ slope @ f if ctx.wide else theta.double() @ slope
        gradient = gradient.mul_(2 * upstream.item()).to(ctx.dtype)
        return (gradient, None, None) if theta is None else (None, gradient, None)


def r_well_of_features(
    features: Tensor, theta: Tensor | None = None, rank: int | None = None, power: float = math.inf
) -> Tensor:
    """R_well,p(F^T F) for features F [N, D] of known rank k, by default D.

    Gradient to `features`; or, where `theta` [D_in, D] is given, the preconditioned gradient to theta,
    K^-1 grad_theta R_well = 2 theta dR/dH (design 2.2), and none to the features. See `r_well_slope`.
    """
    return _HessianRegularizer.apply(
        features, theta, partial(r_well_slope, rank=rank or features.shape[1], power=power)
    )


def r_ill_of_features(features: Tensor, rank: int, theta: Tensor | None = None) -> Tensor:
    """R_ill(F^T F) for features F [N, D] of known rank k; gradients as in `r_well_of_features`.

    `rank` may exceed the true rank, as in the released code, which takes k = D: sigma_k is then 0.
    Raises DegenerateSpectrum where the k eigenvalues are all equal.
    """
    return _HessianRegularizer.apply(features, theta, partial(r_ill_slope, rank=rank))


def _log_condition_number(f: Tensor, rank: int, power: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The value of `log_condition_number`, its derivatives in log sigma_i^2 [k], sigma [k] and V [D, k]."""
    factor = torch.linalg.qr(f, mode="r").R if f.shape[0] > f.shape[1] else f
    _, sigma, vh = torch.linalg.svd(factor, full_matrices=False)
    sigma, v = sigma[:rank], vh[:rank].T
    if len(sigma) < rank or not sigma[-1] > 0:
        raise DegenerateSpectrum(f"log kappa is infinite: the features have fewer than {rank} non-zero singular values")
    if power == math.inf:
        slope = torch.zeros_like(sigma)
        slope[0] += 1
        slope[-1] -= 1
        return 2 * (sigma[0].log() - sigma[-1].log()), slope, sigma, v
    scaled = 2 * power * sigma.log()
    value = (scaled.logsumexp(0) + (-scaled).logsumexp(0) - 2 * math.log(rank)) / power
    return value, scaled.softmax(0) - (-scaled).softmax(0), sigma, v


class _LogConditionNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features: Tensor, rank: int, power: float) -> Tensor:
        f = features.detach().double()
        value, slope, sigma, v = _log_condition_number(f, rank, power)
        seen = slope.nonzero()[:, 0]
        ctx.save_for_backward(f, v[:, seen], slope[seen] / sigma[seen] ** 2)
        ctx.dtype = features.dtype
        return value.to(features.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:
        f, v, weights = ctx.saved_tensors
        return (2 * upstream * ((f @ v) * weights) @ v.T).to(ctx.dtype), None, None


def log_condition_number(features: Tensor, rank: int, power: float = math.inf) -> Tensor:
    """log kappa(F^T F) = 2 (log sigma_1 - log sigma_k), differentiable in `features` [N, D] of known rank k.

    d sigma_i / dF = u_i v_i^T, which exists where sigma_1 and sigma_k are simple. With a finite `power` p it is
    log M_p(H) - log M_-p(H), M_p the power mean of the k non-zero eigenvalues of H: smooth, at most log kappa, and
    by no more than (2/p) log k below it.
    """
    return _LogConditionNumber.apply(features, rank, power)


def relative_log_condition_slope(features: Tensor, rank: int, power: float) -> tuple[Tensor, Tensor]:
    """`log_condition_number` and its relative gradient E [D, D]: features F (I + X) change it by <E, X>.

    E = 2 V diag(s) V^T with s_i the derivative in log sigma_i^2, at most 1. It does not grow as sigma_k vanishes, as
    the gradient in F does, and steps F <- F exp(-rate E) never meet the pole that log kappa has there.
    """
    value, slope, _, v = _log_condition_number(features.double(), rank, power)
    return value, 2 * (v * slope) @ v.T
