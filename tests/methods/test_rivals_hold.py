"""Rivals on a small net: each holds off its own attacker, who has one rate, at little cost for the primary task."""

import pytest

from immunization import run

pytestmark = [pytest.mark.trains, pytest.mark.slow]

PROBE = ("attack=[momentum]", "attack.momentum.rates=[1.0]", "attack.momentum.steps=64")
FINE_TUNING = (
    *("attack=[last_block_finetune]", "attack.last_block_finetune.rates=[0.001]"),
    "attack.last_block_finetune.steps=32",
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Overrides of runs that fit the net once."""
    cache = tmp_path_factory.mktemp("fitted")
    return ["experiment=digits_deep", "tracker=none", "figures=false", f"model.cache={cache}", "threads=1"]


@pytest.mark.parametrize(
    ("options", "attack"),
    [
        (["method=clamp"], PROBE),
        (["method=ntl"], PROBE),
        (["method=encoderlock"], PROBE),
        (["method=sophon", "method.inner_steps=3"], FINE_TUNING),
        (["method=sophon", "method.suppression=uniform", "method.primary_steps=1"], FINE_TUNING),
    ],
    ids=["clamp", "ntl", "encoderlock", "sophon, inverse", "sophon, uniform"],
)
def test_its_own_attacker_is_held_off(options, attack, digits, tmp_path):
    """Harmful accuracy 20 points below the baseline's; the primary head loses 3 points at most."""
    metrics = run([*digits, *options, *attack, "evaluation=[own_head]"], folder=tmp_path / "run").metrics
    name = "momentum" if attack is PROBE else "last_block_finetune"
    assert metrics[f"attack/{name}/final"] < metrics[f"attack/{name}/final_baseline"] - 0.2
    assert metrics["primary/head_accuracy"] > metrics["primary/head_accuracy_baseline"] - 0.03
