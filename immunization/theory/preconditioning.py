"""Gradients in theta multiplied by K^-1, K = X^T X (Alg. 1), by a ridge solve or the pseudo-inverse."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum
from immunization.theory.spectrum import EPS

Precondition = Literal["cancelled", "ridge", "pinv", "none"]


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


class _PreconditionedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return x @ theta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.solve(upstream), None


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
    if mode == "pinv":
        return _PreconditionedProduct.apply(x, theta, lambda upstream: torch.linalg.pinv(x) @ upstream)
    inverse = _Ridge(x, ridge, side)
    return _PreconditionedProduct.apply(x, theta, lambda upstream: inverse(upstream.double()).to(upstream.dtype))
