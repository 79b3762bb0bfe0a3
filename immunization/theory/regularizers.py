"""The regularizers of the paper and their gradients; H = F^T F is the Hessian of a linear probe on features F."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum
from immunization.theory.spectrum import AUTHORS_RIDGE, EPS, extreme_eigenpair, power_of_two, svd

Scalar = float | Tensor
"""A number; on a GPU, where nothing on the CPU depends on it, a tensor [] in float64, which is not waited for."""


class Slope(Protocol):
    """R(H) and dR/dH of a symmetric H [n, n]; with `divided` the second is H^-1 dR/dH."""

    def __call__(self, hessian: Tensor, *, divided: bool = False) -> tuple[Scalar, Tensor]: ...


def r_well_slope(hessian: Tensor, rank: int, power: float = math.inf, divided: bool = False) -> tuple[Scalar, Tensor]:
    """R_well(H) = lambda_1^2 / 2 - ||H||_F^2 / (2k), and dR/dH = lambda_1 v_1 v_1^T - H / k (Eq. 3, Thm. 4.2).

    A finite `power` p puts the power mean M_p of the eigenvalues in the place of lambda_1. `hessian` [n, n] is
    symmetric, float64, of rank k. `divided`: the second is H^-1 dR/dH. Raises LinAlgError where H is not finite; on a
    GPU with a finite `power`, which needs nothing from the CPU, both results are then not finite.
    """
    if power < math.inf:
        return _power_mean_slope(hessian, rank, int(power), divided)
    near = hessian.cpu()
    norm = _norm(near)
    largest, v = extreme_eigenpair(near, -1)
    v = v.to(hessian.device)
    return largest**2 / 2 - norm**2 / (2 * rank), _pair_less_mean(hessian, largest, v, rank, divided)


def r_ill_slope(hessian: Tensor, rank: int, divided: bool = False) -> tuple[float, Tensor]:
    """R_ill(H) = 1/d, d = ||H||_F^2 / (2k) - lambda_k^2 / 2, and dR/dH = (lambda_k v_k v_k^T - H / k) / d^2.

    These are Eq. 12 and 13. Arguments and errors as in `r_well_slope`; lambda_k is 0 where k exceeds the size of H.
    Raises DegenerateSpectrum where H is zero or all k eigenvalues agree.
    """
    near = hessian.cpu()
    norm = _norm(near)
    smallest, v = (0.0, near.new_zeros(len(near))) if rank > len(near) else extreme_eigenpair(near, -rank)
    d = norm**2 / (2 * rank) - smallest**2 / 2
    _check_finite_r_ill(d, norm**2, rank)
    return 1 / d, _pair_less_mean(hessian, smallest, v.to(hessian.device), rank, divided, 1 / d**2)


def _pair_less_mean(h: Tensor, eigenvalue: float, v: Tensor, rank: int, divided: bool, weight: float = 1.0) -> Tensor:
    """`weight` (lambda v v^T - H / k) of an eigenpair of H; `divided` by H it is `weight` (v v^T - I / k)."""
    if divided:
        slope = torch.outer(v, v * weight)
        slope.diagonal().sub_(weight / rank)
        return slope
    return (h * (-weight / rank)).addr_(v, v, alpha=weight * eigenvalue)


def _power_mean_slope(hessian: Tensor, rank: int, power: int, divided: bool) -> tuple[Scalar, Tensor]:
    """R_well,p(H) = M_p^2 / 2 - M_2^2 / 2 and (M_p^(2-p) H^(p-1) - H) / k: for even p without eigenvalues."""
    norm: Any = torch.linalg.vector_norm(hessian)
    unit = hessian / norm  # eigenvalues of at most 1: no power overflows
    lower = torch.linalg.matrix_power(unit, power - 2)
    upper = lower @ unit
    total: Any = torch.dot(upper.flatten(), unit.flatten())
    on_cpu = hessian.device.type == "cpu"
    if on_cpu:
        norm, total = norm.item(), total.item()
        _check_finite(norm)
        if not norm > 0:
            return 0.0, hessian
    mean = (total / rank) ** (1 / power)  # M_p / norm
    factor = mean ** (2 - power) / rank
    if divided:
        slope = lower * factor
        slope.diagonal().sub_(1 / rank)
    elif on_cpu:
        slope = upper.mul_(norm * factor).sub_(unit, alpha=norm / rank)
    else:
        slope = upper.mul_(norm * factor).sub_(unit * (norm / rank))
    value = norm**2 * (mean**2 - 1 / rank) / 2
    return (value, slope) if on_cpu else (torch.where(norm > 0, value, norm), torch.where(norm > 0, slope, hessian))


def _norm(hessian: Tensor) -> float:
    norm = torch.linalg.vector_norm(hessian).item()
    _check_finite(norm)
    return norm


def _check_finite(norm: float) -> None:
    if not math.isfinite(norm * norm):
        raise torch.linalg.LinAlgError("the Hessian of the features holds NaN, infinite or overflowing values")


def _check_finite_r_ill(denominator: float, square: float, rank: int) -> None:
    """Raise where R_ill's denominator overflows or is noise: k eps of the mean square, as in `numerical_rank`."""
    if not square > 0:
        raise DegenerateSpectrum("the matrix is all zero (rank 0): its R_ill does not exist")
    if not denominator > 4 * EPS * square:
        raise DegenerateSpectrum(
            f"R_ill is infinite: all {rank} non-zero singular values are equal (kappa = 1); start from another theta "
            "or leave R_ill out"
        )
    if not 0 < denominator * denominator < math.inf:
        raise torch.linalg.LinAlgError("R_ill of the Hessian leaves the range of float64: rescale the features")


