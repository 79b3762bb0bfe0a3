"""Where an audited checkpoint comes from: its run folder says on which data, and with which model, it was made."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from immunization.errors import ConfigError, DataError
from immunization.runs import files
from immunization.runs.filenames import weights_of
from immunization.runs.resume import different, read_config

PLACES = ("root", "download", "cache", "cache_limit", "workers", "batch_size", "name")
"""Keys of `dataset` that say where the data are and how they are read, but not which they are."""
OF_THE_RUN = ("seed", "dtype")
"""Keys outside of `dataset` and `model` that an audit takes over too: splits and initialization hang on them."""
PAIR = {"pair": ("dataset.primary", "dataset.harmful")}
"""What stands for several keys on the command line."""


def audited(config: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """The configuration of an audit, with data, model, seed and dtype of the run that made its checkpoint.

    What `overrides`, those of the command line, say of them wins. Everything else is returned as it is: a run that
    trains, and a checkpoint without a run folder's config.yaml beside it.
    """
    if not (before := _made_with(config)):
        return config
    chosen = _keys(overrides)
    config = copy.deepcopy(config)
    with open_dict(config):
        for key in OF_THE_RUN:
            if key not in chosen and key in before:
                config[key] = before[key]
        if "dataset" not in chosen or _target(config, "dataset") == before["dataset"]["_target_"]:
            config.dataset = _overridden(before["dataset"], config, "dataset", chosen)
        model = _reloading(before["model"], Path(config.model.checkpoint).expanduser())
        if "model" not in chosen or _target(config, "model") == model["_target_"]:
            config.model = _overridden(model, config, "model", {*chosen, "model.checkpoint"})
            _check_reference(config, before)
    return config


def data_flags(config: DictConfig) -> dict[str, str]:
    """Flags of an audit, each with its reason: `other_data` than the checkpoint's, or `unknown_data`."""
    if config.immunize is not False or OmegaConf.select(config, "model.checkpoint") is None:
        return {}
    if not (before := _made_with(config)):
        return {"unknown_data": "no config.yaml lies beside model.checkpoint: it may have been made on other data"}
    now = OmegaConf.to_container(config.dataset, resolve=True)
    kept = ({key: value for key, value in data.items() if key not in PLACES} for data in (before["dataset"], now))
    if differing := different(*kept, "dataset."):
        return {"other_data": f"model.checkpoint was made on other data than it is audited on ({', '.join(differing)})"}
    return {}


def _made_with(config: DictConfig) -> dict[str, Any] | None:
    """The configuration beside the checkpoint of an audit; None where there is none, or nothing is audited."""
    checkpoint = OmegaConf.select(config, "model.checkpoint")
    if config.immunize is not False or not checkpoint:
        return None
    path = Path(str(checkpoint)).expanduser()
    try:
        before = read_config(path if path.is_dir() else path.parent)
    except DataError:
        return None
    parts = (before.get(key) for key in ("dataset", "model"))
    return before if all(isinstance(part, dict) and "_target_" in part for part in parts) else None


def _target(config: DictConfig, group: str) -> str:
    return str(config[group]._target_)


def _keys(overrides: Iterable[str]) -> set[str]:
    """The keys that overrides of the command line set."""
    keys = {override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides}
    return keys.union(*(PAIR[key] for key in keys & PAIR.keys()))


def _overridden(before: Mapping[str, Any], config: DictConfig, group: str, chosen: Iterable[str]) -> DictConfig:
    """`before` with the values of `config` under the keys below `group` that were chosen."""
    node = OmegaConf.create(dict(before))
    for key in chosen:
        if key.startswith(f"{group}."):
            OmegaConf.update(node, key.removeprefix(f"{group}."), OmegaConf.select(config, key), force_add=True)
    return node


def _reloading(model: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """`model` so that it takes its weights from `checkpoint`, with what it was made from as the baseline of a net."""
    model = dict(model)
    if "checkpoint" not in model:  # one that makes its own weights: a net of timm, or a model that we do not know
        if "architecture" not in (facts := _facts(checkpoint)):
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
    changed = before.get("immunize", True) and before["method"]["_target_"] != "immunization.methods.Identity"
    if not changed or _target(config, "model") != "immunization.models.Timm" or config.model.get("reference"):
        return
    if "fold" not in _facts(Path(config.model.checkpoint).expanduser()):
        raise ConfigError(
            f"model.checkpoint={config.model.checkpoint}: its run folder does not say where the weights before "
            "immunization are; give model=timm model.reference=<file or run folder>, or hub for the pretrained ones"
        )


def _facts(checkpoint: Path) -> dict[str, Any]:
    return files.read_weights(weights_of(checkpoint))[1]
