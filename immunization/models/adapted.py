"""Nets of any library as nets of timm: features and classifier of whatever ends in a linear layer."""

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from immunization.compute.machine import onto
from immunization.errors import ConfigError
from immunization.models.fold import FOLD, READ, Place, fold_into, recorded
from immunization.models.named import name_of

BODY = "body."
"""Begins the names of an adapted net's modules."""


class Adapted(nn.Module):
    """A net in timm's form: `body` gives the features [N, D], a folded map in `features` follows, then `classifier`."""

    fold_place = Place("features", convolution=False, stripped_by="replacing the classifier")

    def __init__(self, net: nn.Module, images: Tensor) -> None:
        super().__init__()
        path, expected = last_linear(net, images), _of_two(net, images)
        self.classifier: nn.Linear = net.get_submodule(path)
        self.features: nn.Module = nn.Identity()
        parent = path.rpartition(".")[0]
        if FOLD in dict(net.get_submodule(parent).named_children()):
            layers = {"original": nn.Identity(), FOLD: net.get_submodule(f"{parent}.{FOLD}")}
            path, self.features = parent, nn.Sequential(OrderedDict(layers))
        net.set_submodule(path, Passed(self.classifier))
        self.body, self.path = net, path
        self.pretrained_cfg = {"architecture": name_of(net), "input_size": tuple(images.shape[1:])}
        self.sample = None if images.is_floating_point() else images[:2].cpu()  # ids that the net knows
        with suppress(RuntimeError):
            if agree(_of_two(self, images), expected):
                return
        raise ConfigError(
            f"{type(net).__name__} does not return what its classifier {path} gives: its forward changes the outputs, "
            "or their dtype, or has the classifier under a second name; let it return them as they are"
        )

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def forward_features(self, x: Tensor) -> Tensor:
        return self.body(x.clone())  # a forward may write into what it gets

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.features(x)
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def released(self) -> nn.Module:
        """The net itself again, of its own class; this one is of no use afterwards."""
        self.body.set_submodule(self.path, self.classifier)
        if not isinstance(self.features, nn.Identity):
            fold_into(self.body, self.path, self.features.get_submodule(FOLD).weight, before=True)
        return self.body


class Passed(nn.Identity):
    """In a classifier's place: gives what it gets, and has what a forward may `READ` of the classifier."""

    def __init__(self, classifier: nn.Linear) -> None:
        super().__init__()
        self.__dict__["of"] = classifier  # no submodule: its weights are `Adapted`'s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["of"], name) if name in READ else super().__getattr__(name)


def check_net(what: str, net: object) -> None:
    """Raise ConfigError for what is no net, or none that can be copied and trained."""
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{what} must be an nn.Module, not {type(net).__name__}")
    if hasattr(net, "_orig_mod"):
        raise ConfigError(f"{what} was made by torch.compile: give the net itself (._orig_mod) and compile the result")
    if isinstance(net, torch.jit.ScriptModule):
        raise ConfigError(f"{what} is TorchScript: give the nn.Module it was made from")
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in net.parameters() if p.is_floating_point()})
    if not dtypes:
        raise ConfigError(f"{what}, a {type(net).__name__}, has no weights: give a net with a linear classifier")
    if len(dtypes) > 1:
        raise ConfigError(f"{what} has weights of {' and '.join(dtypes)}; give it in one dtype, as net.float() does")


def is_of_timm(net: nn.Module) -> bool:
    return all(hasattr(net, name) for name in ("forward_features", "forward_head", "get_classifier"))


def agree(outputs: Tensor, expected: Tensor) -> bool:
    """Whether outputs are the same to a thousandth of the largest, which a GPU's sums may differ by."""
    largest = expected.abs().nan_to_num(posinf=0).max().item()
    return outputs.dtype == expected.dtype and torch.allclose(outputs, expected, 0, 1e-3 * largest, equal_nan=True)


@torch.no_grad()
def _of_two(net: nn.Module, images: Tensor) -> Tensor:
    """Outputs of the first two images in eval mode, in which the net stays."""
    return net.eval()(onto(images[:2].clone(), next(net.parameters())))


@torch.no_grad()
def last_linear(net: nn.Module, images: Tensor) -> str:
    """Name of the linear layer whose output [n, classes] is the net's; raises ConfigError where there is none."""
    linear = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    kind, training = type(net).__name__, net.training
    try:
        with recorded(linear) as ran:
            logits = _of_two(net, images)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        shape = tuple(images.shape[1:])
        raise ConfigError(
            f"{kind} cannot read inputs of shape {shape}: {' '.join(str(error).split())[:200]}"
        ) from error
    finally:
        net.train(training)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        given = f"tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(f"{kind} gives a {given}; wrap it in a module whose forward returns logits [n, classes]")
    path = next((name for name, output in dict(ran).items() if torch.equal(output, logits)), None)
    if path is None:
        raise ConfigError(f"{kind} has no linear classifier: its output is not that of an nn.Linear inside of it")
    return path
