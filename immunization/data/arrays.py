"""The user's own matrices: inputs and targets of both tasks from an npz or safetensors file, or from CSV files."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from immunization.checks import Fraction, check_training_rows, checked
from immunization.data.csv_files import numbers, read_table, require_columns
from immunization.data.preparation import Normalize, finish, split_rows, standardize, standardize_targets
from immunization.data.task import SPLITS, Origin, Split, Task, TaskPair
from immunization.errors import ConfigError, DataError

ROLES = ("primary", "harmful", "benign")
Targets = Literal["auto", "regression", "classes"]
Arrays = dict[str, Tensor]


@checked("dataset")
def arrays(
    seed: int,
    path: str | None = None,
    primary_csv: str | None = None,
    harmful_csv: str | None = None,
    benign_csv: str | None = None,
    target: str = "target",
    targets: Targets = "auto",
    normalize: Normalize = "shared",
    val_fraction: Fraction = 0.1,
    test_fraction: Fraction = 0.2,
    common_range: bool = False,
    name: str = "arrays",
) -> TaskPair:
    """A pair from extracted features or any other matrices; the options are described in conf/dataset/arrays.yaml.

    Raises ConfigError for an option that cannot be, DataError for a file or array that cannot be used.
    """
    check_training_rows(val_fraction, test_fraction)
    tables = {"primary": primary_csv, "harmful": harmful_csv, "benign": benign_csv}
    if path and any(tables.values()):
        raise ConfigError("dataset.path and dataset.*_csv are both given: choose one of them")
    if path:
        source, stored = path, _read_arrays(Path(path).expanduser())
    elif primary_csv and harmful_csv:
        source = ", ".join(filter(None, tables.values()))
        stored = _read_tables({role: Path(file).expanduser() for role, file in tables.items() if file}, target)
    else:
        raise ConfigError(
            "dataset=arrays needs dataset.path (npz, safetensors), or dataset.primary_csv and dataset.harmful_csv"
        )
    generator = torch.Generator().manual_seed(seed)
    tasks, labels = {}, {}
    for role in ROLES:
        if role != "benign" or "benign_x" in stored:
            tasks[role], labels[role] = _task(role, stored, source, targets, val_fraction, test_fraction, generator)
    about = {
        "data": source,
        "normalize": {
            "shared": "mean and std (ddof = 1) of the training rows of primary and harmful task together",
            "each": "mean and std (ddof = 1) of each task's training rows",
            "none": "none",
        }[normalize],
        "labels": labels,
    }
    pair = standardize_targets(standardize(TaskPair(name, **tasks, about=about), normalize))
    return finish(pair, common_range)


def _task(
    role: str,
    stored: Arrays,
    source: str,
    targets: Targets,
    val_fraction: float,
    test_fraction: float,
    generator: torch.Generator,
) -> tuple[Task, str]:
    """The task of one role and a line on its targets; splits the file lacks are drawn from `<role>_x`."""
    x, y = _samples(stored, role, source)
    is_classes = targets == "classes" or (targets == "auto" and not y.is_floating_point())
    given = {s: _samples(stored, f"{role}_{s}", source) for s in ("val", "test") if f"{role}_{s}_x" in stored}
    rows = split_rows(
        y if is_classes else torch.zeros(len(y)),
        0.0 if "val" in given else val_fraction,
        0.0 if "test" in given else test_fraction,
        generator,
    )
    parts = {split: given.get(split, (x[rows[split]], y[rows[split]])) for split in SPLITS}
    origins = {split: Origin(f"{role}_x", rows[split]) for split in SPLITS}
    origins |= {split: Origin(f"{role}_{split}_x", torch.arange(len(label))) for split, (_, label) in given.items()}
    for split, (part, _) in parts.items():
        if part.shape[1] != x.shape[1]:
            raise DataError(
                f"'{role}_{split}_x' in {source} has {part.shape[1]} columns, '{role}_x' has {x.shape[1]}; "
                "give them the same"
            )
    eps = torch.finfo(torch.float64 if x.dtype == torch.float64 or not x.is_floating_point() else torch.float32).eps
    if not is_classes:
        splits = {s: Split(part.double(), target.double(), origins[s]) for s, (part, target) in parts.items()}
        return Task(role, **splits, eps=eps), "regression"
    classes = _classes(y, f"'{role}_y' in {source}", targets)
    for split, (_, label) in parts.items():
        unknown = label[~torch.isin(label, classes)]
        if len(unknown):
            raise DataError(f"'{role}_{split}_y' in {source} holds the label {unknown[0].item()}, '{role}_y' does not")
    splits = {
        split: Split(part.double(), torch.searchsorted(classes, label.to(classes.dtype)), origins[split])
        for split, (part, label) in parts.items()
    }
    about = f"classes {classes.tolist()} coded 0 to {len(classes) - 1}"
    return Task(role, **splits, classes=len(classes), eps=eps), about


def _classes(y: Tensor, where: str, targets: Targets) -> Tensor:
    """The different labels of y, ascending."""
    classes = y.unique()
    if targets == "auto" and 2 * len(classes) > len(y):
        raise ConfigError(
            f"{where} holds {len(classes)} different integers in {len(y)} rows; say whether they are "
            "dataset.targets=classes or dataset.targets=regression"
        )
    if len(classes) < 2:
        raise DataError(f"{where} holds one class only, {classes[0].item()}: the other class is empty")
    return classes


def _samples(stored: Arrays, prefix: str, source: str) -> tuple[Tensor, Tensor]:
    """Inputs `<prefix>_x` [rows, columns] and targets `<prefix>_y` [rows], finite and real; y as float64 or int64."""
    x, y = (stored.get(f"{prefix}_{kind}") for kind in "xy")
    for key, array, shape in ((f"{prefix}_x", x, "[rows, columns]"), (f"{prefix}_y", y, "[rows]")):
        if array is None:
            raise DataError(
                f"{source} lacks the array '{key}'; it holds {', '.join(stored) or 'no array of a known name'}"
            )
        fits = array.ndim == 2 if key.endswith("_x") else array.ndim == 1 or array.shape[1:] == (1,)
        if not fits or not array.numel() or array.is_complex():
            raise DataError(
                f"'{key}' in {source} is {array.dtype} {list(array.shape)}; expected real numbers {shape}, not empty"
            )
        bad = (~torch.isfinite(array)).nonzero()
        if len(bad):
            raise DataError(
                f"'{key}' in {source} holds {len(bad)} NaN or infinite values, the first at {bad[0].tolist()}; "
                "clean or drop those rows"
            )
    if len(x) != len(y):
        raise DataError(
            f"'{prefix}_x' in {source} has {len(x)} rows, '{prefix}_y' has {len(y)} targets; give one a row"
        )
    y = y.flatten()
    return x, y.double() if y.is_floating_point() else y.long()


def _read_arrays(path: Path) -> Arrays:
    """The arrays of an npz or safetensors file whose names are known; nothing is ever unpickled."""
    wanted = [f"{role}{split}_{kind}" for role in ROLES for split in ("", "_val", "_test") for kind in "xy"]
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                return {key: torch.from_numpy(file[key]) for key in wanted if key in file}
        except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be read as an npz file of numbers: {error}") from error
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in wanted if key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read as a safetensors file: {error}") from error
    raise ConfigError(
        f"dataset.path={path}: must end in .npz or .safetensors (for CSV files set dataset.primary_csv ...)"
    )


def _read_tables(paths: dict[str, Path], target: str) -> Arrays:
    """One CSV file a task, `target` its column of targets, all others inputs, the same ones in every file."""
    stored, columns = {}, None
    for role, path in paths.items():
        table = read_table(path)
        require_columns(table, [target], path)
        columns = columns or [column for column in table if column != target]
        if sorted(columns) != sorted(column for column in table if column != target):
            raise DataError(f"{path} and {paths['primary']} have different columns; both tasks need the same inputs")
        y = numbers(table, [target], path)[:, 0]
        stored[f"{role}_x"] = torch.from_numpy(numbers(table, columns, path))
        stored[f"{role}_y"] = torch.from_numpy(y.astype(table[target].dtype) if table[target].dtype.kind == "i" else y)
    return stored
