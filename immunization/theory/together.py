"""Small matrices whose decompositions the CPU takes, brought there together: a GPU is waited for once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

T, U, P = TypeVar("T"), TypeVar("U"), ParamSpec("P")


class Pending(NamedTuple, Generic[T]):
    """A result that needs `wanted` on the CPU, in float64; `finish` makes it of their copies there (`completed`)."""

    wanted: tuple[Tensor, ...]
    finish: Callable[..., T]

    def then(self, function: Callable[..., U]) -> Pending[U]:
        """`function` of this result, a tuple."""
        return Pending(self.wanted, lambda *near: function(*self.finish(*near)))


NOTHING: Pending[None] = Pending((), lambda: None)


def completed(*pending: Pending[Any]) -> list[Any]:
    """All results, for which a GPU copies what they want at once; on a CPU there is nothing to copy."""
    near = _on_cpu([tensor for one in pending for tensor in one.wanted])
    return [one.finish(*(next(near) for _ in one.wanted)) for one in pending]


def checked(found: T | Pending[T], check: Pending[None]) -> T | Pending[T]:
    """`found` once `check` has raised nothing: later where it is pending, else at once."""
    if not isinstance(found, Pending):
        completed(check)
        return found
    count = len(check.wanted)

    def finish(*near: Tensor) -> T:
        check.finish(*near[:count])
        return found.finish(*near[count:])

    return Pending(check.wanted + found.wanted, finish)


def _on_cpu(tensors: list[Tensor]) -> Iterator[Tensor]:
    if not tensors or tensors[0].device.type == "cpu":
        return iter(tensors)
    parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split([tensor.numel() for tensor in tensors])
    return (part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))


class at_once(Generic[P, T]):
    """A function of a pending result, completed by itself; `later` is the function as it was written."""

    def __init__(self, later: Callable[P, Pending[T]]) -> None:
        self.later = later
        update_wrapper(self, later)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return completed(self.later(*args, **kwargs))[0]


def eigendecompositions(*matrices: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues, ascending, and eigenvectors of symmetric positive semidefinite matrices, on their own device.

    A GPU decomposes them in one call, after which it is waited for. Smaller ones are filled up to the size of the
    largest by -1 on the diagonal, times their own trace: these eigenvalues come first, and are left out.
    """
    if len(matrices) == 1 or matrices[0].device.type == "cpu":
        return [tuple(torch.linalg.eigh(matrix)) for matrix in matrices]
    size = max(len(matrix) for matrix in matrices)
    filled = torch.stack([_filled(matrix, size) for matrix in matrices])
    values, vectors = torch.linalg.eigh(filled)
    counts = [len(matrix) for matrix in matrices]
    return [(value[-n:], vector[:n, -n:]) for value, vector, n in zip(values, vectors, counts, strict=True)]


def _filled(matrix: Tensor, size: int) -> Tensor:
    if len(matrix) == size:
        return matrix
    fill = -matrix.diagonal().sum().expand(size - len(matrix))
    return torch.block_diag(matrix, fill.diag())
