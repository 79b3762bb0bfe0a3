"""Linear models under attack, of which everything is known."""

import torch
from matrices import gaussian
from torch import Tensor

from immunization.attacks import Victim
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation.deep import compare
from immunization.models import Linear


def victim_of(harmful: Task, theta: Tensor) -> Victim:
    """A linear model with the given theta [D, D]; both tasks are `harmful`."""
    pair = TaskPair("known", harmful, harmful)
    model = Linear(pair)
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    model.extractor.theta.data.copy_(theta)
    return Victim(model, compare(pair, model), start)


def noisy_classes(dim: int = 6, rows: int = 90, count: int = 3) -> Task:
    """Classes that overlap, `rows` of them on every split."""
    x, labels = gaussian(3 * rows, dim, seed=1), torch.arange(3 * rows) % count
    x = x + 1.5 * torch.eye(count, dim, dtype=torch.float64)[labels]
    return Task("noisy", *map(Split, x.split(rows), labels.split(rows)), classes=count)
