"""Libraries that only a test needs, installed for it alone; where that is not possible the test is skipped."""

import subprocess
import sys
from pathlib import Path

import pytest


def install(folder: Path, *arguments: str, python: str | Path = sys.executable) -> None:
    """`pip install` with these arguments, or a skip with pip's last line."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{arguments[-1]} does not install in time")
    if done.returncode:
        pytest.skip(f"{arguments[-1]} cannot be installed: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
