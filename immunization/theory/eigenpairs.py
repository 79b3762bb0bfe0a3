"""One extreme eigenpair of a symmetric matrix, where a regularizer needs no more than that."""

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dpotrs, dsyevr
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor

from immunization.theory.spectrum import EPS

LANCZOS = 256
"""In more dimensions Lanczos iterations find an extreme eigenpair faster than a decomposition does."""


def extreme_eigenpair(gram: Tensor, index: int) -> tuple[float, Tensor]:
    """Eigenvalue (clamped at 0) and unit eigenvector of a symmetric matrix; `index` -1 is the largest, -k the k-th.

    The matrix is on the CPU, in the steps of a GPU too: one pair takes less there than the GPU's whole decomposition.
    There is no warm start from the pair of the step before (docs/performance.md).
    """
    array, pair = gram.numpy(), None
    if len(gram) > LANCZOS and index in (-1, -len(gram)):
        pair = _lanczos(array) if index == -1 else _inverse_lanczos(array)
    values, vectors = lapack_eigenpair(array, index) if pair is None else pair
    return max(float(values[0]), 0.0), torch.from_numpy(vectors)[:, 0]


def _lanczos(matrix: np.ndarray | LinearOperator) -> tuple[np.ndarray, np.ndarray] | None:
    """The largest pair by ARPACK, to machine precision; None where it is slow or misses.

    It misses where many of the largest eigenvalues agree: a Krylov space then ends early, and rounding decides.
    """
    size = matrix.shape[0]
    try:
        values, vectors = eigsh(matrix, 1, which="LA", v0=np.random.default_rng(0).standard_normal(size), maxiter=10)
    except ArpackError:
        return None
    missed = np.linalg.norm(matrix @ vectors - values * vectors)
    return (values, vectors) if missed <= size * EPS * abs(values[0]) else None


def _inverse_lanczos(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The smallest pair as the largest of the inverse; None where Cholesky finds the matrix singular."""
    factor, failed = dpotrf(gram, lower=0, clean=0)
    if failed:
        return None
    solve = LinearOperator(gram.shape, matvec=lambda x: dpotrs(factor, x, lower=0)[0], dtype=gram.dtype)
    pair = _lanczos(solve)
    return None if pair is None else (1 / pair[0], pair[1])


def lapack_eigenpair(gram: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenpair `index` by LAPACK, in half the time of a whole decomposition."""
    place = len(gram) + index + 1
    values, vectors, *_, failed = dsyevr(gram.T, range="I", il=place, iu=place, lower=1, lwork=33 * len(gram))
    if failed:
        raise torch.linalg.LinAlgError(f"LAPACK finds no eigenpair of the Gram matrix {gram.shape}")
    return values, vectors
