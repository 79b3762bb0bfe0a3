"""Named fields of integers, as a tokenizer gives them of texts, packed into one tensor: a net's input is one tensor."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

IDS, MASK = "input_ids", "attention_mask"
POSITIONAL = ""
"""The name of the only field of a net that reads token ids as they are, not by a name."""
INTEGERS = (torch.int64, torch.int32, torch.bool)


def is_field(x: Tensor) -> bool:
    """Whether it may be one of several named fields, a number for each token: integers [n, T]."""
    return x.dtype in INTEGERS and x.ndim == 2


def names_of(fields: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names in the order in which they are packed: ids, the mask, others by their names."""
    return tuple(sorted(fields, key=lambda name: (name != IDS, name != MASK, name)))


def pack(fields: Mapping[str, Tensor]) -> Tensor:
    """One int64 tensor [n, K, T] of K fields [n, T], in the order of `names_of`; raises ValueError if shapes differ."""
    shapes = {name: tuple(field.shape) for name, field in fields.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"fields of shapes {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    return torch.stack([fields[name].long() for name in names_of(fields)], 1)


def unpack(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The fields [n, T] of a packed tensor [n, K, T], by name."""
    return {name: x[:, k] for k, name in enumerate(names)}


def padded(x: Tensor, names: Sequence[str], length: int, pad: int = 0) -> Tensor:
    """A packed tensor of `length` tokens: behind its own ids `pad`, which the mask leaves out, else 0."""
    if (before := x.shape[2]) == length:
        return x
    x = F.pad(x, (0, length - before))
    if IDS in names:
        x[:, tuple(names).index(IDS), before:] = pad
    return x


def mirrored(x: Tensor) -> Tensor:
    """Mirror images [N, C, H, W]; texts, which have none, as they are."""
    return x.flip(-1) if x.is_floating_point() else x
