"""Folders with one folder per class: the classes, their order and images, and what was left out."""

from __future__ import annotations

import csv
import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from immunization.data.image_files import SUFFIXES, is_system
from immunization.data.images import Files
from immunization.errors import ConfigError, DataError

log = logging.getLogger(__name__)

Order = Literal["text", "natural"]
Classes = str | Sequence[str | int] | None
SYSTEM = "hidden or of the system"
"""Kind of files that are left out without a warning."""


class Contents(NamedTuple):
    """Images of some folders: `folders` are all that hold some, up to the classes' own; `left_out` counts by kind."""

    images: Files
    folders: tuple[Path, ...]
    left_out: dict[str, int]


def class_folders(folder: Path, order: Order | None = None) -> tuple[str, ...]:
    """Names of the class folders in `folder`, in `order`; raises DataError for none."""
    classes = in_order((path.name for path in _entries(folder) if os.path.isdir(path)), order)
    if not classes:
        raise DataError(f"{folder} holds no folders: images are expected in one folder per class")
    return classes


def natural_key(text: str) -> list[int | str]:
    """The key by which timm's reader sorts: numbers by their value, letters whatever their case."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text.lower())]


def in_order(names: Iterable[str], order: Order | None) -> tuple[str, ...]:
    """`names` sorted as text, as torchvision's ImageFolder does, or naturally."""
    return tuple(sorted(names, key=(lambda name: (natural_key(name), name)) if order == "natural" else None))


def in_doubt(names: tuple[str, ...], order: Order | None) -> str:
    """Why nobody knows the order in which a head counts `names`, and what would say it; empty where that is clear."""
    text, natural = in_order(names, "text"), in_order(names, "natural")
    alike = next((pair for pair in pairwise(natural) if natural_key(pair[0]) == natural_key(pair[1])), None)
    if order == "text" or (not alike and (order or text == natural)):
        return ""
    if alike and order:
        return f"Naturally, {alike[0]} and {alike[1]} are alike, and none is first: set dataset.primary.order=text"
    first = next((i for i, pair in enumerate(zip(text, natural, strict=True)) if len({*pair}) > 1), 0)
    shown = [", ".join(own[max(0, first - 1) : first + 3]) for own in (text, natural)]
    return (
        f"As text (torchvision's ImageFolder) it is ... {shown[0]} ...; naturally, whatever the case (timm's reader), "
        f"... {shown[1]} ...: set dataset.primary.order=text or natural,"
    )


def chosen(
    key: str, classes: Classes, folders: tuple[str, ...], order: Order | None, least: int = 2
) -> tuple[str, ...]:
    """`least` or more of the class `folders`, in their order: all for None, or what `classes`, the value of `key`, is.

    It is a range of places, `a:b`, or a list. An entry of the list is the name of a folder, `1` that of folder 1; where
    no folder has a number of the list for its name, the numbers are places.
    """
    names = list(folders)
    if isinstance(classes, str):
        ends = re.fullmatch(r"(-?\d+)?:(-?\d+)?", classes)
        part = slice(*(end and int(end) for end in ends.groups())) if ends else slice(0)
        names = names[part]
        if not names:
            raise ConfigError(
                f"{key}={classes} is outside of the {len(folders)} classes; write a range such as 0:{len(folders)}"
            )
        numbered = order is None and all(name.isdecimal() for name in folders)
        if numbered and {*names} != {*in_order(folders, "natural")[part]}:
            raise ConfigError(
                f"{key}={classes}: the folders have numbers as names, and as text their order is "
                f"{', '.join(folders[:4])}, ...; set {key.removesuffix('classes')}order=text or natural, or list names"
            )
    elif classes is not None:
        places, numbers = dict(enumerate(folders)), [entry for entry in classes if isinstance(entry, int)]
        called = {int(name): name for name in folders if name.isdecimal()}
        if meant := [called[number] for number in numbers if number in called]:
            places = {}
            if wrong := [number for number in numbers if str(number) not in folders]:
                raise ConfigError(
                    f"{key}: no folder is called {wrong[0]}; the folders have numbers as names, "
                    f"{', '.join([*called.values()][:3])}, ...: write the names in quotes, such as '{meant[0]}'"
                )
        if unknown := [entry for entry in classes if entry not in places and str(entry) not in folders]:
            raise ConfigError(
                f"{key}: {unknown[0]} is neither one of the {len(folders)} class folders nor the position of one; "
                f"list folder names, or positions from 0 to {len(folders) - 1}"
            )
        names = [places.get(entry, str(entry)) for entry in classes]
    if len(names) < least or len(set(names)) < len(names):
        needed = "two different classes are" if least > 1 else "one class is"
        raise ConfigError(f"{key}={'null' if classes is None else classes}: at least {needed} needed")
    return in_order(names, order)


