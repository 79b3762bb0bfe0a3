"""Attackers that search: Optuna proposes recipes, measured on validation rows within a budget of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, get_args

import torch

from immunization.attacks.base import areas
from immunization.attacks.optimizers import OPTIMIZERS
from immunization.attacks.recipes import Budget, Norms, Recipe, Schedule
from immunization.attacks.tuning import Course, ShouldStop, Tuner
from immunization.errors import ConfigError

if TYPE_CHECKING:
    from optuna import Trial

RATES = (1e-5, 1.0)
WARMUPS = (0.0, 0.3)
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 0.01, 0.1)
BATCH_SIZES = (8, 32, 128)
DECAYS = (0.5, 0.8, 1.0)
SMOOTHINGS = (0.0, 0.1)
PATIENCE = 2
"""Measurements of a trial before it may be stopped for being below the median of those before it."""


@dataclass(frozen=True)
class Found:
    """The best recipe on validation rows, with what it reached and what the search spent."""

    recipe: Recipe
    course: Course
    trials: int
    stopped: int
    spent: float

    @property
    def facts(self) -> dict[str, float]:
        """How it was found, as plain values."""
        return {"trials": self.trials, "stopped": self.stopped, "search_flops": self.spent}


def require_optuna() -> None:
    """Raise ConfigError where Optuna is missing."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError("a search needs optuna: pip install optuna") from error


def search(
    tuner: Tuner, budget: Budget, known: Sequence[Recipe], parts: Sequence[str], trials: int, seed: int
) -> Found:
    """The best of the `known` recipes, which are tried first and in full, and of `trials` more.

    Best is the largest mean of the validation curve over the budget's grid, as for a fixed grid. Where every recipe
    diverges, the first is returned.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=len(known), n_warmup_steps=PATIENCE)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, pruner=pruner, direction="maximize")
    for recipe in known:
        study.enqueue_trial(asdict(recipe))
    tried: list[tuple[float, Recipe, Course]] = []
    stopped = 0
    for number in range(len(known) + trials):
        trial = study.ask()
        recipe = draw(trial, known, parts, tuner.rows)
        course = tuner.train(recipe, budget, seed, _should_stop(trial, tuner.task.chance, number >= len(known)))
        whole = len(course.val) == len(budget.grid)
        value = _area(course.val, tuner.task.chance) if whole else -torch.inf
        if value == -torch.inf:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            stopped += not whole
        else:
            study.tell(trial, value)
        tried.append((value, recipe, course))
    _, recipe, course = max(tried, key=lambda each: each[0])
    return Found(recipe, course, len(tried), stopped, sum(each[2].spent for each in tried))


def draw(trial: Trial, known: Sequence[Recipe], parts: Sequence[str], rows: int) -> Recipe:
    """A recipe of `parts` by a trial; the space has that of every known recipe, and no batch of more than `rows`."""
    rates = [recipe.rate for recipe in known]
    sizes, decays, smoothings = (
        {getattr(recipe, name) for recipe in known} for name in ("batch_size", "decay", "smoothing")
    )
    return Recipe(
        rate=trial.suggest_float("rate", min(*RATES, *rates), max(*RATES, *rates), log=True),
        optimizer=trial.suggest_categorical(
            "optimizer", list(dict.fromkeys([*OPTIMIZERS, *(r.optimizer for r in known)]))
        ),
        batch_size=trial.suggest_categorical("batch_size", sorted(sizes | {n for n in BATCH_SIZES if n <= rows})),
        part=trial.suggest_categorical("part", list(parts)),
        weight_decay=trial.suggest_categorical("weight_decay", WEIGHT_DECAYS),
        schedule=trial.suggest_categorical("schedule", get_args(Schedule)),
        warmup=trial.suggest_float("warmup", *WARMUPS),
        standardize=trial.suggest_categorical("standardize", [False, True]),
        batchnorm=trial.suggest_categorical("batchnorm", get_args(Norms)),
        head_first=trial.suggest_categorical("head_first", [False, True]),
        decay=trial.suggest_categorical("decay", sorted({*DECAYS} | decays)),
        average=trial.suggest_categorical("average", [False, True]),
        mirror=trial.suggest_categorical("mirror", [False, True]),
        smoothing=trial.suggest_categorical("smoothing", sorted({*SMOOTHINGS} | smoothings)),
    )


def _should_stop(trial: Trial, floor: float, stops: bool) -> ShouldStop:
    """Reports the mean of the curve so far to a trial; says whether to stop it."""

    def should_stop(val: list[float]) -> bool:
        area = _area(val, floor)
        if area > -torch.inf:
            trial.report(area, len(val) - 1)
        return stops and len(val) > PATIENCE and trial.should_prune()

    return should_stop


def _area(val: list[float], floor: float) -> float:
    return areas(torch.tensor([val], dtype=torch.float64), floor).item()
