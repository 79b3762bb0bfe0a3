"""Pairs of binary tasks on images of ten classes: scikit-learn's digits, MNIST and FashionMNIST."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from immunization.checks import AtLeastOne, Digit, Fraction, Seed, checked
from immunization.data.preparation import check_training_rows, classes_of_roles, fetched, finish, split_rows
from immunization.data.task import Origin, Split, Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.roles import is_shown, kind_of

LARGEST = 2**28
"""Bytes of an unpacked IDX file; the official ones have 47 million at most."""
Protocol = Literal["one_vs_rest", "authors"]
PROTOCOLS = {
    "one_vs_rest": "one_vs_rest: a class (1) against as many images of classes that no task has (0), no image in two "
    "tasks",
    "authors": "authors: images of one class a task, equally many, labels all 0 (primary) or all 1",
}

MOMENTS = {"authors": (0.1307, 0.3081), "authors_pixels": (0.0, 1.0)}
"""Mean and standard deviation of MNIST by protocol: the release's, and those that leave pixels from 0 to 1."""

Digits = Digit | Sequence[Digit]  # the class of a task, or those of several

PARTS, KINDS = ("train", "t10k"), ("images-idx3-ubyte", "labels-idx1-ubyte")
"""What the files of MNIST are called."""


@dataclass(frozen=True)
class Images:
    """Images of ten classes: `pixels` [N, D] from 0 to `scale`, `labels` [N] int64."""

    about: str
    pixels: Tensor
    scale: int
    labels: Tensor
    rows: dict[str, Tensor]  # by split
    sources: dict[str, str]  # by split, where its rows stand
    numbers: Tensor  # of every row there


@cache
def sklearn_digits() -> tuple[Tensor, Tensor]:
    """Pixels [1797, 64] float64 and labels [1797] int64 of sklearn.datasets.load_digits, read once a process.

    scikit-learn's own reader imports pandas and scipy.stats, 2.9 s of CPU time: its file is read here, if it is there.
    """
    file = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        table = torch.from_numpy(np.loadtxt(file, delimiter=","))
        return table[:, :-1], table[:, -1].long()
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels), torch.from_numpy(labels)


@checked("dataset/digits")
def digits(
    seed: Seed,
    primary: Digit,
    harmful: Digits,
    benign: Digits | None,
    unseen: Digits | None,
    protocol: Protocol,
    max_samples: AtLeastOne | None,
    val_fraction: Fraction,
    test_fraction: Fraction,
    common_range: bool,
    name: str,
) -> TaskPair:
    """scikit-learn's 1797 digits of 8 x 8 pixels (D = 64), by conf/dataset/digits.yaml; raises ConfigError."""
    roles = _roles(primary=primary, harmful=harmful, benign=benign, unseen=unseen)
    check_training_rows(val_fraction, test_fraction)
    pixels, labels = sklearn_digits()
    rows = split_rows(labels, val_fraction, test_fraction, torch.Generator().manual_seed(seed))
    sources, numbers = dict.fromkeys(rows, "sklearn.datasets.load_digits()"), torch.arange(len(labels))
    about = f"scikit-learn digits, {len(pixels)} images of 8 x 8 pixels"
    images = Images(about, pixels, 16, labels, rows, sources, numbers)
    return _pair(name, images, roles, protocol, max_samples, seed, common_range)


@checked("dataset/mnist")
def mnist(
    seed: Seed,
    primary: Digit,
    harmful: Digits,
    benign: Digits | None,
    unseen: Digits | None,
    protocol: Literal["one_vs_rest", "authors", "authors_pixels"],
    max_samples: AtLeastOne | None,
    val_fraction: Fraction,
    root: str,
    download: bool,
    common_range: bool,
    name: str,
) -> TaskPair:
    """MNIST (D = 784), by conf/dataset/mnist.yaml; raises ConfigError, DataError for absent or damaged files."""
    roles = _roles(primary=primary, harmful=harmful, benign=benign, unseen=unseen)
    images = _torchvision_images("MNIST", root, download, val_fraction, seed)
    moments = MOMENTS.get(protocol)
    choice: Protocol = "authors" if moments else "one_vs_rest"
    return _pair(name, images, roles, choice, max_samples, seed, common_range, moments)


