"""Settings of one fine-tuning, fixed, searched or read from a file, and its budget of operations."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from immunization.attacks.base import AttackCurve
from immunization.checks import AtLeastTwo, Fraction, NonNegative, Share, check_arguments
from immunization.errors import ConfigError
from immunization.runs.records import Stage

Schedule = Literal["constant", "linear", "cosine"]
Norms = Literal["train", "eval"]

WHOLE = ("head", "last", "full")
"""Parts with which every step passes the whole net; with others, what precedes them is passed once."""

WEIGHT_DECAY = {"sgd": 0.0, "adamw": 0.01}
"""The fixed grids': torch's defaults. Of others it is 0."""


@dataclass(frozen=True)
class Recipe:
    """How a fresh head and a part of a net (`Network.part`) are trained.

    `schedule` is that of the rate after `warmup`, a share of all steps in which it grows from 0. `standardize`: the
    head reads features of mean 0 and deviation 1 as they are at the start, instead of features with one factor for all.
    `batchnorm`: the mode of BatchNorm in what is trained. `head_first`: the head starts from ridge regression on the
    features at the start, and not from 0; BatchNorm in train mode first gets the statistics of the own images. `decay`:
    the rate of a block is that of the block behind it times this, and that of the last block is the head's times this.
    `average`: what is measured in the second half of the steps is the mean of the weights, and of the statistics of
    BatchNorm, since its beginning. `mirror`: each training image is mirrored with probability 1/2, and the outputs for
    an image and its mirror image are averaged. `smoothing`: of labels of more than two classes.
    """

    rate: NonNegative
    optimizer: str
    batch_size: AtLeastTwo
    part: str
    weight_decay: NonNegative
    schedule: Schedule = "constant"
    warmup: Fraction = 0.0
    standardize: bool = False
    batchnorm: Norms = "train"
    head_first: bool = False
    decay: Share = 1.0
    average: bool = False
    mirror: bool = False
    smoothing: Fraction = 0.0

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of `step`, 1 to `steps`."""
        warm = round(self.warmup * steps)
        if step <= warm:
            return self.rate * step / warm
        done = (step - 1 - warm) / (steps - warm)
        shares = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.rate * shares[self.schedule]


@dataclass(frozen=True)
class Budget:
    """Operations at which an attack is measured, the last of which are all it has: `grid` [T] steps of `unit` each.

    `start` of them come before the first step.
    """

    grid: Sequence[int]
    unit: float
    start: float = 0.0

    @property
    def flops(self) -> Tensor:
        """The operations [T]."""
        return self.start + self.unit * torch.tensor(self.grid, dtype=torch.float64)

    def steps(self, start: float, cost: float) -> list[int]:
        """Steps [T] of `cost` operations that they pay for, when `start` are spent before; -1: not even these."""
        return [max(-1, math.floor((self.start + step * self.unit - start) / cost + 1e-9)) for step in self.grid]


def found_settings(kind: str, curves: Mapping[Stage, AttackCurve]) -> dict[str, Any] | None:
    """The settings found for each stage, and what they reach with each seed; None where nothing was searched for."""
    settings = {
        str(stage): curve.found | {"validation": curve.val.max().item(), "finals": list(curve.finals)}
        for stage, curve in curves.items()
        if curve.found is not None
    }
    return {"attack": kind, **settings} if settings else None


def read_recipes(path: str, kind: str, parts: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by stage from a file that an attack of class `kind` wrote; raises ConfigError for any other."""
    try:
        content = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"attack.*.replay={path} cannot be read: {error}") from error
    if not isinstance(content, dict) or "attack" not in content or len(content) < 2:
        raise ConfigError(f"attack.*.replay={path} holds no settings; give the attack_<name>.json of a search")
    if content["attack"] != kind:
        raise ConfigError(f"attack.*.replay={path} holds settings of {content['attack']}, and not of {kind}")
    return {stage: _recipe(settings, path, parts) for stage, settings in content.items() if stage != "attack"}


def _recipe(settings: object, path: str, parts: Sequence[str]) -> Recipe:
    options = settings.get("recipe") if isinstance(settings, dict) else None
    try:
        check_arguments(Recipe, options or {}, f"attack.*.replay={path}: recipe")
        recipe = Recipe(**(options or {}))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"attack.*.replay={path}: {error}; it was edited, or written by another version") from error
    if recipe.part not in parts:
        raise ConfigError(f"attack.*.replay={path} trains {recipe.part}; this attack trains {' or '.join(parts)}")
    return recipe
