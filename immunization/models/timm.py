"""Deep nets: any model of timm, split into a frozen trunk, the trainable part theta, and its classifier omega."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.data.images import ImagePair, ImageTask, create_loader
from immunization.data.task import SPLITS, Split, Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.models.activations import Activations, Stream, collect
from immunization.models.base import Batch, Model, Regularizer
from immunization.models.linear import Linear, LinearMap
from immunization.spectral import Precondition, triangular_factor

log = logging.getLogger(__name__)

GIB = 2**30
BATCH = 128
"""Rows of a batch without gradients."""


class Timm(Model):
    """A net of timm: images -> trunk (frozen) -> extractor (features [N, D]) -> head (its own classifier).

    `trainable` names modules, or patterns of names such as `layer4*`; `last` is the last block, `fold` no module of the
    net but a linear map behind its features. Everything else is frozen and in eval mode, also under `train()`. The
    head is trained with weight decay `head_decay`. Weights come from `checkpoint`, else from the hub
    (`pretrained`). `arguments` go to `timm.create_model`.
    """

    def __init__(
        self,
        pair: ImagePair,
        name: str,
        trainable: str | Sequence[str] = "last",
        checkpoint: str | None = None,
        pretrained: bool = True,
        head_decay: float = 2e-5,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        arguments = dict(arguments or {})
        if not isinstance(pair, ImagePair):
            raise ConfigError(f"model={name} needs images, for example dataset=image_folders; '{pair.name}' has none")
        self._take(create(name, checkpoint, pretrained, arguments), pair, name, trainable, head_decay, arguments)
        self.weights = checkpoint or ("weights of the hub" if pretrained else "random weights")

    @classmethod
    def of(cls, net: nn.Module, pair: ImagePair, trainable: str | Sequence[str] = "last") -> Timm:
        """The same around a timm model of the caller's own, which is taken apart: give a copy."""
        model = cls.__new__(cls)
        name = (getattr(net, "pretrained_cfg", None) or {}).get("architecture") or type(net).__name__
        model._take(net, pair, name, trainable, 2e-5, {})
        model.weights = "the caller's own"
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
        self.config = _data_config(net)
        if pair.size is not None:
            self.config["input_size"] = (self.config["input_size"][0], pair.size, pair.size)
        net.eval().requires_grad_(False)
        self.classifier = classifier_path(net)
        self.head: nn.Linear = net.get_submodule(self.classifier).requires_grad_(True)
        net.set_submodule(self.classifier, nn.Identity())
        self.net = net
        self.units = _units(net, self.config["input_size"])
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

    def _match(self, patterns: list[str]) -> list[str]:
        if patterns == ["last"]:
            blocks = [unit for unit in self.units if _parameters(unit[1])] or list(self.net.named_children())
            patterns = [next(n for n, f in reversed(blocks) if any(p.ndim > 1 for p in _parameters(f)))]
        matched = []
        for pattern in patterns:
            names = [n for n, m in self.net.named_modules() if n and fnmatchcase(n, pattern) and _parameters(m)]
            if not names:
                known = ", ".join(name for name, f in self.units if _parameters(f))
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
        first = next((i for i, (_, f) in enumerate(self.units) if theta & set(_parameters(f))), len(self.units))
        later = [f for _, f in self.units[first:]]
        if theta - {p for f in later for p in _parameters(f)} or not all(isinstance(f, nn.Module) for f in later):
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

    def exact(self) -> Timm:
        return self

    # --- data ---------------------------------------------------------------------------------------------------------

    def prepare(self, data: ImagePair, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and what it reads: activations at its trunk's end, or the features for a folded map."""
        folded = folded or self.fold
        weights = {"features": _hash([self.net]), "inputs": _hash(self._trunk)}
        tasks = {}
        for role, task in self.images.tasks.items():
            parts = {split: self._activations(role, task, split, folded, weights) for split in SPLITS}
            tasks[role] = self._task(role, task, parts, folded)
        about = data.about | {
            "inputs": f"features of {self.name}" if folded else f"activations of {self.name} before {self.point}",
            "preprocessing": {role: _preprocessing(self.config, data, t) for role, t in self.images.tasks.items()},
            "rows": {role: {s: len(getattr(task, s)) for s in SPLITS} for role, task in tasks.items()},
        }
        pair = TaskPair(data.name, **tasks, about=about)
        if not folded:
            kept = isinstance(pair.primary.train.x, Tensor) and isinstance(pair.harmful.train.x, Tensor)
            self.loaders = None if kept else self._loaders
            return self, pair
        pair = pair.to(self.images.device, torch.float64)
        return Folded(self, pair), pair

    def _activations(
        self, role: str, task: ImageTask, split: str, folded: bool, weights: dict[str, str]
    ) -> tuple[Tensor | Stream, Tensor]:
        """Inputs and labels of one split; the features of theta_0 go to `reference`."""
        pair, part = self.images, task.splits[split]
        config = _preprocessing(self.config, pair, task)
        if not len(part):
            return torch.empty(0, self.head.in_features, dtype=pair.dtype), torch.empty(0, dtype=torch.long)

        def loader(size: int = pair.batch_size) -> Any:
            return create_loader(pair, part, config, batch_size=size)

        rows = "" if part.rows is None else part.rows.tolist()
        about = f"{config} {part.identity} {rows} {pair.dtype} {pair.device.type} {pair.on_bad_image}"

        def key(name: str) -> str:
            place = "features" if name == "features" else self.point
            return hashlib.sha256(f"{weights[name]} {place} {about}".encode()).hexdigest()[:32]

        root = None if pair.cache is None else Path(pair.cache).expanduser()
        keys = {"features": key("features")}
        if not folded:
            shape = self.trunk(torch.zeros(1, *self.config["input_size"])).shape[1:]
            size = len(part) * shape.numel() * pair.dtype.itemsize / GIB
            free = not pair.augment and size < pair.cache_limit and (root is None or _free(root) > 1.2 * size)
            if free:
                keys["inputs"] = key("inputs")
            place = f"kept in {root or 'memory'}" if free else "computed from the images every time"
            log.info("%s/%s: %d images, %.3g GiB of activations, %s", role, split, len(part), size, place)

        def compute(images: Tensor) -> dict[str, Tensor]:
            inputs = self.trunk(images)
            return {"inputs": inputs, "features": self.extractor(inputs)}

        title = f"{role}/{split}: {len(part)} images"
        try:
            done: dict[str, Activations] = collect(loader(), compute, keys, root, title, pair.on_bad_image == "skip")
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no memory for dataset.batch_size={pair.batch_size} images; lower it"
            ) from error
        features = done["features"]
        if features.skipped:
            log.warning("%s: %d unreadable images are left out: %s", title, len(features.skipped), features.skipped[0])
        self.reference[role, split] = features.x
        if folded:
            return features.x, features.labels
        if "inputs" in done:
            return done["inputs"].x, features.labels
        return Stream(loader, self.trunk, (len(features.labels), *shape)), features.labels

    def _task(self, role: str, task: ImageTask, parts: dict[str, tuple], folded: bool) -> Task:
        classes = len(task.classes) or 1 + max(int(y.max()) for _, y in parts.values() if len(y))
        order, head = torch.arange(classes), None
        if role == "primary":
            outputs = self._outputs(task, classes)
            order = torch.empty_like(outputs)
            order[outputs.argsort()] = torch.arange(classes)  # classes in the order of the head's outputs
            head = None if classes == self.head.out_features else outputs.sort().values
        self.order[role] = order
        counts = torch.bincount(parts["train"][1], minlength=classes)
        if not counts.all():
            empty = int(counts.argmin())
            name = task.classes[empty] if task.classes else empty
            raise DataError(f"{role} task {task.name}: class {name} is empty, no training image of it can be read")
        splits = {s: Split(x, order[y].to(self.images.device)) for s, (x, y) in parts.items()}
        eps = torch.finfo(self.images.dtype).eps
        width = None if folded else self.head.in_features
        if width is not None:  # an empty split has no activations either
            x = splits["train"].x
            splits |= {s: replace(p, x=torch.empty(0, *x.shape[1:])) for s, p in splits.items() if not len(p)}
        return Task(task.name, **splits, classes=classes, eps=eps, width=width, head=head)

    def _outputs(self, task: ImageTask, classes: int) -> Tensor:
        """The head's output [classes] that means each class of the primary task."""
        size = self.head.out_features
        if task.outputs is not None:
            if max(task.outputs) >= size or len(set(task.outputs)) < classes:
                raise ConfigError(
                    f"dataset.primary.outputs: outputs must differ and be below {size}, the outputs of {self.name}"
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
            f"the head of {self.name} has {size} outputs, the primary task {task.name} {classes} classes, and their "
            "names are no ImageNet ids: say which output means which class with dataset.primary.outputs=<csv>, or fit "
            "a head to these classes first (model.arguments.num_classes with a checkpoint that has it)"
        )

    def read(self, role: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What the extractor reads of a loader's images, and the task's own labels."""
        return self.trunk(images), self.order[role][labels].to(self.images.device)

    def _loaders(self, batch_size: int) -> dict[str, Any]:
        """Shuffled training loaders of images by role, augmented where the data set says so."""
        return {
            role: create_loader(
                self.images,
                self.images.tasks[role].splits["train"],
                _preprocessing(self.config, self.images, self.images.tasks[role], training=self.images.augment),
                batch_size=batch_size,
                is_training=True,
                no_aug=not self.images.augment,
            )
            for role in ("primary", "harmful")
        }

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
    def feature_batches(self, x: Tensor | Stream) -> Iterator[Tensor]:
        """Features [n, D] of stored inputs, batch by batch."""
        for part in x.split(BATCH):
            yield self.extractor(part.to(self.head.weight))

    @torch.no_grad()
    def logits(self, x: Tensor | Stream) -> Tensor:
        """Outputs [N, C] of the primary head on stored inputs."""
        return torch.cat([self.head(features) for features in self.feature_batches(x)])

    @torch.no_grad()
    def original_logits(self, features: Tensor) -> Tensor:
        """Outputs [N, C] of the head as it was before training, on features [N, D]."""
        return F.linear(features.to(self.head.weight), *self.original_head)

    def baseline_factor(self, role: str, task: Task) -> Tensor:
        return triangular_factor(self.reference[role, "train"].split(BATCH))[0]

    def factor(self, task: Task) -> Tensor:
        return triangular_factor(self.feature_batches(task.train.x))[0]

    def export(self) -> dict[str, Tensor]:
        """The state dict of the timm model, its own classifier included."""
        state = dict(self.net.state_dict()) | self.head.state_dict(prefix=f"{self.classifier}.")
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def metadata(self) -> dict[str, str]:
        """What `load` needs beside the tensors."""
        facts = {"architecture": self.architecture, "arguments": self.arguments, "data_config": self.config}
        facts["weights"] = self.weights
        facts["license"] = (getattr(self.net, "pretrained_cfg", None) or {}).get("license")
        facts |= {"classes": self.head.out_features, "dtype": str(self.head.weight.dtype).removeprefix("torch.")}
        return {"immunization": json.dumps(facts)}


class Tail(nn.Module):
    """The last units of a net and its pooling: activations -> features [N, D]. Holds the units alone, not the net."""

    def __init__(self, net: nn.Module, units: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, unit in units:
            self.add_module(name.replace(".", "_"), unit)
        self._pool = (net,)  # in a tuple: not a submodule

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.children():
            x = unit(x)
        return self._pool[0].forward_head(x, pre_logits=True)


class Whole(nn.Module):
    """A whole net without its classifier: images -> features [N, D]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.forward_head(self.net.forward_features(x), pre_logits=True)


class Folded(Linear):
    """An invertible linear map theta [D, D] behind the features of a frozen net, its inverse in the primary head.

    The inputs are the net's features, so every method and measure of linear models applies; the baseline theta = I is
    the net as it was. The primary logits do not depend on theta: omega' = theta^-1 omega.
    """

    def __init__(self, base: Timm, pair: TaskPair) -> None:
        super().__init__(pair)
        self.base = (base,)  # in a tuple: its parameters are not this model's
        self.head = InverseHead(self.extractor, base.head)

    @property
    def name(self) -> str:
        return self.base[0].name

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))

    def set_head(self, weight: Tensor) -> None:
        """The net keeps its own head."""

    @torch.no_grad()
    def original_logits(self, features: Tensor) -> Tensor:
        """Outputs [N, C] of the net's own head on its own features."""
        return F.linear(features, self.head.omega, self.head.bias)

    def export(self) -> dict[str, Tensor]:
        """The state dict of the timm model with the map in its pooling (see `fold_into`), all in float64."""
        base = self.base[0]
        state = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in base.export().items()
        }
        head = {"weight": self.head.weight, "bias": self.head.bias}
        state |= {f"{base.classifier}.{name}": tensor for name, tensor in head.items() if tensor is not None}
        place = fold_place(base.net, base.config["input_size"])
        state = {_moved(name, place): tensor for name, tensor in state.items()}
        state[f"{place}.{FOLD}.weight"] = self.extractor.theta.T
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def metadata(self) -> dict[str, str]:
        base = self.base[0]
        facts = json.loads(base.metadata()["immunization"])
        facts |= {"fold": fold_place(base.net, base.config["input_size"]), "dtype": "float64"}
        return {"immunization": json.dumps(facts)}


