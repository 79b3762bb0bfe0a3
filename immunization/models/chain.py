"""A timm net taken apart: its classifier, the units that it applies one after another, and its layers."""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.compute.machine import onto
from immunization.errors import ConfigError
from immunization.models.adapted import BODY, Adapted, Passed, adapted
from immunization.models.blocks import Block, Found, find
from immunization.models.fold import recorded
from immunization.models.halves import Half, halves
from immunization.models.named import Named
from immunization.runs.net_facts import IMAGES

log = logging.getLogger(__name__)

Reduce = Callable[[Tensor, bool, int], Any]
Unit = Callable[[Tensor], Tensor]  # a module or, for what a net does between its modules, a bound method of it
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers with statistics of batches, which are no weights; those of timm inherit from them."""
NET = "whole.net."
"""Begins the names of the modules of a `Network`'s net."""
LEAST_IN_LAST = 0.01
"""Share of the weights of all blocks below which one is not trained as the last."""
PASSED = (nn.Identity, Passed, nn.modules.dropout._DropoutNd)
"""Layers that give what they read, once trained."""
MOST_CHANNELS = 17
"""Fewer than this many channels of images are tried, where the first convolution does not say it."""


@dataclass(frozen=True)
class NetParts:
    """`net` without its classifier, which is `head` and was called `classifier`; `config` says how it wants its images.

    `units` are what its `forward_features` applies one after another, by name, `found` its blocks, `sample` two inputs.
    """

    net: nn.Module
    head: nn.Linear
    classifier: str
    config: dict[str, Any]
    units: list[tuple[str, Unit]]
    sample: Tensor
    found: Found

    def last_block(self) -> str:
        """Name of the last block before the classifier with a share of the weights that is worth training.

        A shortcut is none, though it may run last of a residual block.
        """
        sizes = {
            name: sum(map(Tensor.numel, parameters(self.net.get_submodule(name)))) for name in self.found.innermost
        }
        large = [name for name, size in sizes.items() if size >= LEAST_IN_LAST * sum(sizes.values())]
        if not large:
            raise ConfigError(
                "the net has no layer with weights before its classifier, so no block can be trained; choose another "
                "model"
            )
        return next((name for name in reversed(large) if not self.found.outputs[name].shortcut), large[-1])


def take_apart(net: nn.Module, size: int | None = None) -> NetParts:
    """Freeze `net`, in place, for images of `size` or its own, and take its classifier out; raises ConfigError."""
    config = data_config(net, size)
    net = in_form(net, size).eval().requires_grad_(False)
    head = net.get_classifier()
    classifier = next(name for name, module in net.named_modules() if module is head)
    net.set_submodule(classifier, nn.Identity())
    sample = sample_of(net, config["input_size"])
    found = find(net, partial(features_of, net), onto(sample, head.weight).clone())
    parts = NetParts(net, head.requires_grad_(True), classifier, config, [], sample, found)
    reads_texts = isinstance(net, Adapted) and isinstance(net.body, Named) and found.innermost
    units = halves(net, found, parts.last_block(), onto(sample, head.weight)) if reads_texts else []
    return replace(parts, units=units or units_of(net, sample))


def sample_of(net: nn.Module, input_size: Sequence[int]) -> Tensor:
    """Two inputs [2, ...] that the net reads: those that it was adapted with, or noise of the size of its images."""
    own = getattr(net, "sample", None)
    return noise(input_size) if own is None else own


def noise(input_size: Sequence[int], count: int = 2) -> Tensor:
    """The same random images [count, C, H, W] at every call, on which nets are tried."""
    return torch.randn(count, *input_size, generator=torch.Generator().manual_seed(0))


def features_of(net: nn.Module, inputs: Tensor) -> Tensor:
    """Features [N, D] of inputs of a net in timm's form."""
    return net.forward_head(net.forward_features(inputs), pre_logits=True)


def in_form(net: nn.Module, size: int | None = None) -> nn.Module:
    """`net`, or an `Adapted` of it, tried on noise of `size` or its own: its classifier(pre_logits) is its output."""
    return adapted(net, noise(data_config(net, size)["input_size"]))


