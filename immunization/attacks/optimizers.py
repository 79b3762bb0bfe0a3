"""Optimizers by their names in torch and timm: the one place where an attacker's `optimizer` is looked up."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from immunization.errors import ConfigError

Maker = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer of parameters or groups of them, with `lr` and `weight_decay`."""

OPTIMIZERS: dict[str, Maker] = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}
"""Those that have names of ours, which go before timm's."""


def optimizer_named(name: str, key: str, **arguments: Any) -> Maker:
    """The maker of the optimizer that the configuration's `key` names, with further arguments.

    A name is one of `OPTIMIZERS`, a class of torch.optim (`Rprop`), or a name of timm.optim (`lion`), with the defaults
    that it has there. Raises ConfigError for another name, and for what does not take a step with arguments and a dense
    gradient on a CPU: some need a GPU, second derivatives or, as LBFGS, several losses.
    """
    if name in OPTIMIZERS and not arguments:
        return OPTIMIZERS[name]
    make = partial(OPTIMIZERS.get(name) or _torchs(name) or _timms(name, key), **arguments)
    weights = nn.Parameter(torch.zeros(2, 2))
    weights.grad = torch.ones(2, 2)
    try:
        make([{"params": [weights], "lr": 0.1}]).step()
    except Exception as error:  # torch's and timm's many ways to refuse
        raise ConfigError(f"{key}={name}: takes no step here: {type(error).__name__}: {error}") from error
    return make


def _torchs(name: str) -> Maker | None:
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return None
    if "weight_decay" in signature(found).parameters:
        return found

    def without_decay(parameters: Any, weight_decay: float = 0.0, **options: Any) -> torch.optim.Optimizer:
        if weight_decay:
            raise ConfigError(f"torch.optim.{name} has no weight_decay: give 0, not {weight_decay}")
        return found(parameters, **options)

    return without_decay


def _timms(name: str, key: str) -> Maker:
    from timm import optim

    known = list(map(str, optim.list_optimizers()))  # type: ignore[attr-defined]
    if name.removeprefix("lookahead_") in known:
        return partial(optim.create_optimizer_v2, opt=name)  # type: ignore[attr-defined]
    names = {each.lower(): each for each in (*dir(torch.optim), *known)}
    near = [names[each] for each in get_close_matches(name.lower(), names, n=5)]
    raise ConfigError(
        f"{key}={name}: there is none of this name in torch.optim, whose classes are named as they are (Rprop), or in "
        f"timm.optim; {'near are ' + ', '.join(near) if near else 'timm.optim.list_optimizers() has its names'}"
    )
