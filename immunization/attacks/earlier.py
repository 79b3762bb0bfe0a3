"""Attacks that cut the net: a probe behind each of its blocks."""

import torch
from torch import Tensor

from immunization.attacks.base import AttackCurve
from immunization.attacks.direct import ClosedFormProbe
from immunization.attacks.pooling import passed
from immunization.attacks.renewed import images_of, renew_from
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.data.task import SPLITS
from immunization.models.chain import Network


class EarlierLayers(ClosedFormProbe):
    """Ridge regression on the output of every block of the net, pooled; the block that is best on validation rows.

    Blocks are those that `forward_features` applies one after another (the residual blocks of a ResNet, the transformer
    blocks of a ViT). `AttackCurve.found` has the block's name, its ridge and what every block reaches on test rows.
    Operations are those of the whole net. Only deep nets.
    """

    renewed = False
    """Whether BatchNorm first gets the statistics of the attacker's training images."""

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        network, images = victim.network(stage, self.precision), images_of(victim)
        passes = renew_from(network, images["train"], self.rows(victim.task)) if self.renewed else 0
        outputs = {split: pooled_outputs(network, part) for split, part in images.items()}
        curves: dict[str, AttackCurve] = {}
        for block in outputs["test"]:
            try:
                curves[block] = self.probe(victim, {split: outputs[split][block] for split in SPLITS})
            except Inapplicable:  # a block whose output is the same for all images
                continue
        if not curves:
            raise Inapplicable("no block of the net tells the images of the harmful task apart")
        block, best = max(curves.items(), key=lambda item: item[1].val.max().item())
        reached = {name: curve.final for name, curve in curves.items()}
        best.found = {"block": block, "ridge": best.setting, "blocks": reached}
        best.flops = best.flops + victim.flops_per_row() * passes
        return best


class RenewedEarlierLayers(EarlierLayers):
    """`EarlierLayers` of a net whose BatchNorm has the attacker's statistics, as in `RenewedStatistics`."""

    renewed = True


def pooled_outputs(network: Network, images: Tensor) -> dict[str, Tensor]:
    """What each block of `network` makes of images, averaged over places or tokens: [N, channels], float64, by name."""
    batches = list(passed(network, images))
    found = {name: torch.cat([batch[name] for batch in batches]).double() for name in batches[0]}
    return {name: x for name, x in found.items() if len(x) == len(images)}
