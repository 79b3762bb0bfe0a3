"""The one loop of all attacks that train a net: a fresh head and a part of the net, on mini-batches, by a recipe."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from immunization.attacks.recipe import OPTIMIZERS, Budget, Recipe, Scope
from immunization.data.task import Task
from immunization.models.chain import BATCH_NORMS, Network

NORM = 10.0
"""Longest gradient that is not clipped."""

SAMPLE = 512
"""Training images of which features are standardized."""

Adapt = Callable[[Network, Scope], tuple[list[nn.Parameter], list[nn.Module]]]
"""Parameters of a net to train, and what of it is in train mode meanwhile."""

ShouldStop = Callable[[list[float]], bool]
"""Whether to stop, asked with the validation measures so far."""


@dataclass
class Course:
    """What a training reached: `val` and `test` [T], the task's measure, after `steps` [T] mini-batches.

    Both are NaN from where it did not stay finite on, and end early where it was stopped. `spent`: operations.
    """

    val: list[float]
    test: list[float]
    steps: list[int]
    spent: float


@dataclass
class Opened:
    """A copy of the net that is trained, its head, and how features enter it: head((features - shift) * scale)."""

    network: Network
    head: nn.Linear
    parameters: list[nn.Parameter]
    moving: list[nn.Module]
    shift: Tensor | float
    scale: Tensor
    flops: float
    """Operations before the first step."""

    def logits(self, images: Tensor) -> Tensor:
        features = self.network(images)
        return self.head(self.scale * (features if isinstance(self.shift, float) else features - self.shift))


class Tuner:
    """Trains copies of one net on the images of a task, each by a recipe.

    `splits` [train, val, test] are images and labels, `network` gives a copy of the net, `adapt` says what of it a
    recipe trains.
    """

    def __init__(
        self, task: Task, splits: Mapping[str, tuple[Tensor, Tensor]], network: Callable[[], Network], adapt: Adapt
    ) -> None:
        self.task, self.splits, self.network, self.adapt = task, splits, network, adapt
        self._costs: dict[tuple[int, Scope], float] = {}

    @property
    def rows(self) -> int:
        """Training images."""
        return len(self.splits["train"][1])

    def train(self, recipe: Recipe, budget: Budget, seed: int, should_stop: ShouldStop = lambda val: False) -> Course:
        """Train a copy within the budget; `seed` draws batches, the head's bias and what `adapt` adds."""
        cost = self.step_cost(recipe, seed)
        opened = self.open(recipe, seed)
        optimizer = OPTIMIZERS[recipe.optimizer](opened.parameters, lr=recipe.rate, weight_decay=recipe.weight_decay)
        due = budget.steps(opened.flops, cost)
        course = Course([], [], due, opened.flops)
        stopped = self._measured(course, 0, opened) and should_stop(course.val)
        for step, (x, y) in enumerate(self._batches(recipe.batch_size, due[-1], seed), 1):
            if stopped or len(course.val) == len(due):
                break
            loss = self.loss(opened, recipe, x, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(opened.parameters, NORM)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(step, due[-1])
            optimizer.step()
            course.spent += cost
            stopped = self._measured(course, step, opened) and should_stop(course.val)
        return course

    def step_cost(self, recipe: Recipe, seed: int = 0) -> float:
        """Operations of one mini-batch, forward and backward."""
        key = (recipe.batch_size, recipe.part)
        if key not in self._costs:
            x, y = (part[: recipe.batch_size] for part in self.splits["train"])
            with torch.random.fork_rng():
                opened = self.open(recipe, seed)
                with FlopCounterMode(display=False) as counter:
                    self.loss(opened, recipe, x, y).backward()
            self._costs[key] = float(counter.get_total_flops())
        return self._costs[key]

    def open(self, recipe: Recipe, seed: int) -> Opened:
        """A fresh copy, prepared as the recipe says; nothing is trained yet."""
        x = self.splits["train"][0]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = self.network()
            with torch.no_grad():
                features = network(x[: recipe.batch_size])
            head = nn.Linear(features.shape[1], self.task.outputs).to(features)
            nn.init.zeros_(head.weight)
            parameters, moving = self.adapt(network, recipe.part)
        network.requires_grad_(False)
        parameters = [parameter.requires_grad_(True) for parameter in [*parameters, *head.parameters()]]
        shift, scale, flops = 0.0, features.square().mean().rsqrt(), 0.0
        if recipe.standardize:
            shift, scale, flops = self._standardization(network, seed)
        return Opened(network, head, parameters, moving, shift, scale, flops)

    @torch.no_grad()
    def _standardization(self, network: Network, seed: int) -> tuple[Tensor, Tensor, float]:
        """Mean [D] and inverse deviation [D] of features over some training images, and the operations of them.

        A feature that does not vary, up to rounding, keeps its size.
        """
        x = self.splits["train"][0]
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:SAMPLE]
        with FlopCounterMode(display=False) as counter:
            features = torch.cat([network(x[part]) for part in rows.split(256)])
        deviation, largest = features.std(0, correction=0), features.abs().amax(0)
        deviation = deviation.where(deviation > 10 * torch.finfo(deviation.dtype).eps * largest, 1.0)
        return features.mean(0), 1 / deviation, float(counter.get_total_flops())

    def _batches(self, size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        (x, y), order = self.splits["train"], []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            if len(order) < size:
                order += torch.randperm(len(x), generator=generator).tolist()
            batch, order = order[:size], order[size:]
            yield x[batch], y[batch]

    def loss(self, opened: Opened, recipe: Recipe, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a mini-batch in the modes that the recipe trains in, with a graph."""
        for part in opened.moving:
            part.train()
            for module in part.modules() if recipe.batchnorm == "eval" else ():
                if isinstance(module, BATCH_NORMS):
                    module.eval()
        return self.task.loss(opened.logits(x), y)

    def _measured(self, course: Course, step: int, opened: Opened) -> bool:
        """Add the measures at every point of the course that is at `step`, if any; an untrained head guesses."""
        place, due = len(course.val), course.steps
        if place == len(due) or due[place] != step:
            return False
        val, test = (self._held_out(opened, split) if step else self.task.chance for split in ("val", "test"))
        points = len(due) - place if math.isnan(val) else due.count(step)  # NaN is for good
        course.val += [val] * points
        course.test += [test if not math.isnan(val) else torch.nan] * points
        return True

    @torch.no_grad()
    def _held_out(self, opened: Opened, split: str) -> float:
        images, labels = self.splits[split]
        opened.network.eval()
        logits = torch.cat([opened.logits(part) for part in images.split(256)])
        return self.task.measure(logits, labels).item() if torch.isfinite(logits).all() else torch.nan
