"""The statistics of BatchNorm, which are no weights: an attacker renews them by one pass over their images."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from immunization.attacks.least_squares import require_held_out
from immunization.attacks.victim import BATCH, Inapplicable, Victim
from immunization.data.task import SPLITS
from immunization.models.chain import BATCH_NORMS


def images_of(victim: Victim) -> dict[str, Tensor]:
    """What the net reads, by split. Raises Inapplicable for a linear map, and where a split to measure on is empty."""
    require_held_out(victim.task)
    if not victim.model.deep:
        raise Inapplicable("a linear map reads rows of features: this attack needs the images of a deep net")
    return {split: victim.images(split)[0] for split in SPLITS}


def renew_from(network: nn.Module, images: Tensor) -> int:
    """Give each BatchNorm the statistics of images, and say of how many.

    Raises Inapplicable for a net without BatchNorm.
    """
    if not norms_of(network):
        raise Inapplicable("the net has no BatchNorm whose statistics could be renewed")
    batches = images.tensor_split(math.ceil(len(images) / BATCH))  # none of one image, which may have no variance
    renew(network, batches)
    return len(images)


def norms_of(network: nn.Module) -> list[nn.Module]:
    """Its layers with statistics of batches."""
    return [module for module in network.modules() if isinstance(module, BATCH_NORMS)]


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
