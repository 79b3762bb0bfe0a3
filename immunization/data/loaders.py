"""Tasks from loaders of the user's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from immunization.data.task import Split, Task
from immunization.errors import DataError

Loader = Iterable[tuple[Tensor, Tensor]]
"""Batches of images [n, C, H, W], preprocessed for the model, or of rows [n, D], and labels [n] from 0 on."""


def rows_of_loader(role: str, loader: Loader) -> Task:
    """The task of a loader of rows [n, D] and labels: a fifth of the rows is for validation, another one for test."""
    batches = [(torch.as_tensor(x).double(), torch.as_tensor(y)) for x, y, *_ in loader]
    if not batches:
        raise DataError(f"{role}_loader gives no batches")
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    classes = 0 if y.is_floating_point() else len(y.unique())
    y = y.double() if not classes else y.unique(return_inverse=True)[1]
    parts = shuffled_parts(len(y), 5, 5)
    return Task(role, **{split: Split(x[rows], y[rows]) for split, rows in parts.items()}, classes=classes)


def shuffled_parts(count: int, val: int, test: int | None) -> dict[str, Tensor]:
    """Rows of each split, in random order: each `val`-th for validation, each `test`-th for test (None: none)."""
    place, order = torch.arange(count), torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held_out = place % val == val - 1
    tested = torch.zeros_like(held_out) if test is None else (place % test == 0)
    return {"train": order[~held_out & ~tested], "val": order[held_out], "test": order[tested]}
