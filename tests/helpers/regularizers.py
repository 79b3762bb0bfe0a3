"""R_well and R_ill of any matrix S (paper, Sec. 4.1), for the theorems; training takes those of features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from immunization.theory import regularizers
from immunization.theory.spectrum import numerical_rank


def r_well(s: Tensor, rank: int | None = None, power: float = math.inf) -> Tensor:
    """R_well(S) = ||S||_2^2 / 2 - ||S||_F^2 / (2k), k = min(S.shape) (Eq. 3), with gradient sigma_1 u_1 v_1^T - S / k.

    That gradient jumps where the largest singular values meet. A finite `power` p gives R_well,p(S) = M_p^2 / 2 -
    M_2^2 / 2 with the power means M_p = (1/k sum_i sigma_i^p)^(1/p), i = 1..k = `rank`, and the gradient
    U diag(M_p^(2-p) sigma^(p-1) / k - sigma / k) V^T.
    """
    u, sigma, vh = torch.linalg.svd(s.detach(), full_matrices=False)
    k, slope = min(s.shape) if rank is None else rank, torch.zeros_like(sigma)
    if power == math.inf:
        mean = slope[0] = sigma[0]
    else:
        mean = sigma[0] * (sigma[:k] / sigma[0]).pow(power).mean() ** (1 / power)  # shares of 1: no power overflows
        slope[:k] = mean * (sigma[:k] / mean).pow(power - 1) / k
    gradient = u * (slope - sigma / k) @ vh
    return regularizers.with_gradients(mean**2 / 2 - sigma.square().sum() / (2 * k), {s: gradient})


def r_ill(s: Tensor, rank: int | None = None) -> Tensor:
    """R_ill(S) = 1 / (||S||_F^2 / (2k) - sigma_k^2 / 2), k = `rank` (default: the numerical rank of S) (Eq. 12).

    Gradient (sigma_k u_k v_k^T - S / k) / denominator^2 (Eq. 13). Raises DegenerateSpectrum where all k singular values
    agree.
    """
    u, sigma, vh = torch.linalg.svd(s.detach(), full_matrices=False)
    k = (numerical_rank(sigma, tuple(s.shape)) or 1) if rank is None else rank
    smallest, square = sigma[k - 1], sigma.square().sum()
    d = square / (2 * k) - smallest**2 / 2
    regularizers._check_finite_r_ill(d.item(), square.item(), k)
    gradient = (smallest * torch.outer(u[:, k - 1], vh[k - 1]) - s.detach() / k) / d**2
    return regularizers.with_gradients(1 / d, {s: gradient})
