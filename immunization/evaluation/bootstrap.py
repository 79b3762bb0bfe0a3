"""How surely held-out rows say what they say: 95 % intervals over resamples of these rows."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from immunization.data.task import Task
from immunization.runs.interpretation import interval

RESAMPLES = 1000
BLOCK = 2**22
"""Counts held at once."""
TAIL = 0.025
FLAT = 1e-9
"""Share of the variance of targets below which a resample has none."""


def draws(rows: int) -> Iterator[Tensor]:
    """How often each of `rows` rows is drawn, [B, rows] in blocks of resamples, the same ones at every call."""
    generator = np.random.default_rng(0)  # anybody can draw them again
    for some in torch.arange(RESAMPLES).split(max(1, BLOCK // rows)):
        drawn = torch.from_numpy(generator.integers(rows, size=(len(some), rows)))
        counts = torch.zeros(len(some), rows, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))


def variance(y: Tensor, counts: Tensor) -> Tensor:
    """The variance of targets y [N] on each resample, [B]."""
    y = y - y.mean()
    return counts @ y.square() / len(y) - (counts @ y / len(y)).square()


def resampled(task: Task, scores: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """The task's measure [B, T] on each resample, of the scores [T, N] (`Task.scores`) of rows with targets y [N]."""
    counts = counts.to(scores)
    if task.classes:
        return counts @ scores.T / len(y)
    spread = variance(y, counts).clamp(min=torch.finfo(y.dtype).tiny)
    errors = (1 - scores) * (y - y.mean()).square().mean()
    return 1 - counts @ errors.T / len(y) / spread[:, None]


def of_measure(task: Task, predictions: Tensor) -> tuple[float, float]:
    """The 95 % interval of the task's measure of predictions [N, outputs] for its test rows.

    Wilson's for an accuracy, of which resamples know nothing at 0 and 1. Resamples of targets that are all equal are
    left out: they have no R^2.
    """
    y, predictions = task.test.y, predictions.double()
    if task.classes:
        return interval(task.measure(predictions, y).item(), len(y))
    scores = task.scores(predictions[None], y)
    found = []
    for counts in draws(len(y)):
        counts = counts.to(scores)
        varies = variance(y, counts) > FLAT * y.var(correction=0)
        found.append(resampled(task, scores, y, counts)[varies, 0])
    return ends(torch.cat(found))


def ends(values: Tensor) -> tuple[float, float]:
    """Ends of the 95 % interval of resampled values [B]; each is one of the values."""
    ordered, outside = values.sort().values, int(TAIL * len(values))
    return ordered[outside].item(), ordered[-1 - outside].item()
