"""Attacks that cut the net: a probe behind each of its blocks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from immunization.attacks.base import AttackCurve
from immunization.attacks.direct import ClosedFormProbe
from immunization.attacks.least_squares import require_held_out
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.data.task import SPLITS
from immunization.models.chain import Network

BATCH = 64
"""Images of a batch."""


class EarlierLayers(ClosedFormProbe):
    """Ridge regression on the output of every block of the net, pooled; the block that is best on validation rows.

    What the last layers have lost stands in those before, and an attacker may cut the net wherever he likes. Blocks are
    those that `forward_features` applies one after another (the residual blocks of a ResNet, the transformer blocks of
    a ViT). `AttackCurve.found` has the block's name, its ridge and what every block reaches on test rows. Operations
    are those of the whole net. Deep nets alone.
    """

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        network = victim.network(stage, self.precision)
        outputs = {split: pooled_outputs(network, images) for split, images in images_of(victim).items()}
        curves: dict[str, AttackCurve] = {}
        for block in outputs["test"]:
            try:
                curves[block] = self.probe(victim, {split: outputs[split][block] for split in SPLITS})
            except Inapplicable:  # a block whose output is the same for all images
                continue
        if not curves:
            raise Inapplicable("no block of the net tells the images of the harmful task apart")
        best = max(curves, key=lambda block: curves[block].val.max().item())
        reached = {block: curve.final for block, curve in curves.items()}
        curves[best].found = {"block": best, "ridge": curves[best].setting, "blocks": reached}
        return curves[best]


def images_of(victim: Victim) -> dict[str, Tensor]:
    """What the net reads, by split. Raises Inapplicable where a split to measure on is empty."""
    require_held_out(victim.task)
    return {split: victim.images(split)[0] for split in SPLITS}


@torch.no_grad()
def pooled_outputs(network: Network, images: Tensor) -> dict[str, Tensor]:
    """What each block of `network` makes of images, averaged over places or tokens: [N, channels], float64, by name.

    Blocks come in the order in which they run, one that runs several times with its last output. Those that give
    anything else than a tensor with a row an image are left out.
    """
    seen: dict[str, Tensor] = {}
    last = getattr(network.whole.net, "output_fmt", "NCHW") == "NHWC"

    def keep(name: str, _module: nn.Module, _inputs: object, x: object) -> None:
        if isinstance(x, Tensor) and x.ndim in (2, 3, 4):
            seen[name] = pooled(x, last).double()

    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in network.blocks()]
    batches: list[dict[str, Tensor]] = []
    try:
        for part in images.split(BATCH):
            seen.clear()
            network(part)
            batches.append({name: x for name, x in seen.items() if len(x) == len(part)})
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def pooled(x: Tensor, channels_last: bool = False) -> Tensor:
    """[N, channels] of a map [N, C, H, W] (or [N, H, W, C]), tokens [N, T, C] or rows [N, C]."""
    if x.ndim == 4:
        return x.mean((1, 2) if channels_last else (2, 3))
    return x.mean(1) if x.ndim == 3 else x