class InverseHead(nn.Module):
    """z -> omega^T theta^-1 z + bias: undoes the map it follows, so that the net's own logits come out."""

    def __init__(self, extractor: LinearMap, head: nn.Linear) -> None:
        super().__init__()
        self._map = (extractor,)
        like = {"dtype": extractor.theta.dtype, "device": extractor.theta.device}
        self.omega = nn.Parameter(head.weight.detach().to(**like), requires_grad=False)
        bias = None if head.bias is None else nn.Parameter(head.bias.detach().to(**like), requires_grad=False)
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = head.in_features, head.out_features

    @property
    def weight(self) -> Tensor:
        """[C, D], rows omega_c^T theta^-T."""
        return torch.linalg.solve(self._map[0].theta, self.omega.T).T

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight, self.bias)


# --- timm ------------------------------------------------------------------------------------------------------------


FOLD = "immunization"


def create(name: str, checkpoint: str | None, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A timm model with its weights; raises ConfigError that names what does not fit."""
    import timm

    try:
        net = timm.create_model(name, pretrained=pretrained and checkpoint is None, **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        if not timm.is_model(name.partition(".")[0]):
            close = ", ".join(timm.list_models(f"*{name.partition('.')[0][:8]}*")[:5])
            raise ConfigError(
                f"model.name={name}: timm has no such model{'; did you mean ' + close if close else ''}"
            ) from error
        raise ConfigError(f"model.name={name}: {' '.join(str(error).split())}") from error
    except Exception as error:  # of the hub, whose own classes are many
        raise ConfigError(
            f"model.name={name}: its pretrained weights cannot be had ({type(error).__name__}: {str(error)[:200]}); "
            "connect to the Hugging Face hub, or give model.checkpoint=<file>, or model.pretrained=false"
        ) from error
    if checkpoint is not None:
        load_weights(net, Path(checkpoint).expanduser())
    return net


def load_weights(net: nn.Module, path: Path) -> None:
    """Read a safetensors file or a state dict (weights only); raises ConfigError that names the tensors in the way."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"model.checkpoint={path}: there is no such file") from error
    except Exception as error:  # safetensors and pickle raise a dozen kinds
        raise ConfigError(
            f"model.checkpoint={path} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
            "a safetensors file or a plain state dict of tensors is needed"
        ) from error
    state = next((state[key] for key in ("state_dict", "model") if isinstance(state.get(key), dict)), state)
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    own = net.state_dict()
    problems = [f"{n} is missing" for n in own.keys() - state.keys() if not n.endswith("num_batches_tracked")]
    problems += [f"{n} is unknown" for n in state.keys() - own.keys()]
    problems += [
        f"{n} has shape {tuple(state[n].shape)}, not {tuple(own[n].shape)}"
        for n in own.keys() & state.keys()
        if state[n].shape != own[n].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8]) + ("; ..." if len(problems) > 8 else "")
        raise ConfigError(
            f"model.checkpoint={path} does not fit the model in {len(problems)} tensors: {shown}. Choose the "
            "model.name it was made with (and model.arguments.num_classes for a head of another size)"
        )
    net.load_state_dict(state, strict=False)


