"""The regularizers of the paper, their gradients, and these multiplied by K^-1 (Alg. 1).

H = F^T F is the Hessian of a linear probe on features F, and K = X^T X that of a probe on the inputs X.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum
from immunization.theory.spectrum import AUTHORS_RIDGE, EPS, extreme_eigenpair, power_of_two, svd

Precondition = Literal["cancelled", "ridge", "pinv", "none"]
Slopes = Callable[[Tensor], Sequence[Tensor]]
"""The gradients in some leaves, by the gradient in what was made of them."""

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
        norm, total = _finite(norm.item()), total.item()
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
    """||H||_F; raises LinAlgError where its square is not finite."""
    return _finite(torch.linalg.vector_norm(hessian).item())


def _finite(norm: float) -> float:
    """The norm of a Hessian; raises LinAlgError where its square is not finite."""
    if not math.isfinite(norm * norm):
        raise torch.linalg.LinAlgError("the Hessian of the features holds NaN, infinite or overflowing values")
    return norm


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


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: Slopes, *leaves: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.slopes(upstream)


def by_hand(value: Tensor, slopes: Slopes, *leaves: Tensor) -> Tensor:
    """`value`, computed without a graph, whose gradients in `leaves` are `slopes` of the gradient in it."""
    return _ByHand.apply(value, slopes, *leaves)


def with_gradients(value: Tensor, gradients: Mapping[Any, Tensor]) -> Tensor:
    """`value`, a scalar, with gradients computed by hand: leaf -> matrix."""
    return by_hand(value, lambda upstream: [upstream * gradient for gradient in gradients.values()], *gradients)


def _each(slope_of: Slope, stack: Tensor, divided: bool) -> tuple[Tensor, Tensor]:
    """R [J] and dR/dH [J, n, n] of a stack of matrices, NaN where one's do not exist."""
    values, slopes = [], []
    for hessian in stack:
        try:
            value, slope = slope_of(hessian, divided=divided)
        except (DegenerateSpectrum, torch.linalg.LinAlgError):
            value, slope = math.nan, torch.zeros_like(hessian)
        values.append(scalar(value, hessian))
        slopes.append(slope)
    return torch.stack(values), torch.stack(slopes)


def _of_features(features: Tensor, theta: Tensor | None, slope_of: Slope) -> Tensor:
    """R(H) of H = F^T F through the smaller one of its Grams; of stacked features [J, N, D] each, [J].

    The gradient in F is 2 F dR/dH; with `theta`, it is the preconditioned K^-1 grad_theta R = 2 theta dR/dH, in which K
    has canceled. dR/dH is a function f(H) with f(0) = 0, so that F f(F^T F) = f(F F^T) F.
    """
    f = features.detach().double()
    # the Gram that takes fewer operations: behind theta, the one of the samples needs a product more
    rows, columns = f.shape[-2:]
    wide = rows < columns if theta is None else 2 * rows < columns
    gram, divided = f @ f.mT if wide else f.mT @ f, wide and theta is not None
    value, slope = slope_of(gram, divided=divided) if f.ndim == 2 else _each(slope_of, gram, divided)

    def gradient(upstream: Tensor) -> list[Tensor]:
        if theta is None:
            product = slope @ f if wide else f @ slope
        else:
            start = theta.detach().double()
            product = start @ f.mT @ slope @ f if wide else start @ slope
        return [product.mul_(2 * upstream[..., None, None]).to(features.dtype)]

    return by_hand(scalar(value, features), gradient, features if theta is None else theta)


def r_well_of_features(
    features: Tensor, theta: Tensor | None = None, rank: int | None = None, power: float = math.inf
) -> Tensor:
    """R_well,p(F^T F) for features F [N, D] of known rank k, by default D; [J] for features [J, N, D].

    Gradient to `features`; or, where `theta` [D_in, D] is given, the preconditioned gradient to theta,
    K^-1 grad_theta R_well = 2 theta dR/dH (docs/theory.md, section 3), and none to the features. See `r_well_slope`.
    """
    k = features.shape[-1] if rank is None else rank
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
    v, weights = (part.to(f.device) for part in (v[:, seen], slope[seen] / sigma[seen] ** 2))

    def gradient(upstream: Tensor) -> list[Tensor]:
        return [(2 * upstream * ((f @ v) * weights) @ v.T).to(features.dtype)]

    return by_hand(value.to(features, non_blocking=True), gradient, features)


