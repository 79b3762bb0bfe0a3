"""Batches of the tasks that methods are shown, side by side."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from immunization.compute import distributed
from immunization.compute.transfer import gathered
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.models.base import Batch


class Batches:
    """Batches of all tasks side by side; an epoch is what is left of a pass over D_H, every other task cycles."""

    steps_per_epoch: int

    def __init__(self, passes: Mapping[str, Any]) -> None:
        self.passes = passes
        self.others = [chain.from_iterable(iter(one.rest, None)) for role, one in passes.items() if role != "harmful"]

    def epoch(self) -> Iterator[tuple[Batch, ...]]:
        """Batches (primary, harmful, further harmful ones) of one epoch, or what `load_state_dict` leaves of it."""
        for harmful in self.passes["harmful"].rest():
            primary, *further = (next(one) for one in self.others)
            yield primary, harmful, *further

    def state_dict(self) -> dict[str, Any]:
        return {role: one.state_dict() for role, one in self.passes.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; before the first batch only."""
        for role, one in self.passes.items():
            one.load_state_dict(state[role])


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
        self.steps_per_epoch = 1 if batch_size is None else len(pair.harmful.train) // batch_size