@checked("dataset/fashion_mnist")
def fashion_mnist(
    seed: Seed,
    primary: Digit,
    harmful: Digits,
    benign: Digits | None,
    unseen: Digits | None,
    protocol: Protocol,
    max_samples: AtLeastOne | None,
    val_fraction: Fraction,
    root: str,
    download: bool,
    common_range: bool,
    name: str,
) -> TaskPair:
    """FashionMNIST (D = 784), by conf/dataset/fashion_mnist.yaml; raises what `mnist` does."""
    roles = _roles(primary=primary, harmful=harmful, benign=benign, unseen=unseen)
    images = _torchvision_images("FashionMNIST", root, download, val_fraction, seed)
    return _pair(name, images, roles, protocol, max_samples, seed, common_range)


def _roles(**given: Digits | None) -> dict[str, int]:
    """The class of each role; raises ConfigError where two roles have the same, or a list is empty."""
    roles = {role: classes[0] for role, classes in classes_of_roles(1, **given).items()}
    if len(roles) == 10:
        raise ConfigError("dataset: ten tasks leave no class for the images that are no task's; choose fewer")
    return roles


def _pair(
    name: str,
    images: Images,
    roles: dict[str, int],
    protocol: Protocol,
    max_samples: int | None,
    seed: int,
    common_range: bool,
    moments: tuple[float, float] | None = None,
) -> TaskPair:
    """The binary tasks of `roles` {role: class}, by `moments` (mean, std) or those of the training rows."""
    rows = _choose(images, roles, protocol, max_samples, torch.Generator().manual_seed(seed))
    authors = protocol == "authors"

    def scaled(own: Tensor) -> Tensor:
        return images.pixels[own].double().div_(images.scale)

    if moments:
        mean, std = torch.tensor(moments, dtype=torch.float64)
    else:
        shown = [splits["train"][0] for role, splits in rows.items() if is_shown(role)]
        std, mean = torch.std_mean(scaled(torch.cat(shown)))
        if not std > 0:
            raise DataError(f"{images.about}: all pixels of both tasks are equal (rank 0), the files are damaged")
    tasks = {}
    for role, digit in roles.items():
        splits = {
            split: Split(scaled(own).sub_(mean).div_(std), y, Origin(images.sources[split], images.numbers[own]))
            for split, (own, y) in rows[role].items()
        }
        label = f"class {digit}" if authors else f"class {digit} against the rest"
        tasks[role] = Task(label, **splits, classes=2, constant=authors)
    given = "given by the protocol" if moments else "of all training pixels of primary and harmful task (ddof = 1)"
    about = {
        "data": images.about,
        "protocol": PROTOCOLS[protocol],
        "classes": roles,
        "normalize": f"pixels / {images.scale}, then one mean {mean:.6g} and std {std:.6g}, {given}",
    }
    tensors = {"mean": mean[None], "std": std[None]}
    return finish(replace(TaskPair.of(name, tasks, about), tensors=tensors), common_range)


