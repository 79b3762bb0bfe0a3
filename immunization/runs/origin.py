"""Where an audited checkpoint comes from: its run folder says on which data, and with which model, it was made."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from immunization.errors import ConfigError, DataError
from immunization.runs import files
from immunization.runs.filenames import weights_of
from immunization.runs.resume import different, literal, read_config

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
        model = _reloading(before["model"], checkpoint)
        if "model" not in chosen or config.model._target_ == model["_target_"]:
            config.model = _overridden(model, config, "model", {*chosen, "model.checkpoint"})
            _check_reference(config, before)
    data = before["dataset"], OmegaConf.to_container(config.dataset, resolve=True)
    kept = ({key: value for key, value in one.items() if key not in PLACES} for one in data)
    differing = ", ".join(different(*kept, "dataset."))
    reason = f"model.checkpoint was made on other data than it is audited on ({differing})"
    return config, {"other_data": reason} if differing else {}


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


def _reloading(model: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """`model` so that it takes its weights from `checkpoint`, with what it was made from as the baseline of a net."""
    model = dict(model)
    if "checkpoint" not in model:  # one that makes its own weights: a net of timm, or a model that we do not know
        if "architecture" not in (facts := files.read_weights(weights_of(checkpoint))[1]):
            return {"_target_": "immunization.models.weights.restored", "model": {**model, "_partial_": True}}
        known = {"name": facts["architecture"], "arguments": facts["arguments"]}
        return {"_target_": "immunization.models.Timm", **known, "trainable": model.get("trainable", "last")}
    folded = model.get("trainable") == "fold"  # the map is there, and the net without it is the baseline
    if folded:
        model["trainable"] = "last"
    if "reference" in model:
        if model.get("checkpoint") and Path(model["checkpoint"]).expanduser().exists():
            model["reference"] = model["checkpoint"]
        elif model.get("pretrained") and not model.get("checkpoint") and not folded:
            model["reference"] = "hub"
    return model


def _check_reference(config: DictConfig, before: Mapping[str, Any]) -> None:
    """Raise ConfigError for an immunized net without a folded map where its baseline is not known."""
    method = (before.get("method") or {}).get("_target_")
    changed = before.get("immunize", True) and method != "immunization.methods.Identity"
    if not changed or config.model._target_ != "immunization.models.Timm" or config.model.get("reference"):
        return
    if "fold" not in files.read_weights(weights_of(Path(config.model.checkpoint).expanduser()))[1]:
        raise ConfigError(
            f"model.checkpoint={config.model.checkpoint}: its run folder does not say where the weights before "
            "immunization are; give model=timm model.reference=<file or run folder>, or hub for the pretrained ones"
        )
