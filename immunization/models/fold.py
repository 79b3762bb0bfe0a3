"""Linear maps: by themselves, and folded into a timm net, behind its features, with the inverse in the classifier."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from immunization.errors import ConfigError

FOLD, ORIGINAL = "immunization", "original"  # how the map's layer is called in the net, and the module it stands at
READ = ("weight", "bias", "in_features", "out_features")  # attributes of a classifier, for its dtype or sizes


@contextmanager
def recorded(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[list[tuple[str, object]]]:
    """Inside, the list has the name and the output of every named one of `modules` that ran, in order."""
    ran: list[tuple[str, object]] = []
    with ExitStack() as hooks:
        for name, module in modules:
            if name:
                keep = module.register_forward_hook(lambda _m, _i, output, name=name: ran.append((name, output)))
                hooks.enter_context(keep)
        yield ran


class LinearMap(nn.Module):
    """x @ theta + bias with theta [D_in, D_out]; `bias` is None but for the released code, whose theory has none."""

    def __init__(self, theta: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.theta.dtype)
        return x @ self.theta if self.bias is None else x @ self.theta + self.bias


@dataclass(frozen=True)
class Place:
    """The place of a map: behind the module `name`, over channels [N, D, H, W] (`convolution`) or the last axis.

    `stripped_by`: the function of timm that throws this module away, and the map with it; None where none does.
    `before`: it is in front of the module, which is a classifier.
    """

    name: str
    convolution: bool
    stripped_by: str | None = None
    before: bool = False


@torch.no_grad()
def fold_place(net: nn.Module, input_size: Sequence[int]) -> Place:
    """The place behind which a map is one of the features, `forward_head(..., pre_logits=True)`.

    Average pooling commutes with a map, which so can be inside the last block, where `reset_classifier` leaves it; else
    it follows the last layer that is not linear. Candidates are tried on a copy. Raises ConfigError where none fits.
    """
    if own := getattr(net, "fold_place", None):  # nets that are not timm's say where
        return own
    generator = torch.Generator().manual_seed(0)
    net = copy.deepcopy(net).cpu().double().eval()
    images = torch.randn(2, *input_size, generator=generator, dtype=torch.float64)
    candidates, features = _candidates(net, images)
    theta = torch.randn(features.shape[1], features.shape[1], generator=generator, dtype=torch.float64)
    stripped = None
    for place in candidates:
        trial = copy.deepcopy(net)
        fold_into(trial, place.name, weight_of(theta, place))
        if not _gives(trial, images, features @ theta):
            continue
        if not hasattr(trial, "reset_classifier"):
            return place
        try:
            trial.reset_classifier(10)
        except AttributeError:  # it reads an attribute of this module
            continue
        if _gives(trial.double(), images, features @ theta):
            return place
        stripped = stripped or Place(place.name, place.convolution, "reset_classifier")
    if stripped is None:
        raise ConfigError(
            f"{type(net).__name__}: no layer takes a folded map; choose a method that trains layers, such as forget"
        )
    return stripped


def _candidates(net: nn.Module, images: Tensor) -> tuple[list[Place], Tensor]:
    """Places that have the features' width, best first, and the features [N, D].

    First the ends of `forward_features`, those in the last stage and the innermost before others; then the head's.
    """
    with recorded(net.named_modules()) as ran:
        hidden = net.forward_features(images)
        body = len(ran)
        features = net.forward_head(hidden, pre_logits=True)
    stages = getattr(net, "feature_info", None) or [{}]
    last = f"{stages[-1].get('module')}."
    ends = [(name, x) for name, x in reversed(ran[:body]) if isinstance(x, Tensor) and x is hidden]
    ends.sort(key=lambda end: (not end[0].startswith(last), -end[0].count(".")))
    head = [(name, x) for name, x in reversed(ran[body:]) if isinstance(x, Tensor) and x.numel() == features.numel()]
    places = [
        Place(name, convolution)
        for name, x in (*ends, *head)
        for convolution, axis in ((True, 1), (False, -1))
        if x.shape[axis] == features.shape[1] and (x.ndim == 4 or not convolution)
    ]
    return places, features


def _gives(net: nn.Module, images: Tensor, expected: Tensor) -> bool:
    """Whether the features of `net` are `expected` up to rounding."""
    try:
        features = net.forward_head(net.forward_features(images), pre_logits=True)
    except (
        TypeError,
        RuntimeError,
    ):  # the net calls this module with more than a tensor, or elsewhere on another width
        return False
    return features.shape == expected.shape and bool((features - expected).norm() <= 1e-9 * expected.norm())


def weight_of(theta: Tensor, place: Place) -> Tensor:
    """The weight of the layer at `place` that multiplies by theta [D, D]: [D, D, 1, 1] or [D, D]."""
    return theta.T[:, :, None, None] if place.convolution else theta.T


class Folded(nn.Sequential):
    """A layer and the map folded into it; what a forward may `READ` of the layer is there, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattr__(ORIGINAL), name) if name in READ else super().__getattr__(name)


def fold_into(net: nn.Module, name: str, weight: Tensor, before: bool = False) -> None:
    """Put a layer with `weight`, [D, D] or, a convolution's, [D, D, 1, 1], behind the module `name`, or `before` it."""
    size, like = len(weight), {"bias": False, "dtype": weight.dtype, "device": weight.device}
    layer = nn.Conv2d(size, size, 1, **like) if weight.ndim == 4 else nn.Linear(size, size, **like)
    layer.weight.data.copy_(weight)
    parts = [(ORIGINAL, net.get_submodule(name)), (FOLD, layer)]
    chain = Folded(OrderedDict(reversed(parts) if before else parts))
    chain.training = layer.training = net.training
    net.set_submodule(name, chain)


@torch.no_grad()
def unfold(net: nn.Module) -> None:
    """Take the map out of an exported timm model, in place, and its inverse out of the classifier."""
    name = next(name for name, _ in net.named_modules() if name.endswith(f".{FOLD}")).removesuffix(f".{FOLD}")
    classifier = net.get_classifier()
    classifier.weight.copy_(classifier.weight @ folded_map(net).T)
    net.set_submodule(name, net.get_submodule(f"{name}.{ORIGINAL}"))


def folded_map(net: nn.Module) -> Tensor | None:
    """theta [D, D] that was folded into an exported net; None where there is none."""
    layer = next((module for name, module in net.named_modules() if name.endswith(FOLD)), None)
    return None if layer is None else layer.weight.flatten(1).T