def _choose(
    images: Images, roles: dict[str, int], protocol: Protocol, max_samples: int | None, generator: torch.Generator
) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """Row numbers and labels by role and split; negatives are dealt from one deck, so no image is in two tasks."""
    chosen: dict[str, dict[str, tuple[Tensor, Tensor]]] = {role: {} for role in roles}
    for split, rows in images.rows.items():
        deck = rows[torch.randperm(len(rows), generator=generator)]
        labels = images.labels[deck]
        own = {role: deck[labels == digit][:max_samples] for role, digit in roles.items()}
        rest = deck[~torch.isin(labels, torch.tensor(list(roles.values())))]
        if protocol == "one_vs_rest" and sum(map(len, own.values())) > len(rest):  # too few negatives
            own = {role: positive[: len(rest) // len(own)] for role, positive in own.items()}
        fewest = min(len(positive) for role, positive in own.items() if kind_of(role) != "unseen")
        if split == "train" and not all(map(len, own.values())):
            empty = next(role for role, positive in own.items() if not len(positive))
            raise DataError(
                f"{images.about}: class {roles[empty]} (dataset.{kind_of(empty)}) is empty, it has no training images"
            )
        for role, positive in own.items():
            if protocol == "authors":
                taken = positive[:fewest]  # of an unseen class there may be fewer
                chosen[role][split] = taken, torch.full((len(taken),), int(role != "primary"))
            else:
                negative, rest = rest[: len(positive)], rest[len(positive) :]
                y = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
                chosen[role][split] = torch.cat([positive, negative]), y
    return chosen


def _torchvision_images(family: str, root: str, download: bool, val_fraction: float, seed: int) -> Images:
    """The files of torchvision's class `family`: its test file is the test split, the rest is train and val."""
    folder = Path(root).expanduser() / family / "raw"
    if missing := [name for part in PARTS for kind in KINDS if not _stored(folder, name := f"{part}-{kind}")]:
        remedy = (
            f"put torchvision's four files of {family} into {folder} (dataset.root is the folder above {family}/raw)"
        )
        fetched(lambda: _download(family, folder), f"{folder / missing[0]}[.gz]", remedy, download)
    parts = {part: [_read_idx(_stored(folder, f"{part}-{kind}")) for kind in KINDS] for part in PARTS}
    for part, (images, labels) in parts.items():
        fits = (
            images.dtype == labels.dtype == torch.uint8 and images.shape == (len(labels), 28, 28) and labels.ndim == 1
        )
        if not fits or not len(labels) or labels.max() > 9:
            raise DataError(
                f"{folder}: the {part} files hold images {tuple(images.shape)} and labels {tuple(labels.shape)}, "
                "expected [N, 28, 28] and [N] from 0 to 9; delete them and run again with dataset.download=true"
            )
    pixels, labels = (torch.cat(both) for both in zip(*parts.values(), strict=True))
    first, tested = (len(own) for _, own in parts.values())
    rows = split_rows(labels[:first], val_fraction, 0.0, torch.Generator().manual_seed(seed))
    rows["test"] = torch.arange(first, first + tested)
    sources = {split: f"{family}/raw/{PARTS[split == 'test']}-{KINDS[0]}" for split in rows}
    about = f"{family}, {first} images of 28 x 28 pixels and the official {tested} for test"
    numbers = torch.cat([torch.arange(first), torch.arange(tested)])
    return Images(about, pixels.flatten(1), 255, labels.long(), rows, sources, numbers)


def _stored(folder: Path, name: str) -> Path | None:
    """The file as torchvision leaves it, unpacked or not: a read-only folder may hold only the latter."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _download(family: str, folder: Path) -> None:
    from torchvision import datasets

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as new:  # torchvision writes in place, and takes what a kill left for whole
        getattr(datasets, family)(new, download=True)
        for path in Path(new, family, "raw").iterdir():
            path.replace(folder / path.name)


def _read_idx(path: Path) -> Tensor:
    """What torchvision reads in an IDX file, which it needs unpacked; nothing above `LARGEST` bytes is unpacked."""
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file, TemporaryDirectory() as place:
            if len(data := file.read(LARGEST + 1)) > LARGEST:
                raise ValueError(f"it holds more than {LARGEST:,} bytes")
            (plain := Path(place, "idx")).write_bytes(data)
            return read_sn3_pascalvincent_tensor(plain)
    except (OSError, EOFError, ValueError, LookupError, RuntimeError, AssertionError, zlib.error) as error:
        raise DataError(
            f"{path} is truncated or corrupted ({error or type(error).__name__}): delete it and run again with "
            "dataset.download=true, or copy it again"
        ) from error
