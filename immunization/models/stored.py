"""Immunized models from disk, and what is known of one that was immunized in Python, for the file it is saved in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from immunization.data.images import ImagePair
from immunization.data.task import TaskPair
from immunization.errors import ConfigError, DataError
from immunization.models.adapted import check_net, fold_before, is_of_timm
from immunization.models.base import Model
from immunization.models.chain import data_config
from immunization.models.fold import FOLD
from immunization.models.linear import LinearMap
from immunization.models.weights import create, layer_of, misfits, restore
from immunization.runs import files
from immunization.runs.filenames import WEIGHTS, weights_of

HUB_WEIGHTS, HUB_CONFIG = "model.safetensors", "config.json"


def facts_of(net: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `load` needs beside the tensors; `arguments` are those of timm.create_model that the net does not know.

    Raises ConfigError where they do not give the net.
    """
    tensors = net.state_dict()
    facts: dict[str, Any] = {"architecture": type(net).__name__, "arguments": {}, "data_config": None, "timm": False}
    facts |= {"weights": "the caller's own", "license": None, "computed_in": "float64"}
    facts["dtype"] = str(next(net.parameters()).dtype).removeprefix("torch.")
    facts |= fold_of(tensors) | {"immunized_by": getattr(net, "immunized_by", None)}
    if not is_of_timm(net):
        return facts | {"stripped_by": "replacing the classifier"} if "fold" in facts else facts
    facts |= {"architecture": net.pretrained_cfg["architecture"], "data_config": data_config(net), "timm": True}
    facts["arguments"] = known_arguments(net) | dict(arguments)
    if size := facts["arguments"].get("img_size"):  # which timm leaves out of a net's own data config
        facts["data_config"]["input_size"] = (
            facts["data_config"]["input_size"][0],
            *([size] * 2 if isinstance(size, int) else size),
        )
    try:
        again = restore(create(facts["architecture"], None, False, facts["arguments"]), tensors, facts)
        if not _equal(again, copy.deepcopy(net).cpu().eval(), facts["data_config"]["input_size"]):
            raise ConfigError("its outputs differ")
    except (ConfigError, RuntimeError, AttributeError, AssertionError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in facts["arguments"].items())
        raise ConfigError(
            f"save: timm.create_model({facts['architecture']!r}, {shown}) does not give this net "
            f"({' '.join(str(error).split())[:200]}); say how it was made, save(model, folder, img_size=...)"
        ) from error
    return facts


@torch.no_grad()
def _equal(one: nn.Module, other: nn.Module, input_size: Sequence[int]) -> bool:
    image = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0)).to(next(one.parameters()))
    return torch.allclose(one(image), other(image), equal_nan=True)


def fold_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Where the map hangs and what layer it is, by the names of a net's tensors; nothing where there is none."""
    end = f".{FOLD}.weight"
    place = next((name.removesuffix(end) for name in tensors if name.endswith(end)), None)
    return {} if place is None else {"fold": place, "layer": layer_of(tensors, place)}


def known_arguments(net: nn.Module) -> dict[str, Any]:
    """Arguments that timm remembers of a net, as far as its version does."""
    from timm.models import save_for_hf

    with TemporaryDirectory() as folder:
        bare = copy.copy(net)  # timm's function writes weights, too: none of this one
        bare.state_dict = dict
        try:
            save_for_hf(bare, folder)
            config = json.loads((Path(folder) / HUB_CONFIG).read_text())
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            config = {}
    known = config.get("model_args", {"num_classes": net.num_classes})
    return {key: value for key, value in known.items() if (key, value) != ("in_chans", 3)}


def hub_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a folder that timm's save_for_hf or push_to_hf_hub wrote."""
    tensors, _ = files.read_tensors(folder / HUB_WEIGHTS)
    config = json.loads((folder / HUB_CONFIG).read_text())
    arguments = config.get("model_args", {"num_classes": config["num_classes"]})
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    facts = {"architecture": config["architecture"], "arguments": arguments, "computed_in": "float64"}
    return tensors, facts | {"dtype": str(dtype).removeprefix("torch.")} | fold_of(tensors)


def into(net: nn.Module, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> nn.Module:
    """`tensors` in a copy of `net`, as it was before immunization."""
    check_net("load: the net", net)
    copied = copy.deepcopy(net).to(getattr(torch, facts["dtype"]))
    try:
        if isinstance(copied.get_submodule(facts.get("fold", "")), nn.Linear):
            size, like = len(tensors[f"{facts['fold']}.{FOLD}.weight"]), next(copied.parameters())
            fold_before(copied, facts["fold"], nn.Linear(size, size, bias=False, device=like.device, dtype=like.dtype))
            facts = {key: value for key, value in facts.items() if key != "fold"}
        return restore(copied, tensors, facts)
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"load: the weights are of a {facts['architecture']} and do not fit the {type(net).__name__} that was given"
            f" in {misfits(copied, tensors)}. Give the net as it was before immunization, with the same head"
        ) from error


def restored(pair: TaskPair | ImagePair, model: Callable[..., Model], checkpoint: str) -> Model:
    """What `model(pair=pair)` makes, a model that takes no checkpoint itself, with the weights of a run of it.

    `checkpoint` is the run folder or its weights. Raises ConfigError for weights that are not the model's state dict.
    """
    made = model(pair=pair)
    try:
        tensors, _ = files.read_tensors(weights_of(Path(checkpoint).expanduser()))
        made.load_state_dict({name: tensors[name] for name in made.state_dict()})
    except (DataError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model.checkpoint={checkpoint} does not hold the state dict of {type(made).__name__} "
            f"({' '.join(str(error).split())[:200]}); a model with an `export` of its own needs a key `checkpoint`"
        ) from error
    return made


def load(path: str | Path, net: nn.Module | None = None) -> nn.Module:
    """The immunized model of a run folder, of what `save` wrote, or of a download from the Hub, in eval mode.

    `path` is the folder or its immunized.safetensors. A timm model, in the dtype it was immunized in, for deep nets:
    `forward_features`, `forward_head(..., pre_logits=True)` (the immunized features) and the classifier work as ever. A
    net of another library is put into a copy of `net`, the one that was immunized; so is any where `net` is given. For
    linear models the map theta, which takes prepared inputs [N, D_in] to features. Raises DataError for a file that is
    not there, was not written by this project, or was altered since; ConfigError for a net that does not fit.
    """
    path = Path(path)
    if path.is_dir() and not (path / WEIGHTS).exists() and (path / HUB_WEIGHTS).exists():
        tensors, known = hub_folder(path)
    else:
        path = weights_of(path)
        try:
            tensors, metadata = files.read_tensors(path)
        except DataError as error:
            if path.is_file() and path.suffix != ".safetensors":
                raise DataError(
                    f"{path}: only weights in safetensors are read; immunization.save(model, folder) writes them"
                ) from error
            raise DataError(f"{error}; give a run folder that holds a sound {WEIGHTS}") from error
        facts = metadata.get("immunization")
        if facts is None:
            if "theta" not in tensors:
                raise DataError(f"{path} holds neither a linear map nor a net of this project")
            return LinearMap(tensors["theta"], tensors.get("bias")).eval()
        known = json.loads(facts)
    if net is not None:
        model = into(net, tensors, known)
    elif known.get("timm", True):
        model = restore(create(known["architecture"], None, False, known["arguments"]), tensors, known)
    else:
        raise ConfigError(f"{path} holds a {known['architecture']}, no net of timm: load(path, net) puts it into yours")
    if recipe := known.get("immunized_by"):
        model.immunized_by = recipe
    return model
