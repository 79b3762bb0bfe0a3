"""Weights that other programs wrote, read as data. No code in them is run."""

import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from immunization.errors import DataError
from immunization.runs.filenames import CONFIG_OF_NET, OF_HUB
from immunization.runs.net_facts import IMAGES

log = logging.getLogger(__name__)

AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema_model", "ema", "params_ema")
AS_TRAINED = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "module", "weights", "params")
"""Keys under which trainers keep a state dict, in the order of timm's loader, which takes averaged weights first."""

HOLDERS = tuple(f"{name}." for name in ("module", "model", "net", "network"))
"""What begins every name of a state dict whose net was inside something: of DataParallel, Lightning, AveragedModel."""

WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch.compile, FSDP and activation checkpointing add, also in the middle."""

LIGHTNING = "pytorch-lightning_version"
DEPTH = 3  # of state dicts inside of others, as {"model": {"state_dict": ...}}

REMEDY = "save the weights with torch.save(model.state_dict(), ...) or as safetensors"


class _Nothing:
    """Replaces an object that is no weight: its arguments and its state are thrown away."""

    def __init__(self, *_: object) -> None: ...

    def __new__(cls, *_: object) -> "_Nothing":
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...


class _Plain:
    """Replaces a kind of dict; a plain one takes its entries."""

    def __new__(cls, *_: object) -> dict:  # type: ignore[misc]
        return {}


_DICTS = (
    *("collections.defaultdict", "lightning.fabric.utilities.data.AttributeDict"),
    *("lightning_fabric.utilities.data.AttributeDict", "pytorch_lightning.utilities.parsing.AttributeDict"),
)
_OTHERS = (
    *("argparse.Namespace", "types.SimpleNamespace", "datetime.datetime", "datetime.date", "datetime.timedelta"),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *("numpy.dtype", "numpy.ndarray", "builtins.dict", "builtins.list", "builtins.int", "builtins.float"),
    *(
        f"{pathlib}.{kind}"
        for pathlib in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "WindowsPath")
    ),
    *(f"{pathlib}.Pure{kind}" for pathlib in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
)
STAND_INS = [(stand_in, name) for stand_in, names in ((_Plain, _DICTS), (_Nothing, _OTHERS)) for name in names]
"""What trainers store beside weights, by the names under which pickle knows it. None of it is imported or made."""


def state_in(path: Path, unwrap: bool = True) -> tuple[dict[str, Tensor], str]:
    """The state dict in a file of torch.save, and the key it was under, "" for none; raises DataError.

    `unwrap`: with names as the net itself has them, without those of what it was wrapped in.
    """
    content = _content(path)
    inside = _state_in(content)
    if inside is None:
        raise DataError(f"{path} cannot be read as weights alone: {_instead(content)}; {REMEDY}")
    (state, key, others, nameless), notes = inside, []
    if others:
        notes.append(f"its weights are taken from {key}, not from {' or '.join(others)}")
    if nameless:
        notes.append(f"the averaged weights in {' and '.join(nameless)} have no names that a net could take them by")
    if rest := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        notes.append(f"no tensors and left out: {_listed(rest)}")
        state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for note in notes:
        log.warning("%s: %s", path, note)
    return unwrapped(path, state, LIGHTNING in content) if unwrap else state, key


def unwrapped(path: Path, state: dict[str, Tensor], lightning: bool = False) -> dict[str, Tensor]:
    """The tensors by the names that the net itself has for them; raises DataError where two get the same.

    `lightning`: they are of a LightningModule, of which the net may be one part.
    """
    renamed = {name: ".".join(part for part in name.split(".") if part not in WRAPPED) for name in state}
    while renamed:
        if "n_averaged" in (own := {*renamed.values()}) and all(n.startswith(HOLDERS[0]) for n in own - {"n_averaged"}):
            renamed = {n: o for n, o in renamed.items() if o != "n_averaged"}  # torch.optim.swa_utils.AveragedModel's
        parts = Counter(f"{name.partition('.')[0]}." for name in renamed.values())
        holder = next((name for name in (*(f"{key}." for key in AVERAGED), *HOLDERS) if name in parts), None)
        if holder is None or (len(parts) > 1 and not lightning):
            break
        if len(parts) > 1:  # a LightningModule also has losses and metrics
            left = [name for name, own in renamed.items() if not own.startswith(holder)]
            log.warning("%s: the weights of %s are used; left out are %s", path, holder[:-1], _listed(left))
        renamed = {n: own.removeprefix(holder) for n, own in renamed.items() if own.startswith(holder)}
        lightning = False
    if len(set(renamed.values())) < len(renamed):
        raise DataError(f"{path}: without what its net was wrapped in, several of its tensors have the same name")
    return {own: state[name] for name, own in renamed.items()}


def config_beside(path: Path) -> dict[str, Any]:
    """Facts of a net from the config.json that timm's save_for_hf writes beside its weights; {} where there is none.

    Raises DataError for one that cannot be read.
    """
    beside = path.parent / CONFIG_OF_NET
    if path.name not in OF_HUB or not beside.is_file():
        return {}
    try:
        config = json.loads(beside.read_text())
        if "architecture" not in config:  # of another library
            return {}
        images = config.get("pretrained_cfg", config)  # of older versions of timm
        arguments = config.get("model_args") or {"num_classes": config["num_classes"]}
        wanted = {key: images[key] for key in IMAGES if key in images}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{beside} is no config.json as timm writes it ({error})") from error
    return {"architecture": config["architecture"], "arguments": arguments, "data_config": wanted}


def _content(path: Path) -> Any:
    """What `torch.save` wrote, with stand-ins for all that is no weight; raises DataError, with the reason."""
    try:
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True)  # torch warns of archives that it refuses
    except Exception as error:  # torch and pickle raise a dozen kinds
        raise DataError(f"{path} cannot be read as weights alone: {_why(path, error)}; {REMEDY}") from error


def _why(path: Path, error: Exception) -> str:
    """Why torch does not read a file as weights alone."""
    named = re.findall(r"GLOBAL (\S+)", str(error))
    with suppress(Exception), torch.serialization.safe_globals(STAND_INS):  # of other formats
        named = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or named
    if named:
        return f"it holds objects of {_listed(named)}, and making these would run code that the file chooses"
    if "TorchScript" in str(error):
        return "it is a TorchScript archive, which is code with weights"
    said = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n\nCheck")[0]
    return f"it is damaged, cut off, or not a file of torch.save ({' '.join(said.split())[:120]})"


def _instead(content: object) -> str:
    """What a file holds that has no state dict."""
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}, no state dict"
    return f"no state dict with names and tensors is in it, only {_listed(map(str, content)) or 'an empty dict'}"


def _listed(names: Any) -> str:
    """A few of the `names`, which a file chose, as one line."""
    names = [re.sub(r"[^\w.+-]", "?", name)[:80] for name in names]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


Found = tuple[dict[str, Any], str, list[str], list[str]]


def _state_in(content: object, depth: int = DEPTH) -> Found | None:
    """The state dict in what was read, its key, other keys that hold one, and averaged ones without names; or None."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return None
    states = {
        key: _state_in(content.get(key), depth - 1) for key in (*AVERAGED, *AS_TRAINED) if depth and key in content
    }
    nameless = [key for key in AVERAGED if isinstance(content.get(key), Mapping) and not states[key]]
    usable = {key: inner for key, inner in states.items() if inner}
    if usable:
        key, (state, inner, others, more) = next(iter(usable.items()))
        key = f"{key}.{inner}" if inner else key
        return state, key, [*list(usable)[1:], *others], [*nameless, *more]
    return (dict(content), "", [], nameless) if any(isinstance(v, Tensor) for v in content.values()) else None
