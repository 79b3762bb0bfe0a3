"""Small tasks under attack."""

from collections.abc import Callable
from pathlib import Path

import torch
from helpers.images import draw_folder
from helpers.matrices import gaussian, orthonormal
from torch import Tensor

from immunization.attacks import Victim
from immunization.data import image_folders
from immunization.data.images import ImagePair
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison
from immunization.models import Linear, Model, Timm


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


def colors_behind_a_map(root: Path, val_fraction: float = 0.25, size: int = 32) -> Victim:
    """A net with a map of kappa 1e8 folded behind it, and images of three colors for a harmful task."""
    folders = [draw_folder(root / "primary", 4, 12, 4, 0), draw_folder(root / "harmful", 3, 24, 12, 2)]
    pair = image_folders(*map(str, folders), cache=None, size=size, val_fraction=val_fraction).to("cpu", torch.float32)
    torch.manual_seed(0)
    base = Timm(pair, "test_resnet", trainable="fold", pretrained=False, arguments={"num_classes": 4})
    model, tasks = base.read(pair, True)
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    sigma = torch.logspace(0, -4, tasks.dim, dtype=torch.float64)
    model.extractor.theta.data.copy_(orthonormal(tasks.dim, tasks.dim, seed=4) * sigma)
    return Victim(model, Comparison(tasks, model), start)


def colored_pair(root: Path, val_fraction: float = 0.25) -> ImagePair:
    """Images of three colors a task."""
    folders = [draw_folder(root / name, 3, 16, 8, seed) for seed, name in enumerate(("primary", "harmful"))]
    return image_folders(*map(str, folders), cache=None, size=32, val_fraction=val_fraction).to("cpu", torch.float32)


def net_victim(pair: ImagePair, immunize: Callable[[Model], None], name: str, trainable: str, **arguments) -> Victim:
    """A net of timm with random weights, which `immunize` changes in place; `trainable="fold"`: a map behind it."""
    torch.manual_seed(0)
    base = Timm(pair, name, trainable=trainable, pretrained=False, arguments={"num_classes": 3} | arguments)
    model, tasks = base.read(pair, trainable == "fold")
    start = {key: tensor.clone() for key, tensor in model.extractor.state_dict().items()}
    with torch.no_grad():
        immunize(model)
    return Victim(model, Comparison(tasks, model), start)


def zeroed(model: Model) -> None:
    """Immunize by zeros in all that was trained."""
    for parameter in model.trained().values():
        parameter.zero_()


def silenced(model: Model) -> None:
    """Immunize by BatchNorm's statistics: behind them every ReLU is silent."""
    for key, buffer in model.extractor.named_buffers():
        if key.endswith("running_mean"):
            buffer += 1e6
