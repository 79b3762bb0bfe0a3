"""What a net's trainable part reads of images: preprocessing, activations, and classes in the order of its head."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from immunization.compute.machine import gpu_memory
from immunization.data.image_loading import create_loader
from immunization.data.images import ImagePair, ImageTask
from immunization.data.loaders import LabeledBatches, shuffled_parts
from immunization.data.task import Split, Task, is_shown
from immunization.errors import ConfigError, DataError
from immunization.models.activations import Activations, Stream, collect, free_space
from immunization.terminal import counted

log = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True)
class Reader:
    """A net, called `name`, as far as images are read by it.

    `trunk` maps images to what enters the extractor, just before the net's unit `point`, and `extractor` that to
    features [N, `width`] before immunization. The head has `outputs`. `config` says how the net wants its images.
    """

    images: ImagePair
    config: dict[str, Any]
    name: str
    point: str
    trunk: Callable[[Tensor], Tensor]
    extractor: Callable[[Tensor], Tensor]
    width: int
    outputs: int


@dataclass(frozen=True)
class Part:
    """One split of a task.

    `x` is what the trained part (or a folded map) reads, `y` [N] are labels as the files count them, `features` [N, D]
    those before immunization.
    """

    x: Tensor | Stream
    y: Tensor
    features: Tensor


def preprocessing(config: dict[str, Any], pair: ImagePair, task: ImageTask, training: bool = False) -> dict[str, Any]:
    """The model's own data config with the crops that the data set asks for."""
    if training:
        return {key: value for key, value in config.items() if not key.startswith("crop")}
    crop = {} if pair.crop_pct is None else {"crop_pct": pair.crop_pct}
    if task.crop is not None:
        crop["crop_mode"] = task.crop
        if task.crop == "squash":
            crop["crop_pct"] = 1.0
    return config | crop


def room_for(pair: ImagePair) -> AbstractContextManager[None]:
    """Inside, a GPU that is too small for a batch without gradients is said to be so."""
    return gpu_memory(f"dataset.batch_size={pair.batch_size} images", "lower it")


def read_split(reader: Reader, role: str, split: str, folded: bool, weights: Mapping[str, str]) -> Part:
    """Everything that is computed once of the images of one split.

    `weights` are hashes of what makes the features and the inputs. Raises DataError for images that cannot be read.
    """
    pair, task = reader.images, reader.images.tasks[role]
    part, config = task.splits[split], preprocessing(reader.config, pair, task)
    if not len(part):
        nothing = torch.empty(0, reader.width, dtype=pair.dtype)
        return Part(nothing, torch.empty(0, dtype=torch.long), nothing)

    def loader(size: int = pair.batch_size) -> DataLoader:
        return create_loader(pair, part, config, batch_size=size)

    rows = "" if part.rows is None else part.rows.tolist()
    # before, features of a GPU were computed in TF32 (`machine.full_precision`)
    device = "cpu" if pair.device.type == "cpu" else f"{pair.device.type}, no TF32"
    about = f"{config} {part.identity} {rows} {pair.dtype} {device} {pair.on_bad_image}"

    def key(name: str) -> str:
        place = "features" if name == "features" else reader.point
        return hashlib.sha256(f"{weights[name]} {place} {about}".encode()).hexdigest()[:32]

    root = None if pair.cache is None else Path(pair.cache).expanduser()
    keys = {"features": key("features")}
    if not folded:
        shape = reader.trunk(torch.zeros(1, *reader.config["input_size"])).shape[1:]
        size = len(part) * shape.numel() * pair.dtype.itemsize / GIB
        free = not pair.augment and size < pair.cache_limit and (root is None or free_space(root) > 1.2 * size)
        if free:
            keys["inputs"] = key("inputs")
        place = f"kept in {root or 'memory'}" if free else "computed from the images every time"
        log.info("%s/%s: %d images, %.3g GiB of activations, %s", role, split, len(part), size, place)

    def compute(images: Tensor) -> dict[str, Tensor]:
        inputs = reader.trunk(images)
        return {"inputs": inputs, "features": reader.extractor(inputs)}

    title = f"{role}/{split}: {len(part)} images"
    with room_for(pair):
        done: dict[str, Activations] = collect(loader(), compute, keys, root, title, pair.on_bad_image == "skip")
    features = done["features"]
    if features.skipped:
        log.warning("%s: %d unreadable images are left out: %s", title, len(features.skipped), features.skipped[0])
    if folded:
        x = features.x
    elif "inputs" in done:
        x = done["inputs"].x
    else:
        x = Stream(loader, reader.trunk, (len(features.labels), *shape))
    return Part(x, features.labels, features.x)