def classifier_path(net: nn.Module) -> str:
    """Name of the linear classifier; raises ConfigError for a model without one."""
    head = net.get_classifier() if hasattr(net, "get_classifier") else None
    path = next((name for name, module in net.named_modules() if module is head), None)
    if path is None or not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(net).__name__} has no linear classifier (it has {type(head).__name__}); methods need the primary "
            "head: create the model with its classes"
        )
    return path


def _data_config(net: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_model_data_config

    keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    config = {key: value for key, value in resolve_model_data_config(net).items() if key in keys}
    channels = next(p for p in net.parameters() if p.ndim == 4 and p.shape[-1] > 1).shape[1]
    if channels != len(config["mean"]):  # another number than the pretrained weights had
        config["input_size"] = (channels, *config["input_size"][1:])
        config |= {key: (sum(config[key]) / len(config[key]),) * channels for key in ("mean", "std")}
    return config


def _preprocessing(config: dict[str, Any], pair: ImagePair, task: ImageTask, training: bool = False) -> dict[str, Any]:
    """The model's own data config with the crops that the data set asks for."""
    if training:
        return {key: value for key, value in config.items() if not key.startswith("crop")}
    crop = {} if pair.crop_pct is None else {"crop_pct": pair.crop_pct}
    if task.crop is not None:
        crop["crop_mode"] = task.crop
        if task.crop == "squash":
            crop["crop_pct"] = 1.0
    return config | crop


def _parameters(unit: Callable) -> list[nn.Parameter]:
    return list(unit.parameters()) if isinstance(unit, nn.Module) else []


@torch.no_grad()
def _units(net: nn.Module, input_size: Sequence[int]) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """The parts that `forward_features` applies one after another, checked on an image.

    These are the children in the order in which they run (a ViT's `pos_drop` standing for `_pos_embed`), Sequential
    ones taken apart. A net that is no such chain is one unit.
    """
    like = next(net.parameters())
    image = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0)).to(like)
    order: list[str] = []
    hooks = [
        child.register_forward_pre_hook(lambda _module, _inputs, name=name: order.append(name))
        for name, child in net.named_children()
    ]
    expected = net.forward_features(image)
    for hook in hooks:
        hook.remove()
    units: list[tuple[str, Callable]] = []
    for name in order:
        if name == "pos_drop" and hasattr(net, "_pos_embed"):
            units.append(("_pos_embed", net._pos_embed))
        else:
            units += _chain(name, net.get_submodule(name))
    try:
        x = image
        for _, unit in units:
            x = unit(x)
        if torch.equal(x, expected):
            return units
    except (RuntimeError, TypeError, ValueError, AttributeError):
        pass
    log.info("%s is no chain of modules: it runs as a whole, without a cache of activations", type(net).__name__)
    return [("images", net.forward_features)]


