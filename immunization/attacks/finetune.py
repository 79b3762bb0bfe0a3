"""Attackers who train the net with a fresh head: fine-tuning, LoRA, pruning, and training of fresh layers."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from immunization.attacks.altered import pruned, redrawn
from immunization.attacks.base import Attack, AttackCurve, areas, step_grid
from immunization.attacks.optimizers import optimizer_named
from immunization.attacks.recipes import WEIGHT_DECAY, WHOLE, Budget, Recipe, Schedule, read_recipes
from immunization.attacks.search import require_optuna, search
from immunization.attacks.tuning import Course, ShouldStop, Tuner
from immunization.attacks.victim import Victim
from immunization.checks import AtLeastOne, AtLeastTwo, Fraction, Share
from immunization.data.task import MARGIN
from immunization.errors import ConfigError, Inapplicable
from immunization.models.base import Model
from immunization.models.chain import Network
from immunization.runs.records import Stage

OWN = ("schedule", "head_first", "decay", "average", "mirror", "smoothing")
"""Settings of a recipe that are options of an attack."""

Rates = Mapping[str, Sequence[float]]


class FineTune(Attack):
    """A fresh linear head and a part of the net trained by cross-entropy on mini-batches.

    `scope`: `full`, the whole net and the map behind it, if there is one, `last`, its last block and the map, `head`,
    `trained`, what was immunized, or the name of a block or a stage (`layer4`, `blocks.9`), with which all from there
    on is meant. With the last two, what precedes them is passed once. Features are scaled to a mean square of 1 at the
    start, by one factor; the head starts at 0. The trained part is in train mode. The clipped gradient of a mini-batch
    is one step. `schedule`, `head_first`, `decay`, `average`, `mirror` and `smoothing` are those of a `Recipe`.

    The best of `rates` on the validation split is used; with `search=N`, the best of `known_recipes` and N more
    (`search.py`) within the same operations; or the recipes of the file `replay`. A searched or replayed recipe runs
    with several `seeds`. `epochs` are passes over the training images at which SGRC is taken; the last of them takes
    the place of `steps`. A mini-batch counts as `batch_size` images there, also where the attacker has fewer.
    """

    option = "attack/full_finetune"

    trains = True
    fixed_rates: ClassVar[Rates] = {"sgd": (0.003, 0.03, 0.3), "adamw": (1e-4, 1e-3, 0.01)}
    """The rates in conf/attack, for every optimizer."""

    scope: str
    optimizer: str
    rates: Sequence[float]
    steps: AtLeastOne
    epochs: Sequence[AtLeastOne] | None
    batch_size: AtLeastTwo
    schedule: Schedule
    head_first: bool
    decay: Share
    average: bool
    mirror: bool
    smoothing: Fraction
    search: AtLeastOne | None
    replay: str | None
    seeds: AtLeastOne

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search and self.replay:
            raise ConfigError(
                f"{self.group}.search and {self.group}.replay are both given; give one: replay takes the settings of "
                "an earlier search"
            )
        optimizer_named(self.optimizer, f"{self.group}.optimizer", weight_decay=self.recipe(0.0).weight_decay)
        self.epochs = sorted(self.epochs or ())
        if self.search:
            require_optuna()
        self.replayed = read_recipes(self.replay, self.kind, self.parts) if self.replay else {}

    def trains_all(self, victim: Victim) -> bool:
        if self.scope == "full":
            return True
        network = victim.network("immunized")
        trained, own = ({p for m in network.part(name) for p in m.parameters()} for name in ("trained", self.scope))
        return trained <= own

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a net that may be trained, the smallest first."""
        if self.scope == "full":
            return (*WHOLE[:-1], "trained", "full")
        return WHOLE[: WHOLE.index(self.scope) + 1] if self.scope in WHOLE else ("head", self.scope)

    def check(self, model: Model) -> None:
        if model.deep and self.scope not in (*WHOLE, "trained"):
            model.network().part(self.scope)

    def recipe(self, rate: float) -> Recipe:
        """The recipe of the fixed grid with one of its rates."""
        own = {name: getattr(self, name) for name in OWN}
        return Recipe(rate, self.optimizer, self.batch_size, self.scope, WEIGHT_DECAY.get(self.optimizer, 0.0), **own)

    def known_recipes(self) -> list[Recipe]:
        """The grids of this attack and its relatives in conf/attack, but for rates of 0: a search begins with them."""
        own = [self.recipe(rate) for rate in self.settings]
        others = [
            replace(own[0], rate=rate, optimizer=optimizer, part=part, weight_decay=WEIGHT_DECAY[optimizer])
            for part in self.parts
            if part in ("last", "full") or part == self.scope != "head"
            for optimizer, rates in self.fixed_rates.items()
            for rate in rates
        ]
        return [recipe for recipe in dict.fromkeys(own + others) if recipe.rate > 0]

    def network(self, victim: Victim, stage: Stage, part: str) -> Network:
        """The net whose `part` is trained; what precedes it is as in the released model."""
        return victim.network(stage, self.precision)

    def teacher(self, victim: Victim, stage: Stage) -> Network | None:
        """The net whose features are learned beside the labels."""
        return None

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        victim.network("baseline")  # Inapplicable where there is no net
        victim.check_changeable(self.reference)
        few = self.rows(victim.task)
        rows = None if few is None else tuple(few.tolist())
        splits = {"train": victim.images("train", rows)}
        splits |= {split: victim.images(split) for split in ("val", "test")}
        if not all(len(y) for _, y in splits.values()):
            self.check(victim.model)
            raise Inapplicable("the harmful task needs validation and test images")
        activations = partial(victim.activations, stage, self.precision, rows)
        network, teacher = partial(self.network, victim, stage), self.teacher(victim, stage)
        tuner = Tuner(victim.task, splits, network, self.adapt, activations, teacher)
        marks = {epochs: math.ceil(epochs * tuner.rows / self.batch_size) for epochs in self.epochs or ()}
        steps = max(marks.values(), default=self.steps)
        grid = sorted({*step_grid(steps, per_octave=1), *marks.values()})
        recipe = self.recipe(self.settings[0])
        budget = Budget(grid, tuner.step_cost(recipe, self.seed), tuner.open(recipe, self.seed).flops)
        curve = self._searched(tuner, budget, stage) if self.search or self.replayed else self._fixed(tuner, budget)
        curve.epochs = {epochs: grid.index(step) for epochs, step in marks.items()} or None
        return curve

    def adapt(self, network: Network, part: str) -> tuple[list[nn.Parameter], list[nn.Module]]:
        """Parameters of a part of `network`, to be trained, and what of it is in train mode meanwhile."""
        modules = network.part(part)
        return list(dict.fromkeys(p for module in modules for p in module.parameters())), modules

    def _fixed(self, tuner: Tuner, budget: Budget) -> AttackCurve:
        """The best rate of the grid, of which the middle comes first.

        A rate that cannot become the best any more is stopped, and keeps its last measures.
        """
        made: dict[float, Course] = {}
        middle, points = self.settings[len(self.settings) // 2], len(budget.grid)
        for rate in (middle, *(rate for rate in self.settings if rate != middle)):
            hopeless = _hopeless(made.values(), points, tuner.task.chance)
            course = made[rate] = tuner.train(self.recipe(rate), budget, self.seed, hopeless)
            course.extend(points - len(course.val), course.val[-1], course.test[-1], course.scores[-1])
        courses = [made[rate] for rate in self.settings]
        val, test, scores = _stacked(courses)
        curve = self.choose(budget.grid, budget.flops, val, test, tuner.task.chance, scores=scores)
        spent = {rate: course.spent - budget.start for rate, course in made.items()}
        curve.others = sum(cost for rate, cost in spent.items() if rate != curve.setting)
        return curve

    def _searched(self, tuner: Tuner, budget: Budget, stage: Stage) -> AttackCurve:
        """The recipe that was found or replayed, with the seed that is best on the validation split."""
        if self.search:
            best = search(tuner, budget, self.known_recipes(), self.parts, self.search, self.seed)
            recipe, facts, courses = best.recipe, best.facts, [best.course]
            others = best.spent - best.course.spent
        elif stage in self.replayed:
            recipe, facts, others = self.replayed[stage], {}, 0.0
            courses = [tuner.train(recipe, budget, self.seed)]
        else:
            raise ConfigError(
                f"{self.group}.replay={self.replay} has no settings for the stage {stage}; give the "
                "attack_<name>.json of a search that attacked it"
            )
        courses += [tuner.train(recipe, budget, self.seed + i) for i in range(1, self.seeds)]
        val, test, scores = _stacked(courses)
        area = areas(val, tuner.task.chance)
        curves = [AttackCurve(torch.tensor(budget.grid), budget.flops, *own) for own in zip(val, test, strict=True)]
        best_seed, finite = int(area.argmax()), torch.isfinite(area)
        return replace(
            curves[best_seed],
            setting=recipe.rate,
            diverged=() if finite.any() else (recipe.rate,),
            found={"recipe": asdict(recipe), "steps": courses[0].steps[-1]} | facts,
            finals=tuple(curve.final for curve, sound in zip(curves, finite, strict=True) if sound),
            scores=scores[best_seed],
            others=others + sum(course.spent for course in courses if course is not courses[best_seed]),
        )


class Pruned(FineTune, group="attack.pruned"):
    """Fine-tuning of a part whose smallest weights are set to 0 first, where a defense may have hidden what it did.

    `pruned` is the share of them, in each layer.
    """

    pruned: Fraction

    def network(self, victim: Victim, stage: Stage, part: str) -> Network:
        return pruned(super().network(victim, stage, part), part, self.pruned)


class FreshPart(FineTune, group="attack.fresh_part"):
    """A part of the net drawn anew, and then trained, behind what precedes it: nothing of the part is used."""

    def trains_all(self, victim: Victim) -> bool:
        return False

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.scope,)

    def untouched(self, victim: Victim) -> bool:
        return victim.same_outside(self.scope)

    def network(self, victim: Victim, stage: Stage, part: str) -> Network:
        return redrawn(super().network(victim, stage, part), part)


