"""What a net reads of tasks: prepared images, activations, and classes in the order of its head."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from immunization.compute import keys
from immunization.compute.machine import gpu_memory, memory, onto
from immunization.data.class_folders import in_doubt
from immunization.data.images import WHOLE, ImagePair, ImageSplit, ImageTask, Unreadable, is_own, unreadable
from immunization.data.preparation import check_learnable
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.models.activations import Activations, Stream, collect, free_space
from immunization.models.base import Model
from immunization.models.chain import reads, twice
from immunization.models.linear import Folded
from immunization.roles import is_shown
from immunization.runs import environment
from immunization.terminal import counted

log = logging.getLogger(__name__)

GIB = 2**30
MOST_LABELS = 10**6
"""Classes that a loader may number."""


class Reader(Model):
    """A net as far as tasks are read by it.

    `config` says how `net`, of `parts`, wants its images; what enters the extractor is read just before its unit
    `point`, behind those of `_trunk`. With `fold`, only the features are read, behind which a linear map is to be
    trained. `order` has each task's own labels for those of its source, `reference` the features before by role and
    split, `stored` the images themselves where the extractor reads these.
    """

    def trunk(self, inputs: Tensor) -> Tensor:
        """What enters the extractor: activations [N, ...] of inputs [N, C, H, W]; no graph."""
        with torch.no_grad():
            x = onto(inputs, self.head.weight)
            for unit in self._trunk:
                x = unit(x)
        return x

    def read(self, data: ImagePair, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and what it reads: activations at its trunk's end, or the features for a folded map.

        Whatever the tasks come from is read once here. Without a primary task the harmful one stands for it.
        """
        self.fold = self.fold or folded
        if (primary := self.images.tasks.get("primary")) and primary.classes:
            outputs_of(primary, self.head.out_features, self.name)  # else found after minutes of reading
        tasks = {role: self._task(role) for role in self.images.tasks}
        if primary is None:
            tasks["primary"] = tasks["harmful"]
            self.reference |= {("primary", split): x for (_, split), x in self.reference.items()}
        about = self.images.about | {
            "inputs": f"features of {self.name}" if self.fold else f"activations of {self.name} before {self.point}",
            "preprocessing": {r: preprocessing(self.config, self.images, t) for r, t in self.images.tasks.items()},
            "rows": {role: {s: len(split) for s, split in task.splits.items()} for role, task in tasks.items()},
        }
        pair = TaskPair.of(self.images.name, tasks, about)
        if self.fold:
            if self.images.augment:
                log.warning(
                    "dataset.augment has no effect: features are computed once, and a map is folded in behind them"
                )
            pair = pair.to(self.images.device, torch.float64)
            return Folded(self, self.parts, pair), pair
        kept = all(isinstance(task.train.x, Tensor) for task in pair.shown.values())
        self.loaders = self._training_loaders if self.images.augment or not kept else None
        if self.before is not None and not any(map(is_own, self.images.tasks.values())):
            self.before.read(data, True)  # its features take the place of this net's as the reference
        return self, pair

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Keys of what makes the features and what enters the extractor."""
        sample = self.parts.sample
        with room_for(self.images):
            features = keys.net([self.net], lambda inputs: self.extractor(self.trunk(inputs)), sample)
            return {"features": features, "inputs": keys.net(self._trunk, self.trunk, sample)}

    def _key(self, name: str, part: ImageSplit, config: Mapping[str, Any]) -> str:
        pair = self.images
        return keys.key(
            net=[self._keys[name], "" if name == "features" else self.point],
            images=[config, part.identity, part.rows, keys.code(type(part.dataset))],
            how=[pair.dtype, pair.device, pair.on_bad_image, pair.batch_size],
            code=[keys.source("compute", "data", "models"), keys.code(type(self))],
            machine=environment.arithmetic(pair.device),
        )

    def entering(self, role: str, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the extractor of a batch of a loader, and the task's own labels."""
        return self.trunk(inputs), self._own(role, labels)

    def _own(self, role: str, labels: Tensor) -> Tensor:
        """The task's own labels of a loader's, on the device of the net."""
        order, labels = self.order[role], labels.cpu().long()
        own = order[labels.clamp(0, len(order) - 1)]
        if len(new := labels[(labels < 0) | (labels >= len(order)) | (own < 0)]):
            raise DataError(f"{role}_loader gives label {int(new[0])}, which it did not give when it was first read")
        return own.to(self.head.weight.device, non_blocking=True)

    def _task(self, role: str) -> Task:
        """The task as the extractor (or a folded map) reads it; raises DataError for a class without training rows."""
        task, size, device = self.images.tasks[role], self.head.out_features, self.images.device
        read = {name: self._read_split(role, name) for name in task.splits}
        self._leave_out(role, {name: features.skipped for name, (_, features) in read.items()})
        numbers = self._numbers(role, {name: features.labels for name, (_, features) in read.items()})
        order = self.order[role] = torch.full((int(numbers.max()) + 1,), -1)
        order[numbers] = torch.arange(len(numbers))
        if is_own(task):
            ((x, features),) = read.values()
            parts = task.splits[WHOLE].parts(order[features.labels])
            read = {
                name: (x[rows], Activations(features.x[rows], features.labels[rows])) for name, rows in parts.items()
            }
        splits = {}
        for name, (x, features) in read.items():
            self.reference[role, name] = features.x
            y = order[features.labels]
            if not self.fold and not len(y):
                x = torch.empty(0, *read["train"][0].shape[1:])
            splits[name] = Split(x, y.to(device), None if is_own(task) else self.images.tasks[role].splits[name].origin)
            if not self._trunk and isinstance(x, Tensor) and not self.fold:
                self.stored[role, name] = splits[name]
        head = None
        if role == "primary" and len(numbers) < size:
            outputs = numbers if is_own(task) else outputs_of(task, size, self.name, len(numbers))
            head = outputs.sort().values
        counts = torch.bincount(splits["train"].y, minlength=len(numbers))
        if not is_own(task) and not counts.all():
            number = int(numbers[int(counts.argmin())])
            name = task.classes[number] if task.classes else number
            raise DataError(f"{role} task {task.name}: class {name} is empty, no training image of it can be read")
        names = tuple(task.classes[number] for number in numbers) if task.classes else ()
        eps, width = torch.finfo(self.images.dtype).eps, None if self.fold else self.head.in_features
        made = Task(task.name, **splits, classes=len(numbers), eps=eps, width=width, head=head, names=names)
        if is_own(task):
            check_learnable(made)
        return made

    def _numbers(self, role: str, labels: Mapping[str, Tensor]) -> Tensor:
        """The labels that the source gives the classes, in the order of the task's own: that of the head's outputs."""
        task, size = self.images.tasks[role], self.head.out_features
        if not is_own(task):
            classes = len(task.classes) or 1 + max(int(y.max()) for y in labels.values() if len(y))
            return outputs_of(task, size, self.name, classes).argsort() if role == "primary" else torch.arange(classes)
        numbers = labels[WHOLE].unique()
        lowest, highest, name = int(numbers[0]), int(numbers[-1]), f"{role}_loader"
        if role == "primary" and not 0 <= lowest <= highest < max(size, 2):
            raise ConfigError(
                f"labels of {name} go from {lowest} to {highest}, the model has {size} outputs: number them 0 to "
                f"{size - 1}"
            )
        if not 0 <= lowest <= highest < MOST_LABELS:
            raise DataError(f"labels of {name} go from {lowest} to {highest}; number classes 0, 1, ...")
        if len(numbers) < 2:
            raise DataError(f"{name} holds only one class; at least two are needed")
        return numbers

    def _read_split(self, role: str, split: str) -> tuple[Tensor | Stream, Activations]:
        """What enters the extractor (or the features, for a folded map), and the features with labels."""
        task, pair = self.images.tasks[role], self.images
        part, config, own = task.splits[split], preprocessing(self.config, pair, task), is_own(task)
        if not own and not len(part):
            nothing = torch.empty(0, self.head.in_features, dtype=pair.dtype)
            return nothing, Activations(nothing, torch.empty(0, dtype=torch.long))

        def loader(size: int = pair.batch_size) -> Iterable:
            return part.loader(pair, config, batch_size=size)

        root = None if pair.cache is None else Path(pair.cache).expanduser()
        title = f"inputs of {part.name}" if own else f"{role}/{split}: {len(part)} {part.kind}"
        wanted = ["features"]
        if own and not self.fold:
            wanted.append("inputs")
        elif not self.fold:
            sample = self.trunk(self.parts.sample[:1])
            shape, size = sample.shape[1:], len(part) * sample.nbytes / GIB
            free = not pair.augment and size < pair.cache_limit and (root is None or free_space(root) > 2.2 * size)
            place = f"kept in {root or 'memory'}" if free else "computed from the images every time"
            log.info("%s, %.3g GiB of activations, %s", title, size, place)
            wanted += ["inputs"] if free else []
        before: Reader = self.before if own and self.before and not self.fold else self

        def compute(inputs: Tensor, missing: Sequence[str]) -> dict[str, Tensor]:
            try:
                x = self.trunk(inputs)
            except RuntimeError as error:
                if not own:
                    raise
                raise ConfigError(
                    f"{self.name} cannot read inputs of shape {tuple(inputs.shape[1:])} from {part.name}: "
                    f"{' '.join(str(error).split())[:200]}"
                ) from error
            if "features" not in missing:
                return {"inputs": x}
            return {"inputs": x, "features": before.extractor(x if before is self else before.trunk(inputs))}

        named = {name: self._key(name, part, config) if root else name for name in wanted}
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
        if not any(skipped.values()):
            return
        task, splits = self.images.tasks[role], {}
        for split, part in task.splits.items():
            lost = {image.row for image in skipped[split]}
            splits[split] = part.take(torch.tensor([i for i in range(len(part)) if i not in lost])) if lost else part
        self.images = replace(self.images, tasks=self.images.tasks | {role: replace(task, splits=splits)})

    def _training_loaders(self, batch_size: int) -> dict[str, Iterable]:
        """Training loaders by role, augmented where the data set says so; shuffled but for streams."""
        pair = self.images
        shown = {role: task for role, task in pair.tasks.items() if is_shown(role)}
        how = {"loaders": len(shown), "batch_size": batch_size, "is_training": True}
        configs = {role: preprocessing(self.config, pair, task, training=pair.augment) for role, task in shown.items()}
        splits = {role: task.splits[WHOLE if is_own(task) else "train"] for role, task in shown.items()}
        return {role: split.loader(pair, configs[role], **how) for role, split in splits.items()}

    def image_batches(self, role: str, split: str, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        if kept := self.stored.get((role, split)):
            rows = torch.arange(len(kept)) if rows is None else rows
            for some in rows.split(self.images.batch_size):
                yield onto(kept.x[some], self.head.weight), kept.y[some.to(kept.y.device)]
            return
        task = self.images.tasks[role]
        images = task.splits[split].take(rows)
        for x, labels in self._read(self.images, task, images, f"{role}/{split}: {len(images)} {images.kind}"):
            yield x, self._own(role, labels)

    def images_of(self, task: ImageTask, split: ImageSplit) -> Iterator[tuple[Tensor, Tensor]]:
        images = replace(self.images, crop_pct=None)  # that of the pair's own images
        return self._read(images, task, split, f"{task.name}: {len(split)} {split.kind}")

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
            read, count, self.parts.sample, "dataset.keep_root", "choose fewer with dataset.keep.classes"
        )

    def _enlarged(self, batches: Iterable[Tensor], count: int) -> Tensor:
        """What enters the extractor of `count` images at twice the size."""
        if self.parts.sample.ndim != 4:
            raise ConfigError(f"method.enlarged needs images, and {self.name} reads none; set method.enlarged=0")
        sample = twice(self.parts.sample)
        if not reads(lambda images: self.extractor(self.trunk(images)), sample):
            raise ConfigError(
                f"method.enlarged needs a net that reads several sizes, and {self.name} reads images of one size; "
                "set method.enlarged=0"
            )
        return self._stored(map(twice, batches), count, sample, "method.enlarged", "set it to 0")

    def _stored(self, batches: Iterable[Tensor], count: int, sample: Tensor, key: str, remedy: str) -> Tensor:
        """What enters the extractor of `count` inputs like the `sample`, for option `key`; has to fit into memory."""
        sample = self.trunk(sample[:1])
        if 2 * (needed := count * sample.numel() * sample.itemsize) > (most := memory(torch.device("cpu"))):
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
        loader = split.loader(images, preprocessing(self.config, images, task))
        for x, labels, lost, *_ in counted(loader, what):
            if lost and images.on_bad_image != "skip":
                raise unreadable(what, lost)
            if lost:
                _warn(what, lost)
            if len(x):
                yield onto(x, self.head.weight), labels


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
    """Inside, an error names the batch size where a GPU is too small for a batch without gradients."""
    return gpu_memory(f"dataset.batch_size={pair.batch_size} inputs", "lower it")


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
                f"the order in which {net} counts the {classes} class folders is not known. {doubt} or "
                "dataset.primary.outputs=<csv>, the output of each folder"
            )
        return torch.arange(classes)
    raise ConfigError(
        f"the head of {net} has {size} outputs, the primary task {task.name} has {classes} classes, and their names "
        "are no ImageNet ids: give the output of each class with dataset.primary.outputs=<csv>, or fit "
        f"a head to these classes first (+model.arguments.num_classes={classes} with a checkpoint that has it)"
    )
