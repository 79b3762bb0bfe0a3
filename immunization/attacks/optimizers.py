"""Optimizers by name, from torch and timm. Attackers look up their `optimizer` only here."""

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
    """The maker of the optimizer that the configuration's `key` names, with `weight_decay` and further arguments.

    A name is one of `OPTIMIZERS`, a class of torch.optim (`Rprop`), or a name of timm.optim (`lion`). Raises
    ConfigError for another one, and for what takes no step on a CPU: some need a GPU, second derivatives or several
    losses.
    """
    make, weights = partial(OPTIMIZERS.get(name) or _found(name, key), **arguments), nn.Parameter(torch.zeros(2, 2))
    weights.grad = torch.ones(2, 2)
    try:
        optimizer = make([{"params": [weights], "lr": 0.1}])
        if name not in OPTIMIZERS:
            optimizer.step()
    except Exception as error:  # torch's and timm's many ways to refuse
        raise ConfigError(
            f"{key}={name} cannot take a step here ({type(error).__name__}: {error}); choose another"
        ) from error
    return make


def _found(name: str, key: str) -> Maker:
    from timm import optim

    own, timms = getattr(torch.optim, name, None), list(map(str, optim.list_optimizers()))  # type: ignore[attr-defined]
    if isinstance(own, type) and issubclass(own, torch.optim.Optimizer):
        decays = "weight_decay" in signature(own).parameters  # Rprop has none: its 0 is left out
        return lambda groups, weight_decay=0.0, **options: own(
            groups, **options, **({"weight_decay": weight_decay} if decays or weight_decay else {})
        )
    if name.removeprefix("lookahead_") in timms:
        return partial(optim.create_optimizer_v2, opt=name)  # type: ignore[attr-defined]
    names = {each.lower(): each for each in (*dir(torch.optim), *timms)}
    near = ", ".join(names[each] for each in get_close_matches(name.lower(), names, n=5))
    raise ConfigError(
        f"{key}={name}: neither torch.optim (its classes as they are written, such as Rprop) nor timm.optim has it; "
        f"{f'near are {near}' if near else 'timm.optim.list_optimizers() lists names'}"
    )
