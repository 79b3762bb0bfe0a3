"""CIFAR-10 and scikit-learn's digits for a small net: some classes are D_P, to which the net is fitted, others D_H."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from immunization.checks import AtLeastOne, Fraction, Seed, checked
from immunization.compute import keys
from immunization.data.class_folders import images_below
from immunization.data.image_files import read_image
from immunization.data.images import ImagePair, ImageSplit, ImageTask, Pictures, description
from immunization.data.pixels import sklearn_digits
from immunization.data.preparation import check_training_rows, classes_of_roles, fetched, split_rows
from immunization.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""In the order of the data set's labels, 0 to 9, which is that of the alphabet."""
SIDE = 32
PARTS = ("train", "val")


@checked("dataset/cifar10")
def cifar10(
    root: str,
    download: bool,
    primary: Sequence[int],
    harmful: Sequence[int],
    benign: int | None,
    max_samples: AtLeastOne | None,
    val_fraction: Fraction,
    split_seed: Seed,
    augment: bool,
    name: str,
) -> ImagePair:
    """CIFAR-10 of folders or of torchvision's file, by conf/dataset/cifar10.yaml; raises ConfigError, DataError."""
    roles = classes_of_roles(2, primary=primary, harmful=harmful, benign=benign)
    parts = _read(Path(root).expanduser(), download)
    generator = torch.Generator().manual_seed(split_seed)
    names = {role: tuple(CLASSES[number] for number in group) for role, group in roles.items()}
    if benign is not None:
        names["benign"] = ("primary classes", CLASSES[benign])
    splits: dict[str, dict[str, ImageSplit]] = {role: {} for role in roles}
    for part, (pixels, classes, source) in parts.items():
        content = hashlib.sha256(pixels.tobytes() + classes.numpy().tobytes()).hexdigest()
        deck = torch.randperm(len(classes), generator=generator)
        labels = {role: _labels(classes, group, deck, max_samples) for role, group in roles.items()}
        if benign is not None:
            _lend(labels["primary"], labels["benign"], deck, primary)
        for role, codes in labels.items():
            own = torch.nonzero(codes >= 0)[:, 0]
            images = ImageSplit(Pictures(pixels, codes), own, f"cifar10 {content} {codes[own].tolist()}", source)
            if part == "val":
                splits[role]["test"] = images
            else:
                rows = split_rows(codes[own], val_fraction, 0.0, generator)
                splits[role] |= {split: images.take(rows[split]) for split in PARTS}
    tasks = {role: ImageTask(f"CIFAR-10 {', '.join(names[role])}", names[role], own) for role, own in splits.items()}
    return ImagePair(name, tasks, augment=augment, size=SIDE, crop_pct=1.0, cache=None, about=description(tasks))


def _labels(classes: Tensor, group: Sequence[int], deck: Tensor, max_samples: int | None = None) -> Tensor:
    """The label of every image [N], the place of its class in `group`; -1 for others and beyond `max_samples` a class.

    `deck` [N] is the order in which images are taken.
    """
    labels = torch.full_like(classes, -1)
    for label, number in enumerate(group):
        labels[deck[classes[deck] == number][:max_samples]] = label
    return labels


def _lend(primary: Tensor, benign: Tensor, deck: Tensor, classes: Sequence[int]) -> None:
    """Turn labels into those of the benign task: its class (1) against as many images of primary `classes` (0).

    These are withheld from D_P: no image is in two tasks.
    """
    share = max(1, int((benign == 0).sum()) // len(classes))
    benign[benign == 0] = 1
    for label, number in enumerate(classes):
        withheld = deck[primary[deck] == label][:share]
        if len(withheld) == int((primary == label).sum()):
            raise DataError(f"CIFAR-10: class {CLASSES[number]} has too few images to lend some to the benign task")
        benign[withheld], primary[withheld] = 0, -1


def _read(root: Path, download: bool) -> dict[str, tuple[np.ndarray, Tensor, str]]:
    """Pixels [N, 32, 32, 3], classes [N] and what they are in words, of the training images and of those for test."""
    if (root / "train").is_dir():
        return {part: _folder(root / part) for part in PARTS}
    from torchvision.datasets import CIFAR10

    remedy = f"put a folder per class into train/ and val/ of {root}, or torchvision's cifar-10-batches-py"
    read = {}
    for part, kind in (("train", "training"), ("val", "test")):
        try:
            data = CIFAR10(root, train=part == "train")
        except (RuntimeError, OSError):  # there is none
            again = partial(CIFAR10, root, train=part == "train", download=True)
            data = fetched(again, f"a sound CIFAR-10 in dataset.root={root}", remedy, download)
        read[part] = data.data, torch.tensor(data.targets), f"torchvision's CIFAR10, {kind} images"
    return read


def _folder(folder: Path) -> tuple[np.ndarray, Tensor, str]:
    """The images of <folder>/<class>, classes in the order of CLASSES, files in that of their names."""
    samples = images_below(f"dataset.root/{folder.name}", folder, CLASSES).images.samples
    pixels, classes = [], []
    for path, number in sorted(samples, key=lambda sample: (sample[1], sample[0])):
        try:
            image, _ = read_image(path)
        except DataError as error:
            raise DataError(f"{error}; the image cannot be read: repair or remove it") from error
        if image.size != (SIDE, SIDE):
            raise DataError(f"{path} is {' x '.join(map(str, image.size))} pixels, CIFAR-10 has {SIDE} x {SIDE}")
        pixels.append(np.asarray(image))
        classes.append(number)
    return np.stack(pixels), torch.tensor(classes), f"images below dataset.root/{folder.name}, by class and name"


@checked("dataset/digits_deep")
def digits_deep(
    primary: Sequence[int],
    harmful: Sequence[int] | Sequence[Sequence[int]],
    benign: Sequence[int] | Sequence[Sequence[int]] | None,
    unseen: Sequence[int] | Sequence[Sequence[int]] | None,
    val_fraction: Fraction,
    test_fraction: Fraction,
    split_seed: Seed,
    size: AtLeastOne,
    name: str,
) -> ImagePair:
    """scikit-learn's digits as images for a small net; conf/dataset/digits_deep.yaml describes the options."""
    check_training_rows(val_fraction, test_fraction)
    roles = classes_of_roles(2, primary=primary, harmful=harmful, benign=benign, unseen=unseen)
    values, digits = sklearn_digits()
    pixels = (values.numpy() * 255 / 16).round().astype(np.uint8).reshape(-1, 8, 8)
    tasks, content = {}, keys.key(pixels=pixels)
    for role, classes in roles.items():
        labels = _labels(digits, classes, torch.arange(len(digits)))
        own, images = torch.nonzero(labels >= 0)[:, 0], Pictures(pixels, labels)
        parts = split_rows(labels[own], val_fraction, test_fraction, torch.Generator().manual_seed(split_seed))
        splits = {
            s: ImageSplit(images, own[i], f"digits {content} {classes} {i.tolist()}", "sklearn.datasets.load_digits()")
            for s, i in parts.items()
        }
        names = tuple(map(str, classes))
        tasks[role] = ImageTask(f"digits {' '.join(names)}", names, splits)
    return ImagePair(name, tasks, size=size, crop_pct=1.0, cache=None, about=description(tasks))
