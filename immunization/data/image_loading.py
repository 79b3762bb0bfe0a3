"""Images as a model reads them: timm's loaders over a split, in which an image that cannot be read is named."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from immunization.compute.transfer import reading
from immunization.data.image_files import decoded, read_image
from immunization.data.images import Files, ImagePair, ImageSplit
from immunization.errors import DataError


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
