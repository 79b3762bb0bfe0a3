"""Image tasks from folders with one folder per class, or from any data set that timm can open."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from immunization.checks import AtLeastOne, Count, Fraction, NonNegative, Seed, Share, check_options, checked
from immunization.compute import keys
from immunization.data.class_folders import Classes, Order, chosen, class_folders, images_below, read_outputs
from immunization.data.image_files import READ_AS
from immunization.data.images import Files, ImagePair, ImageSplit, ImageTask, description
from immunization.data.preparation import check_training_rows, split_rows
from immunization.data.task import SPLITS, USUAL, first_shared
from immunization.errors import ConfigError, DataError
from immunization.roles import kind_of, roles_of

Crop = Literal["center", "squash", "border"]
SOURCES = ("torch/", "hfds/")
SAMPLED = 64  # images of a source that has no folders of files, which stand for its content
SYNONYMS = {"val": ("val", "validation", "valid", "test"), "train": ("train", "training")}
USUAL_SPLITS = {name for names in SYNONYMS.values() for name in names} | {"testing", "dev", "eval"}


@checked("dataset/image_folders")
def image_folders(
    primary_root: str | None,
    harmful_root: str | Sequence[str] | None,
    benign_root: str | Sequence[str] | None,
    unseen_root: str | Sequence[str] | None,
    keep_root: str | Sequence[str] | None,
    primary: Mapping[str, Any] | None,
    harmful: Mapping[str, Any] | None,
    benign: Mapping[str, Any] | None,
    unseen: Mapping[str, Any] | None,
    keep: Mapping[str, Any] | None,
    val_fraction: Fraction,
    test_fraction: Fraction,
    split_seed: Seed,
    on_bad_image: Literal["error", "skip"],
    augment: bool,
    size: AtLeastOne | None,
    crop_pct: Share | None,
    batch_size: AtLeastOne,
    workers: Count | None,
    cache: str | None,
    cache_limit: NonNegative,
    name: str,
) -> ImagePair:
    """Images of folders or timm's sources, by conf/dataset/image_folders.yaml; raises ConfigError, DataError."""
    check_training_rows(val_fraction, test_fraction)
    given = (primary_root, primary), (harmful_root, harmful), (benign_root, benign), (unseen_root, unseen)
    tasks = tasks_of(
        given, open_task, (val_fraction, test_fraction, split_seed), "the folder of the images, a folder per class"
    )
    kept = kept_of(keep_root, keep or {}, open_unlabeled)
    refuse_shared(tasks, kept, "class folder")
    reading = on_bad_image, augment, size, crop_pct, batch_size, workers, cache, cache_limit
    about = {"keep": {images.name: len(images.splits["train"]) for images in kept}} if kept else {}
    return ImagePair(name, tasks, *reading, about=description(tasks) | about, keep=kept)


def tasks_of(
    given: Sequence[tuple[str | Sequence[str] | None, Mapping[str, Any] | None]],
    open_one: Callable[..., ImageTask],
    how: Sequence[Any],
    wanted: str,
) -> dict[str, ImageTask]:
    """Tasks by role, from the roots and options of every kind: `open_one(kind, root, *how, **options)` opens each.

    Raises ConfigError for primary and harmful tasks without `wanted`, a root, and for options that `open_one` lacks.
    """
    tasks: dict[str, ImageTask] = {}
    for kind, (root, options) in zip((*USUAL, "unseen"), given, strict=True):
        roots = [root] if root is None or isinstance(root, str) else list(root) or [None]
        if not any(roots) and not (options or {}).get("source"):
            if kind in ("benign", "unseen"):
                continue
            raise ConfigError(f"dataset.{kind}_root is not set: give {wanted}")
        check_options(open_one, options or {}, f"dataset.{kind}")
        for role, root in zip(roles_of(kind, [Path(root or "").name for root in roots]), roots, strict=True):
            tasks[role] = open_one(kind, root, *how, **(options or {}))
    return tasks


