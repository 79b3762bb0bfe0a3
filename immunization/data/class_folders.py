"""Folders with a folder per class: which classes, in which order, and the images of each; what is left out is named."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NoReturn

from immunization.data.image_files import SUFFIXES, is_system
from immunization.data.images import Files
from immunization.errors import ConfigError, DataError

Order = Literal["text", "natural"]
SYSTEM = "hidden or of the system"
"""Kind of files that are left out without a warning."""


@dataclass(frozen=True)
class Found:
    """Images of some folders: `folders` are all that hold some, up to the classes' own; `left_out` paths by kind."""

    images: Files
    folders: tuple[Path, ...]
    left_out: dict[str, list[str]]


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
    key: str, classes: str | Sequence[str | int] | None, folders: tuple[str, ...], order: Order | None, least: int = 2
) -> tuple[str, ...]:
    """`least` or more of the class `folders`, in their order: all for None, or what `classes`, the value of `key`, is.

    It is a range of places, `a:b`, or a list. An entry of the list is the name of a folder, `1` that of folder 1; where
    no folder has a number of the list for its name, the numbers are places.
    """
    if classes is None:
        found = list(folders)
    elif isinstance(classes, str):
        try:
            part = slice(*(int(end) if end else None for end in classes.split(":", 1)))
        except ValueError:
            part = slice(0)
        found = list(folders[part])
        if ":" not in classes or not found:
            raise ConfigError(f"{key}={classes} is no class of {len(folders)}: write a range such as 0:{len(folders)}")
        numbers = order is None and all(name.isdecimal() for name in folders)
        if numbers and {*found} != {*in_order(folders, "natural")[part]}:
            raise ConfigError(
                f"{key}={classes}: the folders are called by numbers, and their order as text is "
                f"{', '.join(folders[:4])}, ...: set {key.removesuffix('classes')}order=text or natural, or list names"
            )
    else:
        numbers = [one for one in classes if isinstance(one, int)]
        padded = {int(name): name for name in folders} if all(name.isdecimal() for name in folders) else {}
        if (meant := [padded[one] for one in numbers if one in padded]) and not {*map(str, numbers)} & {*folders}:
            raise ConfigError(
                f"{key}: the folders are called by numbers, {', '.join(folders[:3])}, ..., and none is called "
                f"{int(meant[0])}: write the names in quotes, such as '{meant[0]}'"
            )
        named = [one for one in numbers if str(one) in folders]
        if named and len(named) < len(numbers):
            other = next(one for one in numbers if one not in named)
            raise ConfigError(
                f"{key}: there is a folder {named[0]}, so that numbers are names, but none is called {other}"
            )
        places = {} if named else dict(enumerate(folders))
        unknown = [one for one in classes if one not in places and str(one) not in folders]
        if unknown:
            raise ConfigError(
                f"{key}: {unknown[0]} is none of the {len(folders)} class folders, nor a place below that"
            )
        found = [places[one] if one in places else str(one) for one in classes]
    if len(found) < least or len(set(found)) < len(found):
        needed = "two different classes are" if least > 1 else "one class is"
        shown = "null" if classes is None else classes
        raise ConfigError(f"{key}={shown}: at least {needed} needed")
    return in_order(found, order)


def images_below(folder: Path, classes: tuple[str, ...] | None) -> Found:
    """The images below the folders `classes` of `folder`, labels in their order, or all of `folder`, without classes.

    The label is that of the topmost folder. Images are in the natural order of their paths. Raises DataError for a
    class or a folder without images, a folder that cannot be read, and one that symbolic links lead to twice.
    """
    samples: list[tuple[str, int]] = []
    left: dict[str, list[str]] = {}
    holding: set[str] = set()
    seen: dict[str, str] = {}
    for label, name in enumerate(("",) if classes is None else classes):
        before, own = len(samples), dict[str, list[str]]()
        for place, below, files in os.walk(top := os.path.join(folder, name), followlinks=True, onerror=_unreadable):
            if (first := seen.setdefault(os.path.realpath(place), place)) != place:
                raise DataError(f"{place} is {first} once more: remove the symbolic link, or images are read twice")
            for one in (one for one in (*below, *files) if is_system(one)):
                own.setdefault(SYSTEM, []).append(os.path.join(place, one))
            below[:] = sorted(one for one in below if not is_system(one))
            for one in (one for one in files if not is_system(one)):
                path, suffix = os.path.join(place, one), os.path.splitext(one)[1].lower()
                if suffix in SUFFIXES:
                    samples.append((path, label))
                    holding.add(place)
                elif name or place != top:  # what lies at the top of all is no class's
                    own.setdefault(suffix or "without suffix", []).append(path)
        if len(samples) == before and os.path.isdir(top):
            held = f" ({_listed(own)})" if own else ""
            what = f"{top}: the class folder" if classes else f"{folder}: the folder"
            raise DataError(f"{what} is empty, it holds no image{held}; add images or remove it")
        for kind, paths in own.items():
            left.setdefault(kind, []).extend(paths)
    beside = [path for path in _entries(folder) if not os.path.isdir(path)] if classes else []
    if lost := [str(path) for path in beside if path.is_symlink() or path.suffix.lower() in SUFFIXES]:
        left["beside the class folders"] = lost
    samples.sort(key=lambda sample: (natural_key(sample[0]), sample[0]))
    tops = [folder / name for name in classes or ()]
    parents = {path for place in holding for path in _up_to(Path(place), folder)}
    found = {path.resolve() for path in (*tops, *parents) if os.path.isdir(path)}
    return Found(Files(samples), tuple(sorted(found)), left)


def left_out(what: str, found: Found, folder: Path) -> tuple[str, dict[str, int]]:
    """A sentence on what is left out of `what`, empty for nothing but hidden files, and the number of each kind."""
    shown = {kind: paths for kind, paths in found.left_out.items() if kind != SYSTEM}
    if not shown:
        return "", {}
    total = sum(map(len, shown.values()))
    sentence = f"{what}: {total} file{'s are' if total > 1 else ' is'} left out below {folder}: "
    return sentence + _listed(shown, folder), {kind: len(paths) for kind, paths in shown.items()}


def _listed(left: Mapping[str, list[str]], folder: Path | None = None) -> str:
    kinds = sorted(left.items(), key=lambda item: -len(item[1]))
    if folder is None:
        return ", ".join(f"{kind}: {len(paths)}" for kind, paths in kinds)
    return ", ".join(f"{kind}: {len(paths)} (as {os.path.relpath(min(paths), folder)})" for kind, paths in kinds)


def _up_to(place: Path, folder: Path) -> list[Path]:
    """`place` and the folders above it, without `folder` itself unless it is that."""
    above = [path for path in place.parents if path.is_relative_to(folder) and path != folder]
    return [place, *above]


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
    found: dict[tuple[int, ...], str | None] = {}
    for column, names in columns.items():
        if set(classes) <= set(names):
            for name in (name for name in classes if names.count(name) > 1):
                raise DataError(f"{path}: column {column} names folder {name} more than once")
            found[tuple(indices[names.index(name)] for name in classes)] = column
    if len(found) > 1:
        raise DataError(
            f"{path}: columns {' and '.join(map(repr, found.values()))} name all class folders, and give them other "
            "outputs; leave one of them"
        )
    if not found:
        raise DataError(f"{path}: no column names all {len(classes)} class folders, e.g. '{classes[0]}'")
    return next(iter(found))
