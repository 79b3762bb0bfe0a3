"""Spectra of feature matrices: rank, condition number, the regularizers R_well and R_ill and their exact gradients.

Pure functions in float64. Notation and equation numbers of arXiv 2505.23760: features F [N, D] with rows as samples,
Hessian of the l2 probe H = F^T F, kappa(H) = (sigma_1 / sigma_k)^2 with sigma the singular values of F and k its
numerical rank. kappa is always taken from F or its triangular factor, never from eigenvalues of H, which would lose
half of the digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import scipy.linalg
import torch
from scipy.linalg.lapack import dsyevr
from scipy.sparse.linalg import ArpackError, eigsh
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum

EPS = torch.finfo(torch.float64).eps
AUTHORS_RIDGE = 1e-6

LANCZOS = 256
"""In more dimensions Lanczos iterations find the largest eigenpair of a matrix faster than a decomposition does."""

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
    def forward(ctx, s: Tensor) -> Tensor:
        u, sigma, vh = torch.linalg.svd(s, full_matrices=False)
        ctx.save_for_backward(s, u[:, 0], sigma[0], vh[0])
        return sigma[0] ** 2 / 2 - sigma.square().sum() / (2 * min(s.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> Tensor:
        s, u, sigma, v = ctx.saved_tensors
        return upstream * (sigma * torch.outer(u, v) - s / min(s.shape))


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


def r_well(s: Tensor) -> Tensor:
    """R_well(S) = ||S||_2^2 / 2 - ||S||_F^2 / (2p), p = min(S.shape); gradient sigma_1 u_1 v_1^T - S / p (Eq. 3)."""
    return _RWell.apply(s)


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
    values, vectors = (len(gram) > LANCZOS and index == -1 and _lanczos(gram.numpy())) or _dsyevr(gram.numpy(), index)
    return max(float(values[0]), 0.0), torch.from_numpy(vectors)[:, 0]


def _lanczos(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The largest pair by ARPACK, to machine precision and from the same vector always; None where it is slow."""
    try:
        start = np.random.default_rng(0).standard_normal(len(gram))
        return eigsh(gram, 1, which="LA", v0=start, maxiter=10)
    except ArpackError:
        return None


