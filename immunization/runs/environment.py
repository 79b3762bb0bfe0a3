"""environment.json: code version, libraries, device and command, so that numbers can be traced and repeated."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from immunization.compute import keys
from immunization.runs.filenames import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("immunization", *keys.LIBRARIES.values(), "hydra-core", "wandb")


def describe(device: torch.device | str) -> dict[str, Any]:
    """Code version, library versions, hardware, command line and time (UTC); None for what cannot be found out."""
    return {
        "time": datetime.now(UTC).isoformat(),
        "command": shlex.join([sys.executable, *sys.argv]),
        "git": _git(ROOT),
        "python": platform.python_version(),
        "packages": {name: keys.version_of(name) for name in PACKAGES},
        "platform": platform.platform(),
        "device": str(device),
        "device_name": _device_name(torch.device(device)),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def command_of(folder: str | Path) -> str | None:
    """The command that made a run, without the places of Python and of this checkout; None where it is not known."""
    try:
        _, program, *arguments = shlex.split(json.loads((Path(folder) / ENVIRONMENT).read_text())["command"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    name = Path(program).name
    start = {"immunize": ["immunize"], "__main__.py": ["python", "-m", "immunization"]}.get(name, ["python", name])
    return shlex.join([*start, *arguments])


def arithmetic(device: torch.device) -> tuple[str | int | None, ...]:
    """What decides how numbers are rounded: libraries, the device, the instructions in use and the threads."""
    return (
        *keys.versions(),
        _device_name(device),
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        torch.get_num_threads(),
    )


def maker(device: torch.device) -> str:
    """Who computes: the commit of this checkout, with a + where files differ from it, and the device."""
    git = _git(ROOT)
    commit = git["commit"][:7] + "+" * git["dirty"] if git else f"version {keys.version_of('immunization')}"
    return f"{commit} on {_device_name(device)}"


@cache  # later runs of a process have the code that was loaded for the first
def _git(root: Path) -> dict[str, Any] | None:
    """Commit of a checkout, and whether tracked files differ from it; None for an installed package."""
    if not (root / ".git").exists():  # else git would report a repository that surrounds the environment
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": answer.removesuffix("-dirty"), "dirty": answer.endswith("-dirty")}


def _device_name(device: torch.device) -> str | None:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
