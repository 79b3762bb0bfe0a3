"""What a net's trainable part reads of images: preprocessing, activations, and classes in the order of its head."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from immunization.data.images import ImagePair, ImageTask, create_loader
from immunization.data.task import Split, Task
from immunization.errors import ConfigError, DataError
from immunization.models.activations import Activations, Stream, collect, free_space

if TYPE_CHECKING:
    from immunization.models.timm import Timm

log = logging.getLogger(__name__)

GIB = 2**30


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


def out_of_memory(pair: ImagePair) -> ConfigError:
    """The error for a GPU that is too small for a batch without gradients."""
    return ConfigError(f"the GPU has no memory for dataset.batch_size={pair.batch_size} images; lower it")


def activations(
    model: Timm, role: str, task: ImageTask, split: str, folded: bool, weights: dict[str, str]
) -> tuple[Tensor | Stream, Tensor]:
    """Inputs and labels of one split; the features of theta_0 go to `model.reference`.

    `weights` are hashes of what makes the features and the inputs. Raises DataError for images that cannot be read.
    """
    pair, part = model.images, task.splits[split]
    config = preprocessing(model.config, pair, task)
    if not len(part):
        return torch.empty(0, model.head.in_features, dtype=pair.dtype), torch.empty(0, dtype=torch.long)

    def loader(size: int = pair.batch_size) -> Any:
        return create_loader(pair, part, config, batch_size=size)

    rows = "" if part.rows is None else part.rows.tolist()
    about = f"{config} {part.identity} {rows} {pair.dtype} {pair.device.type} {pair.on_bad_image}"

    def key(name: str) -> str:
        place = "features" if name == "features" else model.point
        return hashlib.sha256(f"{weights[name]} {place} {about}".encode()).hexdigest()[:32]

    root = None if pair.cache is None else Path(pair.cache).expanduser()
    keys = {"features": key("features")}
    if not folded:
        shape = model.trunk(torch.zeros(1, *model.config["input_size"])).shape[1:]
        size = len(part) * shape.numel() * pair.dtype.itemsize / GIB
        free = not pair.augment and size < pair.cache_limit and (root is None or free_space(root) > 1.2 * size)
        if free:
            keys["inputs"] = key("inputs")
        place = f"kept in {root or 'memory'}" if free else "computed from the images every time"
        log.info("%s/%s: %d images, %.3g GiB of activations, %s", role, split, len(part), size, place)

    def compute(images: Tensor) -> dict[str, Tensor]:
        inputs = model.trunk(images)
        return {"inputs": inputs, "features": model.extractor(inputs)}

    title = f"{role}/{split}: {len(part)} images"
    try:
        done: dict[str, Activations] = collect(loader(), compute, keys, root, title, pair.on_bad_image == "skip")
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the GPU has no memory for dataset.batch_size={pair.batch_size} images; lower it") from error
    features = done["features"]
    if features.skipped:
        log.warning("%s: %d unreadable images are left out: %s", title, len(features.skipped), features.skipped[0])
    model.reference[role, split] = features.x
    if folded:
        return features.x, features.labels
    if "inputs" in done:
        return done["inputs"].x, features.labels
    return Stream(loader, model.trunk, (len(features.labels), *shape)), features.labels


def task_of(model: Timm, role: str, task: ImageTask, parts: dict[str, tuple], folded: bool) -> Task:
    """The task as the extractor (or a folded map) reads it; the order of its labels goes to `model.order`.

    `parts` holds inputs and labels by split. Raises ConfigError for classes that the head does not have.
    """
    classes = len(task.classes) or 1 + max(int(y.max()) for _, y in parts.values() if len(y))
    order, head = torch.arange(classes), None
    if role == "primary":
        outputs = _outputs(model, task, classes)
        order = torch.empty_like(outputs)
        order[outputs.argsort()] = torch.arange(classes)  # classes in the order of the head's outputs
        head = None if classes == model.head.out_features else outputs.sort().values
    model.order[role] = order
    counts = torch.bincount(parts["train"][1], minlength=classes)
    if not counts.all():
        empty = int(counts.argmin())
        name = task.classes[empty] if task.classes else empty
        raise DataError(f"{role} task {task.name}: class {name} is empty, no training image of it can be read")
    origins = {s: task.splits[s].origin for s in parts}
    splits = {  # which images were unreadable, and left out, is not kept
        s: Split(x, order[y].to(model.images.device), origins[s] if len(y) == len(origins[s].rows) else None)
        for s, (x, y) in parts.items()
    }
    eps = torch.finfo(model.images.dtype).eps
    width = None if folded else model.head.in_features
    if width is not None:  # an empty split has no activations either
        x = splits["train"].x
        splits |= {s: replace(p, x=torch.empty(0, *x.shape[1:])) for s, p in splits.items() if not len(p)}
    return Task(task.name, **splits, classes=classes, eps=eps, width=width, head=head)


def _outputs(model: Timm, task: ImageTask, classes: int) -> Tensor:
    """The head's output [classes] that means each class of the primary task."""
    size = model.head.out_features
    if task.outputs is not None:
        if not set(task.outputs) <= set(range(size)) or len(set(task.outputs)) < classes:
            raise ConfigError(
                f"dataset.primary.outputs: outputs must differ and be from 0 to {size - 1}, those of {model.name}"
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
        f"the head of {model.name} has {size} outputs, the primary task {task.name} {classes} classes, and their "
        "names are no ImageNet ids: say which output means which class with dataset.primary.outputs=<csv>, or fit "
        "a head to these classes first (model.arguments.num_classes with a checkpoint that has it)"
    )


def training_loaders(model: Timm, batch_size: int) -> dict[str, Any]:
    """Shuffled training loaders of images by role, augmented where the data set says so."""
    return {
        role: create_loader(
            model.images,
            model.images.tasks[role].splits["train"],
            preprocessing(model.config, model.images, model.images.tasks[role], training=model.images.augment),
            batch_size=batch_size,
            is_training=True,
            no_aug=not model.images.augment,
        )
        for role in ("primary", "harmful")
    }
