"""Attacks that train the net itself on harmful images, beside a fresh head: fine-tuning and LoRA."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, replace
from functools import partial
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from immunization.attacks.base import Attack, AttackCurve, areas, step_grid
from immunization.attacks.recipe import WEIGHT_DECAY, Budget, Optimizer, Recipe, Scope
from immunization.attacks.replay import read_recipes
from immunization.attacks.search import require_optuna, search
from immunization.attacks.tuning import Tuner
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.checks import AtLeastOne, AtLeastTwo
from immunization.data.task import Task
from immunization.errors import ConfigError
from immunization.models.chain import Network

Rates = Mapping[Optimizer, Sequence[float]]


class FineTune(Attack):
    """A fresh linear head and a part of the net trained by cross-entropy on mini-batches, one learning rate for both.

    `scope`: `full`, the whole net and the map behind it, if there is one, `last`, its last block and the map, or
    `head`. Features are scaled to a mean square of 1 at the start, by one factor; the head starts at 0. What is trained
    is in train mode. A step takes the clipped gradient of a mini-batch.

    The best of `rates` on the validation split is used; with `search=N`, the best of `known_recipes` and N more
    (`search.py`) within the same operations; or the recipes of the file `replay`. What was searched or replayed runs
    with several `seeds`. `epochs` are passes over the training images at which SGRC is taken; the last of them takes
    the place of `steps`.
    """

    trains = True
    fixed_rates: ClassVar[Rates] = {"sgd": (0.003, 0.03, 0.3), "adamw": (1e-4, 1e-3, 0.01)}
    """The rates in conf/attack, for every optimizer."""

    scope: Scope = "full"
    optimizer: Optimizer = "sgd"
    rates: Sequence[float] = (0.003, 0.03, 0.3)
    _: KW_ONLY
    steps: AtLeastOne = 64
    epochs: Sequence[AtLeastOne] | None = None
    batch_size: AtLeastTwo = 32
    search: AtLeastOne | None = None
    replay: str | None = None
    seeds: AtLeastOne = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search and self.replay:
            raise ConfigError("attack: search looks for settings and replay has them; give one of the two")
        self.epochs = sorted(self.epochs or ())
        if self.search:
            require_optuna()
        self.replayed = read_recipes(self.replay, self.kind, self.parts) if self.replay else {}

    @property
    def trains_all(self) -> bool:
        return self.scope == "full"

    @property
    def parts(self) -> tuple[Scope, ...]:
        """Parts of a net that may be trained, the smallest first."""
        parts = get_args(Scope)
        return parts[: parts.index(self.scope) + 1]

    def check(self, task: Task) -> None:
        if self.search and not len(task.val):
            raise ConfigError(
                "attack: a search needs validation images of the harmful task: set dataset.val_fraction above 0"
            )

    def recipe(self, rate: float) -> Recipe:
        """The recipe of the fixed grid with one of its rates."""
        return Recipe(rate, self.optimizer, self.batch_size, self.scope, WEIGHT_DECAY[self.optimizer])

    def known_recipes(self) -> list[Recipe]:
        """The grids of this attack and its relatives in conf/attack, but for rates of 0: a search begins with them."""
        own = [self.recipe(rate) for rate in self.settings]
        others = [
            replace(own[0], rate=rate, optimizer=optimizer, part=part, weight_decay=WEIGHT_DECAY[optimizer])
            for part in self.parts
            if part != "head"
            for optimizer, rates in self.fixed_rates.items()
            for rate in rates
        ]
        return [recipe for recipe in dict.fromkeys(own + others) if recipe.rate > 0]

    def network(self, victim: Victim, stage: Stage) -> Network:
        """The net that is trained."""
        return victim.network(stage, self.precision)

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        self.network(victim, "baseline")  # Inapplicable where there is no net
        rows = self.rows(victim.task)
        splits = {"train": victim.images("train", None if rows is None else tuple(rows.tolist()))}
        splits |= {split: victim.images(split) for split in ("val", "test")}
        if not all(len(y) for _, y in splits.values()):
            self.check(victim.task)
            raise Inapplicable("the harmful task needs validation and test images")
        tuner = Tuner(victim.task, splits, partial(self.network, victim, stage), self.adapt)
        marks = {epochs: math.ceil(epochs * tuner.rows / self.batch_size) for epochs in self.epochs}
        steps = max(marks.values(), default=self.steps)
        grid = sorted({*step_grid(steps, per_octave=1), *marks.values()})
        budget = Budget(grid, tuner.step_cost(self.recipe(self.settings[0]), self.seed))
        curve = self._searched(tuner, budget, stage) if self.search or self.replayed else self._fixed(tuner, budget)
        curve.epochs = {epochs: grid.index(step) for epochs, step in marks.items()} or None
        return curve

    def adapt(self, network: Network, part: Scope) -> tuple[list[nn.Parameter], list[nn.Module]]:
        """Parameters of a part of `network`, to be trained, and what of it is in train mode meanwhile."""
        parts = {"head": [], "last": network.last(), "full": [network]}[part]
        return [p for module in parts for p in module.parameters()], parts

    def _fixed(self, tuner: Tuner, budget: Budget) -> AttackCurve:
        """The best rate of the grid."""
        courses = [tuner.train(self.recipe(rate), budget, self.seed) for rate in self.settings]
        val, test = (_stacked([getattr(course, split) for course in courses]) for split in ("val", "test"))
        return self.choose(budget.grid, budget.flops, val, test, tuner.task.chance)

    def _searched(self, tuner: Tuner, budget: Budget, stage: Stage) -> AttackCurve:
        """The recipe that was found or replayed, with the seed that is best on the validation split."""
        if self.replayed:
            if stage not in self.replayed:
                raise ConfigError(f"attack: the file to replay holds no settings for the stage {stage}")
            recipe, facts = self.replayed[stage], {}
            courses = [tuner.train(recipe, budget, self.seed)]
        else:
            found = search(tuner, budget, self.known_recipes(), self.parts, self.search, self.seed)
            recipe, facts, courses = found.recipe, found.facts, [found.course]
        courses += [tuner.train(recipe, budget, self.seed + i) for i in range(1, self.seeds)]
        val, test = (_stacked([getattr(course, split) for course in courses]) for split in ("val", "test"))
        area = areas(val, tuner.task.chance)
        curves = [
            AttackCurve(
                torch.tensor(budget.grid),
                budget.flops,
                *scores,
                setting=recipe.rate,
                diverged=() if torch.isfinite(area).any() else (recipe.rate,),
                found={"recipe": asdict(recipe), "steps": courses[0].steps[-1]} | facts,
            )
            for course, *scores in zip(courses, val, test, strict=True)
        ]
        best = curves[int(area.argmax())]
        best.finals = tuple(curve.final for curve, finite in zip(curves, torch.isfinite(area), strict=True) if finite)
        return best


class LoRA(FineTune, group="attack.lora", without=["scope"]):
    """Low-rank adapters of peft on every convolution and linear layer, and a fresh head; the net stays in eval mode."""

    fixed_rates: ClassVar[Rates] = {"adamw": (0.001, 0.01, 0.1), "sgd": (0.03, 0.3, 3.0)}
    trains_all = False

    optimizer = "adamw"
    rates = (0.001, 0.01, 0.1)
    rank: AtLeastOne = 8

    @property
    def kind(self) -> str:
        return f"LoRA of rank {self.rank}"

    @property
    def parts(self) -> tuple[Scope, ...]:
        return ("full",)

    def adapt(self, network: Network, part: Scope) -> tuple[list[nn.Parameter], list[nn.Module]]:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError("attack=[lora] needs peft: pip install 'immunization[lora]'") from error
        layers = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        ]
        exactly = "|".join(map(re.escape, layers))  # peft takes a list of names for their endings
        inject_adapter_in_model(LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=exactly), network)
        return [p for name, p in network.named_parameters() if "lora_" in name], []


def _stacked(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
