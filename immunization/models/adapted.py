"""Nets of any library as nets of timm: features and classifier of whatever ends in linear layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.compute.machine import onto
from immunization.errors import ConfigError
from immunization.models.deployed import kind_of
from immunization.models.fold import FOLD, ORIGINAL, READ, Place, fold_into, folded_map, recorded
from immunization.models.named import NET, Named, name_of, own

BODY = "body."
"""Begins the names of an adapted net's modules."""
MOST_HEADS = 8
"""As many linear layers are tried together."""


@dataclass(frozen=True)
class Head:
    """A linear layer of a net at `path`: the output has `share` times what it gives.

    It reads `width` features, the columns of all heads' from `start` on.
    """

    path: str
    share: float
    start: int
    width: int


class Passed(nn.Module):
    """In a classifier's place: gives what it gets, among zeros, and has what a forward may `READ` of the classifier."""

    def __init__(self, classifier: nn.Module, start: int = 0, width: int | None = None) -> None:
        super().__init__()
        self.__dict__["of"] = classifier  # no submodule: its weights are those of `Adapted`
        self.start, self.width = start, width

    def forward(self, x: Tensor) -> Tensor:
        axis = 1 if isinstance(self.of, nn.Conv2d) else x.ndim - 1
        behind = 0 if self.width is None else self.width - self.start - x.shape[axis]
        if not self.start and not behind:
            return x
        return F.pad(x, (*(0, 0) * (x.ndim - 1 - axis), self.start, behind))

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.of._apply(fn)  # dtype and device are those of the net
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["of"], name) if name in READ else super().__getattr__(name)


class Counted(Passed):
    """In a classifier's place, it gives 1 in the column `start`, and keeps what it last got in `read`."""

    read: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.read = x
        one = x[:, :1] if isinstance(self.of, nn.Conv2d) else x[..., :1]
        return super().forward(torch.ones_like(one))


