"""The blocks of a net, as attackers find and read them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from immunization.compute.machine import onto
from immunization.models.adapted import BODY
from immunization.models.blocks import Operations
from immunization.models.chain import Network, Reduce


@torch.no_grad()
def block_outputs(
    network: Network, images: Tensor, reduce: Reduce, inside: Reduce | None = None, without: Container[str] = ()
) -> dict[str, Any]:
    """What `reduce` makes of the output of each block of a net for images, by its name, in the order in which they run.

    `reduce` gets the output, whether channels come last, and the number of tokens before those of the image's patches.
    With `inside`, also what that makes of the layers inside of each block, as `<block>/<layer>`. Outputs without a row
    for each image are left out, and so are the blocks `without`.
    """
    with network.whole.watched(reduce, inside, without) as seen:
        network(images)
        return dict(seen)


def blocks_behind(network: Network, part: str) -> set[str]:
    """The net's own blocks that have not ended before a part of it begins."""
    return set(network.found.blocks) - set(network.found.before(network.begins(part)))


def what_is_read(network: Network) -> dict[str, Any]:
    """`depth`: each block's, as the share of the operations that are done at its end. `changed`: where what was begins.

    `before` are the blocks that have ended by then. `unread`: from where to where nobody can read, if that is much and
    does not end before.
    """
    found, changed = network.found, network.begins("trained")
    begin = min((found.begin(name).share for name in changed), default=1.0)
    depth = {name.removeprefix(BODY): found.outputs[name].end.share for name in found.blocks}
    before = [name.removeprefix(BODY) for name in found.before(changed)]
    unread = {"unread": list(found.unread)} if found.much_unread and begin < found.unread[1] else {}
    return {"depth": depth, "changed": begin, "before": before} | unread


@torch.no_grad()
def prefix_flops(network: Network, sample: Tensor) -> dict[str, float]:
    """Operations of the inputs in `sample` from there up to and with each block, by name."""
    sample = onto(sample, next(network.parameters()))
    with Operations() as counted:
        return block_outputs(network, sample, lambda *_: counted.total)