def refuse_shared(tasks: Mapping[str, ImageTask], kept: Sequence[ImageTask], noun: str) -> None:
    """Raise ConfigError for a class, called `noun`, that two tasks have, or a task and what is kept."""
    held = {role: task.folders or [task.splits["train"].identity] for role, task in tasks.items()}
    if shared := first_shared({"keep": [folder for own in kept for folder in own.folders], **held}):
        first, second, what = shared
        owner = "dataset.keep_root" if first == "keep" else f"the {first} task"
        what = f"{noun} {what}" if tasks[second].folders else tasks[second].name
        raise ConfigError(
            f"dataset: {what} belongs to {owner} and to the {second} task; give every task classes of its own, "
            f"dataset.{'keep' if first == 'keep' else kind_of(second)}.classes chooses them"
        )


def kept_of(
    roots: str | Sequence[str] | None,
    options: Mapping[str, Any],
    open_one: Callable[..., ImageTask],
    how: Sequence[Any] = (),
) -> tuple[ImageTask, ...]:
    """What dataset.keep_root names, each opened by `open_one(root, *how, **options)`.

    Of several roots, a list of `classes` has an entry for each.
    """
    roots, classes = [roots] if isinstance(roots, str) else roots or [], options.get("classes")
    each = [classes] * len(roots)
    if len(roots) > 1 and not (classes is None or isinstance(classes, str)):
        if len(classes) != len(roots):
            raise ConfigError(f"dataset.keep.classes={list(classes)}: give an entry for each of {len(roots)} folders")
        each = classes
    kept = []
    for root, own in zip(roots, each, strict=True):
        check_options(open_one, options := {**options, "classes": own}, "dataset.keep")
        kept.append(open_one(root, *how, **options))
    return tuple(kept)


def open_unlabeled(
    root: str, classes: Classes = None, crop: Crop | None = None, order: Order | None = None
) -> ImageTask:
    """All images below `root`, or those in some of its class folders; raises ConfigError, DataError."""
    folder = Path(root).expanduser()
    if not os.path.isdir(folder):
        raise DataError(f"dataset.keep_root: folder {folder.absolute()} not found; it must hold images")
    names = None
    if classes is not None:
        names = chosen("dataset.keep.classes", classes, class_folders(folder, order), order, least=1)
    images, folders, lost = images_below("keep", folder, names)
    split = ImageSplit(images, None, _identity(images), f"images below {folder.name}, in natural order")
    about = f"{folder}" + (f", {len(names)} classes" if names else "")
    return ImageTask(about, (), {"train": split}, crop, None, folders, order, {"train": lost} if lost else {})


def open_task(
    role: str,
    root: str | None,
    val_fraction: float,
    test_fraction: float,
    split_seed: int,
    source: str = "",
    train: str = "train",
    test: str = "val",
    classes: Classes = None,
    crop: Crop | None = None,
    outputs: str | None = None,
    order: Order | None = None,
    options: Mapping[str, Any] | None = None,
) -> ImageTask:
    """The task of one root; `role` is its kind, as the keys of the configuration have it."""
    if outputs is not None and role != "primary":
        raise ConfigError(
            f"dataset.{role}.outputs: only the primary task has outputs of the model's head; leave it out"
        )
    folder = None if root is None else Path(root).expanduser()
    places = [] if source else [place.resolve() for place in (_find(folder, train), _find(folder, test)) if place]
    if train == test or len(set(places)) < len(places):
        raise ConfigError(
            f"dataset.{role}.train={train} and dataset.{role}.test={test} are the same images: name two splits"
        )
    whole, folders, lost = {}, (), {}
    if source:
        if classes is not None:
            raise ConfigError(
                f"dataset.{role}.classes chooses among class folders, and {source} has none; set it to null"
            )
        for split in (train, test):
            images = _open_source(role, source, folder, split, options or {})
            identity = f"{source} {split} {len(images)} {dict(options or {})} {READ_AS} {_sample(images)}"
            whole[split] = ImageSplit(images, None, identity, f"{source}, split {split}")
        opened = whole[train].dataset
        known = getattr(getattr(opened, "reader", None), "class_to_idx", None) or getattr(opened, "classes", None)
        names, labels = tuple(map(str, known or ())), torch.zeros(len(opened), dtype=torch.long)
    else:
        places = _places(role, folder, train, test)
        names = chosen(f"dataset.{role}.classes", classes, class_folders(places[train], order), order)
        some = "" if classes is None else f", of dataset.{role}.classes alone"
        for split, place in places.items():
            images, holding, kinds = images_below(f"{role}/{split}", place, names)
            below = Path(f"dataset.{role}_root", place.relative_to(folder)).as_posix()
            about = f"images below {below}{some}, in natural order of their paths"
            whole[split] = ImageSplit(images, None, _identity(images), about)
            folders, lost = folders + holding, lost | ({split: kinds} if kinds else {})
        labels = whole[train].labels
    generator = torch.Generator().manual_seed(split_seed)
    rows = split_rows(labels, val_fraction, 0.0 if test in whole else test_fraction, generator)
    splits = {split: whole[train].take(rows[split]) for split in SPLITS}
    if test in whole:
        splits["test"] = whole[test]
    named = None if outputs is None else read_outputs(Path(outputs).expanduser(), names)
    part = "" if classes is None else f", {len(names)} classes"
    return ImageTask(f"{source} {folder or ''}".strip() + part, names, splits, crop, named, folders, order, lost)


