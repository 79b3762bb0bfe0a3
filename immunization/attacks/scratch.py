"""Training from random weights: what the harmful task costs one who has no use for the model."""

from collections.abc import Callable

import torch

from immunization.attacks.network import FineTune
from immunization.attacks.recipe import Scope
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.models.chain import Network


class Scratch(FineTune, group="attack.scratch", without=["scope", "precision"]):
    """The net with random weights, trained as `FineTune` trains the whole net: one way to do without the model."""

    reference = True

    optimizer = "adamw"
    rates = (1e-4, 1e-3, 0.01)
    steps = 1024

    @property
    def parts(self) -> tuple[Scope, ...]:
        return ("full",)

    def network(self, victim: Victim, stage: Stage) -> Network:
        return redrawn(super().network(victim, stage))


@torch.no_grad()
def redrawn(network: Network) -> Network:
    """`network` with every weight drawn anew, in place, as its layers and then the net itself draw them.

    Raises Inapplicable for a net with weights that neither draws.
    """
    for parameter in network.parameters():
        parameter.fill_(torch.nan)
    for module in network.modules():
        if isinstance(draw := getattr(module, "reset_parameters", None), Callable):
            draw()
    if isinstance(draw := getattr(network.whole.net, "init_weights", None), Callable):  # of timm
        draw()
    if left := [name for name, parameter in network.named_parameters() if not torch.isfinite(parameter).all()]:
        raise Inapplicable(f"nobody knows how to draw the weights {', '.join(left)} anew")
    return network