def log_authors_condition_number(features: Tensor, theta: Tensor | None = None) -> Tensor:
    """log((lambda_1 + r) / (lambda_D + r)) of H = F^T F, r = 1e-6: the released code's kappa, also of a singular H.

    Gradients as in `r_well_of_features`. Features [N, D] with N < D have lambda_D = 0.
    """
    return _of_features(features, theta, partial(_log_authors_slope, dim=features.shape[1]))


def _log_authors_slope(hessian: Tensor, dim: int, divided: bool = False) -> tuple[float, Tensor]:
    """The value and dR/dH = v_1 v_1^T / (lambda_1 + r) - v_D v_D^T / (lambda_D + r), a Slope."""
    near = hessian.cpu()
    _norm(near)  # raises
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
    on_cpu = _log_condition_number(_factor(features.double()).cpu(), rank, power)
    value, slope, _, v = (part.to(features.device) for part in on_cpu)
    return value, 2 * (v * slope) @ v.T


class _Ridge:
    """U -> (K + ridge I)^-1 X^T U, or with `side="output"` X^T U (K + ridge I)^-1, through the smaller Gram of X."""

    def __init__(self, x: Tensor, ridge: float, side: str) -> None:
        self.x, self.ridge, self.output = x.double(), ridge, side == "output"
        self._factorize((2 if self.output else 1) * len(x) < x.shape[1])
        shortcut = self.few and self.output
        if shortcut and not ridge > x.shape[1] * EPS * self.x.square().sum().item():  # K + ridge I is near singular
            self._factorize(False)
        if self.singular:
            raise DegenerateSpectrum(
                f"K + ridge I cannot be inverted: K is singular and ridge={ridge:g} too small; raise ridge, or set "
                "precondition=pinv"
            )

    def _factorize(self, few: bool) -> None:
        self.few = few
        gram = self.x @ self.x.T if few else self.x.T @ self.x
        gram.diagonal().add_(self.ridge)
        self.factor, info = torch.linalg.cholesky_ex(gram)
        pivots = self.factor.diagonal().square()
        self.singular = (info > 0) | ~(pivots.min() > len(gram) * EPS * pivots.max())

    def __call__(self, upstream: Tensor) -> Tensor:
        x = self.x
        if self.few and not self.output:  # push-through: (X^T X + r I)^-1 X^T = X^T (X X^T + r I)^-1
            return x.T @ torch.cholesky_solve(upstream, self.factor)
        if self.few:  # Woodbury: U (K + r I)^-1 = (U - U X^T (X X^T + r I)^-1 X) / r
            inside = torch.cholesky_solve(x @ upstream.T, self.factor)
            return x.T @ torch.addmm(upstream, inside.T, x, alpha=-1).div_(self.ridge)
        gradient = x.T @ upstream
        if self.output:
            return torch.cholesky_solve(gradient.T, self.factor).T
        return torch.cholesky_solve(gradient, self.factor)


def preconditioned_product(
    x: Tensor,
    theta: Tensor,
    mode: Precondition = "ridge",
    ridge: float = 1.0,
    side: Literal["input", "output"] = "input",
) -> Tensor:
    """x @ theta, whose gradient in theta [D_in, D_out] is multiplied by the inverse of K = x^T x on the way back.

    `mode="ridge"`: (K + ridge I)^-1; `"pinv"`: the pseudo-inverse; `"none"`: the plain gradient. `side="input"` is the
    right one, K^-1 grad; `side="output"` (of ridge) is the released code's grad K^-1. `x` receives no gradient.
    Raises DegenerateSpectrum where K + ridge I is singular up to rounding, but for `side="input"`, ridge 0 and fewer
    rows than columns: there, of independent rows, this is the pseudo-inverse.
    """
    if mode == "cancelled":
        raise ValueError("mode='cancelled' needs the regularizer's own gradient: give theta to r_*_of_features instead")
    if mode == "pinv" and side == "output":
        raise ValueError("side='output' is the released code's ridge solve; it has no pseudo-inverse")
    if mode == "none":
        return x @ theta
    product = x.detach() @ theta.detach()
    if mode == "pinv":
        return by_hand(product, lambda upstream: [torch.linalg.pinv(x) @ upstream], theta)
    inverse = _Ridge(x, ridge, side)
    return by_hand(product, lambda upstream: [inverse(upstream.double()).to(upstream.dtype)], theta)
