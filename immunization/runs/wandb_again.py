"""`wandb_run=...`: the configuration of a tracked run, from W&B's server or from an offline run's folder, run again."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.errors import ConfigError, DataError
from immunization.runs.filenames import CONFIG
from immunization.runs.numbers import unspelled
from immunization.runs.resume import literal, read_config

KEY = "wandb_run="


def again(arguments: Sequence[str]) -> tuple[DictConfig, Path | None]:
    """The configuration that `wandb_run=<id or offline folder> key=value ...` asks for, and hydra.run.dir if given.

    Raises ConfigError for keys that the tracked run does not have, and groups; DataError for a run that cannot be read.
    """
    (reference,) = (argument.removeprefix(KEY) for argument in arguments if argument.startswith(KEY))
    config, folder = literal(tracked_config(reference)), None
    for argument in (argument for argument in arguments if not argument.startswith(KEY)):
        key, equals, value = argument.partition("=")
        if key == "hydra.run.dir":
            folder = Path(value)
            continue
        if argument == "tracker=none":
            config.tracker = None
            continue
        before = OmegaConf.select(config, key, default=...) if equals else ...
        if before is ... or OmegaConf.is_dict(before):
            raise ConfigError(
                f"{argument}: beside wandb_run= only values of the tracked run can be changed, as in seed=3, "
                "tracker=none and hydra.run.dir=..."
            )
        try:
            config = OmegaConf.merge(config, OmegaConf.from_dotlist([argument]))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{argument}: {error}") from error
    return config, folder


def tracked_config(reference: str) -> dict[str, Any]:
    """The configuration of a run: `reference` is a folder, or `[<entity>/<project>/]<id>` on the server."""
    config = _offline(Path(reference)) if Path(reference).exists() else _online(reference)
    if not isinstance(config.get("method"), dict) or "dataset" not in config:
        raise DataError(f"{KEY}{reference}: that run is none of immunization, its configuration has no method and data")
    config["method"].pop("name", None)  # was added for grouping
    if order := config.pop("attack_order", []):  # was added, too
        config["attack"] = {name: config["attack"][name] for name in order}
    return unspelled({key: value for key, value in config.items() if not key.startswith("_") and "." not in key})


def _offline(path: Path) -> dict[str, Any]:
    """What stands in the run folder: `path` is that folder, its wandb/, an offline run in there, or the file of one."""
    around = [path.resolve(), *path.resolve().parents][:4]
    folder = next((folder for folder in around if (folder / CONFIG).is_file()), None)
    if folder is None:
        raise DataError(f"{KEY}{path}: no run folder, which has a {CONFIG}, nor an offline run inside of one")
    return read_config(folder)


def _online(reference: str) -> dict[str, Any]:
    import wandb

    parts = reference.strip("/").split("/")
    path = "/".join(parts if len(parts) > 1 else [os.environ.get("WANDB_PROJECT", "immunization"), *parts])
    try:
        return dict(wandb.Api().run(path).config)
    except Exception as error:  # of W&B, of its HTTP library, of an account that is not there
        reason = " ".join(str(error).split())
        raise DataError(f"{KEY}{reference}: no such folder here, and W&B does not give run {path}: {reason}") from error