def task_of(reader: Reader, role: str, parts: Mapping[str, Part], folded: bool) -> tuple[Task, Tensor]:
    """The task as the extractor (or a folded map) reads it, of its splits, and its label [classes] for each class.

    Raises ConfigError for classes that the head does not have.
    """
    task = reader.images.tasks[role]
    classes = len(task.classes) or 1 + max(int(part.y.max()) for part in parts.values() if len(part.y))
    order, head = torch.arange(classes), None
    if role == "primary":
        outputs = outputs_of(task, reader.outputs, reader.name, classes)
        order = torch.empty_like(outputs)
        order[outputs.argsort()] = torch.arange(classes)  # classes in the order of the head's outputs
        head = None if classes == reader.outputs else outputs.sort().values
    counts = torch.bincount(parts["train"].y, minlength=classes)
    if not counts.all():
        empty = int(counts.argmin())
        name = task.classes[empty] if task.classes else empty
        raise DataError(f"{role} task {task.name}: class {name} is empty, no training image of it can be read")
    origins = {s: task.splits[s].origin for s in parts}
    splits = {  # which images were unreadable, and left out, is not kept
        s: Split(
            part.x,
            order[part.y].to(reader.images.device),
            origins[s] if len(part.y) == len(origins[s].rows) else None,
        )
        for s, part in parts.items()
    }
    eps = torch.finfo(reader.images.dtype).eps
    width = None if folded else reader.width
    if width is not None:  # an empty split has no activations either
        x = splits["train"].x
        splits |= {s: replace(p, x=torch.empty(0, *x.shape[1:])) for s, p in splits.items() if not len(p)}
    return Task(task.name, **splits, classes=classes, eps=eps, width=width, head=head), order


def outputs_of(task: ImageTask, size: int, net: str, classes: int | None = None) -> Tensor:
    """The output [classes] that means each class of `task` in the head of `net`, which has `size` of them.

    `classes` is their number where `task` does not name them. Raises ConfigError where it is not known.
    """
    classes = classes or len(task.classes)
    if task.outputs is not None:
        if not set(task.outputs) <= set(range(size)) or len(set(task.outputs)) < classes:
            raise ConfigError(
                f"dataset.primary.outputs: outputs must differ and be from 0 to {size - 1}, those of {net}"
            )
        return torch.tensor(task.outputs)
    if size == 1000 and task.classes:
        from timm.data import ImageNetInfo

        known = {name: i for i, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
        if set(task.classes) <= set(known):
            return torch.tensor([known[name] for name in task.classes])
    if classes == size or (classes, size) == (2, 1):
        return torch.arange(classes)
    raise ConfigError(
        f"the head of {net} has {size} outputs, the primary task {task.name} {classes} classes, and their "
        "names are no ImageNet ids: say which output means which class with dataset.primary.outputs=<csv>, or fit "
        "a head to these classes first (model.arguments.num_classes with a checkpoint that has it)"
    )


def training_loaders(reader: Reader, batch_size: int) -> dict[str, DataLoader]:
    """Shuffled training loaders of images by role, augmented where the data set says so."""
    pair = reader.images
    shown = [role for role in pair.tasks if is_shown(role)]
    return {
        role: create_loader(
            pair,
            pair.tasks[role].splits["train"],
            preprocessing(reader.config, pair, pair.tasks[role], training=pair.augment),
            loaders=len(shown),
            batch_size=batch_size,
            is_training=True,
            no_aug=not pair.augment,
        )
        for role in shown
    }


@torch.no_grad()
def read_loader(
    reader: Reader, baseline: Callable[[Tensor], Tensor], role: str, loader: LabeledBatches, folded: bool, test: bool
) -> tuple[Task, dict[str, Tensor]]:
    """One pass over a loader of images: the task as the trained part reads it, in random order, and its features.

    `baseline` maps images to these, [N, D] by split, before immunization; there are none for a folded map, which reads
    them. A tenth of the rows is for validation; with `test`, a fifth, and another fifth for test.
    """
    inputs, labels, features = [], [], []
    for images, targets in counted(loader, f"images of {role}_loader"):
        try:
            x = reader.trunk(images)
        except RuntimeError as error:
            raise ConfigError(
                f"{reader.name} cannot read inputs of shape {tuple(images.shape[1:])} from {role}_loader: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        inputs.append(reader.extractor(x).cpu() if folded else x.cpu())
        labels.append(targets)
        if not folded:
            features.append(baseline(images))
    if not labels:
        raise DataError(f"{role}_loader gives no batches")
    device, outputs = reader.images.device, reader.outputs
    x, y = torch.cat(inputs), torch.cat(labels).long().to(device)
    if role == "primary" and not 0 <= int(y.min()) <= int(y.max()) < max(outputs, 2):
        raise ConfigError(
            f"immunize: labels of primary_loader go from {int(y.min())} to {int(y.max())}, the model has {outputs} "
            "outputs"
        )
    present, y = y.unique(return_inverse=True)
    if len(present) < 2:
        raise DataError(f"immunize: {role}_loader holds one class alone; at least two are needed")
    parts = shuffled_parts(len(y), 5, 5) if test else shuffled_parts(len(y), 10, None)
    splits = {s: Split(x[rows], y[rows.to(device)]) for s, rows in parts.items()}
    own = role == "primary" and len(present) < outputs
    task = Task(
        role,
        **splits,
        classes=len(present),
        eps=torch.finfo(reader.images.dtype).eps,
        width=None if folded else reader.width,
        head=present if own else None,
    )
    return task, {s: torch.cat(features)[rows.to(device)] for s, rows in parts.items() if features}
