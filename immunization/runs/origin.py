"""The origin of an audited checkpoint: the data and the model of the run that made it."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from immunization.errors import ConfigError, DataError
from immunization.runs import files
from immunization.runs.filenames import ORIGINAL, ROWS, weights_of
from immunization.runs.net_facts import net_of
from immunization.runs.resume import different, differing_inputs, literal, read_config, recorded_inputs

NET, DATA = "immunization.models.Timm", "dataset "  # DATA begins the names of data among the inputs of a run

PLACES = ("root", "download", "cache", "cache_limit", "workers", "batch_size", "name")
"""Keys of `dataset` that say where the data are and how they are read, but not which they are."""


def audited(config: DictConfig, overrides: Iterable[str]) -> tuple[DictConfig, dict[str, str]]:
    """The configuration of an audit, with data, model, seed and dtype of the run that made its checkpoint, and flags.

    `overrides`, those of the command line, win over it. A run that trains is returned as it is. The flags are
    `other_data` than the checkpoint's, and `unknown_data` without config.yaml beside it, each with its reason.
    """
    if config.immunize is not False or not config.model.get("checkpoint"):
        return config, {}
    checkpoint = Path(config.model.checkpoint).expanduser()
    if not (before := _made_with(checkpoint)):
        reason = "no config.yaml lies beside model.checkpoint: it may have been made on other data"
        return config, {"unknown_data": reason}
    chosen = {override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides}
    if "pair" in chosen:  # stands for both
        chosen |= {"dataset.primary", "dataset.harmful"}
    config = copy.deepcopy(config)
    with open_dict(config):
        for key in ("seed", "dtype"):  # splits and initialization hang on them
            if key not in chosen and key in before:
                config[key] = before[key]
        if "dataset" not in chosen or config.dataset._target_ == before["dataset"]["_target_"]:
            config.dataset = _overridden(before["dataset"], config, "dataset", chosen)
        model = _reloading(before, checkpoint, chosen)
        if "model" not in chosen or config.model._target_ == model["_target_"]:
            config.model = _overridden(model, config, "model", {*chosen, "model.checkpoint"})
            _check_reference(config, before)
    made: dict[str, Any] = before["dataset"]
    now: Any = OmegaConf.to_container(config.dataset, resolve=True)
    kept, mine = ({key: value for key, value in data.items() if key not in PLACES} for data in (made, now))
    differing = ", ".join(different(kept, mine, "dataset."))
    reason = f"model.checkpoint was made on other data than it is audited on ({differing})"
    return config, {"other_data": reason} if differing else {}


def moved(config: DictConfig, inputs: Mapping[str, Any], origins: Mapping[str, tuple[str, Tensor]]) -> dict[str, str]:
    """The flag `other_data` of an audit whose data have another content than those that made its checkpoint.

    The run folder of the checkpoint says what they were. One that does not gives no flag.
    """
    if config.immunize is not False or not config.model.get("checkpoint"):
        return {}
    folder = weights_of(Path(config.model.checkpoint).expanduser()).parent
    changed = [name for name in differing_inputs(recorded_inputs(folder), inputs) if name.startswith(DATA)]
    if not changed:
        return {}
    try:
        kept = files.read_tensors(folder / ROWS)[0]
    except DataError:
        kept = {}
    told, places = [], {name: rows for name, (_, rows) in origins.items()}
    for role in dict.fromkeys(name.removeprefix(DATA).partition("/")[0] for name in changed):
        splits = [f"{role}/{split}" for split in ("train", "val", "test")]
        before, now = ([len(rows.get(name, ())) for name in splits] for rows in (kept, places))
        counts = f"{' + '.join(map(str, before))} rows, now {' + '.join(map(str, now))}"
        told.append(f"{role}: {counts if any(before) and before != now else 'other rows'}")
    return {"other_data": f"model.checkpoint was made on other data than it is audited on ({'; '.join(told)})"}


def _made_with(checkpoint: Path) -> dict[str, Any] | None:
    try:
        before = read_config(weights_of(checkpoint).parent)
    except DataError:
        return None
    parts = (before.get(key) for key in ("dataset", "model"))
    return before if all(isinstance(part, dict) and "_target_" in part for part in parts) else None


def _overridden(before: Mapping[str, Any], config: DictConfig, group: str, chosen: Iterable[str]) -> DictConfig:
    """`before` with the values of `config` under the keys below `group` that were chosen."""
    node = literal(dict(before))
    for key in chosen:
        if key.startswith(f"{group}."):
            OmegaConf.update(node, key.removeprefix(f"{group}."), OmegaConf.select(config, key), force_add=True)
    return node


def _reloading(before: Mapping[str, Any], checkpoint: Path, chosen: Iterable[str]) -> dict[str, Any]:
    """The model so that it takes its weights from `checkpoint`, with what it was made from as the baseline of a net.

    What the folder says of the net was written by others: raises DataError for more than a file may choose.
    """
    model, path = dict(before["model"]), weights_of(checkpoint)
    net, makes_own = model["_target_"] == NET, "checkpoint" not in model
    facts = files.read_weights(path)[1] if makes_own or (net and path.suffix == ".safetensors") else {}
    named = net_of(path, facts) if "architecture" in facts else None
    original = path.with_name(ORIGINAL)
    reference = {"reference": str(original)} if named and original.exists() else {}
    if makes_own:  # a net of timm, or a model that we do not know
        if named is None:
            return {"_target_": "immunization.models.weights.restored", "model": {**model, "_partial_": True}}
        known = {"name": named[0], "arguments": named[1]}
        trainable = model.get("trainable", "last")
        return {"_target_": NET, **known, "trainable": trainable, **reference}
    elsewhere = ":" in str(model.get("name"))  # a folder, or a repository, that need not be there again
    if named and elsewhere:
        model["name"], model["arguments"] = named
    elif net and not any(key.startswith(("model.name", "model.arguments")) for key in chosen):
        net_of(path.parent, {"architecture": model["name"], "arguments": model.get("arguments")})
    folded = model.get("trainable") == "fold"  # the map is there, and the net without it is the baseline
    if folded:
        model["trainable"] = "last"
    if reference:
        model |= reference
    elif "reference" in model and before.get("immunize", True):  # an audit's is the one it had itself
        if model.get("checkpoint") and Path(model["checkpoint"]).expanduser().exists():
            model["reference"] = model["checkpoint"]
        elif model.get("pretrained") and not model.get("checkpoint") and not folded and not elsewhere:
            model["reference"] = "hub"
    return model


def _check_reference(config: DictConfig, before: Mapping[str, Any]) -> None:
    """Raise ConfigError for an immunized net without a folded map where its baseline is not known."""
    method = (before.get("method") or {}).get("_target_")
    changed = before.get("immunize", True) and method != "immunization.methods.Identity"
    if not changed or config.model._target_ != NET or config.model.get("reference"):
        return
    if "fold" not in files.read_weights(weights_of(Path(config.model.checkpoint).expanduser()))[1]:
        raise ConfigError(
            f"model.checkpoint={config.model.checkpoint}: its run folder does not say where the weights before "
            "immunization are; give model=timm model.reference=<file or run folder>, or hub for the pretrained ones"
        )
