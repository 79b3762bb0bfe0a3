"""The loop of all attacks that train a net: a fresh head and a part of the net, on mini-batches, by a recipe."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from immunization.attacks.altered import BATCH, renew
from immunization.attacks.optimizers import optimizer_named
from immunization.attacks.probes import svd_flops
from immunization.attacks.recipes import WHOLE, Budget, Recipe
from immunization.data.fields import mirrored as mirror
from immunization.data.task import Task
from immunization.errors import DegenerateSpectrum
from immunization.models.blocks import Operations
from immunization.models.chain import Network, norms_of
from immunization.theory.probe import Probe, ridge_weights

NORM = 10.0
"""Longest gradient that is not clipped."""

SAMPLE = 512
"""Training images of which features are standardized."""

RIDGES = (1e-5, 1e-4, 1e-3, 0.01, 0.1)
"""Of a head that is solved for first, relative to the largest eigenvalue."""

SHARPNESS = (1.0, 3.0, 10.0, 30.0)
"""What predictions of targets are multiplied by to be logits."""

Adapt = Callable[[Network, str], tuple[list[nn.Parameter], list[nn.Module]]]
"""Parameters of a net to train, and what of it is in train mode meanwhile."""

Activations = Callable[[int, bool], Sequence[Mapping[str, Tensor]] | None]
"""`Victim.activations` of a unit, with mirror images or without."""

ShouldStop = Callable[[list[float]], bool]
"""Whether to stop, asked with the validation measures so far."""


@dataclass
class Course:
    """Measures of a training at the T points of its budget, or up to where it was stopped.

    `val` and `test` are the task's measure after `steps` [T] mini-batches, NaN from where it did not stay finite on.
    `scores` [T, N] is what each test row adds to `test`. `spent`: operations.
    """

    steps: list[int]
    spent: float
    val: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def extend(self, points: int, val: float, test: float, scores: Tensor) -> None:
        """Add the same measures for so many points."""
        self.val += [val] * points
        self.test += [test] * points
        self.scores += [scores] * points


@dataclass
class Opened:
    """A copy of the net that is trained, its head, and how features enter it: head((features - shift) * scale).

    The net reads images and mirror images by split or, from the unit `start` on, what it makes of them.
    """

    network: Network
    head: nn.Linear
    parameters: list[nn.Parameter]
    moving: list[nn.Module]
    inputs: Sequence[Mapping[str, Tensor]]
    start: int
    scale: Tensor
    shift: Tensor | float = 0.0
    flops: float = 0.0
    """Operations before the first step."""
    solved: bool = False
    """Whether the head is one that says something before it is trained."""

    def read(self, x: Tensor) -> Tensor:
        """Inputs of the head, [N, D]."""
        features = self.network(x, self.start)
        return self.scale * (features if isinstance(self.shift, float) else features - self.shift)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.read(x))

    def rows(self, split: str, rows: Sequence[int] | Tensor | slice, mirrored: bool = False) -> Tensor:
        """Rows of a split as the net reads them, of the images or of mirror images."""
        if mirrored and len(self.inputs) == 1:
            return mirror(self.inputs[0][split][rows])
        return self.inputs[mirrored][split][rows]

    @torch.no_grad()
    def whole(self, read: Callable[[Tensor], Tensor], split: str, mirrored: bool = False) -> Tensor:
        """`read` of all rows of a split."""
        count = len(self.inputs[0][split])
        return torch.cat([read(self.rows(split, slice(i, i + 256), mirrored)) for i in range(0, count, 256)])


class Tuner:
    """Trains copies of one net on the images of a task, each by a recipe.

    `splits` [train, val, test] are images and labels, `network` gives a copy of the net whose part is to be trained,
    `adapt` says what of it that is, `activations` has what the units before it make of the images. They are paid for
    as if they were kept, also where they are not. With a `teacher`, a net that is the same up to that part, the loss
    has a term more: the mean squared distance of features from the teacher's, both scaled to a mean square of 1.
    """

    def __init__(
        self,
        task: Task,
        splits: Mapping[str, tuple[Tensor, Tensor]],
        network: Callable[[str], Network],
        adapt: Adapt,
        activations: Activations = lambda start, mirrored: None,
        teacher: Network | None = None,
    ) -> None:
        self.task, self.splits, self.network, self.adapt, self.activations = task, splits, network, adapt, activations
        self.teacher = teacher
        self._costs: dict[tuple[int, str], float] = {}
        self._counted: dict[tuple[str, int], tuple[float, float]] = {}

    @property
    def rows(self) -> int:
        """Training images."""
        return len(self.splits["train"][1])

    def train(self, recipe: Recipe, budget: Budget, seed: int, should_stop: ShouldStop = lambda val: False) -> Course:
        """Train a copy within the budget; `seed` draws batches, masks, the head's bias and what `adapt` adds."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            cost, opened = self.step_cost(recipe, seed), self.open(recipe, seed)
            due = budget.steps(opened.flops, cost)
            course = Course(due, opened.flops if due[-1] >= 0 else 0.0)
            training, taken, trained = self._steps(opened, recipe, due[-1], seed), 0, opened
            for step in dict.fromkeys(due):
                while taken < step:
                    trained, taken = next(training), taken + 1
                    course.spent += cost
                knows = step > 0 or (step == 0 and opened.solved)
                val, test, scores = self._measures(trained, recipe) if knows else self._guessing()
                lost = math.isnan(val)  # for good
                course.extend(len(due) - len(course.val) if lost else due.count(step), val, test, scores)
                if should_stop(course.val) or lost:
                    break
        return course

    def _steps(self, opened: Opened, recipe: Recipe, steps: int, seed: int) -> Iterator[Opened]:
        """What is measured after each step: the copy as it is trained, or with the mean of its weights."""
        depths = opened.network.depths() if recipe.decay < 1 else {}
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in opened.parameters:
            groups.setdefault(depths.get(parameter, 0), []).append(parameter)
        optimizer = optimizer_named(recipe.optimizer, "attack.*.optimizer", weight_decay=recipe.weight_decay)(
            [{"params": group, "share": recipe.decay**depth} for depth, group in groups.items()],
            lr=recipe.rate,
        )
        trained = nn.ModuleList([opened.network, opened.head])
        average = None
        for step, (x, y) in enumerate(self._batches(opened, recipe, steps, seed), 1):
            loss = self.loss(opened, recipe, x, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(opened.parameters, NORM)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(step, steps) * group["share"]
            optimizer.step()
            if recipe.average and step > steps // 2:
                average = average or AveragedModel(trained, use_buffers=True)  # of BatchNorm's, no pass is paid for
                average.update_parameters(trained)
                network, head = cast(tuple[Network, nn.Linear], average.module)
                yield replace(opened, network=network, head=head)
            else:
                yield opened

    def step_cost(self, recipe: Recipe, seed: int = 0) -> float:
        """Operations of one mini-batch, forward and backward."""
        key = (recipe.batch_size, recipe.part)
        if key not in self._costs:
            some = torch.linspace(
                0, self.rows - 1, min(self.rows, recipe.batch_size)
            ).long()  # of texts, some of each length
            x, y = (part[some.to(part.device)] for part in self.splits["train"])
            with torch.random.fork_rng():
                opened = self.open(replace(recipe, standardize=False, head_first=False), seed)
                opened.start = self._start(opened.network, recipe)
                with torch.no_grad():
                    x = opened.network.before(x, opened.start)
                with Operations() as counted:
                    self.loss(opened, recipe, x, y).backward()
            self._costs[key] = counted.total
        return self._costs[key]

    def open(self, recipe: Recipe, seed: int) -> Opened:
        """A fresh copy, prepared as the recipe says; nothing is trained yet."""
        images = {split: x for split, (x, _) in self.splits.items()}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = self.network(recipe.part)
            with torch.no_grad():
                features = network(images["train"][: recipe.batch_size])
            head = nn.Linear(features.shape[1], self.task.outputs).to(features)
            nn.init.zeros_(head.weight)
            parameters, moving = self.adapt(network, recipe.part)
        network.requires_grad_(False)
        parameters = [*parameters, *head.parameters()]
        for parameter in parameters:
            parameter.requires_grad_(True)
        start = self._start(network, recipe)
        kept = self.activations(start, recipe.mirror) if start else None
        inputs = (kept, start) if kept else ([images], 0)
        opened = Opened(network, head, parameters, moving, *inputs, _unit(features))
        views = self.rows * (1 + recipe.mirror)
        place = (recipe.part, start)
        if place not in self._counted:
            self._counted[place] = self._passes(network, start)
        before, behind = self._counted[place]
        opened.flops = before * views
        if recipe.head_first and recipe.batchnorm == "train" and any(map(norms_of, moving)):
            self._renew(opened)
            opened.flops += behind * self.rows
        if recipe.standardize:
            opened.shift, opened.scale = self._standardization(opened, seed)
            opened.flops += behind * min(SAMPLE, self.rows)
        if recipe.head_first:
            self._solve(opened, recipe)
            opened.flops += behind * views + svd_flops(views, features.shape[1])
        return opened

    def _start(self, network: Network, recipe: Recipe) -> int:
        """Unit of an opened net at which steps begin: all before it is frozen."""
        if recipe.part in WHOLE:
            return 0
        return network.start_of(parameter for parameter in network.parameters() if parameter.requires_grad)

    @torch.no_grad()
    def _passes(self, network: Network, start: int) -> tuple[float, float]:
        """Operations of one image up to a unit, and from there on."""
        image = self.splits["train"][0][self.rows // 2 :][:1]  # texts stand by their length
        with Operations() as before:
            x = network.before(image, start)
        with Operations() as behind:
            network(x, start)
        return before.total, behind.total

    @torch.no_grad()
    def _renew(self, opened: Opened) -> None:
        """Give BatchNorm of what is trained the statistics that it has in training, for a head that is solved for."""
        batches = torch.arange(self.rows).tensor_split(math.ceil(self.rows / BATCH))
        inputs = (opened.rows("train", batch) for batch in batches)
        renew(nn.ModuleList(opened.moving), inputs, lambda x: opened.network(x, opened.start))
        features = opened.network(opened.rows("train", batches[0]), opened.start)
        opened.scale = _unit(features)

    @torch.no_grad()
    def _standardization(self, opened: Opened, seed: int) -> tuple[Tensor, Tensor]:
        """Mean [D] and inverse deviation [D] of features over some training images.

        A feature that does not vary, up to rounding, keeps its size.
        """
        rows = torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed))[:SAMPLE]
        features = torch.cat([opened.network(opened.rows("train", part), opened.start) for part in rows.split(256)])
        deviation, largest = features.std(0, correction=0), features.abs().amax(0)
        deviation = deviation.where(deviation > 10 * torch.finfo(deviation.dtype).eps * largest, 1.0)
        return features.mean(0), 1 / deviation

    @torch.no_grad()
    def _solve(self, opened: Opened, recipe: Recipe) -> None:
        """Start the head from ridge regression; ridge and sharpness are those of the smallest loss on validation rows.

        Where features tell nothing apart, it stays as it is.
        """
        sides = range(1 + recipe.mirror)
        train = torch.cat([opened.whole(opened.read, "train", bool(side)) for side in sides]).double()
        val, labels = opened.whole(opened.read, "val").double(), self.splits["val"][1]
        targets = self.task.targets(self.splits["train"][1]).repeat(len(sides), 1)
        mean, mean_target = train.mean(0), targets.mean(0)
        with suppress(DegenerateSpectrum):
            probe = Probe.of(train - mean, targets - mean_target)
            ridges = torch.tensor(RIDGES).to(train) * probe.sigma[0] ** 2
            solved = ridge_weights(probe.sigma, probe.vectors, probe.coefficients, ridges)
            heads = [(factor * w, factor * (mean_target - mean @ w)) for w in solved for factor in SHARPNESS]
            losses = torch.stack([self.task.loss(val @ weight + bias, labels) for weight, bias in heads])
            weight, bias = heads[int(losses.argmin())]
            opened.head.weight.copy_(weight.T)
            opened.head.bias.copy_(bias)
            opened.solved = True

    def _batches(self, opened: Opened, recipe: Recipe, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        size, labels = recipe.batch_size, self.splits["train"][1]
        order: list[int] = []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            if len(order) < size:
                order += torch.randperm(self.rows, generator=generator).tolist()
            batch, order = torch.tensor(order[:size]), order[size:]
            x = opened.rows("train", batch)
            if recipe.mirror:
                coins = torch.rand(len(batch), generator=generator) < 0.5
                x[coins.to(x.device)] = opened.rows("train", batch[coins], True)
            yield x, labels[batch]

    def loss(self, opened: Opened, recipe: Recipe, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a mini-batch in the modes that the recipe trains in, with a graph."""
        for part in opened.moving:
            part.train()
            for norm in norms_of(part) if recipe.batchnorm == "eval" else ():
                norm.eval()
        features = opened.read(x)
        loss = self.task.loss(opened.head(features), y, recipe.smoothing)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            taught = self.teacher(x, opened.start)
        return loss + (_unit(features) * features - _unit(taught) * taught).square().mean()

    def _guessing(self) -> tuple[float, float, Tensor]:
        """`_measures` of a head that is not trained."""
        chance = self.task.chance
        return chance, chance, torch.full((len(self.splits["test"][1]),), chance, dtype=torch.float64)

    def _measures(self, opened: Opened, recipe: Recipe) -> tuple[float, float, Tensor]:
        """The task's measure on validation and on test rows, and what each test row adds; NaN where it diverged."""
        opened.network.eval()
        logits = {}
        for split in ("val", "test"):
            sides = [opened.whole(opened.logits, split, bool(side)) for side in range(1 + recipe.mirror)]
            logits[split] = torch.stack(sides).mean(0)
        val, test = (
            self.task.measure(x, self.splits[split][1]).item() if torch.isfinite(x).all() else torch.nan
            for split, x in logits.items()
        )
        scores = self.task.scores(logits["test"], self.splits["test"][1]).cpu()
        if math.isnan(test):
            scores.fill_(torch.nan)
        return val, torch.nan if math.isnan(val) else test, scores


def _unit(features: Tensor) -> Tensor:
    """The factor that gives features a mean square of 1; 1 for features that are all 0."""
    _, exponent = torch.frexp(features.detach().abs().amax())  # a power of two: exact
    scaled = torch.ldexp(features, -exponent)
    return torch.ldexp(scaled.square().mean().rsqrt().nan_to_num(posinf=1.0), -exponent)
