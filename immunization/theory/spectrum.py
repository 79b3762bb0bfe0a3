"""Spectra of feature matrices: singular values, rank and the condition number of the Hessian of a linear probe.

Notation of arXiv 2505.23760: features F [N, D] one row an input, Hessian of the l2 probe H = F^T F, and
kappa(H) = (sigma_1 / sigma_k)^2 with sigma the singular values of F and k its numerical rank. kappa is always taken
from F or its triangular factor, never from eigenvalues of H, which would lose half of the digits.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal

import numpy as np
import scipy.linalg
import torch
from scipy.linalg.lapack import dsyevr, dsyevr_lwork
from torch import Tensor

from immunization.errors import DataError, DegenerateSpectrum

EPS, EPS32 = (torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32))
AUTHORS_RIDGE = 1e-6
CACHED = 2**17
"""Entries of a block that a QR decomposition works on: of many rows, it waits for memory most of the time."""
NEAR = 3
"""A singular value within so many times of the rank tolerance, above or below, may count or not."""


@contextmanager
def features_of(owner: str) -> Iterator[None]:
    """Inside, a DegenerateSpectrum says whose features it is about."""
    try:
        yield
    except DegenerateSpectrum as error:
        raise DegenerateSpectrum(f"{owner}: {error}; check the weights and the data") from error


Features = Tensor | np.ndarray | Iterable[Any]
"""A matrix [N, D] of torch or NumPy, or an iterable of batches of its rows; of batches (x, y) of a loader, x counts."""


def _as_batches(features: Features) -> Iterator[Any]:
    """The batches as tensors; raises DataError for what has none, and leaves what is no matrix to the caller."""
    if not isinstance(features, Iterable):
        raise DataError(f"features must be a tensor [N, D], or batches of its rows, not {type(features).__name__}")
    for batch in (features,) if hasattr(features, "__array__") else features:
        rows = batch[0] if isinstance(batch, Sequence) and len(batch) and hasattr(batch[0], "__array__") else batch
        if not isinstance(rows, Tensor) and hasattr(rows, "__array__"):
            try:
                rows = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
            except TypeError as error:
                raise DataError(f"features must be numbers: {' '.join(str(error).split())}") from error
        yield rows


def triangular_factor(features: Features) -> tuple[Tensor, int]:
    """Fold features into one R with R^T R = F^T F (TSQR), and count their rows.

    `features` is one matrix [N, D] or any iterable of batches [n_i, D]; memory is O(D^2) plus one batch. Returns R
    [min(N, D), D] in float64 and N. Batches are gathered to D rows before each QR, so that its cost stays O(N D^2).
    Raises DataError for what is no matrix.
    """
    pending: list[Tensor] = []
    rows = waiting = 0
    for batch in _as_batches(features):
        if not isinstance(batch, Tensor) or batch.ndim != 2:
            given = f"a tensor {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise DataError(f"features must be a tensor [N, D], or batches of its rows, not {given}")
        if batch.is_complex():
            raise DataError("features must be real numbers, not complex ones")
        # a sum takes a tenth of the time; that of large finite numbers may be infinite, too
        if not torch.isfinite(batch.sum()) and not torch.isfinite(batch).all():
            raise DegenerateSpectrum("the features hold NaN or infinite values; their spectrum does not exist")
        if pending and batch.shape[1] != pending[0].shape[1]:
            raise DataError(
                f"batches of features must have one width: one has {batch.shape[1]} columns, those before "
                f"have {pending[0].shape[1]}"
            )
        for block in _blocks(batch.detach()):
            pending.append(block.double())
            rows, waiting = rows + len(block), waiting + len(block)
            if waiting >= batch.shape[1]:
                pending, waiting = [torch.linalg.qr(torch.cat(pending), mode="r").R], 0
    if not pending:
        raise DegenerateSpectrum("no features were given: the matrix has no rows")
    return torch.linalg.qr(torch.cat(pending), mode="r").R if waiting or len(pending) > 1 else pending[0], rows


def _blocks(batch: Tensor) -> Sequence[Tensor]:
    """A batch [n, D] in blocks of `CACHED` entries where that is many more rows than D; else whole."""
    rows = CACHED // max(1, batch.shape[1])
    return batch.split(rows) if 16 * batch.shape[1] <= rows < len(batch) else (batch,)


def rank_tolerance(shape: Sequence[int], eps: float = EPS) -> float:
    """Singular values of a matrix of this `shape` are noise up to this share of the largest.

    `eps` is the relative rounding of its entries (`eps_of`). For float64's this is numpy's max(N, D) eps. Coarser
    entries were rounded once, which moves the matrix by at most eps / 2 of its Frobenius norm, so its singular values
    by at most sqrt(min(N, D)) eps / 2 of the largest: nothing grows with the rows. Independent rounding errors move
    them by 0.2 eps at any N and D; those of nets in float32, by up to half of the tolerance. For entries coarser than
    float32's it is `eps`, above independent errors: the bound on all errors would leave little of 16 bits.
    """
    return max(max(shape) * EPS, min(shape) ** 0.5 * min(eps, EPS32), eps)


def numerical_rank(sigma: Tensor, shape: Sequence[int], eps: float = EPS) -> int:
    """Number of singular values above sigma_1 * `rank_tolerance` (0 for a zero matrix)."""
    return int((sigma > sigma.max() * rank_tolerance(shape, eps)).sum()) if sigma.numel() and sigma.max() > 0 else 0


def is_near(sigma: Tensor, tolerance: float) -> bool:
    """Whether some of the descending singular values lie within `NEAR` times of `tolerance` sigma_1."""
    relative = sigma / (sigma[0] * tolerance)
    return bool(((relative > 1 / NEAR) & (relative < NEAR)).any())


def singular_values(features: Tensor | Iterable[Tensor]) -> Tensor:
    """All min(N, D) singular values, descending, of features given whole or in batches."""
    return torch.linalg.svdvals(triangular_factor(features)[0])


def compress(features: Tensor | Iterable[Tensor], eps: float = EPS) -> Tensor:
    """Smallest matrix with the same Gram: [k, D] of k = rank rows with C^T C = F^T F up to the rank tolerance."""
    return compressed(features, eps)[0]


def compressed(features: Tensor | Iterable[Tensor], eps: float = EPS) -> tuple[Tensor, Tensor]:
    """`compress`, and all singular values [min(N, D)], descending."""
    factor, rows = triangular_factor(features)
    _, sigma, vh = svd(factor)
    k = numerical_rank(sigma, (rows, factor.shape[1]), eps)
    return sigma[:k, None] * vh[:k], sigma


def svd(matrix: Tensor, full_matrices: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """U, sigma and V^T of `matrix` [..., m, D], as `torch.linalg.svd` has them, also where LAPACK's fast driver fails.

    Divide and conquer (gesdd) fails on some matrices with many equal singular values, which maps of a step-shaped
    spectrum have; gesvd, several times slower, does not. Raises LinAlgError for NaN and infinite values.
    """
    try:
        return torch.linalg.svd(matrix, full_matrices=full_matrices)
    except torch.linalg.LinAlgError:
        if not torch.isfinite(matrix).all():
            raise
        if matrix.ndim > 2:
            parts = [svd(own, full_matrices) for own in matrix.flatten(0, -3)]
            u, sigma, vh = (torch.stack(part).unflatten(0, matrix.shape[:-2]) for part in zip(*parts, strict=True))
            return u, sigma, vh
        u, sigma, vh = scipy.linalg.svd(matrix.cpu().numpy(), full_matrices=full_matrices, lapack_driver="gesvd")
        return torch.from_numpy(u).to(matrix), torch.from_numpy(sigma).to(matrix), torch.from_numpy(vh).to(matrix)


def extreme_eigenpair(gram: Tensor, index: int) -> tuple[float, Tensor]:
    """Eigenvalue (clamped at 0) and unit eigenvector of a symmetric `gram` on the CPU; `index` -1 is the largest.

    Steps of a GPU take it on the CPU, too: one pair takes less there than the GPU's whole decomposition. Raises
    LinAlgError where LAPACK does not converge.
    """
    place = len(gram) + index + 1
    work, integers, _ = dsyevr_lwork(len(gram), lower=1)
    options = {"range": "I", "il": place, "iu": place, "lower": 1, "lwork": int(work), "liwork": integers}
    values, vectors, _, _, info = dsyevr(gram.numpy(), **options)  # by scipy.linalg.eigh it takes 1.3 times as long
    if info:
        raise torch.linalg.LinAlgError(f"LAPACK's dsyevr finds no eigenpair of a matrix {tuple(gram.shape)}: {info}")
    return max(float(values[0]), 0.0), torch.from_numpy(vectors)[:, 0]


def power_of_two(*matrices: Tensor) -> float:
    """The largest one up to the largest absolute entry: division by it is exact, and brings squares into range.

    1 where all entries are 0, where there are none, or where some are not finite.
    """
    largest = max((float(matrix.detach().abs().max()) for matrix in matrices if matrix.numel()), default=0.0)
    return 2.0 ** (math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


def row_norms(rows: Tensor) -> Tensor:
    """The norms [k] of rows [k, D] of any scale."""
    scale = power_of_two(rows)
    return (rows / scale).norm(dim=1) * scale


def dimensions_outside(root: Tensor, other: Tensor, rows: int, eps: float = EPS) -> int:
    """Dimensions of the row space of `other` [m, D] outside of that of `root` [k, D], which has full rank k.

    These are the singular values of what projection leaves of `other`, above the rank tolerance of `rows` times its
    largest one and above what rounded data leave: they tilt the direction i of `root` by up to sqrt(D) eps
    sigma_1 / sigma_i.
    """
    k, width = root.shape
    if k == width:
        return 0
    _, sigma, vh = svd(root.double())
    along = other.double() @ vh.T
    left = other.double() - along @ vh
    largest, tilted = (torch.linalg.matrix_norm(matrix, 2).item() for matrix in (other.double(), along / sigma))
    threshold = max(rank_tolerance((rows, width), eps) * largest, eps * width**0.5 * sigma[0].item() * tilted)
    return int((torch.linalg.svdvals(left) > threshold).sum())


def eps_of(stored: Tensor) -> float:
    """Epsilon of the rank tolerance of features as they are stored: that of their dtype.

    Integers were not rounded and have float64's, also those in a floating dtype that has halves of their size, too.
    """
    if not stored.is_floating_point() or stored.dtype == torch.float64:
        return EPS
    eps = torch.finfo(stored.dtype).eps
    few = are_integers(stored[:1] if stored.ndim else stored, eps).all()  # which mostly says it
    return EPS if few and are_integers(stored, eps).all() else eps


def are_integers(x: Tensor, eps: float) -> Tensor:
    """Where entries are integers that numbers of this epsilon do not become by rounding, elementwise."""
    return (x == x.round()) & (x.abs() < 1 / eps)


def condition_number(
    features: Features,
    rank: int | None = None,
    conditioning: Literal["rank", "authors"] = "rank",
    eps: float | None = None,
) -> float:
    """kappa of the Hessian F^T F of linear probing on `features` ([N, D], or an iterable of batches, also (x, y)).

    `conditioning="rank"`: (sigma_1 / sigma_k)^2, k the numerical rank, or `rank` where it is known beforehand (an
    invertible linear extractor keeps the rank of its inputs); `eps` sets the rank tolerance (`rank_tolerance`), by
    default that of the dtype in which features are stored. `conditioning="authors"`: the released code's eigenvalues of
    F^T F + 1e-6 I, largest over smallest; for rank-deficient features that is sigma_1^2 / 1e-6.
    Without `rank` and `eps`, gives a UserWarning for features of 16 bits, whose rounding hides large condition numbers,
    and for those of float32 with a singular value near the rank tolerance: kappa depends on whether it counts.
    Raises DegenerateSpectrum for rank 0 or non-finite features, DataError for what is no matrix, ValueError for
    arguments that mean nothing.
    """
    if conditioning not in ("rank", "authors"):
        raise ValueError(f"conditioning must be 'rank' or 'authors', not {conditioning!r}")
    if rank is not None and (not isinstance(rank, Integral) or isinstance(rank, bool) or rank < 1):
        raise ValueError(f"rank must be an integer of at least 1, or None, not {rank!r}")
    if conditioning == "authors":
        if rank is not None or eps is not None:
            raise ValueError("conditioning='authors' takes neither rank nor eps: it counts every eigenvalue")
        return authors_condition_number(features)
    stored: set[float] = set()

    def watched() -> Iterator[Tensor]:
        for batch in _as_batches(features):
            if isinstance(batch, Tensor):
                stored.add(eps_of(batch))
            yield batch

    factor, rows = triangular_factor(watched())
    sigma, shape, asked = torch.linalg.svdvals(factor), (rows, factor.shape[1]), rank is None and eps is None
    eps = max(stored, default=EPS) if eps is None else eps
    kappa = condition_number_of(sigma, rank or numerical_rank(sigma, shape, eps))
    tolerance = rank_tolerance(shape, eps)
    if asked and eps > EPS32:
        warnings.warn(
            f"features of 16 bits show no condition number above {tolerance**-2:.2g}: use float32, or give rank",
            stacklevel=2,
        )
    elif asked and eps > EPS and is_near(sigma, tolerance):
        warnings.warn(
            f"a singular value is near the rank tolerance, {tolerance:.2g} of the largest: kappa={kappa:.3g} depends "
            "on whether it counts; use a finer dtype, or give rank",
            stacklevel=2,
        )
    return kappa


def condition_number_of(sigma: Tensor, rank: int) -> float:
    """(sigma_1 / sigma_rank)^2 of descending singular values; infinite where sigma_rank is 0 or it overflows."""
    if rank > len(sigma) > 0:
        raise DegenerateSpectrum(f"rank={rank}: the features have {len(sigma)} singular values")
    kappa = (sigma[0] / sigma[rank - 1]).square().item() if rank and len(sigma) else math.nan
    if math.isnan(kappa):  # 0 / 0, or infinity over infinity
        why = "not all finite" if rank and len(sigma) and sigma[0] != 0 else "all zero (rank 0)"
        raise DegenerateSpectrum(f"the features are {why}: they have no condition number")
    return kappa


def condition_number_down_to(sigma: Tensor, rank: int, tolerance: float) -> float:
    """kappa over all directions above `tolerance` sigma_1; if these are fewer than `rank`, the others count as there.

    Then it is a lower bound, and rounding does not decide it.
    """
    resolved = int((sigma > tolerance * sigma[0]).sum())
    kappa = condition_number_of(sigma, resolved)
    return kappa if resolved >= rank else tolerance**-2


def authors_condition_number(features: Features) -> float:
    """The released code's kappa: largest over smallest eigenvalue of F^T F + 1e-6 I.

    The release leaves out eigenvalues that come out at 1e-6 or less. For a null one that is a matter of rounding, half
    of the time each way, on every machine another; here it always counts, as 1e-6.
    """
    factor, _ = triangular_factor(features)
    eigenvalues = torch.linalg.svdvals(factor).square()
    if not torch.isfinite(eigenvalues).all():
        raise DegenerateSpectrum("the features are too large: F^T F overflows, and has no eigenvalues")
    if not eigenvalues.sum() > 0:
        raise DegenerateSpectrum(
            "the features are all zero, or so small that F^T F is: no eigenvalue of F^T F + 1e-6 I is above 1e-6"
        )
    smallest = eigenvalues[-1] if len(eigenvalues) == factor.shape[1] else 0.0
    return ((eigenvalues[0] + AUTHORS_RIDGE) / (smallest + AUTHORS_RIDGE)).item()


def rir(
    harmful: Features, harmful_baseline: Features, primary: Features, primary_baseline: Features, **options: Any
) -> dict[str, float]:
    """Relative immunization ratio (Eq. 15/17) of features after and before: `rir`, `ratio_harmful`, `ratio_primary`.

    Each argument is a feature matrix [N, D] or an iterable of batches; `options` go to `condition_number`. All have one
    width: Eq. 15 compares Hessians of the same size, and kappas of different sizes would make up a ratio. Raises
    DataError where they have not.
    """
    given = {"harmful": harmful, "harmful_baseline": harmful_baseline}
    given |= {"primary": primary, "primary_baseline": primary_baseline}
    widths: dict[str, int] = {}

    def watched(name: str) -> Iterator[Tensor]:
        for batch in _as_batches(given[name]):
            if isinstance(batch, Tensor) and batch.ndim == 2:
                widths.setdefault(name, batch.shape[1])
            if (first := next(iter(widths.items()), None)) and widths.get(name, first[1]) != first[1]:
                raise DataError(
                    f"rir: {first[0]} has {first[1]} columns, {name} has {widths[name]}; give features of one width, "
                    "those of the same layer before and after immunization"
                )
            yield batch

    kappa = {name: condition_number(watched(name), **options) for name in given}
    own, other = (kappa[role] / kappa[f"{role}_baseline"] for role in ("harmful", "primary"))
    return {"rir": own / other, "ratio_harmful": own, "ratio_primary": other}