class Distilled(FreshPart, group="attack.distilled"):
    """`FreshPart`, which learns the features of the net as it was, beside the labels.

    So it takes over what the part can still do, and none of the weights that make it hard to train.
    """

    def untouched(self, victim: Victim) -> bool:
        return False

    def teacher(self, victim: Victim, stage: Stage) -> Network:
        return victim.network(stage, self.precision)


class Scratch(FreshPart, group="attack.scratch"):
    """The net's architecture from random weights, trained as `FineTune` trains the whole net."""

    reference = True

    scope = "full"


class LoRA(FineTune, group="attack.lora"):
    """Low-rank adapters of peft on every convolution and linear layer, and a fresh head; the net stays in eval mode."""

    fixed_rates: ClassVar[Rates] = {"adamw": (0.001, 0.01, 0.1), "sgd": (0.03, 0.3, 3.0)}

    rank: AtLeastOne

    @property
    def kind(self) -> str:
        return f"LoRA of rank {self.rank}"

    def trains_all(self, victim: Victim) -> bool:
        return False

    @property
    def parts(self) -> tuple[str, ...]:
        return ("full",)

    def adapt(self, network: Network, part: str) -> tuple[list[nn.Parameter], list[nn.Module]]:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError("attack=[lora] needs peft; install it with pip install peft") from error
        layers = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        ]
        exactly = "|".join(map(re.escape, layers))  # peft takes a list of names for their endings
        inject_adapter_in_model(LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=exactly), network)
        network.find_units()
        return [p for name, p in network.named_parameters() if "lora_" in name], []


def _hopeless(courses: Collection[Course], points: int, floor: float) -> ShouldStop:
    """Whether a course that was MARGIN above the best one, from here on and at its best, would still be behind it."""
    if not courses:
        return lambda val: False
    val = torch.tensor([course.val for course in courses], dtype=torch.float64)
    best = areas(val, floor)
    most, top = val[best.argmax()].max().item() + MARGIN, best.max().item()

    def should_stop(val: list[float]) -> bool:
        return sum(max(value, floor) for value in val) + (points - len(val)) * most < points * top

    return should_stop


def _stacked(courses: Sequence[Course]) -> tuple[Tensor, Tensor, Tensor]:
    """`val` and `test` [courses, T] and `scores` [courses, T, N]."""
    val, test = (torch.tensor([getattr(c, split) for c in courses], dtype=torch.float64) for split in ("val", "test"))
    return val, test, torch.stack([torch.stack(course.scores) for course in courses])
