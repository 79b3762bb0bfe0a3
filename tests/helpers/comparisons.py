"""Small pairs of tasks, and a map compared with none."""

from functools import partial

import torch
from helpers.matrices import gaussian
from torch import Tensor

from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison
from immunization.models import Linear

f64, eye = partial(torch.tensor, dtype=torch.float64), partial(torch.eye, dtype=torch.float64)


def task(x: Tensor, y: Tensor, test: int = 0, **options) -> Task:
    """The first rows train, the last `test` ones test; none validate."""
    cut = len(x) - test
    return Task("task", Split(x[:cut], y[:cut]), Split(x[:0], y[:0]), Split(x[cut:], y[cut:]), **options)


def regression(seed: int, test: int = 20, columns: int = 5) -> Task:
    x = gaussian(60, columns, seed=seed)
    y = x @ gaussian(columns, seed=seed + 1) + 0.5 * gaussian(60, seed=seed + 2)
    return task(x, y, test)


def classification(seed: int, classes: int, test: int = 40, columns: int = 5) -> Task:
    x = gaussian(120, columns, seed=seed)
    y = (x[:, :classes] + 0.3 * gaussian(120, classes, seed=seed + 1)).argmax(1)
    return task(x, y, test, classes=classes)


def compare(pair: TaskPair, theta: Tensor) -> Comparison:
    model = Linear(pair)
    model.extractor.theta.data = theta
    return Comparison(pair, model)


def pair_of(k_p: Tensor, k_h: Tensor) -> TaskPair:
    """Tasks without test rows whose inputs are the given matrices."""
    return TaskPair("pair", *(task(x, torch.ones(len(x)).double()) for x in (k_p, k_h)))
