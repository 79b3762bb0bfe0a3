"""A timm model with its weights, of the hub or of a file that is read as tensors only."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from immunization.errors import ConfigError, DataError
from immunization.models.fold import FOLD, fold_into
from immunization.models.hub import one_try
from immunization.runs import files
from immunization.runs.filenames import weights_of


def create(name: str, checkpoint: str | None, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A timm model with its weights; raises ConfigError that names what does not fit."""
    import timm

    from_hub, answers = pretrained and checkpoint is None, True
    try:
        with one_try() if from_hub and timm.is_model(name.partition(".")[0]) else nullcontext(True) as answers:
            net = timm.create_model(name, pretrained=from_hub, **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        if not timm.is_model(name.partition(".")[0]):
            close = ", ".join(timm.list_models(f"*{name.partition('.')[0][:8]}*")[:5])
            raise ConfigError(
                f"model.name={name}: timm has no such model{'; did you mean ' + close if close else ''}"
            ) from error
        raise ConfigError(f"model.name={name}: {' '.join(str(error).split())}") from error
    except Exception as error:  # of the hub, whose own classes are many
        why = f"{type(error).__name__}: {str(error)[:200]}" if answers else "the Hugging Face hub does not answer"
        raise ConfigError(
            f"model.name={name}: its pretrained weights cannot be had ({why}); "
            "connect to the Hugging Face hub, or give model.checkpoint=<file>, or model.pretrained=false"
        ) from error
    if checkpoint is not None:
        load_weights(net, Path(checkpoint).expanduser())
    return net


def stored_arguments(checkpoint: str | None) -> dict[str, Any]:
    """Arguments of timm.create_model that an exported net was made with; none for any other file."""
    path = Path(checkpoint or "").expanduser()
    path = weights_of(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("immunization", "{}"))
    return facts.get("arguments", {})


def load_weights(net: nn.Module, path: Path) -> None:
    """Read a run folder, a safetensors file or a state dict (tensors only), with the map that may be folded in.

    Raises ConfigError that names the tensors in the way.
    """
    path = weights_of(path)
    if not path.exists():
        raise ConfigError(
            f"model.checkpoint: {path.absolute()} not found; give a run folder, a file of weights, or null for those "
            "of the Hugging Face hub (docs/install.md)"
        )
    try:
        state, metadata = files.read_tensors(path) if path.suffix == ".safetensors" else (_state_dict(path), {})
    except DataError as error:
        raise ConfigError(f"model.checkpoint={error}") from error
    state = next((state[key] for key in ("state_dict", "model") if isinstance(state.get(key), dict)), state)
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    facts = json.loads(metadata.get("immunization", "{}"))
    if "fold" in facts:
        dtype = getattr(torch, facts["dtype"])  # in which the map and its inverse were stored: they need the digits
        fold_into(net.to(dtype), facts["fold"], state[f"{facts['fold']}.{FOLD}.weight"].to(dtype))
    if found := misfits(net, state):
        raise ConfigError(
            f"model.checkpoint={path} does not fit the model in {found}. Choose the "
            "model.name it was made with (and model.arguments.num_classes for a head of another size)"
        )
    net.load_state_dict(state, strict=False)


def _state_dict(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, without running code of the file; raises DataError for anything but a state dict."""
    refused = None
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of archives that it then refuses
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise a dozen kinds
        state, refused = None, error
    if not isinstance(state, Mapping):
        raise DataError(
            f"{path} cannot be read as weights alone: it is a whole pickled model, whose loading would run code of the "
            "file, or damaged; save the weights with torch.save(model.state_dict(), ...) or as safetensors"
        ) from refused
    return state


def misfits(net: nn.Module, state: Mapping[str, Tensor]) -> str:
    """The tensors of `state` that `net` does not take and those it lacks, in words; empty where all fit."""
    own = net.state_dict()
    problems = [f"{n} is missing" for n in own.keys() - state.keys() if not n.endswith("num_batches_tracked")]
    problems += [f"{n} is unknown" for n in state.keys() - own.keys()]
    problems += [
        f"{n} has shape {tuple(state[n].shape)}, not {tuple(own[n].shape)}"
        for n in own.keys() & state.keys()
        if state[n].shape != own[n].shape
    ]
    shown = "; ".join(sorted(problems)[:8]) + ("; ..." if len(problems) > 8 else "")
    return f"{len(problems)} tensors: {shown}" if problems else ""


def restore(net: nn.Module, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> nn.Module:
    """Put exported `tensors` into `net`, a timm model of the same architecture, and fold the map in if there is one.

    Files of versions before this rounded nothing and have no `computed_in`; what they hold takes the dtype of `net`.
    """
    if "computed_in" in facts:
        net = net.to(getattr(torch, facts["dtype"]))
    if "fold" in facts:
        fold_into(net, facts["fold"], tensors[f"{facts['fold']}.{FOLD}.weight"].to(next(net.parameters())))
    net.load_state_dict(dict(tensors))
    return net.eval().requires_grad_(True)


def layer_of(tensors: Mapping[str, Tensor], place: str) -> str:
    """The layer of a folded map, in the words of who would put it into a Sequential by hand."""
    weight, bias = tensors[f"{place}.{FOLD}.weight"], f"{place}.{FOLD}.bias" in tensors
    kind, kernel = ("Linear", "") if weight.ndim == 2 else (f"Conv{weight.ndim - 2}d", ", 1")
    return f"{FOLD}=nn.{kind}({weight.shape[1]}, {weight.shape[0]}{kernel}, bias={bias})"
