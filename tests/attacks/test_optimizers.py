"""Attackers by any optimizer of torch or timm, found by its name."""

import pytest
import torch
from helpers.victims import classes, quadratic, victim_of

from immunization import config
from immunization.attacks import Adam, FineTune, run_attacks
from immunization.config import build, compose
from immunization.errors import ConfigError

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("name", ["Adamax", "adan", "lookahead_radam", "mars", "sgd"])
def test_what_the_project_never_names_learns_a_task(name):
    chosen = compose(["attack=[adam]", f"attack.adam.optimizer={name}", "attack.adam.steps=64"])
    victim = victim_of(classes(), torch.eye(6, dtype=torch.float64))
    assert run_attacks({"it": build(chosen, "attack.adam")}, victim).metrics["attack/it/final"] > 0.95


def test_the_default_is_torchs_adamw():
    victim = victim_of(*quadratic(100.0))
    curves = [
        Adam(rates=[0.1], steps=64, **options).run(victim, "immunized") for options in ({}, {"optimizer": "AdamW"})
    ]
    assert torch.equal(curves[0].excess, curves[1].excess)


def test_a_rate_does_not_depend_on_the_others():
    """timm's lamb clips the gradient of all parameters that one optimizer has."""
    victim = victim_of(*quadratic(100.0))
    alone, beside = (Adam(optimizer="lamb", rates=rates, steps=8) for rates in ([0.01], [0.01, 1e6]))
    curves = {a: a.run(victim, "immunized") for a in (alone, beside)}
    assert torch.equal(curves[alone].excess, curves[beside].excess)


def test_arguments_of_an_optimizer():
    """Rprop needs long steps where the features of a direction are small, which its own default does not allow."""
    victim = victim_of(*quadratic(1e8))
    options = ["attack=[adam]", "attack.adam.optimizer=Rprop", "attack.adam.steps=256"]
    capped, free = (
        build(compose([*options, *more]), "attack.adam")
        for more in ([], ["+attack.adam.arguments.step_sizes=[1e-9,1e9]"])
    )
    assert free.run(victim, "immunized").excess[-1] < 1e-6 < capped.run(victim, "immunized").excess[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lyon", r"attack\.adam\.optimizer=Lyon: neither .* has it; near are .*lion"),
        ("xxxxx", r"list_optimizers\(\) lists names"),
        ("LBFGS", r"optimizer=LBFGS cannot take a step here .*closure"),
        ("SparseAdam", "cannot take a step here"),
        ("adahessian", "cannot take a step here"),
        ("fusedsgd", r"cannot take a step here \(AssertionError: CUDA"),
    ],
)
def test_names_that_cannot_be_are_refused_before_anything_is_read(name, message):
    with pytest.raises(ConfigError, match=message):
        build(compose(["attack=[adam]", f"attack.adam.optimizer={name}"]), "attack.adam")


def test_what_an_optimizer_does_not_take_is_named():
    with pytest.raises(ConfigError, match=r"optimizer=Rprop cannot take a step here \(TypeError: .*weight_decay"):
        Adam(optimizer="Rprop", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"optimizer=adamw cannot take a step here \(TypeError: .*beta"):
        Adam(arguments={"beta": 0.5})
    with pytest.raises(ConfigError, match=r"optimizer=adan cannot take a step here \(TypeError: .*momentun"):
        Adam(optimizer="adan", arguments={"momentun": 0.5})
    with pytest.raises(ConfigError, match=r"attack\.\*\.optimizer=lyon: neither torch.optim"):
        FineTune(optimizer="lyon")


def test_a_yaml_of_two_lines(tmp_path, monkeypatch):
    (tmp_path / "conf" / "attack").mkdir(parents=True)
    text = "defaults: [adam@adopt, _self_]\nadopt: {optimizer: adopt}\n"
    (tmp_path / "conf" / "attack" / "adopt.yaml").write_text(text)
    searched = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    chosen = config._compose([searched, "attack=[adam,adopt]"])
    assert (build(chosen, "attack.adopt").optimizer, build(chosen, "attack.adam").optimizer) == ("adopt", "adamw")