class Adapted(nn.Module):
    """A net in timm's form: `body` gives the features [N, D], a folded map in `features` follows, then `classifier`.

    The net's `heads` are the linear layers of which its output is a weighted sum, also where it picks tokens or
    averages over them afterwards. `body` has them no more. Where they read the same tensor, so does `classifier`; else
    its features are theirs side by side.
    """

    def __init__(self, net: nn.Module, images: Tensor) -> None:
        super().__init__()
        kind, expected = name_of(net), outputs_of_two(net, images)
        if not agree(outputs_of_two(net, images), expected):
            raise ConfigError(
                f"{kind} gives other outputs for the same inputs from call to call, in eval mode: its forward draws "
                "random numbers (dropout without self.training?) or changes a buffer; let it do so in train mode alone"
            )
        self.heads, self.classifier, theta = find_heads(net, images, expected)
        self.features: nn.Module = nn.Identity()
        width = self.classifier.in_features
        layers = [_linear(net.get_submodule(path)) for path in self.paths]
        plain = layers[0] is self.classifier
        for head, layer in zip(self.heads, layers, strict=True):
            net.set_submodule(head.path, Passed(layer, head.start, width))
        if theta is not None:
            fold_into(self, "features", theta.T, before=True)
        self.body, self._plain, self._theta, self._dtype = net, plain, theta, expected.dtype
        self.data_config: dict[str, Any] = {}  # how it wants its inputs, if that is known
        self.sample = None if images.is_floating_point() else images[:2].cpu()  # ids that the net knows
        known = getattr(net, "pretrained_cfg", None) or {}
        self.pretrained_cfg = {"architecture": kind, **known, "input_size": tuple(images.shape[1:])}

    @property
    def inside(self) -> str:
        """Begins the names of the net's own modules."""
        return BODY + (NET if isinstance(self.body, Named) else "")

    @property
    def paths(self) -> list[str]:
        """Names of the heads in the net itself."""
        return [head.path for head in self.heads]

    @property
    def fold_place(self) -> Place:
        """Before the classifier; raises ConfigError where that is several layers that read different features."""
        if any(head.start for head in self.heads):
            fuse = "; its fuse() may make one of them" if hasattr(self.body, "fuse") else ""
            raise ConfigError(
                f"{self.pretrained_cfg['architecture']} sums the outputs of {' and '.join(self.paths)}, which read "
                f"different features: no single linear map is before both. Methods that train layers work{fuse}"
            )
        return Place("features", convolution=False, stripped_by="replacing the classifier", before=True)

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def forward_features(self, x: Tensor) -> Tensor:
        return logits_of(self.body(x.clone()))  # a forward may write into what it gets

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.features(x)
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @torch.no_grad()
    def released(self) -> nn.Module:
        """The net itself, of its own class, with the weights of `classifier`; this one is of no use afterwards."""
        layers = [self.body.get_submodule(path).of for path in self.paths]
        theta = folded_map(self.features)
        if self._plain:
            layers = [self.classifier]
        else:
            self._write_back(layers, theta)
        for path, layer in zip(self.paths, layers, strict=True):
            self.body.set_submodule(path, layer)
            if theta is not None:
                weight = theta.T[:, :, None, None] if isinstance(layer, nn.Conv2d) else theta.T
                fold_into(self.body, path, weight, before=True)
        return self.body

    def _write_back(self, layers: Sequence[nn.Module], theta: Tensor | None) -> None:
        """Give the net's own heads the weights of `classifier`: the same change to those that share features."""
        alone, dtype = len(layers) == len({head.start for head in self.heads}), self._dtype  # in which it was made
        if not alone and (theta is None) != (self._theta is None):  # each undoes the map, not only their sum
            turn = torch.linalg.inv(theta.double().T) if self._theta is None else self._theta.double().T
            dtype = torch.float64
            for layer in layers:
                turned = layer.weight.flatten(1).double() @ turn.to(layer.weight.device)
                layer.weight.copy_(turned.view_as(layer.weight))
        before, biased = joined(layers, self.heads, dtype), [layer.bias is not None for layer in layers]
        for head, layer in zip(self.heads, layers, strict=True):
            columns = slice(head.start, head.start + head.width)
            weight = self.classifier.weight[:, columns]
            if not alone:
                weight = layer.weight.flatten(1) + (weight - before.weight[:, columns])
            layer.weight.copy_(weight.reshape(layer.weight.shape))
            if layer.bias is not None:
                shares = sum(other.share for other, has in zip(self.heads, biased, strict=True) if has)
                layer.bias.add_((self.classifier.bias - before.bias) / shares)


def adapted(net: nn.Module, images: Tensor) -> nn.Module:
    """`net` itself where timm's functions give its features and classifier, else an `Adapted` of it.

    That is tried on the first two of `images`. Raises ConfigError where it has no linear classifier.
    """
    return net if isinstance(net, Adapted) or (is_of_timm(net) and _as_timm_says(net, images)) else Adapted(net, images)


def released(net: nn.Module) -> nn.Module:
    """The net that `adapted` was given, of its own class."""
    return own(net.released()) if isinstance(net, Adapted) else net


@torch.no_grad()
def _as_timm_says(net: nn.Module, images: Tensor) -> bool:
    """Whether classifier(pre_logits) is the net's output."""
    expected, head = outputs_of_two(net, images), net.get_classifier()
    if not isinstance(head, nn.Linear) or all(module is not head for module in net.modules()):
        return False
    try:
        hidden = net.forward_features(onto(images[:2].clone(), next(net.parameters())))
        return agree(head(net.forward_head(hidden, pre_logits=True)), expected)
    except Exception:  # of any kind: the code of the net
        return False


