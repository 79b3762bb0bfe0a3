"""What constructors check of their arguments; each raises ConfigError, which names the key and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from immunization.errors import ConfigError


def nonnegative(**values: float) -> None:
    """Every keyword is a finite number of at least 0, as keys of `method`."""
    for key, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ConfigError(f"method.{key} must be a finite number of at least 0, not {value!r}")


def below_one(**values: float) -> None:
    """Every keyword is in [0, 1), as keys of `method`."""
    nonnegative(**values)
    for key, value in values.items():
        if value >= 1:
            raise ConfigError(f"method.{key} must be below 1, not {value}")


def even_power(power: float) -> None:
    """`method.power` is an even integer from 2 to 64, or infinite."""
    if power != math.inf and not (isinstance(power, int | float) and power in range(2, 66, 2)):
        raise ConfigError(
            f"method.power must be an even number from 2 to 64 (larger ones underflow), or inf, not {power!r}"
        )


def choice(key: str, value: object, allowed: Sequence[object]) -> None:
    """`value` of a key is one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: choose one of {', '.join(map(str, allowed))}")


def fractions(val_fraction: float, test_fraction: float = 0.0) -> None:
    """Both shares of `dataset` are in [0, 1) and leave training rows."""
    for key, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not (isinstance(value, int | float) and 0 <= value < 1):
            raise ConfigError(f"dataset.{key}={value}: must be a number in [0, 1)")
    if val_fraction + test_fraction >= 1:
        raise ConfigError(
            f"dataset.val_fraction={val_fraction} and dataset.test_fraction={test_fraction} leave no training rows: "
            "their sum must be under 1"
        )