class Chain(nn.Module):
    """Blocks of `net` and its pooling, with features [N, D] at their end."""

    def __init__(self, net: nn.Module, found: Found) -> None:
        super().__init__()
        self._net = (net,)  # in a tuple: its parameters are not among this module's
        self.found = found

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Those of the net that run here, by name, in the order in which they end."""
        own, blocks = set(self.modules()), [(name, self._net[0].get_submodule(name)) for name in self.found.blocks]
        return [(name, part) for name, part in blocks if part in own]

    def trained_blocks(self) -> list[str]:
        """Names of the blocks with trained weights."""
        return [name for name, part in self.blocks() if any(p.requires_grad for p in part.parameters())]

    @contextmanager
    def watched(
        self, reduce: Reduce | None = None, inside: Reduce | None = None, without: Container[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """Inside, the dict has what each block gave when it last ran, averaged over places or tokens: [N, channels].

        Blocks come by name, in the order in which they ran first. `reduce`, in place of the average, takes it, whether
        channels come last in a map, and the number of prefix tokens. `inside` does so with what layers inside of blocks
        give, `<block>/<layer>`; BatchNorm, which only scales and shifts channels and may be overwritten in place, is
        left out. So are the blocks `without` and their layers.
        """
        seen: dict[str, Any] = {}

        def keep(name: str, block: Block, take: Reduce, _module: nn.Module, _inputs: object, output: object) -> None:
            if (x := block.read(output)) is not None:
                tokens_last = x.ndim == 3 and not block.last
                seen[name] = take(x.mT if tokens_last else x, block.last, block.prefix)

        reduce = reduce or (lambda x, last, _: pooled(x, last))
        known = self.found.outputs
        places = [(name, known[name], part, reduce) for name, part in self.blocks() if name not in without]
        layers = [] if inside is None else [(*layer, inside) for layer in self._layers()]
        places += [layer for layer in layers if layer[0].partition("/")[0] not in without]
        with ExitStack() as hooks:
            for name, block, module, take in places:
                hooks.enter_context(module.register_forward_hook(partial(keep, name, block, take)))
            yield seen

    def _layers(self) -> Iterator[tuple[str, Block, nn.Module]]:
        """The layers inside of blocks that do more than scale channels, as `<innermost block>/<layer>`."""
        done: set[nn.Module] = set()
        for block, part in self.blocks():  # inner ones end first
            for name, layer in part.named_modules():
                leaf = name and not list(layer.children()) and not isinstance(layer, (*BATCH_NORMS, *PASSED))
                if leaf and layer not in done and (own := self.found.outputs.get(f"{block}.{name}")):
                    done.add(layer)
                    yield f"{block}/{name}", own, layer


class Tail(Chain):
    """The last units of a net and its pooling: activations -> features [N, D]. Holds the units alone, not the net."""

    def __init__(self, net: nn.Module, found: Found, units: list[tuple[str, nn.Module]]) -> None:
        super().__init__(net, found)
        for name, unit in units:
            self.add_module(name.replace(".", "_"), unit)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.children():
            x = unit(x)
        return self._net[0].forward_head(x, pre_logits=True)


class Whole(Chain):
    """A whole net without its classifier: images -> features [N, D]."""

    def __init__(self, net: nn.Module, found: Found) -> None:
        super().__init__(net, found)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return features_of(self.net, x)


class Network(nn.Module):
    """A whole net, all of it trainable, as an attacker has it: images -> features [N, D]; `trained` were immunized."""

    def __init__(self, parts: NetParts, trained: Sequence[str] = ()) -> None:
        super().__init__()
        self.whole, self.sample, self.found = Whole(parts.net, parts.found), parts.sample, parts.found
        self.last_block, self.units = parts.last_block(), parts.units
        self.trained = [f"{NET}{name}" for name in trained]
        self.map: nn.Linear | None = None

    def fold(self, theta: Tensor) -> None:
        """Put a copy of the map theta [D, D] behind the features."""
        self.map = nn.Linear(*theta.shape, bias=False)
        self.map.weight.data = theta.detach().T.clone()
        self.trained = ["map"]

    def find_units(self) -> None:
        """Take the units anew by their names, after layers of the net were replaced."""
        net = self.whole.net
        self.units = [
            (name, f if isinstance(f, Half) or not isinstance(f, nn.Module) else net.get_submodule(name))
            for name, f in self.units
        ]

    def part(self, name: str) -> list[nn.Module]:
        """Modules of a part of the net: of none (`head`), `last`, of what was `trained`, `full`.

        Or of all from a block or a stage of this name to the end, with the map. Raises ConfigError for any other name.
        """
        if name == "trained":
            modules = dict(self.named_modules())
            return [modules[module] for module in self.trained if module in modules]
        last = [self.whole.net.get_submodule(self.last_block), *filter(None, [self.map])]
        parts = {"head": [], "last": last, "full": [self]}
        return parts[name] if name in parts else self._suffix(name)

    def begins(self, part: str) -> list[str]:
        """Names of modules of the net that `part` begins with: none behind all blocks, and "" for all of it."""
        if part == "trained":
            return [name.removeprefix(NET) for name in self.trained if name != "map"]
        known = {"head": [], "last": [self.last_block], "full": [""]}
        return known[part] if part in known else [self._named(part)]

    def _named(self, name: str) -> str:
        """The name of a block or a stage that is called so, whether or not what the net was adapted by is written."""
        ran = [f"{module}." for module in self.found.begins]
        names = [own for own in (name, f"{BODY}{name}") if any(module.startswith(f"{own}.") for module in ran)]
        if names:
            return names[0]
        known = ", ".join(block.removeprefix(BODY) for block in self.found.blocks)
        raise ConfigError(
            f"attack.*.scope={name}: no block of the net is called so; use trained or one of {known} (to fine-tune "
            "also head, last or full)"
        )

    def _suffix(self, name: str) -> list[nn.Module]:
        """The largest modules that run from a block or a stage on, and the map."""
        own = self._named(name)
        if not self.found.before([own]):
            return [self]
        first = self.found.begin(own)

        def later(module: nn.Module, path: str) -> Iterator[nn.Module]:
            for child, part in module.named_children():
                begin = self.found.begins.get(f"{path}{child}")
                if begin is not None and begin.begun >= first.begun:
                    yield part
                else:
                    yield from later(part, f"{path}{child}.")

        return [*later(self.whole.net, ""), *filter(None, [self.map])]

    def _ends(self) -> list[nn.Module]:
        """What follows all units: modules of the net that are in none, and the map."""
        inside = {unit.partition(".")[0] for unit, _ in self.units}
        ends = [module for name, module in self.whole.net.named_children() if name not in inside]
        return ends if self.map is None else [*ends, self.map]

    def start_of(self, trained: Iterable[nn.Parameter]) -> int:
        """Index of the unit before which nothing has any of these parameters; 0 also for a net that is no chain."""
        if not self.units or not isinstance(self.units[-1][1], nn.Module):
            return 0
        ends = {parameter for module in self._ends() for parameter in module.parameters()}
        return first_with(self.units, set(trained) - ends)

    def depths(self) -> dict[nn.Parameter, int]:
        """The unit of each parameter, counted from the end from 1 on, or blocks that end behind it; 0 behind all."""
        net, units = self.whole.net, [parameters(f) for _, f in reversed(self.units) if parameters(f)]
        if not units:  # the net is no chain
            blocks = self.found.innermost
            behind = {
                name: len(blocks) - len({*blocks} & {*self.found.before([name])}) for name, _ in net.named_modules()
            }
            return {p: behind[name] for name, module in net.named_modules() for p in module.parameters(recurse=False)}
        depths = dict.fromkeys(net.parameters(recurse=False), len(units))
        return depths | {parameter: depth for depth, unit in enumerate(units, 1) for parameter in unit}

    def before(self, images: Tensor, start: int) -> Tensor:
        """Outputs of the units before the one with index `start` for images: [N, ...]."""
        for _, unit in self.units[:start]:
            images = unit(images)
        return images

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Features of images, or of what `before` makes of them."""
        if start:
            for _, unit in self.units[start:]:
                x = unit(x)
            features = self.whole.net.forward_head(x, pre_logits=True)
        else:
            features = self.whole(x)
        return features if self.map is None else self.map(features)


