"""Pairs of image classification tasks for deep nets, and timm's loaders over their splits.

`Model.read` makes a `TaskPair` of activations of such a pair. A loader names the images that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from immunization.compute import keys
from immunization.compute.machine import reading
from immunization.data.image_files import decoded, read_image
from immunization.data.task import USUAL, Origin
from immunization.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image


WHOLE = ""
"""The only split of a task whose rows are told apart once they are read, as those of a user's own loader."""


@dataclass(frozen=True)
class ImageSplit:
    """Images of one split: `dataset` gives (image, class); `rows` of it belong here, None standing for all.

    `identity` changes with the files: what is computed from them is kept under it. `source` names the rows in words.
    """

    dataset: Dataset
    rows: Tensor | None
    identity: str
    source: str
    kind: ClassVar[str] = "images"

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def take(self, rows: Tensor | None) -> ImageSplit:
        """Some of the rows; None for all."""
        if rows is None:
            return self
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def loader(self, pair: ImagePair, config: Mapping[str, Any], **options: Any) -> Iterable:
        """Batches (images, labels, unreadable ones, kinds), prepared as a net with the data config `config` reads."""
        return create_loader(pair, self, config, **options)

    @property
    def labels(self) -> Tensor | None:
        """Labels [N] of images in folders; None of others, which are known when they are read."""
        if not isinstance(self.dataset, Files):
            return None
        labels = torch.tensor([label for _, label in self.dataset.samples])
        return labels if self.rows is None else labels[self.rows]

    @property
    def origin(self) -> Origin:
        """Where the images stand, should all of them be readable."""
        return Origin(self.source, torch.arange(len(self.dataset)) if self.rows is None else self.rows)


@dataclass(frozen=True)
class ImageTask:
    """One task: `classes` are the names of its labels 0, 1, ... (empty: not known beforehand), `splits` its images.

    The splits are those of files, or one, `WHOLE`, of a loader that gives what a net reads (data/loaders.py).
    `crop` replaces the model's own crop mode. `outputs` says which output of a model's own head means which class.
    `folders` are those of the classes, where each has one, and all below that hold images; `order` is the one that the
    classes were said to be in. `left_out` counts files that are not read, by split and kind.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Any]
    crop: str | None = None
    outputs: tuple[int, ...] | None = None
    folders: tuple[Path, ...] = ()
    order: Literal["text", "natural"] | None = None
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ImagePair:
    """Tasks by role, as those of `TaskPair`, and how to read their images; see conf/dataset.

    `keep` are images, all in `train`, that a method may keep as theta_0 has them; their labels mean nothing.
    """

    name: str
    tasks: dict[str, ImageTask]
    on_bad_image: Literal["error", "skip"] = "error"
    augment: bool = False
    size: int | None = None
    crop_pct: float | None = None
    batch_size: int = 64
    workers: int | None = 0
    cache: str | None = "~/.cache/immunization/activations"
    cache_limit: float = 20.0
    about: dict[str, object] = field(default_factory=dict)
    keep: tuple[ImageTask, ...] = ()
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def dim(self) -> None:
        """Images are no rows of features; how many a net makes of them, the net says."""

    @property
    def channels(self) -> int | None:
        """Of its images as they are read; None where only their source knows."""
        sources = [getattr(task.splits.get("train"), "dataset", None) for task in self.tasks.values()]
        modes = {getattr(source, "input_img_mode", None) for source in sources}
        return {"L": 1, "RGB": 3}.get(modes.pop()) if len(modes) == 1 else None

    @property
    def content(self) -> dict[str, str]:
        """A key of the images of each split, `<role>/<split>`, and of those that are kept."""
        kept = {f"keep {images.name}": images for images in self.keep}
        splits = {f"{r}/{s}": split for r, task in (self.tasks | kept).items() for s, split in task.splits.items()}
        return {name: keys.key(identity=split.identity, rows=split.rows) for name, split in splits.items()}

    def check_channels(self, net: str, channels: int) -> None:
        """Raise ConfigError for a net that reads images of another number of channels."""
        if self.channels not in (None, channels):
            raise ConfigError(
                f"{net} reads images of {channels} channels, those of dataset={self.name} have {self.channels}: choose "
                f"other data, or a net for these: model=timm +model.arguments.in_chans={self.channels}"
                f"{', or model=digits_net' if self.channels == 1 else ''}"
            )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> ImagePair:
        return replace(self, device=torch.device(device), dtype=dtype)


def is_own(task: ImageTask) -> bool:
    """Whether a task is read from a loader of the user's own, which prepares its inputs itself."""
    return WHOLE in task.splits


