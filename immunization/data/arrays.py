"""The user's own matrices: both tasks from an npz or safetensors file, or from tables."""

from __future__ import annotations

import logging
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from immunization.checks import Fraction, Seed, checked
from immunization.compute.machine import check_room
from immunization.data.encoding import CODED, Missing, Tables
from immunization.data.preparation import (
    Normalize,
    check_training_rows,
    finish,
    split_rows,
    standardize,
    standardize_targets,
)
from immunization.data.tables import dialect_of, read_table
from immunization.data.task import SPLITS, USUAL, Origin, Split, Task, TaskPair, first_shared, kind_of, roles_of
from immunization.errors import ConfigError, DataError
from immunization.theory.spectrum import EPS32, eps_of

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

KINDS = (*USUAL, "unseen")
NAMES = re.compile(rf"(?P<role>({'|'.join(KINDS)})(_(?!val_|test_|[xy]$)[\w.-]+?)?)(_val|_test)?_[xy]")
"""Names of arrays: a role, perhaps a split, and x or y."""
SPLIT = re.compile(r"_(val|test)$")
TRAIN, VALIDATION = re.compile(r"_train(?=_[xy]$)"), re.compile(r"_(valid|validation|dev)(?=_[xy]$)")
"""Other names of splits, which would be those of further tasks."""
NORMALIZED = {
    "shared": "mean and std (ddof = 1) of the training rows of primary and harmful task together",
    "each": "mean and std (ddof = 1) of each task's training rows",
    "none": "none",
}
Targets = Literal["auto", "regression", "classes"]
Arrays = dict[str, Tensor]


@checked("dataset")
def arrays(
    seed: Seed,
    path: str | None = None,
    primary_csv: str | None = None,
    harmful_csv: str | Sequence[str] | None = None,
    benign_csv: str | Sequence[str] | None = None,
    unseen_csv: str | Sequence[str] | None = None,
    tables: Mapping[str, Any] | None = None,
    target: str | Mapping[str, Any] = "target",
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Missing = "refuse",
    csv: Mapping[str, Any] | None = None,
    targets: Targets = "auto",
    normalize: Normalize = "shared",
    val_fraction: Fraction = 0.1,
    test_fraction: Fraction = 0.2,
    common_range: bool = False,
    name: str = "arrays",
) -> TaskPair:
    """A pair of the user's matrices, by conf/dataset/arrays.yaml; raises ConfigError, DataError for a file or array.

    `tables` are DataFrames by the names that arrays of a file have without `_x` and `_y`: `primary`, `harmful`,
    `harmful_<name>`, `primary_test`, ... The index of a DataFrame is no input.
    """
    check_training_rows(val_fraction, test_fraction)
    files = _files(primary=primary_csv, harmful=harmful_csv, benign=benign_csv, unseen=unseen_csv)
    if len([given for given in (path, files, tables) if given]) > 1:
        raise ConfigError("more than one of dataset.path, dataset.*_csv and tables is given: choose one of them")
    read, names, paths = None, {}, {}
    if path:
        source, stored = path, _read_arrays(Path(path).expanduser())
    elif tables or (primary_csv and harmful_csv):
        dialect, as_text = dialect_of(csv), dict.fromkeys(categorical, "string")
        frames = (
            _frames(tables)
            if tables
            else {
                role: read_table(file, dialect, dtype_backend="numpy_nullable", dtype=as_text)
                for role, file in files.items()
            }
        )
        paths = (
            {key: f"tables[{key!r}]" for key in frames} if tables else {key: str(file) for key, file in files.items()}
        )
        source = ", ".join(paths.values())
        read = Tables(frames, paths, _targets(target, frames), drop, categorical, missing)
        stored, names = read.arrays()
    else:
        raise ConfigError(
            "dataset=arrays needs dataset.path (npz, safetensors), or dataset.primary_csv and dataset.harmful_csv"
        )
    generator = torch.Generator().manual_seed(seed)
    tasks, labels = {}, {}
    for role in _roles(stored):
        known, place = names.get(role), paths.get(role, source)
        tasks[role], labels[role] = _task(role, stored, place, targets, val_fraction, test_fraction, generator, known)
    about = {"data": source, "normalize": NORMALIZED[normalize], "labels": labels}
    if read:
        tasks = read.encode(tasks, normalize)
        about |= read.about
    _refuse_shared_rows(tasks)
    binary = [role for role, task in tasks.items() if not task.classes and len(task.train.y.unique()) == 2]
    if binary and targets == "auto":
        log.warning(
            "the targets of %s are floats of two values, taken as regression; for labels set dataset.targets=classes",
            " and ".join(binary),
        )
    pair = standardize_targets(standardize(TaskPair.of(name, tasks, about), normalize))
    return finish(pair, common_range)


