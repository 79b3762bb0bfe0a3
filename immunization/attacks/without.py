"""Attackers who do without the model: what the harmful task costs, and comes to, with none of its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from immunization.attacks.block_probe import BlockProbe
from immunization.attacks.network import FineTune
from immunization.attacks.pooling import Outputs, outputs_of
from immunization.attacks.recipe import Scope
from immunization.attacks.renewed import images_of, renew_from
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.models.chain import BATCH_NORMS, Network

SIDE = 32
"""Larger images are averaged to this many pixels before they are read as they are."""


class Scratch(FineTune, group="attack.scratch", without=["scope", "precision"]):
    """The same architecture from random weights, trained as `FineTune` trains the whole net."""

    reference = True

    optimizer = "adamw"
    rates = (1e-4, 1e-3, 0.01)
    steps = 1024

    @property
    def parts(self) -> tuple[Scope, ...]:
        return ("full",)

    def network(self, victim: Victim, stage: Stage) -> Network:
        return redrawn(super().network(victim, stage))


class RandomNet(BlockProbe, group="attack.random_net", without=["precision", "renewed"]):
    """What `BlockProbe` reads, of the same architecture with random weights and the statistics of the own images."""

    reference = True

    def read(self, victim: Victim, stage: Stage) -> tuple[Outputs, float]:
        images = images_of(victim)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            network = redrawn(victim.network(stage))
        norms = any(isinstance(module, BATCH_NORMS) for module in network.modules())
        passes = renew_from(network, images["train"], None) if norms else 0
        return outputs_of(network, images, self.mirrored), victim.flops_per_row() * passes


class RawInputs(BlockProbe, group="attack.raw_inputs", without=["precision", "renewed"]):
    """Ridge regression on the images themselves, averaged to at most 32 x 32 pixels."""

    reference = True

    def read(self, victim: Victim, stage: Stage) -> tuple[Outputs, float]:
        parts: dict[str, dict[str, torch.Tensor]] = {"pixels": {}, "coarse": {}}
        for split, images in images_of(victim).items():
            views = torch.stack([images, images.flip(-1)]) if self.mirrored else images[None]
            for name, side in (("pixels", SIDE), ("coarse", SIDE // 4)):
                size = [min(side, length) for length in images.shape[2:]]
                small = F.adaptive_avg_pool2d(views.flatten(0, 1), size).flatten(1)
                parts[name][split] = small.unflatten(0, views.shape[:2]).float().cpu()
        return Outputs({(name, "average"): found for name, found in parts.items()}, dict.fromkeys(parts, 0.0)), 0.0


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
