"""Deep nets: any model of timm, split into a frozen trunk, the trainable part theta, and its classifier omega."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.compute import distributed
from immunization.data.images import ImagePair
from immunization.data.task import SPLITS, Task, TaskPair
from immunization.errors import ConfigError
from immunization.models.activations import Stream, fingerprint
from immunization.models.base import Batch, Model, Regularizer
from immunization.models.chain import (
    Tail,
    Whole,
    classifier_path,
    data_config,
    fast_training_forward,
    parameters,
    units_of,
)
from immunization.models.folded import Folded, folded_map, unfold
from immunization.models.image_tasks import activations, out_of_memory, preprocessing, task_of, training_loaders
from immunization.models.weights import create, stored_arguments
from immunization.theory.preconditioning import Precondition
from immunization.theory.spectrum import triangular_factor

log = logging.getLogger(__name__)


class Timm(Model):
    """A net of timm: images -> trunk (frozen) -> extractor (features [N, D]) -> head (its own classifier).

    `trainable` names modules, or patterns of names such as `layer4*`; `last` is the last block, `fold` no module of the
    net but a linear map behind its features. Everything else is frozen and in eval mode, also under `train()`. The
    head is trained with weight decay `head_decay`. Weights come from `checkpoint`, else from the hub
    (`pretrained`). `arguments` go to `timm.create_model`. `channels_last`, `amp` and `compile` hold in training steps
    alone: kept activations, and all that is measured, are computed as without them.

    The baseline is the net as it is before training, or, for audits, another one: that of the weights in `reference`,
    or, where a map is folded into `checkpoint`, the net without it. The trunk is then empty.
    """

    before: tuple[Timm] | None = None
    """The net that is the baseline, where that is another one; in a tuple: its parameters are not this model's."""

    def __init__(
        self,
        pair: ImagePair,
        name: str,
        trainable: str | Sequence[str] = "last",
        checkpoint: str | None = None,
        pretrained: bool = True,
        head_decay: float = 2e-5,
        arguments: dict[str, Any] | None = None,
        reference: str | None = None,
        channels_last: bool = False,
        amp: Literal["bfloat16"] | None = None,
        compile: bool = False,
    ) -> None:
        arguments = dict(arguments or stored_arguments(checkpoint))
        if not isinstance(pair, ImagePair):
            raise ConfigError(f"model={name} needs images, for example dataset=image_folders; '{pair.name}' has none")
        net = create(name, checkpoint, pretrained, arguments)
        stripped = copy.deepcopy(net) if reference is None and folded_map(net) is not None else None
        self._take(net, pair, name, trainable, head_decay, arguments)
        if checkpoint or not pretrained:
            self.weights, self.license = checkpoint or "random weights", None  # timm states that of its own weights

        if reference is not None:
            self.compare_with(Timm(pair, name, checkpoint=reference, arguments=arguments))
        elif stripped is not None:
            unfold(stripped)
            self.compare_with(Timm.of(stripped, pair))
        if channels_last or amp or compile:
            self.extractor.training_features_of = fast_training_forward(
                type(self.extractor), channels_last, amp is not None, compile
            )

    def compare_with(self, before: Timm) -> None:
        """Take another net as the baseline; both then read images."""
        self.before = (before,)
        for model in (self, before):
            model._trunk, model.point, model.extractor = [], "images", Whole(model.net)

    @classmethod
    def of(cls, net: nn.Module, pair: ImagePair, trainable: str | Sequence[str] = "last") -> Timm:
        """The same around a timm model of the caller's own, which is taken apart: give a copy."""
        model = cls.__new__(cls)
        name = (getattr(net, "pretrained_cfg", None) or {}).get("architecture") or type(net).__name__
        model._take(net, pair, name, trainable, 2e-5, {})
        model.weights, model.license = "the caller's own", None
        return model

    def _take(
        self,
        net: nn.Module,
        pair: ImagePair,
        name: str,
        trainable: str | Sequence[str],
        head_decay: float,
        arguments: dict[str, Any],
    ) -> None:
        super().__init__()
        self.images, self.architecture, self.head_decay, self.arguments = pair, name, head_decay, arguments
        self.weights = "weights of the hub"
        self.license = (getattr(net, "pretrained_cfg", None) or {}).get("license")
        self.config = data_config(net)
        if pair.size is not None:
            self.config["input_size"] = (self.config["input_size"][0], pair.size, pair.size)
        net.eval().requires_grad_(False)
        self.classifier = classifier_path(net)
        self.head: nn.Linear = net.get_submodule(self.classifier).requires_grad_(True)
        net.set_submodule(self.classifier, nn.Identity())
        self.net = net
        self.units = units_of(net, self.config["input_size"])
        self.fold = trainable == "fold"
        self.trained = [] if self.fold else self._match([trainable] if isinstance(trainable, str) else list(trainable))
        self._split_net()
        self.to(pair.device, pair.dtype)
        self.eval()
        self.original_head = [p.detach().clone() for p in self.head.parameters()]
        self.reference: dict[tuple[str, str], Tensor] = {}
        self.order: dict[str, Tensor] = {}

    @property
    def name(self) -> str:
        return self.architecture

    def last_block(self) -> str:
        """Name of the last part of the net that has weights."""
        blocks = [unit for unit in self.units if parameters(unit[1])] or list(self.net.named_children())
        return next(n for n, f in reversed(blocks) if any(p.ndim > 1 for p in parameters(f)))

    def _match(self, patterns: list[str]) -> list[str]:
        if patterns == ["last"]:
            patterns = [self.last_block()]
        matched = []
        for pattern in patterns:
            names = [n for n, m in self.net.named_modules() if n and fnmatchcase(n, pattern) and parameters(m)]
            if not names:
                known = ", ".join(name for name, f in self.units if parameters(f))
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
        theta = {p for p in self.net.parameters() if p.requires_grad}
        first = next((i for i, (_, f) in enumerate(self.units) if theta & set(parameters(f))), len(self.units))
        later = [f for _, f in self.units[first:]]
        if theta - {p for f in later for p in parameters(f)} or not all(isinstance(f, nn.Module) for f in later):
            first = 0  # theta is in no unit, or a unit is no module: the net runs as a whole
        self.point = self.units[first][0] if first < len(self.units) else "pooling"
        self._trunk = [f for _, f in self.units[:first]]
        self.extractor = Tail(self.net, self.units[first:]) if first else Whole(self.net)

    def trunk(self, images: Tensor) -> Tensor:
        """What enters the extractor: activations [N, ...] of images [N, C, H, W]; no graph."""
        with torch.no_grad():
            x = images.to(self.head.weight)
            for unit in self._trunk:
                x = unit(x)
        return x

    def train(self, mode: bool = True) -> Timm:
        super().train(False)
        for name in self.trained if mode else ():
            self.net.get_submodule(name).train()
        return self

    def groups(self) -> list[dict[str, Any]]:
        theta = [p for p in self.extractor.parameters() if p.requires_grad]
        return [{"params": theta}, {"params": list(self.head.parameters()), "weight_decay": self.head_decay}]

    def for_measurement(self) -> Timm:
        self.extractor.training_features_of = None
        return self

    # --- data ---------------------------------------------------------------------------------------------------------

    def prepare(self, data: ImagePair, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and what it reads: activations at its trunk's end, or the features for a folded map."""
        folded = folded or self.fold
        weights = {"features": fingerprint([self.net]), "inputs": fingerprint(self._trunk)}
        tasks = {}
        for role, task in self.images.tasks.items():
            parts = {split: activations(self, role, task, split, folded, weights) for split in SPLITS}
            tasks[role] = task_of(self, role, task, parts, folded)
        about = data.about | {
            "inputs": f"features of {self.name}" if folded else f"activations of {self.name} before {self.point}",
            "preprocessing": {role: preprocessing(self.config, data, t) for role, t in self.images.tasks.items()},
            "rows": {role: {s: len(getattr(task, s)) for s in SPLITS} for role, task in tasks.items()},
        }
        pair = TaskPair(data.name, **tasks, about=about)
        if not folded:
            kept = isinstance(pair.primary.train.x, Tensor) and isinstance(pair.harmful.train.x, Tensor)
            self.loaders = None if kept else partial(training_loaders, self)
            if self.before is not None:
                (before,) = self.before
                before.prepare(data, True)
                self.reference, self.original_head = before.reference, before.original_head
            return self, pair
        pair = pair.to(self.images.device, torch.float64)
        return Folded(self, pair), pair

    def read(self, role: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What the extractor reads of a loader's images, and the task's own labels."""
        return self.trunk(images), self.order[role][labels].to(self.images.device)

    # --- what methods and measures ask for ----------------------------------------------------------------------------

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.extractor(batch.x)
        return self.head(features), features

    def hessian_term(
        self,
        regularizer: Regularizer,
        batch: Batch,
        mode: Precondition = "none",
        ridge: float = 1.0,
        side: str = "input",
        features: Tensor | None = None,
    ) -> Tensor:
        if mode != "none":
            raise ConfigError("method.precondition must be none: the matrix K of a deep net is not defined")
        return regularizer(self.extractor(batch.x) if features is None else features)

    @torch.no_grad()
    def features(self, x: Tensor | Stream) -> Tensor:
        return torch.cat(list(self.feature_batches(x)))

    @torch.no_grad()
    def feature_batches(self, x: Tensor | Stream, shared: bool = False) -> Iterator[Tensor]:
        """Features [n, D] of stored inputs, batch by batch; `shared`: this process's part of them alone."""
        parts = x.split(self.images.batch_size)
        for part in distributed.every_nth(parts) if shared else parts:
            try:
                features = self.extractor(part.to(self.head.weight))
            except torch.OutOfMemoryError as error:
                raise out_of_memory(self.images) from error
            yield features

    @torch.no_grad()
    def logits(self, x: Tensor | Stream) -> Tensor:
        """Outputs [N, C] of the primary head on stored inputs."""
        return torch.cat([self.head(features) for features in self.feature_batches(x)])

    @torch.no_grad()
    def original_logits(self, features: Tensor) -> Tensor:
        """Outputs [N, C] of the head as it was before training, on features [N, D]."""
        return F.linear(features.to(self.head.weight), *self.original_head)

    def baseline_factor(self, role: str, task: Task) -> Tensor:
        return triangular_factor(self.reference[role, "train"].split(self.images.batch_size))[0]

    def factor(self, task: Task) -> Tensor:
        return distributed.triangular_factor(self.feature_batches(task.train.x, shared=True), self.head.in_features)

    def export(self) -> dict[str, Tensor]:
        """The state dict of the timm model, its own classifier included."""
        state = dict(self.net.state_dict()) | self.head.state_dict(prefix=f"{self.classifier}.")
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def metadata(self) -> dict[str, str]:
        """What `load` needs beside the tensors."""
        facts = {"architecture": self.architecture, "arguments": self.arguments, "data_config": self.config}
        facts |= {"weights": self.weights, "license": self.license}
        facts |= {"classes": self.head.out_features, "dtype": str(self.head.weight.dtype).removeprefix("torch.")}
        return {"immunization": json.dumps(facts)}