def check_net(what: str, net: object) -> None:
    """Raise ConfigError for what is no net, or none that can be copied and trained."""
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{what} must be an nn.Module, not {type(net).__name__}")
    if kind := kind_of(net):
        raise ConfigError(
            f"{what} is {kind}, which can be audited and not changed: give the nn.Module it was made from"
        )
    if hasattr(net, "_orig_mod"):
        raise ConfigError(f"{what} was made by torch.compile: give the net itself (._orig_mod) and compile the result")
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in net.parameters() if p.is_floating_point()})
    if not dtypes:
        raise ConfigError(f"{what}, a {type(net).__name__}, has no weights: give a net with a linear classifier")
    if len(dtypes) > 1:
        raise ConfigError(f"{what} has weights of {' and '.join(dtypes)}; give it in one dtype, as net.float() does")


def is_of_timm(net: nn.Module) -> bool:
    return all(hasattr(net, name) for name in ("forward_features", "forward_head", "get_classifier"))


def agree(outputs: Tensor, expected: Tensor) -> bool:
    """Whether outputs are the same to 1e-4 of the largest, or to a few of the last bits of their dtype."""
    largest = expected.abs().nan_to_num(posinf=0).max().item()
    close = max(1e-4, 4 * torch.finfo(expected.dtype).eps) * largest
    same = outputs.dtype == expected.dtype and outputs.shape == expected.shape
    return same and torch.allclose(outputs, expected, 0, close, equal_nan=True)


def logits_of(output: Any) -> Any:
    """The logits of what a net gives: all of it, or what a ModelOutput or a dict calls so."""
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)


@torch.no_grad()
def outputs_of_two(net: nn.Module, images: Tensor, like: Tensor | None = None) -> Tensor:
    """Logits [n, classes] of the first two images in eval mode, in which the net stays; raises ConfigError.

    The images come in the dtype and on the device of `like`, or of the net.
    """
    kind, given = name_of(net), images[:2].clone()
    try:
        output = net.eval()(onto(given, next(net.parameters()) if like is None else like))
    except Exception as error:  # of any kind: the code of the net
        raise ConfigError(
            f"{kind} cannot read inputs of shape {tuple(images.shape[1:])}: {' '.join(str(error).split())[:200]}"
        ) from error
    logits = logits_of(output)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        found = f"{type(output).__name__}{f' of {len(output)}' if isinstance(output, list | tuple) else ''}"
        found = f"tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else found
        raise ConfigError(f"{kind} gives a {found}; wrap it in a module whose forward returns logits [n, classes]")
    return logits


@torch.no_grad()
def find_heads(net: nn.Module, images: Tensor, expected: Tensor) -> tuple[list[Head], nn.Linear, Tensor | None]:
    """The layers that give the logits `expected`, as one layer, and the map folded in before them.

    Of the linear layers with as many outputs the last that ran are tried, one, two and more. Raises ConfigError.
    """
    known = [(name, part) for name, part in net.named_modules() if _fits(net, name, part, expected.shape[1])]
    with recorded(known) as ran:
        outputs_of_two(net, images)
    names, kind = list(dict(reversed(ran))), name_of(net)
    for count in range(1, min(len(names), MOST_HEADS) + 1):
        if found := _taken_out(net, names[:count][::-1], images, expected):
            return found
    if not names:
        raise ConfigError(
            f"{kind} has no linear classifier: no nn.Linear and no 1 x 1 convolution inside of it that ran has "
            f"{expected.shape[1]} outputs, as many as the net"
        )
    raise ConfigError(
        f"{kind} has no linear classifier: its output is not that of {names[0]}, nor a weighted sum of the last "
        "linear layers. Its forward changes their outputs (by softmax, a maximum or another dtype), or the layers have "
        "second names; return their outputs unchanged"
    )


def _fits(net: nn.Module, name: str, part: nn.Module, outputs: int) -> bool:
    """Whether a module can be a classifier: a linear layer, or one with a map before it, which stands for both."""
    parent, _, own = name.rpartition(".")
    layer = _linear(part)
    if own == ORIGINAL and _linear(net.get_submodule(parent)) is layer:
        return False
    if isinstance(layer, nn.Conv2d):
        pointwise = {*layer.kernel_size, *layer.stride, layer.groups} == {1} and not any(layer.padding)
        return pointwise and layer.out_channels == outputs
    return isinstance(layer, nn.Linear) and layer.out_features == outputs


