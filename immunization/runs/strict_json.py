"""JSON that every parser reads (no NaN or Infinity), written so that a killed process leaves no half file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from immunization.runs import files


def plain(value: object) -> Any:
    """`value` with tensors and arrays as lists, non-finite numbers as None, and other objects as text."""
    if hasattr(value, "tolist"):  # tensors, arrays and numpy scalars
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def dumps(value: object, indent: int | None = None) -> str:
    """`value` as JSON, non-finite numbers as null."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write(path: Path, value: object) -> None:
    """Write `value` to `path` as JSON: the file is the old one or the new one, never a part of either.

    Raises OSError if the folder cannot be written.
    """
    files.write(path, dumps(value, indent=2) + "\n")
