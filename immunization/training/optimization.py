"""The optimizer of a run, and the scheduler of its learning rate."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from immunization.checks import NonNegative, check_value
from immunization.config import build
from immunization.errors import ConfigError

LENGTHS = ("T_0", "T_max", "milestones", "step_size", "step_size_down", "step_size_up", "total_iters", "total_steps")
"""Keys by which torch's schedulers are told steps of the training."""

RATES = ("base_lr", "end_factor", "eta_min", "factor", "gamma", "max_lr", "min_lr", "power", "start_factor")
"""Keys, of one number or one a group of parameters, by which they are told rates, or what makes one of another."""

ENDS = ("T_max", "total_steps")  # those of schedulers that climb again, or fail, in a training that goes on


def optimizer_of(
    make: Callable[..., torch.optim.Optimizer], parameters: Iterable[Tensor] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer that `make` makes for parameters or groups of them; raises ConfigError."""
    try:
        made = make(parameters)
    except IndexError as error:  # of betas, which torch does not count
        if "betas" not in (given := getattr(make, "keywords", {})):
            raise
        raise ConfigError(f"optimizer.betas={given['betas']} must have two numbers, such as [0.9,0.999]") from error
    except (TypeError, ValueError) as error:  # torch's way to refuse a value
        raise ConfigError(f"optimizer: {error}") from error
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError(
            "optimizer._target_=torch.optim.LBFGS computes several losses a step, which is not supported; use "
            "optimizer=adam, sgd or nesterov"
        )
    return made


def scheduler_of(settings: Mapping[str, Any], optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler | None:
    """The scheduler of a plain configuration for a training of `steps` steps, each of them followed by one of its own.

    The keys of `LENGTHS` are numbers of steps or, as fractions, shares of `steps` (of those of its part of a
    SequentialLR). None without a scheduler or steps. Raises ConfigError for a length above `steps` or an end before.
    """
    if settings.get("scheduler") is None or not steps:
        return None
    try:
        node = _fitted(settings["scheduler"], steps, "scheduler")
        scheduler = _attached(build({**settings, "scheduler": node}, "scheduler"), optimizer)
    except (KeyError, TypeError, ValueError) as error:  # torch's ways to refuse a value
        raise ConfigError(f"scheduler: {error}") from error
    return scheduler


def _attached(factory: partial[LRScheduler], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The scheduler, built after those it consists of."""
    parts = [_attached(part, optimizer) for part in factory.keywords.get("schedulers", ())]
    return factory(optimizer=optimizer, **({"schedulers": parts} if parts else {}))


def _fitted(node: object, steps: int, key: str) -> dict[str, Any]:
    """The content of a scheduler's YAML with every length in steps."""
    if not isinstance(node, dict):
        raise ConfigError(f"{key}={node!r}: a scheduler is a mapping with _target_, _partial_ and what it takes")
    if "steps_per_epoch" in node:
        raise ConfigError(f"{key}.steps_per_epoch: give {key}.total_steps=1.0 instead, the whole training")
    if not isinstance(node.get("milestones", []), list):
        raise ConfigError(f"{key}.milestones={node['milestones']}: must be a list, [0.5,0.75] on the command line")
    for name in filter(node.__contains__, RATES):  # below 0, steps would climb the loss
        for rate in node[name] if isinstance(node[name], list) else [node[name]]:
            check_value(f"{key}.{name}", rate, NonNegative)
    fitted = node | {name: _steps(node[name], steps, f"{key}.{name}") for name in LENGTHS if name in node}
    for name in ENDS:
        if (fitted.get(name) or steps) < steps:
            raise ConfigError(
                f"{key}.{name}={node[name]} ends before the {steps} steps of the training; give 1.0 for all of them"
            )
    if "schedulers" in node:
        ends = [0, *(fitted.get("milestones") or ()), steps]
        lengths = [end - start for start, end in pairwise(ends)] if len(ends) > 2 else [steps] * len(node["schedulers"])
        if len(lengths) != len(node["schedulers"]):
            raise ConfigError(f"{key}.milestones: give one entry fewer than {key}.schedulers has")
        fitted["schedulers"] = [
            _fitted(part, length, f"{key}.schedulers[{place}]")
            for place, (part, length) in enumerate(zip(node["schedulers"], lengths, strict=True))
        ]
    return fitted


def _steps(value: object, steps: int, key: str, most: int | None = None) -> Any:
    """A length, or a list of them, as numbers of steps, the largest being `most`."""
    most = steps if most is None else most
    if isinstance(value, list):
        fitted = [_steps(length, steps, f"{key}[{place}]", steps - 1) for place, length in enumerate(value)]
        if any(a >= b for a, b in pairwise(value)) or fitted != sorted(fitted):
            raise ConfigError(f"{key}={value}: each value must be larger than the one before it")
        return fitted
    if value is None:
        return None
    if isinstance(value, float) and 0 < value <= 1:
        return max(1, round(value * steps))
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{key}={value!r}: expected a number of steps, an integer above 0, or a share of all, a fraction up to 1.0"
        )
    if value > most:
        raise ConfigError(
            f"{key}={value}: does not fit into the {steps} steps of the training; lower it, raise method.epochs, or "
            "give a share of all steps, 0.5"
        )
    return value