def scalar(value: Scalar, like: Tensor) -> Tensor:
    """`value` as a tensor [] of the dtype and device of `like`; infinite where it is too large for that."""
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    return like.new_full((), value if abs(value) <= torch.finfo(like.dtype).max else math.copysign(math.inf, value))


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.gradients)


def with_gradients(value: Tensor, gradients: Mapping[Any, Tensor]) -> Tensor:
    """`value`, a scalar, with gradients computed by hand: leaf -> matrix."""
    return _WithGradients.apply(value, tuple(gradients.values()), *gradients)


class _HessianRegularizer(torch.autograd.Function):
    """R(H) of H = F^T F through the smaller one of its Grams.

    The gradient to F is 2 F dR/dH; with `theta`, it is the preconditioned K^-1 grad_theta R = 2 theta dR/dH, in which K
    has cancelled. dR/dH is a function f(H) with f(0) = 0, so that F f(F^T F) = f(F F^T) F.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, theta: Tensor | None, f: Tensor, wide: bool, value: Scalar, slope: Tensor
    ) -> Tensor:
        ctx.save_for_backward(f, theta, slope)
        ctx.wide, ctx.dtype = wide, features.dtype
        return scalar(value, features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        f, theta, slope = ctx.saved_tensors
        if theta is None:
            gradient = slope @ f if ctx.wide else f @ slope
        else:
            gradient = theta.double() @ f.T @ slope @ f if ctx.wide else theta.double() @ slope
        gradient = gradient.mul_(2 * upstream).to(ctx.dtype)
        return (gradient, *[None] * 5) if theta is None else (None, gradient, *[None] * 4)


def _of_features(features: Tensor, theta: Tensor | None, slope_of: Slope) -> Tensor:
    f = features.detach().double()
    # the Gram that takes fewer operations: behind theta, the one of the samples needs a product more
    wide = len(f) < f.shape[1] if theta is None else 2 * len(f) < f.shape[1]
    found = slope_of(f @ f.mT if wide else f.mT @ f, divided=wide and theta is not None)
    return _HessianRegularizer.apply(features, theta, f, wide, *found)


def r_well_of_features(
    features: Tensor, theta: Tensor | None = None, rank: int | None = None, power: float = math.inf
) -> Tensor:
    """R_well,p(F^T F) for features F [N, D] of known rank k, by default D.

    Gradient to `features`; or, where `theta` [D_in, D] is given, the preconditioned gradient to theta,
    K^-1 grad_theta R_well = 2 theta dR/dH (docs/theory.md, section 3), and none to the features. See `r_well_slope`.
    """
    k = features.shape[1] if rank is None else rank
    return _of_features(features, theta, partial(r_well_slope, rank=k, power=power))


def r_ill_of_features(features: Tensor, rank: int, theta: Tensor | None = None) -> Tensor:
    """R_ill(F^T F) for features F [N, D] of known rank k; gradients as in `r_well_of_features`.

    `rank` may exceed the true rank, as in the released code, which takes k = D: sigma_k is then 0.
    Raises DegenerateSpectrum where the k eigenvalues are all equal.
    """
    return _of_features(features, theta, partial(r_ill_slope, rank=rank))


def _factor(f: Tensor) -> Tensor:
    """The R factor of features [N, D] with N > D, others as they are."""
    return torch.linalg.qr(f, mode="r").R if f.shape[0] > f.shape[1] else f


def _log_condition_number(factor: Tensor, rank: int, power: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The value of `log_condition_number`, its derivatives in log sigma_i^2 [k], sigma [k] and V [D, k]."""
    _, sigma, vh = svd(factor)
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
    def forward(ctx: Any, features: Tensor, f: Tensor, value: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(f, v, weights)
        ctx.dtype = features.dtype
        return value.to(features, non_blocking=True, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        f, v, weights = ctx.saved_tensors
        return (2 * upstream * ((f @ v) * weights) @ v.T).to(ctx.dtype), None, None, None, None


def log_condition_number(features: Tensor, rank: int, power: float = math.inf) -> Tensor:
    """log kappa(F^T F) = 2 (log sigma_1 - log sigma_k), differentiable in `features` [N, D] of known rank k.

    d sigma_i / dF = u_i v_i^T, which exists where sigma_1 and sigma_k are simple. With a finite `power` p it is
    log M_p(H) - log M_-p(H), M_p the power mean of the k non-zero eigenvalues of H: smooth, at most log kappa, and
    by no more than (2/p) log k below it.
    """
    features = features / power_of_two(features)  # or squares of sigma would leave the range of float64
    f = features.detach().double()
    value, slope, sigma, v = _log_condition_number(_factor(f).cpu(), rank, power)
    seen = slope.nonzero()[:, 0]
    pairs = (part.to(f.device) for part in (v[:, seen], slope[seen] / sigma[seen] ** 2))
    return _LogConditionNumber.apply(features, f, value, *pairs)


def log_authors_condition_number(features: Tensor, theta: Tensor | None = None) -> Tensor:
    """log((lambda_1 + r) / (lambda_D + r)) of H = F^T F, r = 1e-6: the released code's kappa, also of a singular H.

    Gradients as in `r_well_of_features`. Features [N, D] with N < D have lambda_D = 0.
    """
    return _of_features(features, theta, partial(_log_authors_slope, dim=features.shape[1]))


def _log_authors_slope(hessian: Tensor, dim: int, divided: bool = False) -> tuple[float, Tensor]:
    """The value and dR/dH = v_1 v_1^T / (lambda_1 + r) - v_D v_D^T / (lambda_D + r), a Slope."""
    near = hessian.cpu()
    _norm(near)
    largest, v = extreme_eigenpair(near, -1)
    v = v.to(hessian.device)
    slope = torch.outer(v, v * (1 / (largest + AUTHORS_RIDGE) / (largest if divided else 1)))
    smallest = 0.0
    if dim == len(hessian):
        smallest, u = extreme_eigenpair(near, -dim)
        u = u.to(hessian.device)
        if smallest > EPS * largest:  # a null direction is orthogonal to the features: its term is none
            slope.sub_(torch.outer(u, u * (1 / (smallest + AUTHORS_RIDGE) / (smallest if divided else 1))))
    return math.log((largest + AUTHORS_RIDGE) / (smallest + AUTHORS_RIDGE)), slope


def relative_log_condition_slope(features: Tensor, rank: int, power: float) -> tuple[Tensor, Tensor]:
    """`log_condition_number` and its relative gradient E [D, D]: features F (I + X) change it by <E, X>.

    E = 2 V diag(s) V^T with s_i the derivative in log sigma_i^2, at most 1. E does not grow as sigma_k vanishes, unlike
    the gradient in F, and steps F <- F (I - rate E) of a rate below 1/2 never meet the pole that log kappa has there.
    Both are on the device of the features.
    """
    found = _log_condition_number(_factor(features.double()).cpu(), rank, power)
    value, slope, _, v = (part.to(features.device) for part in found)
    return value, 2 * (v * slope) @ v.T
