"""An immunized net as it leaves a run: rounded once, to the dtype the original came in, and how far that moves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from immunization.data.task import Task
from immunization.models.base import Model
from immunization.models.weights import layer_of

TOLERANCE = 1e-3
"""Largest change of an output by rounding, relative to the largest output, that passes without a word."""
ROWS = 4096


def exported(model: Model, task: Task) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of immunized.safetensors, nets in the dtype of the original whatever they were computed in.

    For a net with a folded map the header says, under `rounding`, what that does to the outputs on `task`, the primary
    one (see `rounding_error`).
    """
    tensors, metadata = model.export(), model.metadata()
    if "immunization" not in metadata:
        return tensors, metadata
    facts = json.loads(metadata["immunization"])
    facts["computed_in"], facts["dtype"] = facts["dtype"], facts.pop("original_dtype", facts["dtype"])
    dtype = getattr(torch, facts["dtype"])
    if "fold" in facts:
        facts["layer"] = layer_of(tensors, facts["fold"])
        facts["rounding"] = rounding_error(model, task.train.x[:ROWS], dtype)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return tensors, {"immunization": json.dumps(facts)}


@torch.no_grad()
def rounding_error(model: Model, features: Tensor, dtype: torch.dtype) -> float:
    """max |y_rounded - y| / max |y| over the outputs y of `features` [n, D] by the map theta and its inverse.

    y is computed in the model's own dtype; y_rounded with theta and the head rounded to `dtype`, in which all is
    computed then, as it is by whoever loads the file.
    """
    exact, bias = model.logits(features), model.head.bias
    theta, weight = model.linear_map().to(dtype), model.head.weight.to(dtype)
    rounded = F.linear(features.to(dtype) @ theta, weight, None if bias is None else bias.to(dtype))
    return ((rounded.to(exact) - exact).abs().max() / exact.abs().max()).nan_to_num(torch.inf).item()


def rounding_flag(facts: Mapping[str, Any]) -> str | None:
    """Why the outputs of an exported net are not those of the original; None where they agree within `TOLERANCE`."""
    error = facts.get("rounding", 0.0)
    if error <= TOLERANCE:
        return None
    return (
        f"{facts['dtype']}, the dtype of the original net, does not hold the map and its inverse: outputs differ from "
        f"the original's by up to {error:.1g} of the largest; choose a map of smaller condition number, or immunize "
        "the net in float64"
    )
