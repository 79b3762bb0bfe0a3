"""Deep nets: any model of timm, split into a frozen trunk, the trainable part theta, and its classifier omega."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import checked
from immunization.compute import distributed, machine
from immunization.compute.machine import onto
from immunization.data.images import ImagePair
from immunization.data.task import Split, Task
from immunization.errors import ConfigError
from immunization.models.activations import Stream
from immunization.models.adapted import BODY, Adapted, adapted, released
from immunization.models.chain import (
    Network,
    Tail,
    Whole,
    data_config,
    first_with,
    in_form,
    noise,
    parameters,
    take_apart,
)
from immunization.models.deployed import Deployed, deployed
from immunization.models.fold import FOLD, folded_map, unfold
from immunization.models.reading import Reader, room_for
from immunization.models.weights import create, head_size, known_arguments, name_of, read_checkpoint
from immunization.theory.spectrum import triangular_factor

log = logging.getLogger(__name__)

MOST_IN_LAST = 0.4
"""Share of a net's weights above which its last block counts as large."""


ROWS = 16
"""Images of noise on which the net in a file is tried."""


class Timm(Reader):
    """A net of timm, or in its form: images -> trunk (frozen) -> extractor (features [N, D]) -> head (its classifier).

    Its options are those of conf/model/timm.yaml; in Python, `net` is a timm model of the caller's own, which is taken
    apart: give a copy. The frozen part is in eval mode, also under `train()`. The baseline is the net before
    training, or, with an empty trunk, that of `reference` or the net without the map that is folded into `checkpoint`.
    """

    deep = True

    @checked("model/timm")
    def __init__(
        self,
        pair: ImagePair,
        name: str | None = None,
        *,
        trainable: str | Sequence[str],
        checkpoint: str | None,
        pretrained: bool,
        head_decay: float,
        arguments: dict[str, Any] | None,
        reference: str | None,
        channels_last: bool,
        amp: Literal["bfloat16", "auto"] | None,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pair, ImagePair):
            raise ConfigError(f"model={name} needs images, for example dataset=image_folders; '{pair.name}' has none")
        if not isinstance(arguments, Mapping | None):
            raise ConfigError(
                f"model.arguments must be options of timm.create_model, {{num_classes: 10}}, or null, not {arguments!r}"
            )
        file = Path(checkpoint) if net is None and checkpoint and Path(checkpoint).suffix == ".onnx" else None
        if file is not None:
            net, checkpoint = (
                in_file(file.expanduser(), create(str(name), None, False, dict(arguments or {})), pair.size),
                None,
            )
        stored, asked = None if checkpoint is None else read_checkpoint(checkpoint), name
        said = stored.net() if stored and (":" in str(name) or not arguments) else None
        if said and ":" in str(name):  # a folder or a repository, which need not be there again
            name = said[0]
        self.arguments = dict(arguments or (said[1] if said else {}))
        self.weights, self.license, stripped = "the caller's own" if file is None else file.name, None, None
        if net is None:
            if stored and "num_classes" not in self.arguments and (outputs := head_size(name, stored.tensors)):
                self.arguments["num_classes"] = outputs
            net = create(name, stored, pretrained, self.arguments)
            self.weights = "weights of the hub" if pretrained else "random weights"
            if checkpoint:
                self.weights = Path(checkpoint).name + (f" ({stored.key})" if stored.key else "")
            elif pretrained:  # timm states the license of its own weights
                self.license = (getattr(net, "pretrained_cfg", None) or {}).get("license")
            if ":" in str(name):  # timm's words for it hold everywhere
                source, _, place = name.partition(":")
                self.weights = f"{source}:{Path(place).name if source == 'local-dir' else place}"
                name, self.arguments = net.pretrained_cfg["architecture"], known_arguments(net) | self.arguments
            if reference is None and folded_map(net) is not None:
                stripped = in_form(copy.deepcopy(net).double(), pair.size)  # taking the map out costs digits
        own = getattr(net, "pretrained_cfg", None) or {}
        self.architecture = name or own.get("architecture") or type(net).__name__
        self.original_dtype = next(net.parameters()).dtype
        self.images, self.head_decay, self.channels_last = pair, head_decay, channels_last
        self.amp = amp == "bfloat16" or (
            amp == "auto" and pair.dtype == torch.float32 and machine.has_bfloat16(pair.device)
        )
        self.parts = take_apart(net, pair.size)
        self.head, self.net, self.config = self.parts.head, self.parts.net, self.parts.config
        self.fixed = next((part.fixed for part in self.net.modules() if isinstance(part, Deployed)), None)
        if "fields" not in self.config:  # of texts
            pair.check_channels(self.architecture, self.config["input_size"][0])
        self.fold = trainable == "fold"
        self.trainable = [] if self.fold else self._match([trainable] if isinstance(trainable, str) else trainable)
        self._split_net()
        self.to(pair.device, pair.dtype)
        self.eval()
        self._original_head = [p.detach().clone() for p in self.head.parameters()]
        self._before: tuple[Timm, ...] = ()
        self._stripped = reference is None and stripped is not None
        self.reference: dict[tuple[str, str], Tensor] = {}
        self.few: dict[str, Tensor] = {}  # rows that a method learns from, by role, where these are not all
        self.order: dict[str, Tensor] = {}
        self.stored: dict[tuple[str, str], Split] = {}
        if reference is not None:
            weights = None if reference == "hub" else reference
            self.compare_with(Timm(pair, name if weights else asked, checkpoint=weights, arguments=self.arguments))
        elif stripped is not None:
            unfold(stripped)
            self.compare_with(Timm(pair, net=stripped))

    @property
    def before(self) -> Timm | None:
        return self._before[0] if self._before else None

    def compare_with(self, before: Timm) -> None:
        """Take another net as the baseline; both then read images, at the blocks that the baseline has."""
        self._before = (before,)  # in a tuple: it is no part of this net
        self.fixed = self.fixed or before.fixed
        self.unlike = None if self.fixed else unlike(self.net, before.net)
        if {name for name, _ in self.net.named_modules()}.issuperset(before.parts.found.outputs):
            self.parts = replace(self.parts, found=before.parts.found)  # what is dead gives nothing to find it by
        self.reference, self._original_head = before.reference, before._original_head
        for model in (self, before):  # no trunk
            model._trunk, model.point, model.extractor = [], "images", Whole(model.net, model.parts.found)

    @property
    def name(self) -> str:
        return self.architecture

    def _match(self, patterns: Sequence[str]) -> list[str]:
        inside = self.net.inside if isinstance(self.net, Adapted) else ""
        last = list(patterns) == ["last"]
        patterns = [self._last_block()] if last else [f"{inside}{pattern}" for pattern in patterns]
        matched = []
        for pattern in patterns:
            names = [n for n, m in self.net.named_modules() if n and fnmatchcase(n, pattern) and parameters(m)]
            if not names:
                known = ", ".join(name.removeprefix(inside) for name, f in self.parts.units if parameters(f))
                raise ConfigError(
                    f"model.trainable={pattern.removeprefix(inside)}: {self.architecture} has no module with "
                    f"parameters of this name; there are {known} and the modules inside of them"
                )
            matched += names
        for name in matched:
            self.net.get_submodule(name).requires_grad_(True)
        log.info("%s: trained are %s", self.architecture, ", ".join(matched))
        return matched

    def _last_block(self) -> str:
        """The name of the last block; `doubt` says if that is much of the net, or if much follows it."""
        name = self.parts.last_block()
        inside, everything = (sum(p.numel() for p in m.parameters()) for m in (self.net.get_submodule(name), self.net))
        if inside > MOST_IN_LAST * everything:
            self.doubt = (
                f"trainable=last is {name.removeprefix(BODY)}, which has {inside / everything:.0%} of the weights of "
                f"{self.architecture}: name a smaller part to change less"
            )
        found = self.parts.found
        if found.much_unread and (end := found.outputs[name].end.share) < found.unread[1]:
            self.doubt = (
                f"trainable=last is {name.removeprefix(BODY)}, and {1 - end:.0%} of the operations follow it: no "
                "module behind it gives one output for each input; name what to train"
            )
        return name

    def check_fold(self) -> None:
        if isinstance(self.net, Adapted):
            _ = self.net.fold_place

    def _split_net(self) -> None:
        """Trunk: everything before the first trainable unit, in the order of execution."""
        units = self.parts.units
        theta = {p for p in self.net.parameters() if p.requires_grad}
        first = first_with(units, theta)
        self.point = units[first][0] if first < len(units) else "pooling"
        self._trunk = [f for _, f in units[:first]]
        net, found = self.net, self.parts.found
        self.extractor = Tail(net, found, units[first:]) if first else Whole(net, found)

    def train(self, mode: bool = True) -> Timm:
        super().train(False)
        for name in self.trainable if mode else ():
            self.net.get_submodule(name).train()
        return self

    def training_features(self, x: Tensor, theta: Mapping[str, Tensor] | None = None) -> Tensor:
        """Features [N, D] with a graph, in the dtype of `x`: with `channels_last` and `amp`, as asked for."""
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return super().training_features(x, theta).to(x.dtype if x.is_floating_point() else self.dtype)

    def groups(self) -> list[dict[str, Any]]:
        theta = [p for p in self.extractor.parameters() if p.requires_grad]
        return [{"params": theta}, {"params": list(self.head.parameters()), "weight_decay": self.head_decay}]

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
        for part in islice(parts, distributed.rank(), None, distributed.size()) if shared else parts:
            with room_for(self.images):
                features = self.extractor(onto(part, self.head.weight))
            yield features

    @torch.no_grad()
    def logits(self, x: Tensor | Stream) -> Tensor:
        return torch.cat([self.head(features) for features in self.feature_batches(x)])

    def factor(self, task: Task) -> Tensor:
        return distributed.triangular_factor(self.feature_batches(task.train.x, shared=True), self.head.in_features)

    def baseline_factor(self, role: str, task: Task) -> Tensor:
        features = self.reference[role, "train"]
        features = features[self.few[role].to(features.device)] if role in self.few else features
        return triangular_factor(features.split(self.images.batch_size))[0]

    def baseline_features(self, role: str, split: str) -> Tensor:
        return self.reference[role, split]

    @torch.no_grad()
    def baseline_logits(self, task: Task) -> Tensor:
        return F.linear(self.reference["primary", "test"].to(self.head.weight), *self._original_head)

    def last_map(self, extractor: nn.Module) -> Tensor | None:
        return folded_map(extractor)

    def network(self, start: Mapping[str, Tensor] | None = None) -> Network:
        parts, extractor = copy.deepcopy((self.parts, self.extractor))
        if start is not None:
            extractor.load_state_dict(start)  # shares its parameters with the net
        return Network(parts, self.trainable)

    def deployed(self) -> nn.Module:
        net = copy.deepcopy(self.net)
        net.set_submodule(self.parts.classifier, copy.deepcopy(self.head))
        return net

    def deployed_before(self, start: Mapping[str, Tensor] | None = None) -> nn.Module | None:
        if self.before is not None:
            return self.before.deployed()
        if start is None:
            return None
        net, extractor, head = copy.deepcopy((self.net, self.extractor, self.head))
        extractor.load_state_dict(start)  # shares its parameters with the net
        head.load_state_dict(dict(zip(head.state_dict(), self._original_head, strict=True)))
        net.set_submodule(self.parts.classifier, head)
        return net

    def export(self) -> dict[str, Tensor]:
        """The state dict of the net, of its own class and with its own classifier."""
        return released(self.deployed()).state_dict()

    def original(self) -> dict[str, Tensor]:
        if self.before is not None:
            return {} if self._stripped else self.before.export()
        adapted = isinstance(self.net, Adapted)
        heads = [BODY + path for path in self.net.paths] if adapted else [self.parts.classifier]
        inside = self.net.inside if adapted else ""
        changed = tuple(f"{name.removeprefix(inside)}." for name in (*self.trainable, *heads))
        return {} if self.fold else {n: tensor for n, tensor in self.export().items() if n.startswith(changed)}

    def facts(self) -> dict[str, Any]:
        facts = {"architecture": self.architecture, "arguments": self.arguments, "data_config": self.config}
        facts |= {"weights": self.weights, "license": self.license, "original_dtype": name_of(self.original_dtype)}
        if self.head.bias is None:
            facts["head_bias"] = False
        return facts | {"classes": self.head.out_features, "dtype": name_of(self.head.weight.dtype)}


def unlike(net: nn.Module, before: nn.Module) -> str | None:
    """How many parameters of two nets have a shape of which the other has fewer; None if one has all of the other's.

    Names do not count, as a net may be wrapped, and one may have more: an adapter, or copies of tied weights.
    """
    shapes = [
        Counter(tuple(p.shape) for name, p in one.named_parameters() if FOLD not in name.split("."))
        for one in (net, before)
    ]
    own, other = (shapes[0] - shapes[1]).total(), (shapes[1] - shapes[0]).total()
    if not own or not other:
        return None
    return (
        f"{own} of {shapes[0].total()} parameters of the model and {other} of {shapes[1].total()} of the reference "
        "have no counterpart of their shape in the other: the reference may be another net than the model once was"
    )


def in_file(path: Path, like: nn.Module, size: int | None) -> nn.Module:
    """The net in an ONNX file, which reads images that are prepared as for `like`, of `size` or its own."""
    config = data_config(like, size)
    net = adapted(deployed(path, noise(config["input_size"], ROWS)), noise(config["input_size"]))
    net.data_config = config
    return net