def images_below(
    what: str,
    folder: Path,
    classes: tuple[str, ...] | None,
    suffixes: Collection[str] = SUFFIXES,
    noun: str = "image",
) -> Contents:
    """The images below the folders `classes` of `folder`, labels in their order, or all of `folder`, without classes.

    The label is that of the topmost folder. Images are in the natural order of their paths. What is left out of `what`
    is told. Raises DataError for a class or a folder without images, a folder that cannot be read, and one that
    symbolic links lead to twice. `suffixes` and `noun`: of files of another kind than images.
    """
    samples: list[tuple[str, int]] = []
    left: dict[str, list[str]] = defaultdict(list)
    parents: set[Path] = set()
    seen: dict[str, str] = {}
    for label, name in enumerate(("",) if classes is None else classes):
        before, own = len(samples), defaultdict[str, list[str]](list)
        for place, below, files in os.walk(top := os.path.join(folder, name), followlinks=True, onerror=_unreadable):
            if (first := seen.setdefault(os.path.realpath(place), place)) != place:
                raise DataError(f"{place} is a link to {first}, whose {noun}s would be read twice; remove the link")
            subfolders = {*below}
            for file in (*below, *files):
                path, suffix = os.path.join(place, file), os.path.splitext(file)[1].lower()
                if is_system(file):
                    own[SYSTEM].append(path)
                elif file in subfolders:
                    continue
                elif suffix in suffixes:
                    samples.append((path, label))
                    parents.add(Path(place))
                elif name or place != top:  # what lies at the top of all is no class's
                    own[suffix or "without suffix"].append(path)
            below[:] = sorted(name for name in subfolders if not is_system(name))
        if len(samples) == before and os.path.isdir(top):
            held = ", ".join(f"{kind}: {len(paths)}" for kind, paths in _by_number(own))
            which = f"{top}: the class folder" if classes else f"{folder}: the folder"
            raise DataError(
                f"{which} is empty, it holds no {noun}{f' ({held})' if held else ''}; add {noun}s or remove it"
            )
        for kind, paths in own.items():
            left[kind] += paths
    for path in _entries(folder) if classes else ():
        if not os.path.isdir(path) and (path.is_symlink() or path.suffix.lower() in suffixes):
            left["beside the class folders"].append(str(path))
    samples.sort(key=lambda sample: (natural_key(sample[0]), sample[0]))
    above = {parent for place in parents for parent in place.parents if folder in parent.parents}
    tops = {folder / name for name in classes or () if os.path.isdir(folder / name)}
    folders = sorted(path.resolve() for path in parents | above | tops)
    return Contents(Files(samples), tuple(dict.fromkeys(folders)), _told(what, left, folder))


def _told(what: str, left: dict[str, list[str]], folder: Path) -> dict[str, int]:
    """Say what is left out of `what`: hidden files in the log alone. Returns the number of the others by kind."""
    hidden = left.pop(SYSTEM, [])
    if total := sum(map(len, left.values())):
        kinds = [f"{kind}: {len(own)} (as {os.path.relpath(min(own), folder)})" for kind, own in _by_number(left)]
        verb = "files are" if total > 1 else "file is"
        log.warning("%s: %d %s left out below %s: %s", what, total, verb, folder, ", ".join(kinds))
    if hidden:
        log.info("%s: %d files or folders are left out that are %s", what, len(hidden), SYSTEM)
    return {kind: len(paths) for kind, paths in left.items()}


def _by_number(left: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(left.items(), key=lambda item: -len(item[1]))


def _entries(folder: Path) -> list[Path]:
    """What lies in `folder` and is not the system's; raises DataError where it cannot be read."""
    try:
        return [path for path in folder.iterdir() if not is_system(path.name)]
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: the folder of images cannot be read: {error.strerror}") from error


def read_outputs(path: Path, classes: tuple[str, ...]) -> tuple[int, ...]:
    """The output of the model's head for every class: CSV with a column `index` and one that holds the folder names."""
    needed = "a CSV with a column 'index' and one of class folders is needed"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        indices = [int(row["index"]) for row in rows]
        columns = {column: [row[column] for row in rows] for column in rows[0] if column != "index"}
    except (OSError, KeyError, TypeError, ValueError, IndexError, csv.Error) as error:
        raise DataError(f"{path}: {needed} ({error})") from error
    outputs: dict[tuple[int, ...], str] = {}
    for column, names in columns.items():
        if set(classes) <= set(names):
            if twice := next((name for name in classes if names.count(name) > 1), None):
                raise DataError(f"{path}: column {column} names folder {twice} more than once")
            outputs[tuple(indices[names.index(name)] for name in classes)] = column
    if len(outputs) != 1:
        which = (
            f"columns {' and '.join(map(repr, outputs.values()))} name all class folders, and give them other outputs"
        )
        none = f"no column names all {len(classes)} class folders, e.g. '{classes[0]}'"
        raise DataError(f"{path}: {f'{which}; leave one of them' if outputs else none}")
    return next(iter(outputs))
