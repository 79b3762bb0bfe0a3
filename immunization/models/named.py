"""Nets that read several named fields, as nets of one tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from immunization.data.fields import MASK, POSITIONAL, unpack
from immunization.models.deployed import Deployed

NET = "net."
"""Begins the names of the modules of a net whose fields are named."""


class Named(nn.Module):
    """A net that reads named `fields` [n, T], as one that reads them packed, int64 [n, K, T] (data/fields.py)."""

    def __init__(self, net: nn.Module, fields: Sequence[str]) -> None:
        super().__init__()
        self.net, self.fields = net, tuple(fields)
        self.train(net.training)

    def forward(self, x: Tensor) -> Any:
        read = self.mask(x).any(0).nonzero()
        if not isinstance(self.net, Deployed):  # which may read texts of one length alone
            x = x[..., : int(read.max()) + 1 if len(read) else None]  # what pads all texts alike costs nothing
        if self.fields == (POSITIONAL,):
            return self.net(x[:, 0])
        return self.net(**unpack(x, self.fields))

    def mask(self, x: Tensor) -> Tensor:
        """Which tokens [n, T] of packed ones are read (bool); all, where there is no mask."""
        if MASK in self.fields:
            return x[:, self.fields.index(MASK)] > 0
        return torch.ones(len(x), x.shape[2], dtype=torch.bool, device=x.device)


def mask_of(net: nn.Module, x: Tensor) -> Tensor | None:
    """Which tokens [n, T] of its inputs a net, in which one may be `Named`, reads (bool); None for images."""
    named = next((module for module in net.modules() if isinstance(module, Named)), None)
    return None if named is None or x.is_floating_point() else named.mask(x)


def own(net: nn.Module) -> nn.Module:
    """The net itself, without what names its fields."""
    return net.net if isinstance(net, Named) else net


def name_of(net: nn.Module) -> str:
    """How a net's own class is called, or what was deployed."""
    net = own(net)
    return net.title if isinstance(net, Deployed) else type(net).__name__
