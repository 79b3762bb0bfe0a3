"""`wandb_run=...`: the configuration of a tracked run, read from W&B's server or from an offline folder, run again."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.config import check_trust
from immunization.errors import ConfigError, DataError

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

KEY = "wandb_run="


def again(arguments: Sequence[str]) -> tuple[DictConfig, Path | None]:
    """The configuration that `wandb_run=<id or offline folder> key=value ...` asks for, and hydra.run.dir if given.

    Raises ConfigError for what cannot be changed of a tracked run: keys that it does not have, and groups, which are
    composed before a run; DataError for a run that cannot be read.
    """
    (reference,) = (argument.removeprefix(KEY) for argument in arguments if argument.startswith(KEY))
    config = OmegaConf.create(tracked_config(reference))
    folder = None
    for argument in (argument for argument in arguments if not argument.startswith(KEY)):
        key, equals, value = argument.partition("=")
        if key == "hydra.run.dir":
            folder = Path(value)
            continue
        if argument == "tracker=none":
            config.tracker = None
            continue
        missing = object()
        before = OmegaConf.select(config, key, default=missing) if equals else missing
        if before is missing or OmegaConf.is_config(before):
            raise ConfigError(
                f"{argument}: beside wandb_run= only single values of the tracked run can be changed, as in seed=3, "
                "tracker=none and hydra.run.dir=..."
            )
        try:
            config = OmegaConf.merge(config, OmegaConf.from_dotlist([argument]))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{argument}: {error}") from error
    check_trust(config, arguments)
    return config, folder


def tracked_config(reference: str) -> dict[str, Any]:
    """The configuration of a run: `reference` is an offline folder, or `[<entity>/<project>/]<id>` on the server."""
    config = _offline(Path(reference)) if Path(reference).exists() else _online(reference)
    if not isinstance(config.get("method"), dict) or "dataset" not in config:
        raise DataError(f"{KEY}{reference}: that run is none of immunization, its configuration has no method and data")
    config["method"].pop("name", None)  # was added for grouping
    return {key: value for key, value in config.items() if not key.startswith("_") and "." not in key}


def _offline(folder: Path) -> dict[str, Any]:
    found = sorted(folder.rglob("run-*.wandb")) if folder.is_dir() else [folder]
    if len(found) != 1:
        raise DataError(f"{KEY}{folder}: {len(found)} files run-<id>.wandb are in it; give the folder of one run")
    config: dict[str, Any] = {}
    for record in records(found[0]):
        updates = [*record.run.config.update, *record.config.update]
        config |= {item.key: json.loads(item.value_json) for item in updates if item.key}
    return config


def _online(reference: str) -> dict[str, Any]:
    import wandb

    parts = reference.strip("/").split("/")
    path = "/".join(parts if len(parts) > 1 else [os.environ.get("WANDB_PROJECT", "immunization"), *parts])
    try:
        return dict(wandb.Api().run(path).config)
    except Exception as error:  # of W&B, of its HTTP library, of an account that is not there
        reason = " ".join(str(error).split())
        raise DataError(f"{KEY}{reference}: no such folder here, and W&B does not give run {path}: {reason}") from error


def records(path: Path) -> Iterator[Record]:
    """The records of a run-<id>.wandb file: LevelDB's log format after 7 bytes; a cut-off end is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, payload = path.read_bytes(), b""
    if not data.startswith(b":W&B"):
        raise DataError(f"{path} is no file of W&B")
    position, block, header = 7, 32768, 7
    while position + header <= len(data):
        if block - position % block < header:  # the rest of a block is too short for a header
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += header + length
        if position > len(data):  # still being written
            return
        payload += data[position - length : position]
        if kind in (1, 4):  # the whole record, or the last part of one
            yield Record.FromString(payload)
            payload = b""