class Files(Dataset):
    """Images in files: `samples` are the path and the label of each."""

    input_img_mode = "RGB"  # as timm's data sets call it

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[Image, int]:
        path, label = self.samples[i]
        return read_image(path, self.input_img_mode)[0], label


class Pictures(Dataset):
    """Images in memory: `pixels` [N, H, W] or [N, H, W, 3] (uint8), and the label of each, -1 for those of no class."""

    def __init__(self, pixels: np.ndarray, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels
        self.input_img_mode = "L" if pixels.ndim == 3 else "RGB"  # as timm's data sets call it

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Image, int]:
        from PIL import Image

        return Image.fromarray(self.pixels[i]), int(self.labels[i])


def description(tasks: Mapping[str, ImageTask], inputs: str = "images") -> dict[str, object]:
    """What a pair is `about`: the name of every task, with how many `inputs` and classes they have."""
    names = {role: task.name for role, task in tasks.items()}
    left_out = {role: task.left_out for role, task in tasks.items() if task.left_out}
    more = ({} if tasks.keys() <= set(USUAL) else {"tasks": names}) | ({"left_out": left_out} if left_out else {})
    return more | {
        "data": names,
        inputs: {role: {s: len(split) for s, split in task.splits.items()} for role, task in tasks.items()},
        "classes": {role: len(task.classes) for role, task in tasks.items()},
    }


class Unreadable(NamedTuple):
    """An image that cannot be read: its place among those of the split, and the file with the reason."""

    row: int
    why: str


def unreadable(title: str, images: Sequence[Unreadable]) -> DataError:
    """The error that names the first of `images`."""
    shown = "; ".join(image.why for image in images[:5]) + ("; ..." if len(images) > 5 else "")
    return DataError(
        f"{title}: {len(images)} unreadable image{'s' * (len(images) > 1)}: {shown}. Repair or remove them, or set "
        "dataset.on_bad_image=skip"
    )


class Readable(Dataset):
    """The images of a split after `transform`, which timm's loaders set, or what says that one cannot be read."""

    def __init__(self, split: ImageSplit) -> None:
        self.split, self.transform = split, None

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, i: int) -> tuple[Tensor, int, list[str]] | Unreadable:
        dataset, rows, kinds = self.split.dataset, self.split.rows, []
        row = i if rows is None else int(rows[i])
        try:
            if isinstance(dataset, Files):
                path, label = dataset.samples[row]
                image, kinds = read_image(path, dataset.input_img_mode)
            elif hasattr(dataset, "reader"):  # timm's own data set would put another image in place of a bad one
                stream, label, *_ = dataset.reader[row]
                image, kinds = decoded(stream, f"image {row}", dataset.input_img_mode)
            else:
                image, label = dataset[row]
        except DataError as error:
            return Unreadable(i, str(error))
        except (OSError, SyntaxError, ValueError) as error:
            return Unreadable(i, f"image {row}: {error}")
        return self.transform(image), label, kinds


def collate(items: list[tuple[Any, ...]]) -> tuple[Tensor, Tensor, list[Unreadable], list[str]]:
    """Images [n, C, H, W] that can be read, labels [n], those that cannot, and kinds of the first."""
    good = [item for item in items if not isinstance(item, Unreadable)]
    images = torch.stack([torch.as_tensor(item[0]) for item in good]) if good else torch.empty(0)
    labels = torch.tensor([int(item[1]) for item in good], dtype=torch.long)
    kinds = [kind for item in good for kind in chain(*item[2:])]
    return images, labels, [item for item in items if isinstance(item, Unreadable)], kinds


def create_loader(
    pair: ImagePair, split: ImageSplit, config: Mapping[str, Any], loaders: int = 1, **options: Any
) -> Any:
    """timm's loader over one split with a model's data config; batches are as `collate` makes them.

    Images are augmented for training where the pair says so, and else prepared as those that are measured.
    """
    from timm.data import create_loader as timm_loader
    from timm.data import create_transform

    dataset, training = Readable(split), options.get("is_training", False)
    drawn = training and pair.augment
    how = reading(torch.device(pair.device), len(split), pair.workers, drawn, loaders)
    options = {"batch_size": pair.batch_size, **how, **options}
    loader = timm_loader(dataset, **config, **options, use_prefetcher=False, collate_fn=collate)
    if training and not drawn:  # timm's own would squash them
        dataset.transform = create_transform(**config, is_training=False)
    return loader
