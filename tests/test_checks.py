"""Ranges in annotations: what they let pass, what the message says, and that a signature stays what it was."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, fields
from typing import Literal

import pytest
from omegaconf import OmegaConf

from immunization.checks import (
    AtLeastOne,
    Component,
    Count,
    EvenPower,
    Fraction,
    NonNegative,
    Positive,
    Seed,
    Share,
    check_arguments,
    checked,
)
from immunization.errors import ConfigError


@checked("method")
def build(
    epochs: Count,
    rates: Sequence[NonNegative] = (),
    mode: Literal["raw", "log"] = "raw",
    rows: AtLeastOne | None = None,
    scale: Positive = 1.0,
    share: Share = 1.0,
    smoothing: Fraction = 0.0,
    power: EvenPower = 10,
    seed: Seed = 0,
) -> int:
    """Build."""
    return epochs


@pytest.mark.parametrize(
    "arguments",
    [
        {"epochs": 0, "rates": [0, 0.5], "mode": "log", "rows": None},
        {"epochs": 2, "rates": OmegaConf.create([1, 2.0]), "rows": 1, "scale": 1e-9, "share": 1, "smoothing": 0},
        {"epochs": 2, "power": math.inf, "seed": 2**32 - 1},
        {"epochs": 2, "power": 64.0},
    ],
)
def test_what_is_in_range_passes(arguments):
    assert build(**arguments) == arguments["epochs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "method.epochs must be an integer of at least 0, not -1"),
        ({"epochs": True}, "method.epochs must be an integer of at least 0, not True"),
        ({"epochs": 1.0}, "method.epochs must be an integer of at least 0, not 1.0"),
        ({"rates": [1, -1]}, "method.rates must be a list of which each is a finite number of at least 0, not [1, -1]"),
        ({"rates": "12"}, "method.rates must be a list of which each is a finite number of at least 0, not '12'"),
        ({"mode": "square"}, "method.mode must be one of raw, log, not 'square'"),
        ({"rows": 0}, "method.rows must be an integer of at least 1, or null, not 0"),
        ({"scale": 0}, "method.scale must be a finite number above 0, not 0"),
        ({"scale": math.inf}, "method.scale must be a finite number above 0, not inf"),
        ({"scale": math.nan}, "method.scale must be a finite number above 0, not nan"),
        ({"share": 0.0}, "method.share must be a number above 0 and at most 1, not 0.0"),
        ({"smoothing": 1}, "method.smoothing must be a number of at least 0 and below 1, not 1"),
        ({"power": 7}, "method.power must be an even number from 2 to 64 (larger ones underflow), or inf, not 7"),
        (
            {"power": math.nan},
            "method.power must be an even number from 2 to 64 (larger ones underflow), or inf, not nan",
        ),
        ({"seed": 2**32}, f"method.seed must be an integer of at least 0 and below 2^32, not {2**32}"),
    ],
)
def test_what_is_not_is_named_with_its_key_and_range(arguments, message):
    with pytest.raises(ConfigError) as caught:
        build(**{"epochs": 1} | arguments)
    assert str(caught.value) == message


class Trained(Component, group="method"):
    epochs: Count = 0
    _: KW_ONLY
    patience: AtLeastOne | None = None

    def __post_init__(self) -> None:
        self.prepared = True


class Weighted(Trained):
    """With a default and an option of its own."""

    epochs = 40
    weight: NonNegative = 1.0


class Fixed(Weighted, group="method.fixed", without=["patience", "weight"]):
    weight = 2.0


def values(component: Component) -> dict[str, object]:
    return {option.name: getattr(component, option.name) for option in fields(component)}


def test_a_component_inherits_options_and_names_only_its_own():
    assert values(Trained()) == {"epochs": 0, "patience": None}
    assert values(Weighted(3, 0.5, patience=2)) == {"epochs": 3, "patience": 2, "weight": 0.5}
    assert values(Weighted()) == {"epochs": 40, "patience": None, "weight": 1.0}
    assert values(Fixed(1)) == {"epochs": 1, "patience": None, "weight": 2.0}
    assert Weighted().prepared
    assert list(inspect.signature(Fixed).parameters) == ["epochs"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weighted(-1), "method.epochs must be an integer of at least 0, not -1"),
        (lambda: Weighted(patience=0), "method.patience must be an integer of at least 1, or null, not 0"),
        (lambda: Weighted(weight=-1), "method.weight must be a finite number of at least 0, not -1"),
        (lambda: Fixed(-1), "method.fixed.epochs must be an integer of at least 0, not -1"),
        (lambda: check_arguments(Fixed, {"epochs": -1}, "key"), "key.epochs must be an integer of at least 0, not -1"),
    ],
)
def test_an_inherited_option_keeps_its_range(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("make", [lambda: Fixed(patience=2), lambda: Fixed(weight=1.0), lambda: Trained(1, 2)])
def test_a_component_takes_no_other_argument(make):
    with pytest.raises(TypeError):
        make()


def test_a_constructor_of_ones_own_stays():
    class Own(Weighted):
        def __init__(self, rate: float) -> None:
            super().__init__(2, weight=rate)

    assert values(Own(0.5)) == {"epochs": 2, "patience": None, "weight": 0.5}
    with pytest.raises(ConfigError, match=r"method\.weight must be"):
        Own(-1.0)


def test_the_signature_stays():
    assert list(inspect.signature(build).parameters)[:2] == ["epochs", "rates"]
    assert (build.__name__, build.__doc__) == ("build", "Build.")
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        build(1, epoch=1)
