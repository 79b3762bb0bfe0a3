"""An attacker who renews the statistics of BatchNorm, which are no weights and cost one pass over his images."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from immunization.attacks.base import AttackCurve
from immunization.attacks.direct import ClosedFormProbe
from immunization.attacks.earlier import BATCH, images_of
from immunization.attacks.tuning import NORMS
from immunization.attacks.victim import Inapplicable, Stage, Victim


class RenewedStatistics(ClosedFormProbe):
    """Ridge regression on features of the net whose BatchNorm has mean and variance of the attacker's training images.

    An immunization that stands in these statistics alone, or that only held with those of theta_0, does not hold here.
    Operations are those of `ClosedFormProbe` and of one pass more over the training images. Deep nets with BatchNorm
    alone.
    """

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        network = victim.network(stage, self.precision)
        if not any(isinstance(module, NORMS) for module in network.modules()):
            raise Inapplicable("the net has no BatchNorm whose statistics could be renewed")
        images = images_of(victim)
        rows = self.rows(victim.task)
        own = images["train"] if rows is None else images["train"][rows.to(images["train"].device)]
        batches = own.tensor_split(math.ceil(len(own) / BATCH))  # none of one image, which may have no variance
        renew(network, batches)
        with torch.no_grad():
            features = {
                split: torch.cat([network(part).double() for part in x.split(BATCH)]) for split, x in images.items()
            }
        curve = self.probe(victim, features)
        curve.flops = curve.flops + victim.flops_per_row() * len(own)
        return curve


@torch.no_grad()
def renew(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Give each BatchNorm the mean, over batches, of their statistics; the rest, dropout too, stays in eval mode."""
    norms = [module for module in network.modules() if isinstance(module, NORMS)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in batches:
        network(batch)
    for norm in norms:
        norm.eval()
