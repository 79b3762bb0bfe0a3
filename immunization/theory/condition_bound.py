"""Linear maps of bounded condition number, which number formats of few digits can hold together with their inverse."""

import math

import torch
from torch import Tensor

BISECTIONS = 60


def nearest_bounded(a: Tensor, bound: float) -> Tensor:
    """The matrix nearest to `a` [D, D] in the Frobenius norm with sigma_1 / sigma_D <= `bound`.

    Its singular values are those of `a`, clipped to [floor, bound floor]; the floor changes them least in the sum of
    squares. `a` itself where it is within the bound.
    """
    u, sigma, vh = torch.linalg.svd(a)
    near = sigma.cpu()  # on a GPU every comparison below would wait
    if near[0] <= bound * near[-1]:
        return a
    low, high = near[-1], near[0] / bound
    for _ in range(BISECTIONS):
        floor = (low + high) / 2
        slope = (floor - near).clamp(min=0).sum() - bound * (near - bound * floor).clamp(min=0).sum()
        low, high = (low, floor) if slope > 0 else (floor, high)
    return u * near.clamp(high, bound * high).to(sigma, non_blocking=True) @ vh


def power_of_two(factor: float) -> float:
    """The power of two nearest to `factor` on a logarithmic scale: binary formats multiply by it without rounding."""
    return 2.0 ** round(math.log2(factor))
