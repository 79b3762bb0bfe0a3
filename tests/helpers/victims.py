"""Small tasks under attack."""

import torch
from helpers.matrices import gaussian, orthonormal
from torch import Tensor

from immunization.attacks import Victim
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison
from immunization.models import Linear


def victim_of(harmful: Task, theta: Tensor) -> Victim:
    """A linear model with the given theta, immunized against `harmful`; the primary task has the same inputs."""
    pair = TaskPair("known", harmful, harmful)
    model = Linear(pair)
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    model.extractor.theta.data.copy_(theta)
    return Victim(model, Comparison(pair, model), start)


def regression(x: Tensor, y: Tensor) -> Task:
    """A task whose validation and test rows are the training rows: what is learned is seen."""
    return Task("regression", Split(x, y), Split(x, y), Split(x, y))


def classes(dim: int = 6, rows: int = 240, count: int = 3) -> Task:
    """Well separated classes with inputs of kappa near 1."""
    labels = torch.arange(rows) % count
    x = gaussian(rows, dim, seed=1) + 6 * torch.eye(count, dim, dtype=torch.float64)[labels]
    x = torch.linalg.qr(x).Q
    parts = map(Split, x.split(rows // 3), labels.split(rows // 3))
    return Task("classes", *parts, classes=count)


def quadratic(kappa: float) -> tuple[Task, Tensor]:
    """Isotropic inputs and a map that gives the worst start for exact line search: a gradient of two equal parts."""
    sigma = torch.tensor([1.0, kappa**-0.5], dtype=torch.float64)
    x = orthonormal(50, 2, seed=0)
    return regression(x, x @ (1 / sigma)), torch.diag(sigma)


def noisy_classes(dim: int = 6, rows: int = 90, count: int = 3) -> Task:
    """Classes that overlap, `rows` of them on every split."""
    x, labels = gaussian(3 * rows, dim, seed=1), torch.arange(3 * rows) % count
    x = x + 1.5 * torch.eye(count, dim, dtype=torch.float64)[labels]
    return Task("noisy", *map(Split, x.split(rows), labels.split(rows)), classes=count)
