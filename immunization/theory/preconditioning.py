"""Gradients in theta multiplied by K^-1, K = X^T X (Alg. 1), by a ridge solve or the pseudo-inverse."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum
from immunization.theory.spectrum import EPS

Precondition = Literal["cancelled", "ridge", "pinv", "none"]


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
        elif side == "output" and _few_rows(x, ridge):  # Woodbury: U (K + r I)^-1 = (U - U X^T (X X^T + r I)^-1 X) / r
            inside = torch.cholesky_solve(x @ upstream.T, _cholesky(x @ x.T, ridge))
            gradient = x.T @ torch.addmm(upstream, inside.T, x, alpha=-1).div_(ridge)
        else:
            gradient, factor = x.T @ upstream, _cholesky(x.T @ x, ridge)
            gradient = (
                torch.cholesky_solve(gradient, factor)
                if side == "input"
                else torch.cholesky_solve(gradient.T, factor).T
            )
        return None, gradient.to(dtype), None, None, None


def _few_rows(x: Tensor, ridge: float) -> bool:
    """Whether the Gram of the rows of x [N, D] saves most of the operations, and K + ridge I is far from singular."""
    return 2 * len(x) < x.shape[1] and ridge > x.shape[1] * EPS * x.square().sum().item()


def _cholesky(gram: Tensor, ridge: float) -> Tensor:
    """Lower factor of gram + ridge I (in place); DegenerateSpectrum where that is singular up to rounding."""
    gram.diagonal().add_(ridge)
    factor, info = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal().square()
    if (info > 0) | ~(pivots.min() > len(gram) * EPS * pivots.max()):  # together: a GPU is waited for once
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