def _chain(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(module) is not nn.Sequential:
        return [(name, module)]
    return [unit for child, part in module.named_children() for unit in _chain(f"{name}.{child}", part)]


@torch.no_grad()
def fold_place(net: nn.Module, input_size: Sequence[int]) -> str:
    """Name of the last module that `forward_head(..., pre_logits=True)` runs, behind which a map changes the features.

    The map then belongs to what timm calls the features. Raises ConfigError for a net without such a module.
    """
    like = next(net.parameters())
    image = torch.zeros(1, *input_size).to(like)
    ran: list[tuple[str, Any]] = []
    hidden = net.forward_features(image)
    hooks = [
        module.register_forward_hook(lambda _m, _i, output, name=name: ran.append((name, output)))
        for name, module in net.named_modules()
        if name and not any(module.children())
    ]
    features = net.forward_head(hidden, pre_logits=True)
    for hook in hooks:
        hook.remove()
    for name, output in reversed(ran):
        if isinstance(output, Tensor) and output.shape == features.shape and torch.equal(output, features):
            return name
    raise ConfigError(f"{type(net).__name__} runs no module last in forward_head; a map cannot be folded into it")


def fold_into(net: nn.Module, place: str, size: int, **like: Any) -> None:
    """Put a linear layer of `size` features, called `immunization`, behind the module at `place`."""
    module = net.get_submodule(place)
    chain = nn.Sequential()
    chain.add_module("original", module)
    chain.add_module(FOLD, nn.Linear(size, size, bias=False, **like))
    net.set_submodule(place, chain)


def _moved(name: str, place: str) -> str:
    return name.replace(f"{place}.", f"{place}.original.", 1) if name.startswith(f"{place}.") else name


def _hash(parts: Sequence[Any]) -> str:
    """A hash of the structure and all tensors of modules (and of the net behind bound methods)."""
    digest = hashlib.sha256()
    for part in parts:
        module = part if isinstance(part, nn.Module) else part.__self__
        digest.update(str(module).encode())
        for name, tensor in module.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy() if tensor.ndim else
                          str(tensor.item()).encode())  # fmt: skip
    return digest.hexdigest()


def _free(root: Path) -> float:
    """Free space in GiB on the disk of `root`, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free / GIB