def _places(role: str, folder: Path, train: str, test: str) -> dict[str, Path]:
    """The folders of class folders of the training split and, where there is one, of that held out."""
    if not os.path.isdir(folder):
        raise DataError(
            f"dataset.{role}_root: folder {folder.absolute()} not found; it must hold a folder of images per class. "
            "docs/install.md says where to get the data of an experiment; set data_root to the folder that holds them"
        )
    training, testing = _find(folder, train), _find(folder, test)
    if testing is None:
        classes = class_folders(training or folder)
        if not training and {name.lower() for name in classes} <= USUAL_SPLITS:
            raise DataError(
                f"{folder}: {', '.join(classes)} are names of splits, and not of classes; dataset.{role}.train and "
                f"dataset.{role}.test name the folders"
            )
        return {train: training or folder}
    if training is None:
        raise DataError(f"{folder} has {testing.name}/ but no {train}/; dataset.{role}.train names the folder")
    unknown = sorted(set(class_folders(testing)) - set(class_folders(training)))
    if unknown:
        raise DataError(
            f"{testing}: class {unknown[0]} is not in {training}; both need the same classes, or "
            f"dataset.{role}.test=none holds out images of {training.name}/ instead"
        )
    return {train: training, test: testing}


def _find(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in (split, *SYNONYMS.get(split, ())) if os.path.isdir(folder / name)), None)


def _open_source(role: str, source: str, folder: Path | None, split: str, options: Mapping[str, Any]) -> Dataset:
    """A data set of timm's. Raises ConfigError for one without splits, DataError for one that cannot be opened."""
    from timm.data import create_dataset

    key = f"dataset.{role}.source={source}"
    # any other name makes timm read the folder, and torch's folder is the whole of it for every split
    if not source.lower().startswith(SOURCES) or source.lower() in ("torch/folder", "torch/image_folder"):
        written = ", ".join(f"{known}<name>" for known in SOURCES)
        raise ConfigError(f'{key} is not a source with splits; write one of {written}, or "" for a folder per class')
    own = f"dataset.{role}_root=<folder> dataset.{role}.source= reads a folder instead (docs/install.md)"
    try:
        with redirect_stdout(None):  # timm prints what to install
            return create_dataset(source, root=folder and str(folder), split=split, search_split=False, **options)
    except ImportError as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}; install it with pip, or {own}") from error
    except (AssertionError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{key}, split {split}, cannot be opened: {reason}; {own}") from error


def _identity(images: Files) -> str:
    """How images are read, and the key of the content of the files, in order, and of their labels."""
    paths, labels = zip(*images.samples, strict=True)
    return f"{READ_AS} {keys.key(content=keys.content(paths), labels=torch.tensor(labels))}"


def _sample(dataset: Dataset) -> str | None:
    """The key of some images of a source, evenly spaced; None where one of them cannot be read."""
    rows = sorted({round(i) for i in np.linspace(0, len(dataset) - 1, SAMPLED)} if len(dataset) else {})
    with suppress(Exception):  # of anybody's source: what cannot be read is said when it is
        return keys.key(images=([np.asarray(image), int(label)] for image, label in map(dataset.__getitem__, rows)))
    return None
