"""What of a configuration decides the numbers of a run, and which run folders need no further work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from immunization.errors import DataError
from immunization.result import Result

CONFIG = "config.yaml"

BOOKKEEPING = ("figures", "log_every", "name", "objective", "resume", "tags", "threads", "tracker", "trusted")
"""Keys that change where and how a run is shown, and no number in its result."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with it, ten times faster


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration that a run folder holds; raises DataError where there is none to read."""
    path = folder / CONFIG
    try:
        content = yaml.load(path.read_text(), _LOADER)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a configuration; it was cut off or edited")
    return content


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plain configuration that decides the numbers of the run."""
    return {key: value for key, value in config.items() if key not in BOOKKEEPING}


def completed(config: DictConfig, folder: Path) -> Result | None:
    """The result in `folder` if it is a completed one of this very configuration, else None: there is work to do."""
    try:
        result, before = Result.read(folder), read_config(folder)
    except DataError:
        return None
    now = OmegaConf.to_container(config, resolve=True)
    return result if result.status == "completed" and decisive(before) == decisive(now) else None
