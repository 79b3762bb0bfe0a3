"""Batches straight from image loaders: for augmented images, sets too large to keep, and loaders of the user's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from immunization.compute import distributed, randomness
from immunization.compute.transfer import room
from immunization.data.task import TaskPair
from immunization.errors import DataError
from immunization.models.base import Batch, Model
from immunization.training.batches import PairedBatches

log = logging.getLogger(__name__)


class LoaderPasses:
    """Passes over a loader with random numbers of their own, so that any of them can be begun again."""

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader
        self.seed, self.number, self.taken = int(torch.randint(2**60, ())), 0, 0

    def rest(self) -> Iterator[tuple]:
        """What is left of the pass, all of it at first; what was taken before is read once more and left out."""
        outside = randomness.states()
        randomness.seed(self.seed + self.number)
        source = iter(self.loader)
        for _ in range(self.taken):
            next(source)
        inside = randomness.states()
        randomness.restore(outside)
        while True:
            outside = randomness.states()
            randomness.restore(inside)
            item = next(source, None)
            inside = randomness.states()
            randomness.restore(outside)
            if item is None:
                break
            self.taken += 1
            yield item
        self.number, self.taken = self.number + 1, 0

    def forever(self) -> Iterator[tuple]:
        while True:
            yield from self.rest()


class LoaderBatches:
    """Batches from a loader a task; one epoch is one pass over D_H, D_P goes on where it was and cycles.

    So do further harmful tasks. `loaders` (`primary`, `harmful`, `harmful_<name>`) give (images, labels, ...); `read`
    maps a role and such a pair to what the extractor reads and the task's labels. `width` is D.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable],
        read: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]],
        width: int,
    ) -> None:
        self.passes = {role: LoaderPasses(loader) for role, loader in loaders.items()}
        self.read, self.width = read, width
        self.others = [self._batches(role, one.forever()) for role, one in self.passes.items() if role != "harmful"]

    @property
    def steps_per_epoch(self) -> int:
        """Raises DataError for a loader that does not know."""
        try:
            return len(self.passes["harmful"].loader)
        except TypeError as error:
            raise DataError(f"the harmful loader cannot say how many batches it gives: {error}") from error

    def epoch(self) -> Iterator[tuple[Batch, ...]]:
        """Batches (primary, harmful, further harmful ones) of one epoch, or what `load_state_dict` leaves of it."""
        for harmful in self._batches("harmful", self.passes["harmful"].rest()):
            primary, *further = (next(one) for one in self.others)
            yield primary, harmful, *further

    def _batches(self, role: str, items: Iterable[tuple]) -> Iterator[Batch]:
        for images, labels, *_ in items:
            if len(images):
                x, y = self.read(role, distributed.share(images), labels)
                yield Batch(x, y, min(len(y), self.width), first=self.passes[role].taken == 1)

    def state_dict(self) -> dict[str, Any]:
        """Where all passes stand."""
        return {role: (one.seed, one.number, one.taken) for role, one in self.passes.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; before the first batch only."""
        for role, one in self.passes.items():
            one.seed, one.number, one.taken = state[role]


def _kept(pair: TaskPair) -> TaskPair:
    """`pair` with the training rows of the tasks that methods are shown on the GPU that wants them, where they fit."""
    apart = {role: t for role, t in pair.shown.items() if t.train.y.is_cuda and not t.train.x.is_cuda}
    size = sum(task.train.x.nbytes for task in apart.values())
    if not apart or size > room(pair.primary.train.y.device):
        return pair
    log.info("%.3g GiB of training inputs are kept on the GPU", size / 2**30)
    moved = {role: replace(t, train=replace(t.train, x=t.train.x.to(t.train.y.device))) for role, t in apart.items()}
    return pair.with_tasks(moved)


def batches_of(
    model: Model, pair: TaskPair, batch_size: int | None, generator: torch.Generator
) -> PairedBatches | LoaderBatches:
    """Batches of rows where they are stored, of images where they are not."""
    if batch_size is None:
        return PairedBatches(pair, batch_size, generator)
    if model.loaders is None:
        return PairedBatches(_kept(pair), batch_size, generator)
    return LoaderBatches(model.loaders(batch_size), model.read, pair.dim)
