"""Ranges in annotations: what they let pass, what the message says, and that a signature stays what it was."""

import inspect
import math
import re
from collections.abc import Sequence
from typing import Literal

import pytest
from helpers.options import nodes
from hydra.utils import get_object
from omegaconf import OmegaConf

from immunization.attacks import RandomNet
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
    takes,
    values_of,
)
from immunization.errors import ConfigError
from immunization.methods import Forget, Identity, ReleasedConditionNumber


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
    patience: AtLeastOne | None = None

    def __post_init__(self) -> None:
        self.prepared = True


class Weighted(Trained):
    """With a default and an option of its own."""

    epochs = 40
    weight: NonNegative


class Own(Weighted):
    """With a constructor of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__(epochs=2, weight=rate)


def test_a_component_inherits_options_and_names_only_its_own():
    assert Trained().options == {"epochs": 0, "patience": None}
    assert Weighted(weight=0.5, patience=2).options == {"epochs": 40, "patience": 2, "weight": 0.5}
    assert Weighted(weight=0.5).prepared
    assert Own(0.5).options == {"epochs": 2, "patience": None, "weight": 0.5}
    assert [takes(kind, "epochs") for kind in (Trained, Weighted, Own)] == [True, True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weighted(epochs=-1), "method.epochs must be an integer of at least 0, not -1"),
        (lambda: Weighted(weight=1, patience=0), "method.patience must be an integer of at least 1, or null, not 0"),
        (lambda: Own(-1.0), "method.weight must be a finite number of at least 0, not -1.0"),
        (lambda: check_arguments(Weighted, {"epochs": -1}, "key"), "key.epochs must be an integer of at least 0"),
    ],
)
def test_an_inherited_option_keeps_its_range(make, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        make()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Weighted, "weight"),
        (lambda: Trained(weight=1.0), "weight"),
        (lambda: RandomNet(scope="layer4"), "scope"),
        (lambda: Identity(patience=2), "patience"),
    ],
)
def test_a_component_takes_what_it_needs_and_what_its_yaml_offers(make, name):
    with pytest.raises(TypeError, match=name):
        make()


def test_the_yaml_has_the_defaults(monkeypatch):
    monkeypatch.setenv("IMMUNIZATION_CACHE", "/elsewhere")
    assert values_of("attack/adam_scaled", ["scaling", "steps"]) == {"scaling": "standard", "steps": 2048}
    assert values_of("dataset/mnist", ["root", "primary"]) == {"root": "/elsewhere/mnist", "primary": 0}
    assert values_of("model/timm", ["name"]) == {}  # it has to be given
    assert (ReleasedConditionNumber().power, ReleasedConditionNumber().task_weight) == (math.inf, 1.0)
    first, second = Forget(), Forget()
    first.ridges.append(7.0)
    assert 7.0 not in second.ridges


def test_no_component_takes_a_seed_that_repeats_another():
    """Torch reads 32 bits of it: 2^32 would be 0 once more."""
    built = {get_object(node._target_) for node in nodes().values() if node and "immunization" in node._target_}
    seeds = [(target, key) for target in built for key in ("seed", "split_seed") if takes(target, key)]
    assert len({target.__module__.split(".")[1] for target, _ in seeds}) == 3  # data, attacks, evaluations
    for target, key in seeds:
        check_arguments(target, {key: 2**32 - 1}, "group")
        with pytest.raises(ConfigError, match=rf"group\.{key} must be an integer of at least 0 and below 2\^32"):
            check_arguments(target, {key: 2**32}, "group")


def test_the_signature_stays():
    assert list(inspect.signature(build).parameters)[:2] == ["epochs", "rates"]
    assert (build.__name__, build.__doc__) == ("build", "Build.")
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        build(1, epoch=1)
