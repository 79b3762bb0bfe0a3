"""What the YAML groups offer, for `--help` and for messages: options of each group, and values with their comments."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml
from omegaconf import OmegaConf

from immunization.config import CONF

NESTED = "experiment"
"""The group whose folders hold options for users; in those of others an experiment chooses, or W&B reads."""

WIDTH, COLUMN = 118, 26


def options(group: str) -> tuple[str, list[str]]:
    """`group`, or the closest one above it that exists, and its options, those of --config-dir included."""
    given = re.search(r"(?:^|\0)(?:--config-dir|-cd)[=\0]([^\0]+)", "\0".join(sys.argv[1:]))
    folders = [CONF, *([Path(given[1])] if given else [])]
    while group:
        if known := {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}:
            return group, sorted(known)
        group = group.rpartition("/")[0]
    return group, []


def groups() -> str:
    """An entry for each group, its default marked; options in folders below a group stand behind its own."""
    pairs = [pair for entry in own()["defaults"] if isinstance(entry, dict) for pair in entry.items()]
    pairs.sort(key=lambda pair: pair[0] == "scheduler")  # it stands first in config.yaml for what it asks of the others
    return "\n".join(_entry(group, _listed(group, chosen)) for group, chosen in pairs if not {" ", "@"} & {*group})


def _listed(group: str, chosen: str | list[str] | None) -> str:
    below = sorted((CONF / group).glob("*/")) if group == NESTED else []
    folders = [group, *(f"{group}/{path.name}" for path in below)]
    found = [f"{folder}/{name}" for folder in folders for name in options(folder)[1]]
    names = [name.removeprefix(f"{group}/") for name in found]
    defaults = chosen if isinstance(chosen, list) else [chosen]
    return ", ".join(f"{name}*" if name in defaults else name for name in names)


def values() -> str:
    """An entry for each value at the top of config.yaml, with its comment."""
    entries, above = [], ""
    block = _text().partition("\nname:")[2].partition("\nhydra:")[0].strip()
    for line in f"name:{block}".splitlines():
        indent, key, value, comment = re.fullmatch(r"( *)(\w+): *(.*?)(?: *# (.*))?", line).groups()
        name = f"{above}.{key}" if indent else key
        above = above if indent else key
        if value:
            entries.append(_entry(name if "${" in value else f"{name}={value}", comment))
    return "\n".join(entries)


def own() -> dict[str, Any]:
    """The content of config.yaml."""
    return yaml.safe_load(_text())


def _text() -> str:
    return (CONF / "config.yaml").read_text()


def _entry(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"{name:<{COLUMN - 2}}  ", subsequent_indent=" " * COLUMN)


OmegaConf.register_new_resolver("usage_folder", lambda: str(CONF), replace=True)
OmegaConf.register_new_resolver("usage_groups", groups, replace=True)
OmegaConf.register_new_resolver("usage_values", values, replace=True)
