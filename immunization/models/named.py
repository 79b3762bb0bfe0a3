"""Nets that read several named fields, as nets of one tensor."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from immunization.data.fields import POSITIONAL, unpack

NET = "net."
"""Begins the names of the modules of a net whose fields are named."""


class Named(nn.Module):
    """A net that reads named `fields` [n, T], as one that reads them packed, int64 [n, K, T] (data/fields.py)."""

    def __init__(self, net: nn.Module, fields: Sequence[str]) -> None:
        super().__init__()
        self.net, self.fields = net, tuple(fields)
        self.train(net.training)

    def forward(self, x: Tensor) -> Any:
        if self.fields == (POSITIONAL,):
            return self.net(x[:, 0])
        return self.net(**unpack(x, self.fields))


def own(net: nn.Module) -> nn.Module:
    """The net itself, without what names its fields."""
    return net.net if isinstance(net, Named) else net


def name_of(net: nn.Module) -> str:
    """How a net's own class is called."""
    return type(own(net)).__name__