def _dsyevr(gram: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The one pair that is wanted by LAPACK, in half the time of all of them."""
    place = len(gram) + index + 1
    values, vectors, *_, failed = dsyevr(gram.T, range="I", il=place, iu=place, lower=1, lwork=33 * len(gram))
    if failed:
        raise torch.linalg.LinAlgError(f"LAPACK finds no eigenpair of the Gram matrix {gram.shape}")
    return values, vectors


class _Derivative(NamedTuple):
    """R(H) and its derivative dR/dH = c (a v v^T - b H) by one of the two Grams of the features."""

    value: float
    c: float
    a: float
    v: Tensor
    b: float


def _derivative(gram: Tensor, width: int, rank: int | None, norm: float | None = None) -> _Derivative:
    """Of R_ill of known rank, or of R_well where `rank` is None; `gram` is F^T F or F F^T, `width` the D of F.

    R_well: a = sigma_1(H), b = 1/D, c = 1. R_ill: a = sigma_k(H), b = 1/k, c = 1/denominator^2. Scalars are Python's:
    at these sizes an operation on a tensor costs as much as a tenth of a matrix product.
    """
    norm = torch.linalg.vector_norm(gram).item() if norm is None else norm
    square = norm * norm
    if not math.isfinite(square):
        raise torch.linalg.LinAlgError("the Hessian of the features holds NaN, infinite or overflowing values")
    if rank is None:
        a, v = extreme_eigenpair(gram, -1)
        return _Derivative(a * a / 2 - square / (2 * width), 1.0, a, v, 1 / width)
    if rank > len(gram):  # fewer rows than `rank`: sigma_k is exactly 0
        a, v = 0.0, gram.new_zeros(len(gram))
    else:
        a, v = extreme_eigenpair(gram, -rank)
    if not square > 0:
        raise DegenerateSpectrum("the features are all zero (rank 0): R_ill of their Hessian does not exist")
    denominator = square / (2 * rank) - a * a / 2
    if _flat(denominator, square):
        raise DegenerateSpectrum(
            f"R_ill is infinite: all {rank} non-zero eigenvalues of the harmful Hessian are equal (kappa = 1); "
            "start from another theta or leave R_ill out"
        )
    return _Derivative(1 / denominator, 1 / denominator**2, a, v, 1 / rank)


def hessian_slope(
    hessian: Tensor, rank: int | Sequence[int] | None = None, weight: float | Tensor = 1.0
) -> tuple[float | Tensor, Tensor]:
    """R(H) and `weight` dR/dH [D, D] of a Hessian [D, D] in float64, which is overwritten by the latter.

    R_ill for a known `rank`, R_well without one. The gradient of R(theta^T K theta) is 2 K theta dR/dH, and times K^-1
    it is 2 theta dR/dH (design 2.2). Errors as in `r_ill_of_features`. Of a stack [B, D, D], with a rank and a weight
    each, R(H) is [B], to the same bits.
    """
    if hessian.dim() == 3:
        norms = torch.linalg.vector_norm(hessian, dim=(1, 2)).tolist()
        each = zip(hessian, norms, rank or [None] * len(norms), strict=True)
        derivatives = [_derivative(one, len(one), k, norm) for one, norm, k in each]
        weights = weight.tolist()
        factors = [-w * of.c * of.b for w, of in zip(weights, derivatives, strict=True)]
        hessian.mul_(hessian.new_tensor(factors)[:, None, None])
        for one, w, of in zip(hessian, weights, derivatives, strict=True):
            one.addr_(of.v, of.v, alpha=w * of.c * of.a)
        return hessian.new_tensor([of.value for of in derivatives]), hessian
    value, c, a, v, b = _derivative(hessian, len(hessian), rank)
    return value, hessian.mul_(-weight * c * b).addr_(v, v, alpha=weight * c * a)


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
    """R(H) of H = F^T F through one of the two Grams.

    The gradient to F is 2 F dR/dH; with `theta`, it is the preconditioned K^-1 grad_theta R = 2 theta dR/dH, in which K
    has cancelled.
    """

    @staticmethod
    def forward(ctx, features: Tensor, theta: Tensor | None, rank: int | None) -> Tensor:
        f = features.detach().double()
        # the Gram that takes fewer operations: behind theta, the one of the samples needs a product more
        wide = len(f) < f.shape[1] if theta is None else 2 * len(f) < f.shape[1]
        gram = f @ f.T if wide else f.T @ f
        value, c, a, v, b = _derivative(gram, f.shape[1], rank)
        # a v v^T = w w^T with w = sqrt(a) v; for a wide F, w = F^T u needs no division by a vanishing sigma_k
        w = f.T @ v if wide else math.sqrt(a) * v
        ctx.save_for_backward(f, theta, gram, w)
        ctx.wide, ctx.factor, ctx.share, ctx.dtype = wide, 2 * c, b, features.dtype
        return features.new_tensor(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        f, theta, gram, w = ctx.saved_tensors
        left = f if theta is None else theta.double()
        left_h = ((gram if theta is None else left @ f.T) @ f) if ctx.wide else left @ gram
        factor = ctx.factor * upstream.item()
        gradient = left_h.mul_(-factor * ctx.share).addr_(left @ w, w, alpha=factor).to(ctx.dtype)
        return (gradient, None, None) if theta is None else (None, gradient, None)


def r_well_of_features(features: Tensor, theta: Tensor | None = None) -> Tensor:
    """R_well(F^T F) for features F [N, D], p = D.

    Gradient to `features`; or, where `theta` [D_in, D] is given, the preconditioned gradient to theta,
    K^-1 grad_theta R_well = 2 theta (sigma_1 v_1 v_1^T - H/D), and none to the features (design 2.2).
    """
    return _HessianRegularizer.apply(features, theta, None)


def r_ill_of_features(features: Tensor, rank: int, theta: Tensor | None = None) -> Tensor:
    """R_ill(F^T F) for features F [N, D] of known rank k; gradients as in `r_well_of_features`.

    `rank` may exceed the true rank, as in the released code, which takes k = D: sigma_k is then 0.
    Raises DegenerateSpectrum where the k eigenvalues are all equal.
    """
    return _HessianRegularizer.apply(features, theta, rank)


class _LogConditionNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features: Tensor, rank: int) -> Tensor:
        f = features.detach().double()
        factor = torch.linalg.qr(f, mode="r").R if f.shape[0] > f.shape[1] else f
        _, sigma, vh = torch.linalg.svd(factor, full_matrices=False)
        if not sigma[rank - 1] > 0:
            raise DegenerateSpectrum(
                f"log kappa is infinite: the features have fewer than {rank} non-zero singular values"
            )
        ctx.save_for_backward(f, sigma[[0, rank - 1]], vh[[0, rank - 1]])
        ctx.dtype = features.dtype
        return 2 * (sigma[0].log() - sigma[rank - 1].log()).to(features.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None]:
        f, sigma, vh = ctx.saved_tensors
        weight = torch.stack([sigma[0] ** -2, -(sigma[1] ** -2)])
        return (2 * upstream * ((f @ vh.T) * weight) @ vh).to(ctx.dtype), None


def log_condition_number(features: Tensor, rank: int) -> Tensor:
    """log kappa(F^T F) = 2 (log sigma_1 - log sigma_k), differentiable in `features` [N, D] of known rank k.

    d sigma_i / dF = u_i v_i^T, which exists where sigma_1 and sigma_k are simple.
    """
    return _LogConditionNumber.apply(features, rank)


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
