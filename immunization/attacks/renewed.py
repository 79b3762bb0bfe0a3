"""The statistics of BatchNorm, which are no weights: an attacker renews them by one pass over their images."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from immunization.attacks.victim import BATCH, Inapplicable
from immunization.models.chain import norms_of


def renew_from(network: nn.Module, images: Tensor) -> int:
    """Give each BatchNorm the statistics of images, and say of how many.

    Raises Inapplicable for a net without BatchNorm.
    """
    if not norms_of(network):
        raise Inapplicable("the net has no BatchNorm whose statistics could be renewed")
    batches = images.tensor_split(math.ceil(len(images) / BATCH))  # none of one image, which may have no variance
    renew(network, batches)
    return len(images)


@torch.no_grad()
def renew(network: nn.Module, batches: Iterable[Tensor], forward: Callable[[Tensor], Tensor] | None = None) -> None:
    """Give each BatchNorm the mean, over batches, of their statistics; the rest, dropout too, stays in eval mode.

    `forward` passes a batch, where `network` is only a part of what does so.
    """
    norms = norms_of(network)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in batches:
        (forward or network)(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
