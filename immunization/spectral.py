"""Spectra of feature matrices: rank, condition number, the regularizers R_well and R_ill and their exact gradients.

Pure functions in float64. Notation and equation numbers of arXiv 2505.23760: features F [N, D] with rows as samples,
Hessian of the l2 probe H = F^T F, kappa(H) = (sigma_1 / sigma_k)^2 with sigma the singular values of F and k its
numerical rank. kappa is always taken from F or its triangular factor, never from eigenvalues of H, which would lose
half of the digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

import numpy as np
import scipy.linalg
import torch
from scipy.linalg.blas import dtrmm
from scipy.linalg.lapack import dpotrf, dpotrs, dsyevr
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum

EPS = torch.finfo(torch.float64).eps
AUTHORS_RIDGE = 1e-6

LANCZOS = 256
"""In more dimensions Lanczos iterations find an extreme eigenpair of a matrix faster than a decomposition does."""

WIDE = 0.85
"""Rows of a feature matrix over its columns, below which the Gram of its rows takes fewer operations."""

Precondition = Literal["cancelled", "ridge", "pinv", "none"]


def _as_batches(features: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    return (features,) if isinstance(features, Tensor) else features


def triangular_factor(features: Tensor | Iterable[Tensor]) -> tuple[Tensor, int]:
    """Fold features into one R with R^T R = F^T F (TSQR), and count their rows.

    `features` is one matrix [N, D] or any iterable of batches [n_i, D]; memory is O(D^2) plus one batch. Returns R
    [min(N, D), D] in float64 and N. Batches are gathered to D rows before each QR, so that its cost stays O(N D^2).
    """
    pending: list[Tensor] = []
    factor, rows, waiting = None, 0, 0
    for batch in _as_batches(features):
        if not torch.isfinite(batch).all():
            raise DegenerateSpectrum("the features hold NaN or infinite values; their spectrum does not exist")
        pending.append(batch.detach().double())
        rows, waiting = rows + len(batch), waiting + len(batch)
        if waiting >= batch.shape[1]:
            factor = torch.linalg.qr(torch.cat(pending if factor is None else [factor, *pending]), mode="r").R
            pending, waiting = [], 0
    if pending:
        factor = torch.linalg.qr(torch.cat(pending if factor is None else [factor, *pending]), mode="r").R
    if factor is None:
        raise DegenerateSpectrum("no features were given: the matrix has no rows")
    return factor, rows


def numerical_rank(sigma: Tensor, shape: tuple[int, int], eps: float = EPS) -> int:
    """Number of singular values above sigma_1 * max(shape) * eps, numpy's convention (0 for a zero matrix)."""
    return int((sigma > sigma.max() * max(shape) * eps).sum()) if sigma.numel() and sigma.max() > 0 else 0


def singular_values(features: Tensor | Iterable[Tensor]) -> Tensor:
    """All min(N, D) singular values, descending, of features given whole or in batches."""
    return torch.linalg.svdvals(triangular_factor(features)[0])


def compress(features: Tensor | Iterable[Tensor], eps: float = EPS) -> Tensor:
    """Smallest matrix with the same Gram: [k, D] of k = rank rows with C^T C = F^T F up to the rank tolerance."""
    factor, rows = triangular_factor(features)
    _, sigma, vh = torch.linalg.svd(factor, full_matrices=False)
    k = numerical_rank(sigma, (rows, factor.shape[1]), eps)
    return sigma[:k, None] * vh[:k]


