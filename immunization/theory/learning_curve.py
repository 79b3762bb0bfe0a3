"""The attacker's gradient descent, solved and differentiated: residuals of a linear probe after any number of steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.theory.spectrum import power_of_two

CLOSE = 1e-4
"""Relative step-weighted gap of two eigenvalues below which a derivative replaces their difference quotient."""

ENTRIES = 2**18
"""Entries of the difference quotients that are worked on at once: as many as caches hold."""


class _Residuals(torch.autograd.Function):
    """With mu the eigenvalues of G = F F^T over the largest one, both results are functions (1 - mu)^t of G.

    The gradient in G of <g, (1 - G)^t c> is U (Phi * U^T c g^T U) U^T, Phi the difference quotients of (1 - mu)^t
    (Daleckii and Krein): one eigendecomposition whatever the number of steps, and no division by the gap of two
    eigenvalues that meet.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, coefficients: Tensor, steps: Tensor, eigenvalues: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        decay = 1 - (eigenvalues / eigenvalues[-1]).clamp(min=0)
        c = u.T @ coefficients
        ctx.save_for_backward(factor, eigenvalues[-1], u, decay, c, steps)
        powers = decay[:, None] ** steps
        decayed = powers[:, :, None] * c[:, None, :]
        return (u @ decayed.flatten(1)).unflatten(1, decayed.shape[1:]).transpose(0, 1), powers.square().mean(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_residual: Tensor, of_expected: Tensor) -> tuple[Tensor | None, ...]:
        factor, largest, u, decay, c, steps = ctx.saved_tensors
        gap = decay[:, None] - decay
        distance, smaller = gap.abs(), torch.minimum(decay[:, None], decay)
        gradient, weights, n = torch.zeros_like(gap), u.T @ of_residual, steps[:, None]
        at_once = max(1, ENTRIES // len(decay) ** 2)
        for t, weight in zip(n.split(at_once), weights.split(at_once), strict=True):
            power, half = decay**t, decay ** ((t - 1) / 2)
            tangents = (t * half)[:, :, None] * half[:, None, :]
            quotients = (power[:, :, None] - power[:, None, :]).div_(gap)
            quotients = torch.where(t[:, :, None] * distance <= CLOSE * smaller, tangents, quotients)
            gradient += quotients.mul_(weight @ c.T).sum(0)
        slopes = of_expected @ (2 * n * decay ** (2 * n - 1)) / len(decay)
        # the derivative in mu instead of in decay = 1 - mu has the opposite sign
        gradient = -(gradient + gradient.T) / 2
        gradient.diagonal().sub_(slopes)
        # mu = eigenvalues / largest, and the largest has the gradient u_1 u_1^T of its own
        gradient[-1, -1] -= gradient.diagonal() @ (1 - decay)
        return 2 / largest * u @ (gradient @ (u.T @ factor)), None, None, None, None


def residuals(probes: Sequence[tuple[Tensor, Tensor]], steps: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Residuals of l2 probes after `steps` [T] of gradient descent, exact and differentiable in their factors.

    Each probe is a factor F [m, D] and coefficients c [m, C], which stand for features and targets of any number of
    rows: e.g. R A and Q^T Y of features Q R behind a map A. Step size 1/lambda_1(F^T F), w_0 = 0, no bias. Returns
    c - F w_t [T, m, C] and the mean of its square over random c of unit length, 1/m sum_i (1 - lambda_i / lambda_1)^2t
    [T]. Both ignore the scale of F, and F^T F may be singular. The cost is one eigendecomposition of F F^T forward and
    a few products of m x m matrices backward.
    """
    scaled = [(f / power_of_two(f), c) for f, c in probes]
    return [_Residuals.apply(f, c, steps.to(f), *torch.linalg.eigh(f.detach() @ f.detach().T)) for f, c in scaled]


def excess(residual: Tensor) -> Tensor:
    """||F w_t - c||^2 [T], summed over outputs: the excess loss, plus the part of c that no w reaches."""
    return residual.square().sum((1, 2))