def _frames(tables: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """DataFrames given from Python, without their index. Raises ConfigError for other values and names."""
    import pandas as pd

    for key, frame in tables.items():
        if not NAMES.fullmatch(f"{key}_x"):
            raise ConfigError(
                f"tables: {key!r} names no task; tasks are {', '.join(KINDS)}, further ones <kind>_<name>"
            )
        if isinstance(frame, str):
            raise ConfigError(
                f"dataset.tables: {key!r} was a DataFrame in Python; give it again, immunization.run(..., tables=...)"
            )
        if not isinstance(frame, pd.DataFrame) or frame.empty or not frame.columns.is_unique:
            raise ConfigError(f"tables[{key!r}] must be a pandas.DataFrame with rows, and columns of different names")
    return {key: frame.reset_index(drop=True).rename(columns=str) for key, frame in tables.items()}


def _targets(target: str | Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """The name of the target of every table: `target` is one, or has one by role. Raises ConfigError."""
    if isinstance(target, str):
        return dict.fromkeys(keys, target)
    found = {key: target.get(key, target.get(SPLIT.sub("", key))) for key in keys}
    if lacking := [key for key, name in found.items() if not isinstance(name, str)]:
        raise ConfigError(
            f"dataset.target names no column for {lacking[0]}: give one name, or one for each of {', '.join(found)}, "
            "as in 'dataset.target={primary:price,harmful:label}'"
        )
    return found


def _files(**given: str | Sequence[str] | None) -> dict[str, Path]:
    """The table of every role; raises ConfigError for one that two roles have."""
    found: dict[str, Path] = {}
    for kind, files in given.items():
        paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files or ())]
        found |= dict(zip(roles_of(kind, [path.name.partition(".")[0] for path in paths]), paths, strict=False))
    if shared := first_shared({role: [os.path.realpath(path)] for role, path in found.items()}):
        one, other, _ = shared
        raise ConfigError(
            f"dataset: {found[other]} is both the {one} and the {other} task; give every task its own file"
        )
    return found


def _roles(stored: Arrays) -> list[str]:
    """Roles of the tasks in `stored`, in the order in which they draw their splits: no task changes those before it."""
    found = list(dict.fromkeys(match["role"] for key in stored if (match := NAMES.fullmatch(key))))
    usual = [role for role in KINDS if role in found or role in ("primary", "harmful")]
    further = sorted((role for role in found if role not in KINDS), key=lambda role: KINDS.index(kind_of(role)))
    for role in further:
        if kind_of(role) == "primary" or kind_of(role) not in usual:
            remedy = "there is one primary task" if kind_of(role) == "primary" else "name the first of its kind"
            raise DataError(f"'{role}_x': {remedy} '{kind_of(role)}_x', further ones '<kind>_<name>_x'")
    return sorted(usual + further, key=lambda role: kind_of(role) == "unseen")


def _refuse_shared_rows(tasks: dict[str, Task]) -> None:
    """Raise DataError for two equal tasks, and for one beyond the usual three that shares a row with another.

    Warns of a harmful one with the inputs of the primary one.
    """
    rows = {}
    for role, task in tasks.items():
        pairs = (row for s in task.splits.values() for row in zip(s.x.numpy(), s.y.tolist(), strict=True))
        rows[role] = sorted((hash(x.tobytes()), y) for x, y in pairs)
    inputs = {role: [x for x, _ in pairs] for role, pairs in rows.items()}
    for one, other in combinations(rows, 2):
        usual = {one, other} <= set(USUAL)  # of the same inputs, two labels may agree here and there
        if rows[one] == rows[other] if usual else not set(rows[one]).isdisjoint(rows[other]):
            raise DataError(f"the {other} task and the {one} task share rows; give every task rows of its own")
        if one == "primary" and kind_of(other) == "harmful" and inputs[one] == inputs[other]:
            told = "the primary and the %s task have the same inputs: RIR is 1 with any model, up to the splits"
            log.warning(told, other)


