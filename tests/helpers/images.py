"""Small made-up images: folders of PNG files, files in MNIST's format, and loaders."""

import gzip
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset


def draw_folder(root: Path, classes: int, train: int, val: int, seed: int) -> Path:
    """Noise around one color a class, `train` and `val` images each."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        color = rng.uniform(50, 200, 3)
        for split, count in (("train", train), ("val", val)):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(color + rng.normal(0, 30, (36, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def loader(classes: int, seed: int, count: int = 120, size: int = 16) -> DataLoader:
    """Noise around one color a class, as tensors of 3 x `size` x `size`."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = torch.randn(count, 3, size, size, generator=generator) + torch.randn(classes, 3, 1, 1, generator=generator)[y]
    return DataLoader(TensorDataset(x, y), batch_size=32)


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the format of MNIST's files."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_idx(path: Path, array: np.ndarray) -> None:
    """`array` as an IDX file, packed where its name ends with .gz."""
    path.write_bytes(gzip.compress(idx(array)) if path.suffix == ".gz" else idx(array))
