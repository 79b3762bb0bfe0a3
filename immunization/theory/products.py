"""Matrix products in half the operations, where a matrix is symmetric or triangular (docs/performance.md)."""

import math

import torch
from scipy.linalg.blas import dtrmm
from torch import Tensor

SMALL = 256
"""Up to so many rows a plain product is as fast as BLAS's triangular one."""


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


def gram(f: Tensor) -> Tensor:
    """f^T f [D, D] of f [N, D]; on a CPU by numpy, which leaves it to BLAS's syrk: half the operations of a product."""
    if f.device.type != "cpu":
        return f.mT @ f
    array = f.numpy()
    return torch.from_numpy(array.T @ array)


def matrix_power(s: Tensor, exponent: int) -> Tensor:
    """S^exponent of a symmetric S [n, n] by repeated squaring, each of which is a `gram`; S^1 is S itself."""
    if exponent == 0:
        return torch.eye(len(s), dtype=s.dtype, device=s.device)
    if exponent == 1:
        return s
    square = gram(matrix_power(s, exponent // 2))
    return square @ s if exponent % 2 else square


def triangular_product(triangle: Tensor, theta: Tensor) -> Tensor:
    """R theta of an upper trapezoidal R [k, D], k <= D: on a CPU the triangle costs half of a product (BLAS's trmm)."""
    if triangle.device.type != "cpu" or triangle.dtype != torch.float64 or len(triangle) <= SMALL:
        return triangle @ theta
    k = len(triangle)
    left, right = triangle[:, :k].contiguous().numpy(), theta[:k].contiguous().numpy()
    product = torch.from_numpy(dtrmm(1.0, left.T, right.T, side=1, lower=1).T)  # BLAS counts columns first
    return product if k == triangle.shape[1] else product.addmm_(triangle[:, k:], theta[k:])
