"""Deep nets: any model of timm, split into a frozen trunk, the trainable part theta, and its classifier omega."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.compute import distributed
from immunization.compute.transfer import onto
from immunization.data.image_loading import create_loader
from immunization.data.images import ImagePair, ImageSplit, ImageTask
from immunization.data.loaders import LabeledBatches
from immunization.data.task import SPLITS, Task, TaskPair
from immunization.errors import ConfigError
from immunization.models.activations import Stream, fingerprint
from immunization.models.base import Model
from immunization.models.chain import Borrowed, Network, Tail, Unit, Whole, first_with, parameters, take_apart
from immunization.models.fold import folded_map, unfold
from immunization.models.folded import Folded
from immunization.models.image_tasks import (
    Reader,
    preprocessing,
    read_loader,
    read_split,
    room_for,
    task_of,
    training_loaders,
)
from immunization.models.weights import create, name_of, read_checkpoint
from immunization.terminal import counted
from immunization.theory.spectrum import triangular_factor

log = logging.getLogger(__name__)

HUB = "hub"
"""As `reference`: the pretrained weights of the Hugging Face hub."""


class Timm(Model):
    """A net of timm: images -> trunk (frozen) -> extractor (features [N, D]) -> head (its own classifier).

    `trainable` names modules, or patterns of names such as `layer4*`; `last` is the last block, `fold` no module of the
    net but a linear map behind its features. Everything else is frozen and in eval mode, also under `train()`. The
    head is trained with weight decay `head_decay`. Weights come from `checkpoint`, else from the hub
    (`pretrained`). `arguments` go to `timm.create_model`. `channels_last` and `amp` hold in training steps alone: kept
    activations, and all that is measured, are computed as without them. In Python, `net` is a timm model of the
    caller's own, which is taken apart: give a copy.

    The baseline is the net as it is before training, or, for audits, another one: that of the weights in `reference`
    (`hub`: the pretrained ones), or, where a map is folded into `checkpoint`, the net without it. The trunk is then
    empty.
    """

    deep = True

    def __init__(
        self,
        pair: ImagePair,
        name: str | None = None,
        trainable: str | Sequence[str] = "last",
        checkpoint: str | None = None,
        pretrained: bool = True,
        head_decay: float = 2e-5,
        arguments: dict[str, Any] | None = None,
        reference: str | None = None,
        channels_last: bool = False,
        amp: Literal["bfloat16"] | None = None,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pair, ImagePair):
            raise ConfigError(f"model={name} needs images, for example dataset=image_folders; '{pair.name}' has none")
        stored = None if checkpoint is None else read_checkpoint(checkpoint)
        self.arguments = dict(arguments or (stored.facts.get("arguments", {}) if stored else {}))
        own = getattr(net, "pretrained_cfg", None) or {}
        self.architecture = name or own.get("architecture") or type(net).__name__
        stripped = None
        if net is not None:
            self.weights, self.license = "the caller's own", None
        else:
            net = create(name, stored, pretrained, self.arguments)
            if reference is None and folded_map(net) is not None:
                stripped = copy.deepcopy(net).double()  # taking the map out costs digits
            self.weights, self.license = Path(checkpoint).name if checkpoint else "random weights", None
            if pretrained and not checkpoint:  # timm states the license of its own weights
                self.weights = "weights of the hub"
                self.license = (getattr(net, "pretrained_cfg", None) or {}).get("license")
        self.original_dtype = next(net.parameters()).dtype
        self.images, self.head_decay, self.channels_last, self.amp = pair, head_decay, channels_last, amp is not None
        self.parts = take_apart(net, pair.size)
        self.head, self.net = self.parts.head, self.parts.net
        self.fold = trainable == "fold"
        self.trainable = [] if self.fold else self._match([trainable] if isinstance(trainable, str) else trainable)
        self._split_net()
        self.to(pair.device, pair.dtype)
        self.eval()
        self._original_head = [p.detach().clone() for p in self.head.parameters()]
        self._before: Borrowed[Timm] | None = None
        self.reference: dict[tuple[str, str], Tensor] = {}
        self.order: dict[str, Tensor] = {}
        if reference is not None:
            weights = None if reference == HUB else reference
            self.compare_with(Timm(pair, name, checkpoint=weights, arguments=self.arguments))
        elif stripped is not None:
            unfold(stripped)
            self.compare_with(Timm(pair, net=stripped))

    @property
    def before(self) -> Timm | None:
        return None if self._before is None else self._before.module

    def compare_with(self, before: Timm) -> None:
        """Take another net as the baseline; both then read images."""
        self._before = Borrowed(before)
        self.reference, self._original_head = before.reference, before._original_head
        for model in (self, before):
            model._read_images()

    @property
    def name(self) -> str:
        return self.architecture

    @property
    def config(self) -> dict[str, Any]:
        """How the net wants its images."""
        return self.parts.config

    @property
    def reads_images(self) -> bool:
        return not self._trunk

    def _match(self, patterns: Sequence[str]) -> list[str]:
        if list(patterns) == ["last"]:
            patterns = [self.parts.last_block()]
        matched = []
        for pattern in patterns:
            names = [n for n, m in self.net.named_modules() if n and fnmatchcase(n, pattern) and parameters(m)]
            if not names:
                known = ", ".join(name for name, f in self.parts.units if parameters(f))
                raise ConfigError(
                    f"model.trainable={pattern}: no module of {self.architecture} with parameters is called so; "
                    f"there are {known} and the modules inside of them"
                )
            matched += names
        for name in matched:
            self.net.get_submodule(name).requires_grad_(True)
        log.info("%s: trainable are %s", self.architecture, ", ".join(matched))
        return matched

    def _split_net(self) -> None:
        """Trunk: everything before the first trainable unit, in the order of execution."""
        units = self.parts.units
        theta = {p for p in self.net.parameters() if p.requires_grad}
        first = first_with(units, theta)
        self.point = units[first][0] if first < len(units) else "pooling"
        self._trunk: list[Unit] = [f for _, f in units[:first]]
        self.extractor = Tail(self.net, units[first:]) if first else Whole(self.net)

    def _read_images(self) -> None:
        """Leave nothing to the trunk."""
        self._trunk, self.point, self.extractor = [], "images", Whole(self.net)

    def trunk(self, images: Tensor) -> Tensor:
        """What enters the extractor: activations [N, ...] of images [N, C, H, W]; no graph."""
        with torch.no_grad():
            x = onto(images, self.head.weight)
            for unit in self._trunk:
                x = unit(x)
        return x

    def train(self, mode: bool = True) -> Timm:
        super().train(False)
        for name in self.trainable if mode else ():
            self.net.get_submodule(name).train()
        return self

    # --- data ---------------------------------------------------------------------------------------------------------

    def read_tasks(self, data: ImagePair, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and what it reads: activations at its trunk's end, or the features for a folded map."""
        folded = folded or self.fold
        weights = {"features": fingerprint([self.net]), "inputs": fingerprint(self._trunk)}
        reader, tasks = self._reader(), {}
        for role in self.images.tasks:
            parts = {split: read_split(reader, role, split, folded, weights) for split in SPLITS}
            tasks[role], self.order[role] = task_of(reader, role, parts, folded)
            self.reference |= {(role, split): part.features for split, part in parts.items()}
        about = data.about | {
            "inputs": f"features of {self.name}" if folded else f"activations of {self.name} before {self.point}",
            "preprocessing": {role: preprocessing(self.config, data, t) for role, t in self.images.tasks.items()},
            "rows": {role: {s: len(getattr(task, s)) for s in SPLITS} for role, task in tasks.items()},
        }
        pair = TaskPair.of(data.name, tasks, about)
        if folded:
            return self._folded(pair)
        kept = all(isinstance(task.train.x, Tensor) for task in pair.shown.values())
        self.loaders = None if kept else partial(training_loaders, reader)
        if self.before is not None:
            self.before.read_tasks(data, True)  # its features take the place of this net's as the reference
        return self, pair

    def read_loaders(
        self, loaders: Mapping[str, LabeledBatches], folded: bool, test: bool = False
    ) -> tuple[Model, TaskPair]:
        """The same for loaders by role, each of which is read once; `test`: with rows for test (see `read_loader`)."""
        before, reader, tasks = self.before or self, self._reader(), {}
        for role, loader in loaders.items():
            tasks[role], features = read_loader(
                reader, lambda images: before.extractor(before.trunk(images)), role, loader, folded, test
            )
            self.reference |= {(role, split): part for split, part in features.items()}
        pair = TaskPair("loaders", **tasks)
        return self._folded(pair) if folded else (self, pair)

    def _reader(self) -> Reader:
        width, outputs = self.head.in_features, self.head.out_features
        return Reader(self.images, self.config, self.name, self.point, self.trunk, self.extractor, width, outputs)

    def _folded(self, pair: TaskPair) -> tuple[Folded, TaskPair]:
        pair = pair.to(self.images.device, torch.float64)
        return Folded(self, self.parts, pair), pair

    def read(self, role: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What the extractor reads of a loader's images, and the task's own labels."""
        return self.trunk(images), self._own(role, labels)

    def _own(self, role: str, labels: Tensor) -> Tensor:
        """The task's own labels of a loader's, on the device of the net."""
        return self.order[role][labels].to(self.head.weight.device, non_blocking=True)

    # --- training -----------------------------------------------------------------------------------------------------

    def training_features(self, x: Tensor, theta: Mapping[str, Tensor] | None = None) -> Tensor:
        """Features [N, D] with a graph, in the dtype of `x`: with `channels_last` and `amp`, as asked for."""
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return super().training_features(x, theta).to(x.dtype)

    def groups(self) -> list[dict[str, Any]]:
        theta = [p for p in self.extractor.parameters() if p.requires_grad]
        return [{"params": theta}, {"params": list(self.head.parameters()), "weight_decay": self.head_decay}]

    # --- measuring ----------------------------------------------------------------------------------------------------

    def for_measurement(self) -> Timm:
        """Itself, in its own dtype."""
        return self

    @torch.no_grad()
    def features(self, x: Tensor | Stream) -> Tensor:
        return torch.cat(list(self.feature_batches(x)))

    @torch.no_grad()
    def feature_batches(self, x: Tensor | Stream, shared: bool = False) -> Iterator[Tensor]:
        """Features [n, D] of stored inputs, batch by batch; `shared`: this process's part of them alone."""
        parts = x.split(self.images.batch_size)
        for part in distributed.every_nth(parts) if shared else parts:
            with room_for(self.images):
                features = self.extractor(onto(part, self.head.weight))
            yield features

    @torch.no_grad()
    def logits(self, x: Tensor | Stream) -> Tensor:
        """Outputs [N, C] of the primary head on stored inputs."""
        return torch.cat([self.head(features) for features in self.feature_batches(x)])

    def factor(self, task: Task) -> Tensor:
        return distributed.triangular_factor(self.feature_batches(task.train.x, shared=True), self.head.in_features)

    def baseline_factor(self, role: str, task: Task) -> Tensor:
        return triangular_factor(self.reference[role, "train"].split(self.images.batch_size))[0]

    def baseline_features(self, role: str, split: str) -> Tensor:
        return self.reference[role, split]

    @torch.no_grad()
    def baseline_logits(self, task: Task) -> Tensor:
        return F.linear(self.reference["primary", "test"].to(self.head.weight), *self._original_head)

    # --- attacks ------------------------------------------------------------------------------------------------------

    def last_map(self, extractor: nn.Module) -> Tensor | None:
        return folded_map(extractor)

    def network(self, start: Mapping[str, Tensor] | None = None) -> Network:
        net, extractor, units = copy.deepcopy((self.net, self.extractor, self.parts.units))
        if start is not None:
            extractor.load_state_dict(start)  # shares its parameters with `net`
        return Network(net, self.parts.last_block(), self.config["input_size"], units, self.trainable)

    def image_batches(self, role: str, split: str, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        task = self.images.tasks[role]
        part = task.splits[split].take(rows)
        for images, labels in self._read(self.images, task, part, f"{role}/{split}: {len(part)} images"):
            yield images, self._own(role, labels)

    def images_of(self, task: ImageTask, split: ImageSplit) -> Iterator[tuple[Tensor, Tensor]]:
        images = replace(self.images, crop_pct=None)  # that of the pair's own images
        return self._read(images, task, split, f"{task.name}: {len(split)} images")

    def _read(
        self, images: ImagePair, task: ImageTask, split: ImageSplit, what: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images of a split as the net reads them, on its device, and their labels as the files count."""
        loader = create_loader(images, split, preprocessing(self.config, images, task))
        for x, labels, *_ in counted(loader, what):
            if len(x):
                yield onto(x, self.head.weight), labels

    # --- deployment ---------------------------------------------------------------------------------------------------

    def deployed(self) -> nn.Module:
        net = copy.deepcopy(self.net)
        net.set_submodule(self.parts.classifier, copy.deepcopy(self.head))
        return net

    def deployed_before(self) -> nn.Module | None:
        return None if self.before is None else self.before.deployed()

    # --- files --------------------------------------------------------------------------------------------------------

    def export(self) -> dict[str, Tensor]:
        """The state dict of the timm model, its own classifier included."""
        state = dict(self.net.state_dict()) | self.head.state_dict(prefix=f"{self.parts.classifier}.")
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def facts(self) -> dict[str, Any]:
        facts = {"architecture": self.architecture, "arguments": self.arguments, "data_config": self.config}
        facts |= {"weights": self.weights, "license": self.license, "original_dtype": name_of(self.original_dtype)}
        return facts | {"classes": self.head.out_features, "dtype": name_of(self.head.weight.dtype)}
