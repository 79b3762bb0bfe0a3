"""A timm model with its weights: of the hub, or of a file that is read as tensors only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from immunization import files
from immunization.errors import ConfigError, DataError


def create(name: str, checkpoint: str | None, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A timm model with its weights; raises ConfigError that names what does not fit."""
    import timm

    try:
        net = timm.create_model(name, pretrained=pretrained and checkpoint is None, **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        if not timm.is_model(name.partition(".")[0]):
            close = ", ".join(timm.list_models(f"*{name.partition('.')[0][:8]}*")[:5])
            raise ConfigError(
                f"model.name={name}: timm has no such model{'; did you mean ' + close if close else ''}"
            ) from error
        raise ConfigError(f"model.name={name}: {' '.join(str(error).split())}") from error
    except Exception as error:  # of the hub, whose own classes are many
        raise ConfigError(
            f"model.name={name}: its pretrained weights cannot be had ({type(error).__name__}: {str(error)[:200]}); "
            "connect to the Hugging Face hub, or give model.checkpoint=<file>, or model.pretrained=false"
        ) from error
    if checkpoint is not None:
        load_weights(net, Path(checkpoint).expanduser())
    return net


def load_weights(net: nn.Module, path: Path) -> None:
    """Read a safetensors file or a state dict (weights only); raises ConfigError that names the tensors in the way."""
    if not path.exists():
        raise ConfigError(f"model.checkpoint={path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            state, _ = files.read_tensors(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except DataError as error:  # says all there is to say
        raise ConfigError(f"model.checkpoint={error}") from error
    except Exception as error:  # safetensors and pickle raise a dozen kinds
        raise ConfigError(
            f"model.checkpoint={path} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
            "a safetensors file or a plain state dict of tensors is needed"
        ) from error
    state = next((state[key] for key in ("state_dict", "model") if isinstance(state.get(key), dict)), state)
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    own = net.state_dict()
    problems = [f"{n} is missing" for n in own.keys() - state.keys() if not n.endswith("num_batches_tracked")]
    problems += [f"{n} is unknown" for n in state.keys() - own.keys()]
    problems += [
        f"{n} has shape {tuple(state[n].shape)}, not {tuple(own[n].shape)}"
        for n in own.keys() & state.keys()
        if state[n].shape != own[n].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8]) + ("; ..." if len(problems) > 8 else "")
        raise ConfigError(
            f"model.checkpoint={path} does not fit the model in {len(problems)} tensors: {shown}. Choose the "
            "model.name it was made with (and model.arguments.num_classes for a head of another size)"
        )
    net.load_state_dict(state, strict=False)
