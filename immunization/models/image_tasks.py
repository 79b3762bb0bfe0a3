"""What a net reads of images: preprocessing, activations, and classes in the order of its head."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from immunization.compute import keys
from immunization.compute.machine import gpu_memory, memory, onto
from immunization.data.class_folders import in_doubt
from immunization.data.images import ImagePair, ImageSplit, ImageTask, Unreadable, create_loader, unreadable
from immunization.data.loaders import LabeledBatches
from immunization.data.preparation import check_learnable
from immunization.data.task import SPLITS, Split, Task, TaskPair, is_shown
from immunization.errors import ConfigError, DataError
from immunization.models.activations import Activations, Stream, collect, free_space
from immunization.models.base import Model
from immunization.models.chain import reads, twice
from immunization.models.folded import Folded
from immunization.runs import environment
from immunization.terminal import counted

log = logging.getLogger(__name__)

GIB = 2**30
MOST_LABELS = 10**6
"""Classes that a loader may number."""


class ImageReader(Model):
    """A net as far as images are read by it.

    `config` says how `net`, of `parts`, wants its images; what enters the extractor is read just before its unit
    `point`, behind those of `_trunk`. With `fold`, only the features are read, behind which a linear map is to be
    trained. `order` has each task's own labels for those of its files, `reference` the features before by role and
    split.
    """

    def trunk(self, images: Tensor) -> Tensor:
        """What enters the extractor: activations [N, ...] of images [N, C, H, W]; no graph."""
        with torch.no_grad():
            x = onto(images, self.head.weight)
            for unit in self._trunk:
                x = unit(x)
        return x

    def _folded(self, pair: TaskPair) -> tuple[Model, TaskPair]:
        """The map behind the features that is to be trained, and the tasks as it reads them."""
        pair = pair.to(self.images.device, torch.float64)
        return Folded(self, self.parts, pair), pair

    def read_tasks(self, data: ImagePair, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and what it reads: activations at its trunk's end, or the features for a folded map."""
        self.fold = self.fold or folded
        if (primary := self.images.tasks["primary"]).classes:
            outputs_of(primary, self.head.out_features, self.name)  # else found after minutes of reading
        size = self.config["input_size"]
        with room_for(self.images):
            nets = {"features": keys.net([self.net], lambda images: self.extractor(self.trunk(images)), size)}
            if not self.fold:
                nets["inputs"] = keys.net(self._trunk, self.trunk, size)
        tasks = {}
        for role in self.images.tasks:
            read = {split: self._read_split(role, split, nets) for split in SPLITS}
            self.reference |= {(role, split): features.x for split, (_, features) in read.items()}
            self._leave_out(role, {split: features.skipped for split, (_, features) in read.items()})
            tasks[role] = self._task(role, read)
        about = data.about | {
            "inputs": f"features of {self.name}" if self.fold else f"activations of {self.name} before {self.point}",
            "preprocessing": {role: preprocessing(self.config, data, t) for role, t in self.images.tasks.items()},
            "rows": {role: {s: len(split) for s, split in task.splits.items()} for role, task in tasks.items()},
        }
        pair = TaskPair.of(data.name, tasks, about)
        if self.fold:
            if self.images.augment:
                log.warning("dataset.augment does nothing: features are read once, and a map is folded in behind them")
            return self._folded(pair)
        kept = all(isinstance(task.train.x, Tensor) for task in pair.shown.values())
        self.loaders = None if kept else self._training_loaders
        if self.before is not None:
            self.before.read_tasks(data, True)  # its features take the place of this net's as the reference
        return self, pair

    def read(self, role: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What the extractor reads of a loader's images, and the task's own labels."""
        return self.trunk(images), self._own(role, labels)

    def _own(self, role: str, labels: Tensor) -> Tensor:
        """The task's own labels of a loader's, on the device of the net."""
        order, labels = self.order[role], labels.cpu()
        own = order[labels.clamp(0, len(order) - 1)]
        if len(new := labels[(labels < 0) | (labels >= len(order)) | (own < 0)]):
            raise DataError(f"{role}_loader gives label {int(new[0])}, which it did not give when it was first read")
        return own.to(self.head.weight.device, non_blocking=True)

    def _read_split(self, role: str, split: str, nets: Mapping[str, str]) -> tuple[Tensor | Stream, Activations]:
        """What the trained part (or a folded map) reads of one split, and its features before immunization."""
        pair, task = self.images, self.images.tasks[role]
        part, config = task.splits[split], preprocessing(self.config, pair, task)
        if not len(part):
            nothing = torch.empty(0, self.head.in_features, dtype=pair.dtype)
            return nothing, Activations(nothing, torch.empty(0, dtype=torch.long))

        def loader(size: int = pair.batch_size) -> DataLoader:
            return create_loader(pair, part, config, batch_size=size)

        def key(name: str) -> str:
            return keys.key(
                net=[nets[name], "" if name == "features" else self.point],
                images=[config, part.identity, part.rows, keys.code(type(part.dataset))],
                how=[pair.dtype, pair.device, pair.on_bad_image, pair.batch_size],
                code=[keys.source("compute", "data", "models"), keys.code(type(self))],
                machine=environment.arithmetic(pair.device),
            )

        root = None if pair.cache is None else Path(pair.cache).expanduser()
        named = {"features": key("features")}
        if not self.fold:
            shape = self.trunk(torch.zeros(1, *self.config["input_size"])).shape[1:]
            size = len(part) * shape.numel() * pair.dtype.itemsize / GIB
            free = not pair.augment and size < pair.cache_limit and (root is None or free_space(root) > 2.2 * size)
            if free:
                named["inputs"] = key("inputs")
            place = f"kept in {root or 'memory'}" if free else "computed from the images every time"
            log.info("%s/%s: %d images, %.3g GiB of activations, %s", role, split, len(part), size, place)

        def compute(images: Tensor) -> dict[str, Tensor]:
            inputs = self.trunk(images)
            return {"inputs": inputs, "features": self.extractor(inputs)}

        title = f"{role}/{split}: {len(part)} images"
        with room_for(pair):
            done = collect(loader(), compute, named, root, title, pair.on_bad_image == "skip")
        features = done["features"]
        if features.skipped:
            _warn(title, features.skipped)
        if self.fold:
            return features.x, features
        if "inputs" in done:
            return done["inputs"].x, features
        return Stream(loader, self.trunk, (len(features.labels), *shape)), features

    def _leave_out(self, role: str, skipped: Mapping[str, Sequence[Unreadable]]) -> None:
        """From here on the task has only the images that can be read, so that rows of it are those of its features."""
        task, splits = self.images.tasks[role], {}
        for split, part in task.splits.items():
            lost = {image.row for image in skipped[split]}
            splits[split] = part.take(torch.tensor([i for i in range(len(part)) if i not in lost])) if lost else part
        self.images = replace(self.images, tasks=self.images.tasks | {role: replace(task, splits=splits)})

    def _task(self, role: str, read: Mapping[str, tuple[Tensor | Stream, Activations]]) -> Task:
        """The task as the extractor (or a folded map) reads it, of its splits; raises DataError for an empty class."""
        task, size, device = self.images.tasks[role], self.head.out_features, self.images.device
        labels = {split: features.labels for split, (_, features) in read.items()}
        classes = len(task.classes) or 1 + max(int(y.max()) for y in labels.values() if len(y))
        order, head = torch.arange(classes), None
        if role == "primary":
            outputs = outputs_of(task, size, self.name, classes)
            order = torch.empty_like(outputs)
            order[outputs.argsort()] = torch.arange(classes)  # classes in the order of the head's outputs
            head = None if classes == size else outputs.sort().values
        counts = torch.bincount(labels["train"], minlength=classes)
        if not counts.all():
            empty = int(counts.argmin())
            name = task.classes[empty] if task.classes else empty
            raise DataError(f"{role} task {task.name}: class {name} is empty, no training image of it can be read")
        splits = {}
        for split, (x, features) in read.items():
            y, origin = features.labels, task.splits[split].origin
            if not self.fold and not len(y):
                x = torch.empty(0, *read["train"][0].shape[1:])
            splits[split] = Split(x, order[y].to(device), origin)
        self.order[role] = order
        eps, width = torch.finfo(self.images.dtype).eps, None if self.fold else self.head.in_features
        names = tuple(task.classes[label] for label in order.argsort()) if task.classes else ()
        return Task(task.name, **splits, classes=classes, eps=eps, width=width, head=head, names=names)

    def _training_loaders(self, batch_size: int) -> dict[str, DataLoader]:
        """Training loaders of images by role, augmented where the data set says so; shuffled but for streams."""
        pair = self.images
        shown = {role: task for role, task in pair.tasks.items() if is_shown(role)}
        how = {"loaders": len(shown), "batch_size": batch_size, "is_training": True}
        return {
            role: create_loader(
                pair, task.splits["train"], preprocessing(self.config, pair, task, training=pair.augment), **how
            )
            for role, task in shown.items()
        }

    def image_batches(self, role: str, split: str, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        task = self.images.tasks[role]
        part = task.splits[split].take(rows)
        for images, labels in self._read(self.images, task, part, f"{role}/{split}: {len(part)} images"):
            yield images, self._own(role, labels)

    def images_of(self, task: ImageTask, split: ImageSplit) -> Iterator[tuple[Tensor, Tensor]]:
        images = replace(self.images, crop_pct=None)  # that of the pair's own images
        return self._read(images, task, split, f"{task.name}: {len(split)} images")

    def enlarged(self, role: str, split: Split) -> Tensor:
        task = self.images.tasks.get(role)
        if task is None or split.origin is None:
            raise ConfigError("method.enlarged needs folders of images that can all be read: set method.enlarged=0")
        images = replace(task.splits["train"], rows=split.origin.rows)
        read = self._read(self.images, task, images, f"{role} at twice the size: {len(images)} images")
        return self._enlarged((x for x, _ in read), len(images))

    def kept(self, enlarged: bool = False) -> Tensor | None:
        if not self.images.keep:
            return None
        splits = [(task, task.splits["train"]) for task in self.images.keep]
        read = (images for split in splits for images, _ in self.images_of(*split))
        count = sum(len(split) for _, split in splits)
        if enlarged:
            return self._enlarged(read, count)
        return self._stored(
            read, count, self.config["input_size"], "dataset.keep_root", "choose fewer with dataset.keep.classes"
        )

    def _enlarged(self, batches: Iterable[Tensor], count: int) -> Tensor:
        """What enters the extractor of `count` images at twice the size."""
        channels, height, width = self.config["input_size"]
        size = channels, 2 * height, 2 * width
        if not reads(lambda images: self.extractor(self.trunk(images)), torch.zeros(1, *size)):
            raise ConfigError(f"{self.name} reads images of one size: set method.enlarged=0")
        return self._stored(map(twice, batches), count, size, "method.enlarged", "set it to 0")

    def _stored(self, batches: Iterable[Tensor], count: int, size: Sequence[int], key: str, remedy: str) -> Tensor:
        """What enters the extractor of `count` images of a size, for the option `key`; it has to fit into memory."""
        one = self.trunk(torch.zeros(1, *size))
        if 2 * (needed := count * one.numel() * one.itemsize) > (most := memory(torch.device("cpu"))):
            raise ConfigError(
                f"{key}: {count:,} images take {needed / GIB:.3g} GiB before {self.point}, and half of "
                f"{most / GIB:.3g} is free for them; {remedy}"
            )
        read = [self.trunk(images).cpu() for images in batches]
        if not read:
            raise DataError(f"{key}: none of its images can be read")
        return torch.cat(read)

    def _read(
        self, images: ImagePair, task: ImageTask, split: ImageSplit, what: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images of a split as the net reads them, on its device, and their labels as the files count."""
        loader = create_loader(images, split, preprocessing(self.config, images, task))
        for x, labels, lost, *_ in counted(loader, what):
            if lost and images.on_bad_image != "skip":
                raise unreadable(what, lost)
            if lost:
                _warn(what, lost)
            if len(x):
                yield onto(x, self.head.weight), labels

    def read_loaders(
        self, loaders: Mapping[str, LabeledBatches], folded: bool, test: bool = False
    ) -> tuple[Model, TaskPair]:
        """`read_tasks` for loaders by role, each of which is read once.

        A tenth of the rows of a single loader, drawn class by class, is for validation; with `test`, a fifth, and
        another fifth for test. Without a primary loader the harmful task stands for the primary one.
        """
        self.fold = self.fold or folded
        tasks = {role: self._task_of_loader(role, loader, test) for role, loader in loaders.items()}
        if "primary" not in tasks:
            tasks["primary"] = tasks["harmful"]
            self.reference |= {("primary", split): x for (_, split), x in self.reference.items()}
        pair = TaskPair("loaders", **tasks)
        return self._folded(pair) if self.fold else (self, pair)

    @torch.no_grad()
    def _task_of_loader(self, role: str, loader: LabeledBatches, test: bool) -> Task:
        before: ImageReader = self.before or self
        inputs, labels, features = [], [], []
        for images, targets in counted(loader, f"images of {role}_loader"):
            try:
                x = self.trunk(images)
            except RuntimeError as error:
                raise ConfigError(
                    f"{self.name} cannot read inputs of shape {tuple(images.shape[1:])} from {role}_loader: "
                    f"{' '.join(str(error).split())[:200]}"
                ) from error
            inputs.append(self.extractor(x).cpu() if self.fold else x.cpu())
            labels.append(targets)
            if not self.fold:  # else the inputs are the features before immunization
                features.append(before.extractor(before.trunk(images)))
        if not labels:
            raise DataError(f"{role}_loader gives no batches")
        device, outputs = self.images.device, self.head.out_features
        x, y = torch.cat(inputs), torch.cat(labels).long().to(device)
        if role == "primary" and not 0 <= int(y.min()) <= int(y.max()) < max(outputs, 2):
            raise ConfigError(
                f"immunize: labels of primary_loader go from {int(y.min())} to {int(y.max())}, the model has {outputs} "
                "outputs"
            )
        if not 0 <= int(y.min()) <= int(y.max()) < MOST_LABELS:
            raise DataError(
                f"immunize: labels of {role}_loader go from {int(y.min())} to {int(y.max())}; number classes 0, 1, ..."
            )
        present, y = y.unique(return_inverse=True)
        if len(present) < 2:
            raise DataError(f"immunize: {role}_loader holds only one class; at least two are needed")
        self.order[role] = torch.full((int(present.max()) + 1,), -1)
        self.order[role][present.cpu()] = torch.arange(len(present))
        parts = loader.parts(y.cpu(), 5, 5) if test else loader.parts(y.cpu(), 10, None)
        if features:
            of_all = torch.cat(features)
            self.reference |= {(role, s): of_all[rows.to(device)] for s, rows in parts.items()}
        splits = {s: Split(x[rows], y[rows.to(device)]) for s, rows in parts.items()}
        head = present if role == "primary" and len(present) < outputs else None
        eps, width = torch.finfo(self.images.dtype).eps, None if self.fold else self.head.in_features
        task = Task(role, **splits, classes=len(present), eps=eps, width=width, head=head)
        check_learnable(task)
        return task


def _warn(title: str, images: Sequence[Unreadable]) -> None:
    log.warning("%s: %d unreadable images are left out: %s", title, len(images), images[0].why)


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


def outputs_of(task: ImageTask, size: int, net: str, classes: int | None = None) -> Tensor:
    """The output [classes] of `net`, of `size`, for each of the `classes` of `task`; raises ConfigError if unknown."""
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
        if task.folders and (doubt := in_doubt(task.classes, task.order)):
            raise ConfigError(
                f"{net} counts its outputs in an order of the {classes} class folders that is not known. {doubt} or "
                "dataset.primary.outputs=<csv>, the output of each folder"
            )
        return torch.arange(classes)
    raise ConfigError(
        f"the head of {net} has {size} outputs, the primary task {task.name} {classes} classes, and their "
        "names are no ImageNet ids: say which output means which class with dataset.primary.outputs=<csv>, or fit "
        f"a head to these classes first (+model.arguments.num_classes={classes} with a checkpoint that has it)"
    )
