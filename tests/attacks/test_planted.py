"""Planted defenses that fool one kind of attacker: another kind, of the suite `standard`, finds each out."""

from collections.abc import Callable

import pytest
import torch
from helpers.matrices import orthonormal
from helpers.victims import classes, net_victim, silenced, victim_of, zeroed
from torch import Tensor

from immunization.attacks import (
    Attack,
    BlockProbe,
    ClosedFormProbe,
    FineTune,
    FreshPart,
    LinearProbe,
    Victim,
    WhitenedProbe,
    run_attacks,
)
from immunization.config import compose
from immunization.models import Model

pytestmark = pytest.mark.trains

IN_STANDARD = {"BlockProbe", "ClosedFormProbe", "FreshPart", "FineTune", "WhitenedProbe"}


def of_trained(change: Callable[[Tensor], Tensor]) -> Callable[[Model], None]:
    def immunize(model: Model) -> None:
        for parameter in model.trained().values():
            parameter.copy_(change(parameter))

    return immunize


def mask(model: Model) -> None:
    of_trained(lambda x: 1e4 * x)(model)
    model.net.layer4[-1].register_forward_hook(lambda _module, _inputs, output: output.detach())


FEW = {"samples": 5, "mirrored": False, "enlarged": False, "ridges": [0.01, 0.1]}
TUNED = FineTune(scope="trained", rates=[0.01], steps=8, batch_size=12)

DEFENSES: dict[str, tuple[Callable[[Model], None], Attack, Attack]] = {
    "dead features": (zeroed, ClosedFormProbe(), BlockProbe(**FEW)),
    "scaled weights": (of_trained(lambda x: 1e-6 * x), TUNED, ClosedFormProbe()),
    "statistics": (silenced, ClosedFormProbe(), BlockProbe(renewed=True, **FEW)),
    "a bad start": (zeroed, TUNED, FreshPart(steps=32, rates=[1e-3, 1e-2], batch_size=12)),
    "masked gradients": (mask, TUNED, BlockProbe(**FEW)),
}


@pytest.mark.parametrize("name", DEFENSES)
def test_what_fools_one_attacker_is_found_out_by_another(colors, name):
    plant, fooled, finds = DEFENSES[name]
    victim = net_victim(colors, plant, "test_resnet", "layer4")
    found_out(victim, fooled, finds)


def test_a_rotated_map_is_found_out_by_whitening():
    theta = orthonormal(6, 6, seed=4) * torch.logspace(0, -4, 6, dtype=torch.float64) @ orthonormal(6, 6, seed=5)
    found_out(victim_of(classes(), theta), LinearProbe(steps=64), WhitenedProbe(steps=64))


def found_out(victim: Victim, fooled: Attack, finds: Attack) -> None:
    values = run_attacks({"fooled": fooled, "finds": finds}, victim).metrics
    assert values["attack/fooled/final"] < 0.75 < 0.9 < values["attack/finds/final"]
    assert type(finds).__name__ in IN_STANDARD
    targets = {attack._target_.rpartition(".")[2] for attack in compose(["attack=[standard]"]).attack.values()}
    assert targets >= IN_STANDARD
