"""The user's own matrices: all tasks from an npz or safetensors file, or from tables."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations
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
from immunization.data.task import SPLITS, USUAL, Origin, Split, Task, TaskPair, first_shared
from immunization.errors import ConfigError, DataError
from immunization.roles import kind_of, roles_of
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
LAST = {"train": 1, "valid": 1, "validation": 1, "dev": 1, "val": 1, "test": 1, "x": 2, "y": 2}
"""The order of words in a name of an array: first the role, then other words, splits, x or y."""
SPLIT_OF_ARRAY = re.compile(r"_(val|test)_([xy])$")
USUAL_NAMES = [f"{kind}{split}_{end}" for kind in KINDS for split in ("", "_val", "_test") for end in "xy"]
NORMALIZED = {
    "shared": "mean and std (ddof = 1) of the training rows of primary and harmful task together",
    "each": "mean and std (ddof = 1) of each task's training rows",
    "none": "none",
}
Targets = Literal["auto", "regression", "classes"]


@checked("dataset/arrays")
def arrays(
    seed: Seed,
    path: str | None,
    primary_csv: str | None,
    harmful_csv: str | Sequence[str] | None,
    benign_csv: str | Sequence[str] | None,
    unseen_csv: str | Sequence[str] | None,
    tables: Mapping[str, Any] | None,
    target: str | Mapping[str, Any],
    drop: Sequence[str],
    categorical: Sequence[str],
    missing: Missing,
    csv: Mapping[str, Any] | None,
    targets: Targets,
    normalize: Normalize,
    val_fraction: Fraction,
    test_fraction: Fraction,
    common_range: bool,
    name: str,
) -> TaskPair:
    """A pair of the user's matrices, by conf/dataset/arrays.yaml; raises ConfigError, DataError for a file or array.

    `tables` are DataFrames by the names that arrays of a file have without `_x` and `_y`: `primary`, `harmful`,
    `harmful_<name>`, `primary_test`, ... The index of a DataFrame is no input.
    """
    check_training_rows(val_fraction, test_fraction)
    files = _files(primary=primary_csv, harmful=harmful_csv, benign=benign_csv, unseen=unseen_csv)
    if len([given for given in (path, files, tables) if given]) > 1:
        raise ConfigError("more than one of dataset.path, dataset.*_csv and tables is given: choose one of them")
    encoder, places = None, {}
    if path:
        source = path
        x, y = _matrices(_read_arrays(Path(path).expanduser()), path)
        numbers, eps = {key: torch.arange(len(own)) for key, own in x.items()}, {key: eps_of(x[key]) for key in x}
    elif tables or (primary_csv and harmful_csv):
        if tables:
            frames, places = _frames(tables), {key: f"tables[{key!r}]" for key in tables}
        else:
            options = {"dtype_backend": "numpy_nullable", "dtype": dict.fromkeys(categorical, "string")}
            frames = {role: read_table(file, dialect_of(csv), **options) for role, file in files.items()}
            places = {role: str(file) for role, file in files.items()}
        source = ", ".join(places.values())
        encoder = Tables(frames, places, _target_names(target, frames), drop, categorical, missing)
        y, numbers, eps = encoder.targets, encoder.rows, encoder.eps
    else:
        raise ConfigError(
            "dataset=arrays needs dataset.path (npz, safetensors), or dataset.primary_csv and dataset.harmful_csv"
        )
    generator, codes, classes, labels = torch.Generator().manual_seed(seed), dict[str, Tensor](), {}, {}
    rows: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for role in (roles := _roles(y, source, "" if encoder else "_x")):
        unlabeled = encoder.unlabeled[role] if encoder else 0
        own, classes[role], labels[role] = _coded(role, y, places.get(role, source), targets, unlabeled)
        strata = own[role] if classes[role] else torch.zeros(len(own[role]))
        fractions = (
            0.0 if f"{role}_{s}" in own else share for s, share in (("val", val_fraction), ("test", test_fraction))
        )
        drawn, codes = split_rows(strata, *fractions, generator), codes | own
        given = {s: (key, torch.arange(len(own[key]))) for s in SPLITS if (key := f"{role}_{s}") in own}
        rows[role] = {s: given.get(s, (role, drawn[s])) for s in SPLITS}
        if eps[role] > EPS32:
            told = "'%s_x' in %s has 16 bits, which show no condition number above %.2g; store float32"
            log.warning(told, role, source, eps[role] ** -2)
    if encoder:
        x = encoder.encode({role: own["train"] for role, own in rows.items()}, normalize)
    tasks = {}
    for role in roles:
        splits = {
            s: Split(x[k][i].double(), codes[k][i], Origin(f"{k}_x", numbers[k][i])) for s, (k, i) in rows[role].items()
        }
        tasks[role] = Task(role, **splits, classes=classes[role], eps=eps[role])
    _refuse_shared_rows(tasks)
    few = []
    for role, y in ((role, task.train.y) for role, task in tasks.items() if not task.classes):
        if (values := len(y.unique())) == 2 or (2 * values <= len(y) and (y == y.round()).all()):
            few.append(f"{role} ({values} values)")
    if few and targets == "auto":
        told = "the targets of %s are floats, taken as regression; for labels set dataset.targets=classes"
        log.warning(told, " and ".join(few))
    about = {"data": source, "normalize": NORMALIZED[normalize], "labels": labels} | (encoder.about if encoder else {})
    pair = standardize_targets(standardize(TaskPair.of(name, tasks, about), normalize))
    return finish(pair, common_range)


def _frames(tables: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """DataFrames given from Python, without their index. Raises ConfigError for other values and names."""
    import pandas as pd

    frames = {}
    for key, frame in tables.items():
        meant = _meant(key if NAMES.fullmatch(key) else f"{key}_x")
        if meant != f"{key}_x" or not NAMES.fullmatch(meant):
            remedy = f"rename it to {meant[:-2]!r}; " if NAMES.fullmatch(meant) else ""
            raise ConfigError(
                f"tables: {key!r} names no task; {remedy}tasks are {', '.join(KINDS)}, further ones <kind>_<name>"
            )
        if isinstance(frame, str):
            raise ConfigError(
                f"dataset.tables: {key!r} was a DataFrame in Python; give it again, immunization.run(..., tables=...)"
            )
        if not isinstance(frame, pd.DataFrame) or frame.empty:
            raise ConfigError(f"tables[{key!r}] must be a pandas.DataFrame with rows")
        frames[key] = frame.reset_index(drop=True).rename(columns=str)
        if len(twice := frames[key].columns[frames[key].columns.duplicated()]):
            raise ConfigError(f"tables[{key!r}] has several columns {twice[0]!r}; names are read as text: rename one")
    return frames


def _target_names(target: str | Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """The name of the target of every table: `target` is one, or has one by role. Raises ConfigError."""
    if isinstance(target, str):
        return dict.fromkeys(keys, target)
    names = {key: target.get(key, target.get(SPLIT.sub("", key))) for key in keys}
    if lacking := [key for key, name in names.items() if not isinstance(name, str)]:
        raise ConfigError(
            f"dataset.target names no column for {lacking[0]}: give one name, or one for each of {', '.join(names)}, "
            "as in 'dataset.target={primary:price,harmful:label}'"
        )
    return names


def _files(**given: str | Sequence[str] | None) -> dict[str, Path]:
    """The table of every role; raises ConfigError for one that two roles have."""
    files: dict[str, Path] = {}
    for kind, own in given.items():
        paths = [Path(file).expanduser() for file in ([own] if isinstance(own, str) else own or ())]
        files |= dict(zip(roles_of(kind, [path.name.partition(".")[0] for path in paths]), paths, strict=False))
    if shared := first_shared({role: [os.path.realpath(path)] for role, path in files.items()}):
        first, second, _ = shared
        raise ConfigError(
            f"dataset: {files[second]} is both the {first} and the {second} task; give every task its own file"
        )
    return files


def _roles(keys: Collection[str], source: str, end: str) -> list[str]:
    """Roles of the tasks, in the order in which they draw their splits: no task changes those before it.

    `end` is what follows the role in a name that the user gives. Raises DataError for tasks that are lacking.
    """
    roles = list(dict.fromkeys(SPLIT.sub("", key) for key in keys))
    if lacking := next((role for role in ("primary", "harmful", *roles) if role not in keys), None):
        what = f"{source} lacks the array" if end else "dataset.tables lacks the DataFrame"
        raise DataError(f"{what} '{lacking}{end}'; it holds those of {', '.join(keys) or 'no task'}")
    further = sorted({*roles} - {*KINDS}, key=lambda role: (KINDS.index(kind_of(role)), roles.index(role)))
    for role in further:
        if kind_of(role) == "primary" or kind_of(role) not in roles:
            remedy = "there is one primary task" if kind_of(role) == "primary" else "name the first of its kind"
            raise DataError(f"'{role}{end}': {remedy} '{kind_of(role)}{end}', further ones '<kind>_<name>{end}'")
    return sorted([*(kind for kind in KINDS if kind in roles), *further], key=lambda role: kind_of(role) == "unseen")


def _refuse_shared_rows(tasks: dict[str, Task]) -> None:
    """Raise DataError for two equal tasks, and for one beyond the usual three that shares a row with another.

    Warns of a harmful one with the inputs of the primary one.
    """
    rows = {}
    for role, task in tasks.items():
        pairs = (row for s in task.splits.values() for row in zip(s.x.numpy(), s.y.tolist(), strict=True))
        rows[role] = sorted((hash(x.tobytes()), y) for x, y in pairs)
    inputs = {role: [x for x, _ in pairs] for role, pairs in rows.items()}
    for first, second in combinations(rows, 2):
        usual = {first, second} <= set(USUAL)  # of the same inputs, two labels may agree here and there
        if rows[first] == rows[second] if usual else not set(rows[first]).isdisjoint(rows[second]):
            raise DataError(f"the {second} task and the {first} task share rows; give every task rows of its own")
        if first == "primary" and kind_of(second) == "harmful" and inputs[first] == inputs[second]:
            told = "the primary and the %s task have the same inputs: RIR is 1 with any model, up to the splits"
            log.warning(told, second)


def _coded(
    role: str, y: Mapping[str, np.ndarray], place: str, targets: Targets, unlabeled: int
) -> tuple[dict[str, Tensor], int, str]:
    """The targets of a task by name, float64 or codes of classes; the number of classes, 0 for none; and a line on it.

    `unlabeled` rows were left out because they miss the target.
    Raises ConfigError for targets of which `targets` does not say what they are, DataError for a class that is empty.
    """
    own = {key: y[key] for key in (role, f"{role}_val", f"{role}_test") if key in y}
    text, where = y[role].dtype.kind == "U", f"'{role}_y' in {place}"
    if not all((part.dtype.kind == "U") == text for part in own.values()):
        raise DataError(
            f"{where}: the target of {role} is text in some rows and numbers in others; make all text, or all numbers"
        )
    if text and targets == "regression":
        raise ConfigError(
            f"dataset.targets=regression: the targets of {role} are text, such as '{min(y[role])}'; give numbers, "
            "or set dataset.targets=classes"
        )
    if targets == "regression" or (targets == "auto" and y[role].dtype.kind == "f"):
        return {key: torch.from_numpy(part.astype(float)) for key, part in own.items()}, 0, "regression"
    classes = np.unique(y[role])
    if targets == "auto" and 2 * len(classes) > len(y[role]):
        held, remedy = (
            ("texts", "which look like names or free text; if they are classes, set dataset.targets=classes")
            if text
            else ("integers", "say whether they are dataset.targets=classes or dataset.targets=regression")
        )
        raise ConfigError(f"{where} holds {len(classes)} different {held} in {len(y[role])} rows; {remedy}")
    if len(classes) < 2:
        lost = f"; {unlabeled} rows without a label were left out: a class called NA, None or null is read as missing"
        raise DataError(
            f"{where} holds one class only, {classes[0]}; give rows of two classes or more{lost if unlabeled else ''}"
        )
    for key, part in own.items():
        if len(unknown := part[~np.isin(part, classes)]):
            raise DataError(
                f"'{key}_y' in {place} holds the label {unknown[0]}, which '{role}_y' lacks; every label must occur "
                f"in '{role}_y'"
            )
    codes = {key: torch.from_numpy(np.searchsorted(classes, part.astype(classes.dtype))) for key, part in own.items()}
    return codes, len(classes), f"classes {classes.tolist()} coded 0 to {len(classes) - 1}"


def _matrices(stored: Mapping[str, Tensor], source: str) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Inputs [rows, columns] and targets [rows], float64 or int64, by names. Raises DataError unless they fit."""
    inputs, targets = {}, {}
    for name in dict.fromkeys(key[:-2] for key in stored):
        for key, shape in ((f"{name}_x", "[rows, columns]"), (f"{name}_y", "[rows]")):
            if (array := stored.get(key)) is None:
                raise DataError(f"{source} lacks the array '{key}'; it holds {', '.join(stored)}")
            wrong = array.ndim != 2 if key.endswith("_x") else array.ndim != 1 and array.shape[1:] != (1,)
            if wrong or not array.numel() or array.is_complex():
                held = f"{array.dtype} {list(array.shape)}"
                raise DataError(f"'{key}' in {source} is {held}; expected real numbers {shape}, not empty")
            if len(bad := (~torch.isfinite(array)).nonzero()):
                raise DataError(
                    f"'{key}' in {source} holds {len(bad)} NaN or infinite values, the first at {bad[0].tolist()}; "
                    "clean or drop those rows"
                )
        x, y = stored[f"{name}_x"], stored[f"{name}_y"].flatten()
        if len(x) != len(y):
            raise DataError(
                f"'{name}_x' in {source} has {len(x)} rows, '{name}_y' has {len(y)} targets; give one target for "
                "each row"
            )
        inputs[name], targets[name] = x, (y.double() if y.is_floating_point() else y.long()).numpy()
    for name, x in inputs.items():
        if (whole := inputs.get(SPLIT.sub("", name), x)).shape[1] != x.shape[1]:
            raise DataError(
                f"'{name}_x' in {source} has {x.shape[1]} columns, '{SPLIT.sub('', name)}_x' has {whole.shape[1]}; "
                "give both the same columns"
            )
    return inputs, targets


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of an npz or safetensors file whose names are known; nothing is ever unpickled."""
    if path.suffix not in (".npz", ".safetensors"):
        raise ConfigError(
            f"dataset.path={path}: must end in .npz or .safetensors (for tables set dataset.primary_csv ...)"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in _known(file.keys(), path)}
        with np.load(path, allow_pickle=False) as file:
            names = _known(file, path)
            check_room(sum(file.zip.getinfo(f"{name}.npy").file_size for name in names))
            return {key: _tensor(file[key], key) for key in names}
    except DataError:
        raise
    except Exception as error:  # numpy, zipfile and safetensors raise a dozen kinds
        said = "it is none; write one by numpy.savez" if "unsafely" in str(error) else error  # numpy's bad advice
        said = f"it holds Python objects; {CODED}" if "Object arrays" in str(said) else said
        kind = "an npz file of numbers" if path.suffix == ".npz" else "a safetensors file"
        raise DataError(f"{path} cannot be read as {kind}: {said}") from error


def _tensor(array: np.ndarray, key: str) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"'{key}' holds {array.dtype}; {CODED if key.endswith('_y') else 'give real numbers'}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise TypeError(f"'{key}' holds integers above 2^63; {CODED}")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _meant(name: str) -> str:
    """The name of an array that is read, if `name` has its words in another order, case or spelling of a split."""
    if not NAMES.fullmatch(name):
        words = [word for word in re.split(r"[\W_]+", name.lower()) if word]
        name = "_".join(sorted(words, key=lambda word: (LAST.get(word, 0), word not in KINDS)))
    return TRAIN.sub("", VALIDATION.sub("_val", name))


def _known(names: Iterable[str], path: Path) -> list[str]:
    """Those of the `names` in a file that are read; raises DataError for one that is meant to be."""
    known, ignored = [], []
    names = [*names]
    right = {*USUAL_NAMES, *(name for name in names if NAMES.fullmatch(name))}
    for name in names:
        meant = _meant(name)
        if NAMES.fullmatch(name) and meant == name:
            known.append(name)
        elif meant in right or SPLIT_OF_ARRAY.sub(r"_\2", meant) in right:  # or its words say something else
            remedy = f"rename it to '{meant}', or leave it out"
            raise DataError(f"{path} holds '{name}', which names no array that is read; {remedy}")
        else:
            near = get_close_matches(name.lower(), USUAL_NAMES, 1)
            ignored.append(f"{name} (closest name: {near[0]})" if near else name)
    if ignored:
        log.warning("%s: not read are %s; tasks are %s", path, ", ".join(ignored), ", ".join(KINDS))
    return known