def _task(
    role: str,
    stored: Arrays,
    source: str,
    targets: Targets,
    val_fraction: float,
    test_fraction: float,
    generator: torch.Generator,
    names: Sequence[str] | None = None,
) -> tuple[Task, str]:
    """The task of one role and a line on its targets; splits the file lacks are drawn from `<role>_x`.

    `names` are the texts of the classes that targets number.
    """
    x, y = _samples(stored, role, source)
    if names and targets == "regression":
        raise ConfigError(f"dataset.targets=regression: the targets of {role} are text, such as '{names[0]}'")
    is_classes = targets == "classes" or (targets == "auto" and not y.is_floating_point())
    classes = _classes(y, f"'{role}_y' in {source}", targets, names) if is_classes else None
    named = [s for s in ("val", "test") if {f"{role}_{s}_x", f"{role}_{s}_y"} & stored.keys()]
    given = {s: _samples(stored, f"{role}_{s}", source) for s in named}
    rows = split_rows(
        y if is_classes else torch.zeros(len(y)),
        0.0 if "val" in given else val_fraction,
        0.0 if "test" in given else test_fraction,
        generator,
    )
    splits = {}
    for split in SPLITS:
        part, target = given.get(split, (x[rows[split]], y[rows[split]]))
        if part.shape[1] != x.shape[1]:
            raise DataError(
                f"'{role}_{split}_x' in {source} has {part.shape[1]} columns, '{role}_x' has {x.shape[1]}; "
                "give them the same"
            )
        if classes is not None:
            unknown = target[~torch.isin(target, classes)]
            if len(unknown):
                raise DataError(
                    f"'{role}_{split}_y' in {source} holds the label {_named(unknown, names)[0]}, '{role}_y' does not"
                )
            target = torch.searchsorted(classes, target.to(classes.dtype))
        origin = Origin(f"{role}_x", rows[split])
        if split in given:
            origin = Origin(f"{role}_{split}_x", torch.arange(len(target)))
        splits[split] = Split(part.double(), target if is_classes else target.double(), origin)
    eps = eps_of(x)
    if eps > EPS32:
        told = "'%s_x' in %s has 16 bits, which show no condition number above %.2g; store float32"
        log.warning(told, role, source, eps**-2)
    if classes is None:
        return Task(role, **splits, eps=eps), "regression"
    about = f"classes {_named(classes, names)} coded 0 to {len(classes) - 1}"
    return Task(role, **splits, classes=len(classes), eps=eps), about


def _named(classes: Tensor, names: Sequence[str] | None) -> list[Any]:
    return [names[label] for label in classes.tolist()] if names else classes.tolist()


def _classes(y: Tensor, where: str, targets: Targets, names: Sequence[str] | None) -> Tensor:
    classes = y.unique()
    if targets == "auto" and 2 * len(classes) > len(y):
        if names:
            raise ConfigError(
                f"{where} holds {len(classes)} different texts in {len(y)} rows, which look like names or free text; "
                "if they are classes, set dataset.targets=classes"
            )
        raise ConfigError(
            f"{where} holds {len(classes)} different integers in {len(y)} rows; say whether they are "
            "dataset.targets=classes or dataset.targets=regression"
        )
    if len(classes) < 2:
        raise DataError(f"{where} holds one class only, {_named(classes, names)[0]}: the other class is empty")
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
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                names = _known(file, path)
                _check_claims(file, names)
                return {key: _tensor(file[key], key, path) for key in names}
        except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            said = "it is none; write one by numpy.savez" if "unsafely" in str(error) else error  # numpy's bad advice
            said = f"it holds Python objects; {CODED}" if "Object arrays" in str(said) else said
            raise DataError(f"{path} cannot be read as an npz file of numbers: {said}") from error
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in _known(file.keys(), path)}
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read as a safetensors file: {error}") from error
    raise ConfigError(f"dataset.path={path}: must end in .npz or .safetensors (for tables set dataset.primary_csv ...)")


def _check_claims(file: np.lib.npyio.NpzFile, names: Sequence[str]) -> None:
    """Raise ValueError where headers claim other sizes than the file holds, or more than half of the memory."""
    total = 0
    for name in names:
        with file.zip.open(f"{name}.npy") as member:
            one = np.lib.format.read_magic(member) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
            claimed, held = prod(shape) * dtype.itemsize, file.zip.getinfo(member.name).file_size - member.tell()
        if claimed != held and not dtype.hasobject:
            raise ValueError(f"'{name}' claims {dtype} {list(shape)}, {claimed:,} bytes, and holds {held:,}")
        total += claimed
    check_room(total)


def _tensor(array: np.ndarray, key: str, path: Path) -> torch.Tensor:
    if array.dtype.kind not in "biuf":
        remedy = CODED if key.endswith("_y") else "give real numbers"
        raise TypeError(f"'{key}' holds {array.dtype}; {remedy}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise TypeError(f"'{key}' holds integers above 2^63; {CODED}")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _known(names: Iterable[str], path: Path) -> list[str]:
    """Those of the `names` in a file that are read; raises DataError for one that is meant to be."""
    names = list(names)
    for name in names:
        own = name if NAMES.fullmatch(name) else re.sub(r"[\W_]+", "_", name).lower()
        meant = TRAIN.sub("", VALIDATION.sub("_val", own))
        if meant != name and NAMES.fullmatch(meant):
            raise DataError(f"{path} holds '{name}', which names no array that is read; rename it to '{meant}'")
    if ignored := [name for name in names if not NAMES.fullmatch(name) and name.endswith(("_x", "_y"))]:
        log.warning("%s: not read are %s; tasks are %s", path, ", ".join(ignored), ", ".join(KINDS))
    return [name for name in names if NAMES.fullmatch(name)]
