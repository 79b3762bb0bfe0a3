"""Weights that move little along what their layers read of images to keep."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from immunization.models.chain import multiplies, rows_of

log = logging.getLogger(__name__)


class Damped(nn.Module):
    """The weights W [out, ...] = W_0 + V S of a layer, trained by V, which is 0 at first.

    S [d, d] = (I + a C / mean diag C)^-1/2, where C are the second moments of the rows [N, d] that W multiplies: what a
    layer reads, or the patches of a convolution. A step of V then moves what a layer gives for such rows by about the
    same in every direction, and W most where they have nothing. With a projection in place of S this is training in the
    null space of the features (Wang et al., CVPR 2021).
    """

    def __init__(self, w_0: Tensor, root: Tensor) -> None:
        super().__init__()
        self.w_0, self.root = w_0, root
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._moved(v)
        if not v.any():  # theta_0, which every step asks for
            return self.w_0
        if self.last is None or not torch.equal(v, self.last[0]):  # a fused optimizer leaves v._version as it is
            self.last = v.clone(), self._moved(v)
        return self.last[1]

    def _moved(self, v: Tensor) -> Tensor:
        return self.w_0 + (v.flatten(1) @ self.root).view_as(self.w_0).to(self.w_0)

    def right_inverse(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w)


@torch.no_grad()
def damp(net: nn.Module, batches: Iterable[Tensor], damping: float) -> list[nn.Module]:
    """Make the trained weights of a net's linear layers and ungrouped convolutions `Damped`, for a = `damping`.

    `batches` are what the net reads of the images to keep. Returns the layers, for `release`; none where they are
    damped already.
    """
    layers = [part for part in net.modules() if multiplies(part)]
    if not layers:
        log.warning(
            "method.damping has nothing to damp: no trained layer is linear or a plain convolution (one group, zeros)"
        )
    if any(parametrize.is_parametrized(layer) for layer in layers):
        return []
    moments: dict[nn.Module, Tensor] = {}

    def add(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        rows = rows_of(layer, inputs[0]).flatten(0, 1)
        moments[layer] = moments.get(layer, 0.0) + rows.T @ rows

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(add))
        for batch in batches:
            net(batch)
    layers = [layer for layer in layers if layer in moments]  # attention reads some weights itself
    for layer in layers:
        c = moments.pop(layer)
        c *= damping / c.diagonal().mean().clamp(min=torch.finfo(c.dtype).tiny)
        c.diagonal().add_(1)
        values, vectors = torch.linalg.eigh(c)  # of C alone, which may be singular, LAPACK does not always converge
        root = vectors / values.sqrt() @ vectors.T
        damped = Damped(layer.get_parameter("weight").detach().clone(), root)
        parametrize.register_parametrization(layer, "weight", damped, unsafe=True)
    return layers


def release(layers: Iterable[nn.Module]) -> None:
    """Make the weights of damped layers plain ones again, as they are now."""
    for layer in layers:
        parametrize.remove_parametrizations(layer, "weight")
