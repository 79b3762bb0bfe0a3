"""A timm net taken apart: its classifier, and the units that it applies one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from immunization.errors import ConfigError

log = logging.getLogger(__name__)


class Extractor(nn.Module):
    """What enters the trained part of a net -> features [N, D], as subclasses compute them in `features_of`.

    `training_features_of` is how passes that record gradients compute the same, where they do it otherwise (see
    `fast_training_forward`). All other passes, from which everything measured comes, never use it.
    """

    training_features_of: Callable[[Extractor, Tensor], Tensor] | None = None

    def features_of(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.training_features_of is None or not torch.is_grad_enabled():
            return self.features_of(x)
        return self.training_features_of(self, x)


def fast_training_forward(
    kind: type[Extractor], channels_last: bool, amp: bool, compile: bool
) -> Callable[[Extractor, Tensor], Tensor]:
    """`features_of` a kind of extractor in another memory layout, in bfloat16 or by compiled code; the dtype is kept.

    The extractor is an argument, so that a copy of one computes with its own weights.
    """
    compute = _compiled(kind.features_of) if compile else kind.features_of

    def training_features_of(extractor: Extractor, x: Tensor) -> Tensor:
        if channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            return compute(extractor, x).to(x.dtype)

    return training_features_of


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` by torch.compile, whose failure is a ConfigError."""
    import torch._functorch.config  # torch's compiler: seconds that only those pay who use it
    from torch._dynamo.exc import TorchDynamoException

    torch._functorch.config.donated_buffer = False  # or the terms of a step could not be differentiated one by one
    torch.compiler.reset()  # torch keeps the code of a few models, and runs further ones uncompiled
    fast = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> Tensor:
        try:
            return fast(*arguments)
        except TorchDynamoException as error:
            reason = " ".join(str(error).partition("\n\n")[0].split())
            raise ConfigError(
                f"model.compile=true: torch.compile fails here ({reason}); it needs a C++ compiler, g++ or the one "
                "that CXX names, and Python's headers; else leave model.compile=false"
            ) from error

    return call


class Tail(Extractor):
    """The last units of a net and its pooling: activations -> features [N, D]. Holds the units alone, not the net."""

    def __init__(self, net: nn.Module, units: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, unit in units:
            self.add_module(name.replace(".", "_"), unit)
        self._pool = (net,)  # in a tuple: not a submodule

    def features_of(self, x: Tensor) -> Tensor:
        for unit in self.children():
            x = unit(x)
        return self._pool[0].forward_head(x, pre_logits=True)


class Whole(Extractor):
    """A whole net without its classifier: images -> features [N, D]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def features_of(self, x: Tensor) -> Tensor:
        return self.net.forward_head(self.net.forward_features(x), pre_logits=True)


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


def data_config(net: nn.Module) -> dict[str, Any]:
    """How the net wants its images: size, interpolation, mean, std and crop, for as many channels as it reads."""
    from timm.data import resolve_model_data_config

    keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    config = {key: value for key, value in resolve_model_data_config(net).items() if key in keys}
    channels = next(p for p in net.parameters() if p.ndim == 4 and p.shape[-1] > 1).shape[1]
    if channels != len(config["mean"]):  # another number than the pretrained weights had
        config["input_size"] = (channels, *config["input_size"][1:])
        config |= {key: (sum(config[key]) / len(config[key]),) * channels for key in ("mean", "std")}
    return config


def parameters(unit: Callable) -> list[nn.Parameter]:
    return list(unit.parameters()) if isinstance(unit, nn.Module) else []


@torch.no_grad()
def units_of(net: nn.Module, input_size: Sequence[int]) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
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