def data_config(net: nn.Module, size: int | None = None) -> dict[str, Any]:
    """How the net wants its images: size (or this one), interpolation, mean, std, crop, for the channels it reads."""
    if known := getattr(net, "data_config", None):
        return dict(known) if size is None else known | {"input_size": (known["input_size"][0], size, size)}
    own = net.pretrained_cfg.get("input_size") if isinstance(net, Adapted) else None
    net = net.body if isinstance(net, Adapted) else net
    if own is not None and not getattr(net, "pretrained_cfg", None):
        return {"input_size": own if size is None else (own[0], size, size)}
    from timm.data import resolve_model_data_config

    config = {key: value for key, value in resolve_model_data_config(net).items() if key in IMAGES}
    config["input_size"] = own or config["input_size"]
    if size is not None:
        config["input_size"] = (config["input_size"][0], size, size)
    channels = channels_of(net, config["input_size"])
    if channels != len(config["mean"]):  # another number than the pretrained weights had
        config["input_size"] = (channels, *config["input_size"][1:])
        config |= {key: (sum(config[key]) / len(config[key]),) * channels for key in ("mean", "std")}
    return config


@torch.no_grad()
def channels_of(net: nn.Module, size: Sequence[int]) -> int:
    """How many channels a net reads: those of its first convolution, unless it takes `size` [C, H, W] otherwise."""
    convolutions = (part for part in net.modules() if isinstance(part, nn.Conv2d) and part.kernel_size[-1] > 1)
    first = next((part.in_channels for part in convolutions), size[0])
    if first == size[0]:
        return first
    like = next(net.parameters())
    tried = (channels for channels in (size[0], first, *range(1, MOST_CHANNELS)) if channels)
    was, _ = net.training, net.eval()
    try:  # some rearrange pixels or take frequencies first
        return next((c for c in tried if reads(net, torch.zeros(2, c, *size[1:]).to(like))), first)
    finally:
        net.train(was)


