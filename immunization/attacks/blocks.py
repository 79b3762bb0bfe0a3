"""The blocks of a net, as attackers find and read them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from immunization.compute.machine import onto
from immunization.models.chain import Network, Reduce


@torch.no_grad()
def block_outputs(network: Network, images: Tensor, reduce: Reduce, inside: Reduce | None = None) -> dict[str, Any]:
    """What `reduce` makes of the output of each block of a net for images, by its name, in the order in which they run.

    `reduce` gets the output, whether channels come last, and the number of tokens before those of the image's patches.
    With `inside`, also what that makes of the layers inside of each block, as `<block>/<layer>`. Outputs without a row
    for each image are left out.
    """
    with network.whole.watched(reduce, inside) as seen:
        network(images)
        return dict(seen)


def blocks_behind(network: Network, part: str, blocks: Sequence[str]) -> set[str]:
    """Those of the net's own `blocks`, in the order in which they run, from the part called so on."""
    parameters = {parameter for module in network.part(part) for parameter in module.parameters()}
    modules = dict(network.whole.blocks())
    own = [block for block in blocks if block in modules]
    return set(itertools.dropwhile(lambda block: parameters.isdisjoint(modules[block].parameters()), own))


def prefix_flops(network: Network, sample: Tensor) -> dict[str, float]:
    """Operations of the inputs in `sample` from there up to and with each block, by name."""
    sample = onto(sample, next(network.parameters()))
    with FlopCounterMode(display=False) as counter:
        return block_outputs(network, sample, lambda *_: float(counter.get_total_flops()))
