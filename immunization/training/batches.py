"""Batches of the tasks that methods are shown, side by side: of stored rows, or straight from loaders of images."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from immunization.compute import distributed, randomness
from immunization.compute.machine import gathered, room
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.models.base import Batch, Model

log = logging.getLogger(__name__)

Read = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What the extractor reads and the task's labels, of a role, its images and what the loader calls them."""


class Batches:
    """Batches of all tasks side by side; an epoch is what is left of a pass over D_H, every other task cycles."""

    def __init__(self, passes: Mapping[str, Any]) -> None:
        self.passes = passes
        self.others = [chain.from_iterable(iter(own.rest, None)) for role, own in passes.items() if role != "harmful"]

    @property
    def steps_per_epoch(self) -> int | None:
        """None where the loader cannot say how many batches it gives."""
        try:
            return len(self.passes["harmful"])
        except TypeError:
            return None

    def epoch(self) -> Iterator[tuple[Batch, ...]]:
        """Batches (primary, harmful, further harmful ones) of one epoch, or what `load_state_dict` leaves of it."""
        for harmful in self.passes["harmful"].rest():
            primary, *further = (next(own) for own in self.others)
            yield primary, harmful, *further

    def state_dict(self) -> dict[str, Any]:
        return {role: own.state_dict() for role, own in self.passes.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; before the first batch only."""
        for role, own in self.passes.items():
            own.load_state_dict(state[role])


class RowPasses:
    """Passes over stored rows, shuffled by `generator`; None for `batch_size`: all rows at once.

    `shots` rows of a class stand side by side, as far as it has so many left.
    """

    def __init__(self, task: Task, batch_size: int | None, generator: torch.Generator, shots: int = 1) -> None:
        self.task, self.batch_size, self.generator, self.shots = task, batch_size, generator, shots
        self.start: Tensor | None = None
        self.taken = 0  # batches of the current pass

    def rest(self) -> Iterator[Batch]:
        task, x, y = self.task, self.task.train.x, self.task.train.y
        if self.batch_size is None:
            if len(x.shape) != 2:
                raise ConfigError("method.batch_size must be set: a net is trained on batches, not on all rows at once")
            if not self.taken:
                self.taken = 1
                yield Batch(x, y, task.rank, task.triangle.to(x), True)
        else:
            self.start = self.generator.get_state()
            order = self._order()
            chunks = order[: len(x) - len(x) % self.batch_size].split(self.batch_size)[self.taken :]
            parts = gathered(x, [distributed.share(rows) for rows in chunks], y.device)
            for rows, inputs in zip(chunks, parts, strict=True):
                self.taken += 1
                labels, first = y[rows.to(y.device, non_blocking=True)], self.taken == 1
                yield Batch(inputs, labels, min(len(rows), task.rank), first=first)
        self.start, self.taken = None, 0

    def __len__(self) -> int:
        return 1 if self.batch_size is None else len(self.task.train) // self.batch_size

    def _order(self) -> Tensor:
        order = torch.randperm(len(self.task.train), generator=self.generator)
        if self.shots == 1 or not self.task.classes:
            return order
        y = self.task.train.y.cpu()[order]
        groups = [part for label in y.unique() for part in order[y == label].split(self.shots)]
        return torch.cat([groups[i] for i in torch.randperm(len(groups), generator=self.generator)])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state() if self.start is None else self.start, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.taken = state["taken"]


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
            raise DataError(
                f"the {self.role} loader gives no batches: it has fewer images than one, or cannot be read twice"
            )
        self.number, self.taken = self.number + 1, 0

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError where it cannot say

    def state_dict(self) -> tuple[int, int, int]:
        return self.seed, self.number, self.taken

    def load_state_dict(self, state: tuple[int, int, int]) -> None:
        self.seed, self.number, self.taken = state


class PairedBatches(Batches):
    """Batches of stored rows, without an incomplete last one (its Hessian's rank would differ); raises ConfigError.

    Harmful rows come in groups of `shots` of a class.
    """

    def __init__(self, pair: TaskPair, batch_size: int | None, generator: torch.Generator, shots: int = 1) -> None:
        for key, task in pair.shown.items():
            if batch_size is not None and batch_size > len(task.train):
                raise ConfigError(
                    f"method.batch_size={batch_size} is above the {len(task.train)} training rows of the {key} task; "
                    "lower it, or set it to null for full batches"
                )
        # a generator per task, in the same state: tasks of as many rows are shuffled alike, as in the release
        state = generator.get_state()
        own = {role: torch.Generator().set_state(state) for role in pair.shown} | {"harmful": generator}
        grouped = dict.fromkeys(pair.harmful_tasks, shots)
        super().__init__(
            {role: RowPasses(task, batch_size, own[role], grouped.get(role, 1)) for role, task in pair.shown.items()}
        )


def batches_of(
    model: Model, pair: TaskPair, batch_size: int | None, generator: torch.Generator, shots: int = 1
) -> Batches:
    """Batches of rows where they are stored, else those of loaders, in their order."""
    if batch_size is not None and model.loaders is not None:
        if shots > 1:
            log.warning(
                "method.shots=%d has no effect: the images are augmented or too many to cache, so loaders order them; "
                "use fewer images and dataset.augment=false",
                shots,
            )
        loaders = model.loaders(batch_size).items()
        return Batches({role: LoaderPasses(loader, role, model.entering, pair.dim) for role, loader in loaders})
    apart = {role: task for role, task in pair.shown.items() if task.train.y.is_cuda and not task.train.x.is_cuda}
    size = sum(task.train.x.nbytes for task in apart.values())
    if batch_size is not None and apart and size <= room(pair.primary.train.y.device):
        log.info("%.3g GiB of training inputs are kept on the GPU", size / 2**30)
        pair = pair.with_tasks(
            {
                role: replace(task, train=replace(task.train, x=task.train.x.to(task.train.y.device)))
                for role, task in apart.items()
            }
        )
    return PairedBatches(pair, batch_size, generator, shots if batch_size is not None else 1)
