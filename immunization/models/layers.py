"""The layers of a net that multiply rows by a matrix of weights [out, d], and these rows."""

from torch import Tensor, nn
from torch.nn import functional as F


def multiplies(layer: nn.Module) -> bool:
    """Whether it is a trained linear layer, or a convolution without groups that pads with zeros, if at all."""
    if not getattr(getattr(layer, "weight", None), "requires_grad", False):
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)


def rows_of(layer: nn.Module, x: Tensor) -> Tensor:
    """What such a layer reads at every place, [N, places, d]: the patches of a convolution."""
    if isinstance(layer, nn.Conv2d):
        return F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
    return x.flatten(1, -2) if x.ndim > 2 else x[:, None]