def svd(matrix: Tensor, full_matrices: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """U, sigma and V^T of `matrix` [m, D], as `torch.linalg.svd` has them, also where LAPACK's fast driver gives up.

    Divide and conquer (gesdd) fails on some matrices with many equal singular values, which maps of a step-shaped
    spectrum have; gesvd, several times slower, does not. Raises LinAlgError for NaN and infinite values.
    """
    try:
        return torch.linalg.svd(matrix, full_matrices=full_matrices)
    except torch.linalg.LinAlgError:
        if not torch.isfinite(matrix).all():
            raise
        parts = scipy.linalg.svd(matrix.cpu().numpy(), full_matrices=full_matrices, lapack_driver="gesvd")
        return tuple(torch.from_numpy(part).to(matrix) for part in parts)


def dimensions_outside(root: Tensor, other: Tensor, rows: int, eps: float = EPS) -> int:
    """Dimensions of the row space of `other` [m, D] outside of that of `root` [k, D], which has full rank k.

    That is the rank of both together minus k; `rows`, for which both stand, and `eps` set the tolerance.
    """
    k, width = root.shape
    if k == width:
        return 0
    sigma = torch.linalg.svdvals(torch.cat([root, other]).double())
    return max(0, numerical_rank(sigma, (rows, width), eps) - k)


def condition_number(
    features: Tensor | Iterable[Tensor],
    rank: int | None = None,
    conditioning: Literal["rank", "authors"] = "rank",
    eps: float | None = None,
) -> float:
    """kappa of the Hessian F^T F of linear probing on `features` ([N, D], or an iterable of batches).

    `conditioning="rank"`: (sigma_1 / sigma_k)^2, k the numerical rank, or `rank` where it is known beforehand (an
    invertible linear extractor keeps the rank of its inputs); `eps` sets the rank tolerance, by default float32's where
    features are stored in less than float64. `conditioning="authors"`: the released code's eigenvalues of
    F^T F + 1e-6 I, largest over smallest; for rank-deficient features that is sigma_1^2 / 1e-6.
    Raises DegenerateSpectrum for rank 0 or non-finite features.
    """
    if conditioning == "authors":
        return authors_condition_number(features)
    if conditioning != "rank":
        raise ValueError(f"conditioning must be 'rank' or 'authors', not {conditioning!r}")
    dtypes: set[torch.dtype] = set()

    def watched() -> Iterator[Tensor]:
        for batch in _as_batches(features):
            dtypes.add(batch.dtype)
            yield batch

    factor, rows = triangular_factor(watched())
    if eps is None:
        coarse = any(dtype.is_floating_point and dtype != torch.float64 for dtype in dtypes)
        eps = torch.finfo(torch.float32).eps if coarse else EPS
    sigma = torch.linalg.svdvals(factor)
    return condition_number_of(sigma, rank or numerical_rank(sigma, (rows, factor.shape[1]), eps))


def condition_number_of(sigma: Tensor, rank: int) -> float:
    """(sigma_1 / sigma_rank)^2 of descending singular values; infinite where sigma_rank is 0 or it overflows."""
    if not rank or not sigma[0] > 0:
        raise DegenerateSpectrum("the features are all zero (rank 0): they have no condition number")
    return (sigma[0] / sigma[rank - 1]).square().item()


def authors_condition_number(features: Tensor | Iterable[Tensor]) -> float:
    """The released code's kappa: largest over smallest eigenvalue of F^T F + 1e-6 I.

    The release leaves out eigenvalues that come out at 1e-6 or less. For a null one that is a matter of rounding, half
    of the time each way, on every machine another; here it always counts, as 1e-6.
    """
    factor, _ = triangular_factor(features)
    eigenvalues = torch.linalg.svdvals(factor).square()
    if not torch.isfinite(eigenvalues).all():
        raise DegenerateSpectrum("the features are too large: F^T F overflows, and has no eigenvalues")
    if not eigenvalues.sum() > 0:
        raise DegenerateSpectrum("the features are all zero: no eigenvalue of F^T F + 1e-6 I is above 1e-6")
    smallest = eigenvalues[-1] if len(eigenvalues) == factor.shape[1] else 0.0
    return ((eigenvalues[0] + AUTHORS_RIDGE) / (smallest + AUTHORS_RIDGE)).item()


def rir(
    harmful: Tensor, harmful_baseline: Tensor, primary: Tensor, primary_baseline: Tensor, **options: object
) -> dict[str, float]:
    """Relative immunization ratio (Eq. 15/17) of features after and before: `rir`, `ratio_harmful`, `ratio_primary`.

    Each argument is a feature matrix [N, D] or an iterable of batches; `options` go to `condition_number`.
    """
    ratio_harmful = condition_number(harmful, **options) / condition_number(harmful_baseline, **options)
    ratio_primary = condition_number(primary, **options) / condition_number(primary_baseline, **options)
    return {"rir": ratio_harmful / ratio_primary, "ratio_harmful": ratio_harmful, "ratio_primary": ratio_primary}


# --- Regularizers of a general matrix S (paper Sec. 4.1) ------------------------------------------------------------


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


# --- The same regularizers of a Hessian H = F^T F, differentiated to the features or to theta ------------------------


def extreme_eigenpair(gram: Tensor, index: int) -> tuple[float, Tensor]:
    """Eigenvalue (clamped at 0) and unit eigenvector of a symmetric matrix; `index` -1 is the largest, -k the k-th.

    No warm start from the pair of the step before: see docs/performance.md.
    """
    if gram.device.type != "cpu":
        eigenvalues, eigenvectors = torch.linalg.eigh(gram)
        return max(eigenvalues[index].item(), 0.0), eigenvectors[:, index]
    array, pair = gram.numpy(), None
    if len(gram) > LANCZOS and index in (-1, -len(gram)):
        pair = _lanczos(array) if index == -1 else _inverse_lanczos(array)
    values, vectors = pair or _dsyevr(array, index)
    return max(float(values[0]), 0.0), torch.from_numpy(vectors)[:, 0]


def _lanczos(matrix: np.ndarray | LinearOperator) -> tuple[np.ndarray, np.ndarray] | None:
    """The largest pair by ARPACK, to machine precision and from the same vector always; None where it is slow."""
    try:
        start = np.random.default_rng(0).standard_normal(matrix.shape[0])
        return eigsh(matrix, 1, which="LA", v0=start, maxiter=10)
    except ArpackError:
        return None


def _inverse_lanczos(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The smallest pair as the largest of the inverse; None where Cholesky finds the matrix singular."""
    factor, failed = dpotrf(gram, lower=0, clean=0)
    if failed:
        return None
    solve = LinearOperator(gram.shape, matvec=lambda x: dpotrs(factor, x, lower=0)[0], dtype=gram.dtype)
    pair = _lanczos(solve)
    return pair and (1 / pair[0], pair[1])


def _dsyevr(gram: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The one pair that is wanted by LAPACK, in half the time of all of them."""
    place = len(gram) + index + 1
    values, vectors, *_, failed = dsyevr(gram.T, range="I", il=place, iu=place, lower=1, lwork=33 * len(gram))
    if failed:
        raise torch.linalg.LinAlgError(f"LAPACK finds no eigenpair of the Gram matrix {gram.shape}")
    return values, vectors


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


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, gradients: tuple[Tensor, ...], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream[..., None, None] * gradient for gradient in ctx.gradients)


def known(value: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    """`value`, a scalar or one a member of a stack, with gradients computed by hand: leaf -> matrix or matrices."""
    return _Known.apply(value, tuple(gradients.values()), *gradients)


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


# --- Preconditioning of gradients in theta ---------------------------------------------------------------------------


class _PreconditionedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, theta: Tensor, mode: Precondition, ridge: float, side: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = mode, ridge, side
        return x @ theta

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[None, Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        mode, ridge, side = ctx.options
        if mode == "pinv":
            return None, torch.linalg.pinv(x) @ upstream, None, None, None
        dtype, x, upstream = upstream.dtype, x.double(), upstream.double()
        if side == "input" and len(x) < x.shape[1]:  # push-through: (X^T X + r I)^-1 X^T = X^T (X X^T + r I)^-1
            gradient = x.T @ torch.cholesky_solve(upstream, _cholesky(x @ x.T, ridge))
        else:
            gradient, factor = x.T @ upstream, _cholesky(x.T @ x, ridge)
            gradient = (
                torch.cholesky_solve(gradient, factor)
                if side == "input"
                else torch.cholesky_solve(gradient.T, factor).T
            )
        return None, gradient.to(dtype), None, None, None


def _cholesky(gram: Tensor, ridge: float) -> Tensor:
    """Lower factor of gram + ridge I (in place); DegenerateSpectrum where that is singular up to rounding."""
    gram.diagonal().add_(ridge)
    factor, info = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal().square()
    if info or not pivots.min() > len(gram) * EPS * pivots.max():
        raise DegenerateSpectrum(
            f"K + ridge I cannot be inverted: K is singular and method.ridge={ridge:g} too small; raise method.ridge, "
            "or set method.precondition=pinv"
        )
    return factor


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
    Backward raises DegenerateSpectrum where K + ridge I is singular.
    """
    if mode == "cancelled":
        raise ValueError("mode='cancelled' needs the regularizer's own gradient: give theta to r_*_of_features instead")
    if mode == "pinv" and side == "output":
        raise ValueError("side='output' is the released code's ridge solve; it has no pseudo-inverse")
    if mode == "none":
        return x @ theta
    return _PreconditionedProduct.apply(x, theta, mode, ridge, side)