def same_code(module: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same classes inside, without hooks, and the same plain attributes of them."""

    def plain(value: object) -> bool:
        return all(map(plain, value)) if isinstance(value, tuple) else isinstance(value, (int, float, str, type(None)))

    def facts(of: nn.Module) -> list[object]:
        return [(n, type(m), {key: x for key, x in vars(m).items() if plain(x)}) for n, m in of.named_modules()]

    hooked = any(m._forward_hooks or m._forward_pre_hooks for of in (module, other) for m in of.modules())
    return not hooked and facts(module) == facts(other)


def parameters(unit: Unit) -> list[nn.Parameter]:
    return list(unit.parameters()) if isinstance(unit, nn.Module) else []


def first_with(units: Sequence[tuple[str, Unit]], trained: set[nn.Parameter]) -> int:
    """Index of the first unit with one of these parameters; 0 where those from there on are no chain with all."""
    first = next((i for i, (_, f) in enumerate(units) if trained & set(parameters(f))), len(units))
    later = [f for _, f in units[first:]]
    chain = all(isinstance(f, nn.Module) for f in later)
    return first if chain and trained <= {p for f in later for p in parameters(f)} else 0


@torch.no_grad()
def units_of(net: nn.Module, sample: Tensor) -> list[tuple[str, Unit]]:
    """The parts that `forward_features` applies one after another, checked on a `sample` of inputs.

    Children in the order in which they run (a ViT's `pos_drop` for `_pos_embed`), Sequential ones apart; else one unit,
    as where one writes into images or, with weights, into activations, which may be kept.
    """
    like = next(net.parameters(), None)
    if like is None:
        raise ConfigError(
            "the net has no layer with weights before its classifier, so nothing can be immunized; choose another model"
        )
    image = onto(sample[:1], like).clone()  # which a module may write into
    whole, prefix = (net.body, BODY) if isinstance(net, Adapted) else (net, "")
    with recorded(whole.named_children()) as ran:
        expected = net.forward_features(image)
    units: list[tuple[str, Unit]] = []
    for name, _ in ran:
        if name == "pos_drop" and hasattr(whole, "_pos_embed"):
            units.append((f"{prefix}_pos_embed", whole._pos_embed))
        else:
            units += _chain(f"{prefix}{name}", whole.get_submodule(name))
    for tried in (units, [(prefix[:-1], whole)] if prefix else []):
        if tried and _is_chain(tried, image.clone(), expected):
            return tried
    log.info(
        "%s is not a sequence of modules: each step runs the whole net, without cached activations", type(net).__name__
    )
    return [("images", net.forward_features)]


def _is_chain(units: Sequence[tuple[str, Unit]], image: Tensor, expected: Tensor) -> bool:
    """Whether units one after another make the features of an image, and write into none that may be kept."""
    try:
        x, kept = image, True
        for _, unit in units:
            before, written = x, x._version
            x = unit(x)
            kept &= before._version == written or (before is not image and not parameters(unit))
            kept &= not isinstance(x, Tensor) or len(x) == len(image)  # rows of [T, N, C] would be tokens
        return kept and torch.equal(x, expected)
    except Exception:  # of any kind: the code of the net
        return False


def pooled(x: Tensor, channels_last: bool = False) -> Tensor:
    """[N, channels] of a map [N, C, H, W] (or [N, H, W, C]), tokens [N, T, C] or rows [N, C]."""
    if x.ndim == 4:
        return x.mean((1, 2) if channels_last else (2, 3))
    return x.mean(1) if x.ndim == 3 else x


def twice(images: Tensor) -> Tensor:
    """Images [N, C, H, W] at twice their height and width."""
    return F.interpolate(images, scale_factor=2, mode="bilinear")


@torch.no_grad()
def reads(net: Callable[[Tensor], Tensor], images: Tensor) -> bool:
    """Whether a net reads images [N, C, H, W] of this size: some read those of one size alone."""
    try:
        net(images[:1])
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


def _chain(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(module) is not nn.Sequential:
        return [(name, module)]
    return [unit for child, part in module.named_children() for unit in _chain(f"{name}.{child}", part)]


def norms_of(module: nn.Module) -> list[nn.Module]:
    """Its layers with statistics of batches."""
    return [part for part in module.modules() if isinstance(part, BATCH_NORMS)]


def multiplies(layer: nn.Module) -> bool:
    """Whether it is a trained linear layer, or a convolution without groups that pads with zeros, if at all."""
    if not getattr(getattr(layer, "weight", None), "requires_grad", False):
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)


def rows_of(layer: nn.Module, x: Tensor) -> Tensor:
    """What such a layer reads at every place, [N, places, d]: the patches of a convolution."""
    if isinstance(layer, nn.Conv2d):
        return F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
    return x.flatten(1, -2) if x.ndim > 2 else x[:, None]
