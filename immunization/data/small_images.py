"""CIFAR-10 and scikit-learn's digits for a small net: some classes are D_P, to which the net is fitted, others D_H."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from immunization.checks import AtLeastOne, Fraction, Seed, checked
from immunization.compute import keys
from immunization.data.image_files import SUFFIXES, is_system, read_image
from immunization.data.images import ImagePair, ImageSplit, ImageTask, Pictures, description
from immunization.data.pixels import sklearn_digits
from immunization.data.preparation import check_training_rows, split_rows
from immunization.data.task import kind_of, roles_of
from immunization.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""In the order of the data set's labels, 0 to 9, which is that of the alphabet."""
SIDE = 32
PARTS = ("train", "val")


@checked("dataset")
def cifar10(
    root: str = "~/.cache/immunization/cifar10",
    download: bool = True,
    primary: Sequence[int] = (0, 1, 2, 3, 4),
    harmful: Sequence[int] = (5, 6, 7, 8),
    benign: int | None = 9,
    max_samples: AtLeastOne | None = None,
    val_fraction: Fraction = 0.1,
    split_seed: Seed = 0,
    augment: bool = False,
    name: str = "cifar10",
) -> ImagePair:
    """CIFAR-10 of folders or of torchvision's file, by conf/dataset/cifar10.yaml; raises ConfigError, DataError."""
    chosen = [*primary, *harmful, *([] if benign is None else [benign])]
    if min(len(primary), len(harmful)) < 2 or not set(chosen) <= set(range(10)):
        raise ConfigError("dataset.primary and harmful need two classes or more, all of 0 to 9")
    if len(set(chosen)) < len(chosen):
        raise ConfigError("dataset.primary, harmful and benign must have no class in common, and none twice")
    parts = _read(Path(root).expanduser(), download)
    generator = torch.Generator().manual_seed(split_seed)
    names = {role: tuple(CLASSES[c] for c in group) for role, group in (("primary", primary), ("harmful", harmful))}
    if benign is not None:
        names["benign"] = ("primary classes", CLASSES[benign])
    tasks: dict[str, dict[str, ImageSplit]] = {role: {} for role in names}
    for part, (pixels, classes, source) in parts.items():
        codes = _codes(classes, primary, harmful, benign, max_samples, generator)
        content = hashlib.sha256(pixels.tobytes() + classes.numpy().tobytes()).hexdigest()
        for role, labels in codes.items():
            own = torch.nonzero(labels >= 0)[:, 0]
            images = ImageSplit(Pictures(pixels, labels), own, f"cifar10 {content} {labels[own].tolist()}", source)
            if part == "val":
                tasks[role]["test"] = images
                continue
            rows = split_rows(labels[own], val_fraction, 0.0, generator)
            tasks[role] |= {split: images.take(rows[split]) for split in PARTS}
    made = {r: ImageTask(f"CIFAR-10 {', '.join(names[r])}", names[r], splits) for r, splits in tasks.items()}
    return ImagePair(name, made, augment=augment, size=SIDE, crop_pct=1.0, cache=None, about=description(made))