def _linear(part: nn.Module) -> nn.Module:
    """The layer itself, or that behind the map that was folded in before it."""
    parts = dict(part.named_children())
    return parts[ORIGINAL] if list(parts) == [FOLD, ORIGINAL] else part


def _taken_out(
    net: nn.Module, paths: Sequence[str], images: Tensor, expected: Tensor
) -> tuple[list[Head], nn.Linear, Tensor | None] | None:
    """What `find_heads` gives if the layers at `paths` are the heads, else None."""
    parts = [net.get_submodule(path) for path in paths]
    layers, maps = [_linear(part) for part in parts], [folded_map(part) for part in parts]
    counted = [Counted(layer, i, len(paths)) for i, layer in enumerate(layers)]
    try:
        with _replaced(net, paths, counted):
            shares = outputs_of_two(net, images, layers[0].weight)
        used = [path for path, share in zip(paths, shares[0], strict=True) if share]
        if 0 < len(used) < len(paths):  # others give what is not among the logits
            return _taken_out(net, used, images, expected)
        heads = _heads(paths, shares[0].tolist(), counted)
        width = max(head.start + head.width for head in heads)
        with _replaced(
            net, paths, [Passed(layer, head.start, width) for head, layer in zip(heads, layers, strict=True)]
        ):
            features = outputs_of_two(net, images, layers[0].weight)
        plain = len(layers) == 1 and isinstance(layers[0], nn.Linear) and abs(heads[0].share - 1) < 1e-5
        head, theta = layers[0] if plain else joined(layers, heads), maps[0]
        read = features if theta is None else features @ theta
        fits = (shares == shares[0]).all() and (plain or all("weight" in layer._parameters for layer in layers))
        if fits and agree(head(read), expected):
            return heads, head, theta
    except Exception:  # of any kind: the code of the net
        pass
    return None


@contextmanager
def _replaced(net: nn.Module, paths: Sequence[str], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the net has other modules at `paths`."""
    with ExitStack() as back:
        for path, module in zip(paths, modules, strict=True):
            back.callback(partial(net.set_submodule, path, net.get_submodule(path)))
            net.set_submodule(path, module)
        yield


def _heads(paths: Sequence[str], shares: Sequence[float], counted: Sequence[Counted]) -> list[Head]:
    """The heads with columns of their own, or those of an earlier one that read the very same tensor."""
    heads: list[Head] = []
    for i, (path, share, place) in enumerate(zip(paths, shares, counted, strict=True)):
        same = next((head for head, other in zip(heads, counted[:i], strict=True) if other.read is place.read), None)
        start = max((head.start + head.width for head in heads), default=0) if same is None else same.start
        heads.append(Head(path, share, start, place.of.weight.shape[1]))
    return heads


@torch.no_grad()
def joined(layers: Sequence[nn.Module], heads: Sequence[Head], dtype: torch.dtype | None = None) -> nn.Linear:
    """One layer that gives the sum of `heads`, of which features have the shares already; added up in `dtype`."""
    width = max(head.start + head.width for head in heads)
    like, bias = layers[0].weight, any(layer.bias is not None for layer in layers)
    sum_ = nn.Linear(width, len(like), bias=bias, dtype=dtype or like.dtype, device=like.device)
    for parameter in sum_.parameters():
        parameter.zero_()
    for head, layer in zip(heads, layers, strict=True):
        share = sum(other.share for other in heads if other.start == head.start)
        columns = slice(head.start, head.start + head.width)
        sum_.weight[:, columns] += head.share / share * layer.weight.flatten(1).to(sum_.weight)
        if layer.bias is not None:
            sum_.bias += head.share * layer.bias.to(sum_.weight)
    return sum_.to(like)
