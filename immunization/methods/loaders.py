"""Batches straight from image loaders: for augmented images, sets too large to keep, and loaders of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from immunization.data.task import TaskPair
from immunization.methods.base import PairedBatches
from immunization.models.base import Batch, Model


class LoaderBatches:
    """Pairs of batches from two loaders; one epoch is one pass over D_H, D_P goes on where it was and cycles.

    `loaders` (`primary`, `harmful`) give (images, labels, ...); `prepare` maps a role and such a pair to what the
    extractor reads and the task's labels. `width` is D.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable],
        prepare: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]],
        width: int,
    ) -> None:
        self.loaders, self.prepare, self.width = loaders, prepare, width
        self.primary = self._cycle("primary")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loaders["harmful"])

    def epoch(self) -> Iterator[tuple[Batch, Batch]]:
        """The pairs of batches of one epoch."""
        for harmful in self._pass("harmful"):
            yield next(self.primary), harmful

    def _cycle(self, role: str) -> Iterator[Batch]:
        while True:
            yield from self._pass(role)

    def _pass(self, role: str) -> Iterator[Batch]:
        for images, labels, *_ in self.loaders[role]:
            if len(images):
                x, y = self.prepare(role, images, labels)
                yield Batch(x, y, min(len(x), self.width))


def batches_of(
    model: Model, pair: TaskPair, batch_size: int | None, generator: torch.Generator
) -> PairedBatches | LoaderBatches:
    """Batches of rows where they are stored, of images where they are not."""
    if model.loaders is None or batch_size is None:
        return PairedBatches(pair, batch_size, generator)
    return LoaderBatches(model.loaders(batch_size), model.read, pair.dim)
