"""Image descriptors without a model: pixels, and how well patches match patches of training images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from immunization.attacks.altered import BATCH
from immunization.attacks.pooling import Outputs, gathered, poolings
from immunization.errors import Inapplicable

SIDE = 64
"""Larger images are averaged to this many pixels, half as many for single pixels."""

SIDES = (6, 8)
"""Pixels of a patch's sides."""

FILTERS = 256
"""Patches that all others are compared with; each gives two channels."""

IMAGES, SAMPLE = 200, 50_000
"""Images, and patches of them, whose covariance whitens all."""

DENSE = 32
"""Larger images are compared at every second pixel, or less often."""

FLAT, RIDGE = 0.01, 0.1
"""Added to the variance within a patch, and to the eigenvalues of the covariance of patches of variance 1."""

THRESHOLD = 0.5
"""What a fit has to exceed, in deviations of a whitened patch along one direction."""


class Patches(nn.Module):
    """Whitened patches of images [N, C, H, W], drawn at random, as the filters of one convolution.

    Every patch is first brought to mean 0 and variance 1. Maps [N, 2 FILTERS, h, w] have by how much its inner product
    with a filter is above `self.threshold`, and below its negative (Coates and Ng, The importance of encoding versus
    training with sparse coding and vector quantization, ICML 2011). All of it in the dtype of the images.
    """

    def __init__(self, images: Tensor, side: int, seed: int = 0) -> None:
        super().__init__()
        self.side, self.stride = min(side, *images.shape[2:]), max(1, max(images.shape[2:]) // DENSE)
        generator = torch.Generator().manual_seed(seed)
        some = images[torch.randint(len(images), (IMAGES,), generator=generator)]
        found = F.unfold(some, self.side).transpose(1, 2).flatten(0, 1)
        found = found[torch.randint(len(found), (SAMPLE,), generator=generator)].double()
        found = found - found.mean(1, keepdim=True)
        found = found / (found.var(1, correction=0, keepdim=True) + FLAT).sqrt()
        mean = found.mean(0)
        values, vectors = torch.linalg.eigh((found - mean).T @ (found - mean) / len(found))
        whitening = (vectors / (values.clamp(min=0) + RIDGE).sqrt()) @ vectors.T
        chosen = F.normalize((found[:FILTERS] - mean) @ whitening, dim=1) @ whitening
        self.weight = chosen.unflatten(1, (images.shape[1], self.side, self.side)).to(images)
        self.bias = (chosen @ mean).to(images)

    def forward(self, x: Tensor) -> Tensor:
        mean, square = (F.avg_pool2d(part.mean(1, keepdim=True), self.side, self.stride) for part in (x, x.square()))
        deviation = ((square - mean.square()).clamp(min=0) + FLAT).sqrt()
        sums = self.weight.flatten(1).sum(1)[:, None, None]
        fit = (F.conv2d(x, self.weight, stride=self.stride) - sums * mean) / deviation - self.bias[:, None, None]
        return torch.cat([(fit - THRESHOLD).relu(), (-fit - THRESHOLD).relu()], 1)

    def flops(self, images: Tensor) -> float:
        """Operations of one of the images [N, C, H, W]."""
        high, wide = ((length - self.side) // self.stride + 1 for length in images.shape[2:])
        return 2.0 * self.weight.numel() * high * wide


def outputs_of_images(images: Mapping[str, Tensor], mirrored: bool) -> Outputs:
    """What is read of images [N, C, H, W] by split without a net, and of their mirror images. Raises Inapplicable."""
    if images["train"].ndim != 4:
        raise Inapplicable("the net reads no images: there are no pixels")
    images = {split: _averaged(x, SIDE) for split, x in images.items()}
    filters = {f"patches{side}": Patches(images["train"], side) for side in SIDES}
    parts = gathered(partial(_read, filters), images, mirrored, BATCH // 4)  # the maps of patches are large
    flops = {name: patches.flops(images["train"]) for name, patches in filters.items()}
    passes = [{"pixels": 0.0, "coarse": 0.0}, *({name: cost} for name, cost in flops.items())]
    return Outputs(parts, passes, [0] * len(passes), images["train"].device)


def _averaged(images: Tensor, side: int) -> Tensor:
    height, width = images.shape[2:]
    return F.adaptive_avg_pool2d(images, (min(side, height), min(side, width)))


@torch.no_grad()
def _read(filters: Mapping[str, Patches], images: Tensor) -> dict[tuple[str, str], Tensor]:
    """What is read of images, [N, D] by block and pooling."""
    sides = {"pixels": SIDE // 2, "coarse": SIDE // 8}
    found = {(name, "average"): _averaged(images, side).flatten(1) for name, side in sides.items()}
    for name, patches in filters.items():
        found |= {(name, pooling): x for pooling, x in poolings(patches(images), False, 0).items()}
    return found