def _codes(
    classes: Tensor,
    primary: Sequence[int],
    harmful: Sequence[int],
    benign: int | None,
    max_samples: int | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """For each role the label [N] of every image, -1 where it is none of the task's, at most `max_samples` a class.

    The benign task has as many images of primary classes, which are withheld from D_P: no image is in two tasks.
    """
    deck = torch.randperm(len(classes), generator=generator)

    def dealt(group: Sequence[int]) -> Tensor:
        labels = torch.full_like(classes, -1)
        for label, number in enumerate(group):
            labels[deck[classes[deck] == number][:max_samples]] = label
        return labels

    codes = {"primary": dealt(primary), "harmful": dealt(harmful)}
    if benign is None:
        return codes
    labels = dealt([benign])
    own = codes["primary"]
    share = max(1, int((labels == 0).sum()) // len(primary))
    labels[labels == 0] = 1
    for label in range(len(primary)):
        withheld = deck[own[deck] == label][:share]
        if len(withheld) == int((own == label).sum()):
            raise DataError(
                f"CIFAR-10: class {CLASSES[primary[label]]} has too few images to lend some to the benign task"
            )
        labels[withheld], own[withheld] = 0, -1
    return codes | {"benign": labels}


def _read(root: Path, download: bool) -> dict[str, tuple[np.ndarray, Tensor, str]]:
    """Pixels [N, 32, 32, 3], classes [N] and what they are in words, of the training images and of those for test."""
    if (root / "train").is_dir():
        return {part: _folder(root / part) for part in PARTS}
    from torchvision.datasets import CIFAR10

    read = {}
    for part, kind in (("train", "training"), ("val", "test")):
        try:
            data = CIFAR10(root, train=part == "train", download=download)
        except (RuntimeError, OSError) as error:
            fetch = "" if download else ", or set dataset.download=true"
            raise DataError(
                f"dataset.root={root} has no CIFAR-10 ({' '.join(str(error).split())}): put a folder per class into "
                f"train/ and val/ of it, or torchvision's cifar-10-batches-py{fetch}"
            ) from error
        read[part] = data.data, torch.tensor(data.targets), f"torchvision's CIFAR10, {kind} images"
    return read


def _folder(folder: Path) -> tuple[np.ndarray, Tensor, str]:
    """The images of <folder>/<class>/*, classes in the order of CLASSES, files in that of their names."""
    pixels, classes = [], []
    for number, name in enumerate(CLASSES):
        inside = [path for path in (folder / name).glob("*") if not is_system(path.name)]
        paths = sorted(path for path in inside if path.suffix.lower() in SUFFIXES)
        if lost := sorted({*inside} - {*paths}):
            told = "%s: %d of %d are no image files and are left out, as %s"
            log.warning(told, folder / name, len(lost), len(inside), lost[0].name)
        if not paths:
            raise DataError(f"{folder / name} holds no images: a folder per class is expected, {', '.join(CLASSES)}")
        for path in paths:
            try:
                image, _ = read_image(str(path))
            except DataError as error:
                raise DataError(f"{error}; {path.name} cannot be read: repair or remove it") from error
            if image.size != (SIDE, SIDE):
                width, height = image.size
                raise DataError(f"{path} is {width} x {height} pixels, CIFAR-10 has {SIDE} x {SIDE}")
            pixels.append(np.asarray(image))
            classes.append(number)
    return np.stack(pixels), torch.tensor(classes), f"images below dataset.root/{folder.name}, by class and name"


@checked("dataset")
def digits_deep(
    primary: Sequence[int] = (0, 1, 2, 3),
    harmful: Sequence[int] | Sequence[Sequence[int]] = (4, 5, 6),
    benign: Sequence[int] | Sequence[Sequence[int]] | None = (7, 8, 9),
    unseen: Sequence[int] | Sequence[Sequence[int]] | None = None,
    val_fraction: Fraction = 0.1,
    test_fraction: Fraction = 0.25,
    split_seed: Seed = 0,
    size: AtLeastOne = 32,
    name: str = "digits_deep",
) -> ImagePair:
    """scikit-learn's digits as images for a small net; conf/dataset/digits_deep.yaml describes the options."""
    check_training_rows(val_fraction, test_fraction)
    roles: dict[str, list[int]] = {}
    for kind, given in {"primary": primary, "harmful": harmful, "benign": benign, "unseen": unseen}.items():
        if given is not None:
            groups = [list(one) for one in given] if given and isinstance(given[0], Sequence) else [list(given)]
            roles |= dict(zip(roles_of(kind, ["-".join(map(str, one)) for one in groups]), groups, strict=True))
    for role, classes in roles.items():
        if len(classes) < 2 or len(set(classes)) < len(classes) or not set(classes) <= set(range(10)):
            raise ConfigError(f"dataset.{kind_of(role)}={classes}: at least two different digits of 0 to 9 are needed")
    if sum(map(len, roles.values())) > len(set().union(*roles.values())):
        raise ConfigError("dataset.primary, harmful, benign and unseen must have no digit in common")
    pixels, digits = (tensor.numpy() for tensor in sklearn_digits())
    pixels = (pixels * 255 / 16).round().astype(np.uint8).reshape(-1, 8, 8)
    tasks = {}
    for role, classes in roles.items():
        codes = {digit: code for code, digit in enumerate(classes)}
        labels = torch.tensor([codes.get(digit, -1) for digit in digits])
        own = torch.nonzero(labels >= 0)[:, 0]
        parts = split_rows(labels[own], val_fraction, test_fraction, torch.Generator().manual_seed(split_seed))
        images, content = Pictures(pixels, labels), keys.key(pixels=pixels)
        splits = {
            s: ImageSplit(images, own[i], f"digits {content} {classes} {i.tolist()}", "sklearn.datasets.load_digits()")
            for s, i in parts.items()
        }
        tasks[role] = ImageTask("digits " + " ".join(map(str, classes)), tuple(map(str, classes)), splits)
    return ImagePair(name, tasks, size=size, crop_pct=1.0, cache=None, about=description(tasks))
