"""Batches straight from image loaders: for augmented images, sets too large to keep, and loaders of the user's own."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from immunization.compute import distributed, randomness
from immunization.compute.transfer import room
from immunization.data.task import TaskPair
from immunization.errors import DataError
from immunization.models.base import Batch, Model
from immunization.training.batches import Batches, PairedBatches

log = logging.getLogger(__name__)

Read = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What the extractor reads and the task's labels, of a role, its images and what the loader calls them."""


class LoaderPasses:
    """Passes over a loader with random numbers of their own, so that any of them can be begun again."""

    def __init__(self, loader: Iterable, role: str, read: Read, width: int) -> None:
        self.loader, self.role, self.read, self.width = loader, role, read, width
        self.seed, self.number, self.taken = int(torch.randint(2**60, ())), 0, 0

    def rest(self) -> Iterator[Batch]:
        for images, labels, *_ in self._items():
            if len(images):
                x, y = self.read(self.role, distributed.share(images), labels)
                yield Batch(x, y, min(len(y), self.width), first=self.taken == 1)

    def _items(self) -> Iterator[tuple]:
        """What the loader gives; what was taken before is read once more and left out."""
        with randomness.isolated_rng():
            randomness.seed(self.seed + self.number)
            source, inside = islice(self.loader, self.taken, None), randomness.states()
        while True:
            with randomness.isolated_rng():
                randomness.restore(inside)
                item, inside = next(source, None), randomness.states()
            if item is None:
                break
            self.taken += 1
            yield item
        if not self.taken:
            raise DataError(f"the {self.role} loader gives no batches: it holds fewer images than one, or is exhausted")
        self.number, self.taken = self.number + 1, 0

    def state_dict(self) -> tuple[int, int, int]:
        return self.seed, self.number, self.taken

    def load_state_dict(self, state: tuple[int, int, int]) -> None:
        self.seed, self.number, self.taken = state


class LoaderBatches(Batches):
    """Batches from a loader of (images, labels, ...) per role: `primary`, `harmful`, `harmful_<name>`; `width` is D."""

    def __init__(self, loaders: Mapping[str, Iterable], read: Read, width: int) -> None:
        super().__init__({role: LoaderPasses(loader, role, read, width) for role, loader in loaders.items()})

    @property
    def steps_per_epoch(self) -> int:
        """Raises DataError for a loader that does not know."""
        try:
            return len(self.passes["harmful"].loader)
        except TypeError as error:
            raise DataError(f"the harmful loader cannot say how many batches it gives: {error}") from error


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
    model: Model, pair: TaskPair, batch_size: int | None, generator: torch.Generator, shots: int = 1
) -> Batches:
    """Batches of rows where they are stored, of images where they are not, which come in the order of their loaders."""
    if batch_size is None:
        return PairedBatches(pair, batch_size, generator)
    if model.loaders is None:
        return PairedBatches(_kept(pair), batch_size, generator, shots)
    if shots > 1:
        log.warning(
            "method.shots=%d does nothing: images that are augmented, or too many to keep, come in the order of their "
            "loaders; use fewer images and dataset.augment=false",
            shots,
        )
    return LoaderBatches(model.loaders(batch_size), model.read, pair.dim)
