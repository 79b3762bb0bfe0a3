"""Small tasks, and what a method does with them."""

import numpy as np
import torch
from helpers.matrices import gaussian
from torch import Tensor

from immunization.data.task import Split, Task, TaskPair
from immunization.methods import Method
from immunization.models import Batch, Linear
from immunization.training.batches import PairedBatches
from immunization.training.loop import train


def task(x: Tensor, y: Tensor, classes: int = 0) -> Task:
    return Task("task", Split(x, y), Split(x[:0], y[:0]), Split(x[:0], y[:0]), classes=classes)


def make_pair(rows: tuple[int, int] = (30, 20), columns: int = 4, classes: int = 0) -> TaskPair:
    """Two tasks of random inputs, without validation and test rows: regressions, or `classes` classes."""
    tasks = []
    for seed, n in enumerate(rows):
        x, y = gaussian(n, columns, seed=seed), gaussian(n, seed=seed + 10)
        tasks.append(task(x, torch.arange(n) % classes if classes else y, classes))
    return TaskPair("pair", *tasks)


def full_batches(pair: TaskPair) -> tuple[Batch, Batch]:
    return next(PairedBatches(pair, None, torch.Generator()).epoch())


def gradient(term: Tensor, model: Linear) -> Tensor:
    (found,) = torch.autograd.grad(term, [model.extractor.theta], retain_graph=True)
    return found


def central_differences(function, theta: Tensor, step: float = 1e-6) -> Tensor:
    """Gradient of a scalar function of a matrix, entry by entry."""
    found = torch.zeros_like(theta)
    for index in np.ndindex(*theta.shape):
        ends = []
        for sign in (step, -step):
            moved = theta.clone()
            moved[index] += sign
            ends.append(float(function(moved)))
        found[index] = (ends[0] - ends[1]) / (2 * step)
    return found


def fit(method: Method, pair: TaskPair, optimizer: type, lr: float, init: str = "random") -> Linear:
    """A model, trained."""
    model = Linear(pair, init)
    method.setup(model, pair)
    batches = PairedBatches(pair, method.batch_size, torch.Generator().manual_seed(0))
    train(method, model, batches, optimizer(model.parameters(), lr=lr))
    return model
