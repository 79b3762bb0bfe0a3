"""Small data files of every kind the program reads, good ones and damaged ones, and the options that read them.

`{tmp}` in an option stands for the folder that holds the files.
"""

import gzip
from pathlib import Path

import numpy as np
from helpers.images import draw_folder, idx

ARRAYS = ("dataset=arrays", "method.epochs=1")
NPZ = (*ARRAYS, "dataset.path={tmp}/pair.npz")
MNIST = ("dataset=mnist", "dataset.root={tmp}", "dataset.download=false", "method.epochs=1")
IMAGES = (
    *("dataset=image_folders", "model=timm", "model.name=test_resnet", "model.pretrained=false", "dataset.size=32"),
    *("+model.arguments.num_classes=2", "method=closed_form", "dataset.primary_root={tmp}/p", "dataset.cache={tmp}/c"),
    "dataset.harmful_root={tmp}/h",
)


def matrices(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """A good pair of tasks with 40 rows, 3 columns and 2 classes, changed."""
    rng = np.random.default_rng(0)
    good = {f"{role}_x": rng.normal(size=(40, 3)) for role in ("primary", "harmful")}
    return good | {f"{role}_y": np.arange(40) % 2 for role in ("primary", "harmful")} | changes


def with_nan() -> np.ndarray:
    x = matrices()["harmful_x"]
    x[7, 1] = np.nan
    return x


def npz(tmp: Path, **changes: np.ndarray | None) -> None:
    """`matrices` as a file; None leaves one out."""
    np.savez(tmp / "pair.npz", **{name: value for name, value in matrices(**changes).items() if value is not None})


def table(header: str = "a,b,target", first: str = "0.1,0.2,0.3") -> str:
    """A good CSV file of 40 rows, or one with another header or first row."""
    rows = np.random.default_rng(0).normal(size=(39, 2))
    return "\n".join([header, first, *(f"{a:.4f},{b:.4f},{a + b:.4f}" for a, b in rows)]) + "\n"


def csv(tmp: Path, text: str | bytes) -> None:
    """A good table for the primary task, `text` for the harmful one."""
    (tmp / "primary.csv").write_text(table())
    (tmp / "harmful.csv").write_bytes(text if isinstance(text, bytes) else text.encode())


def zeros(*shape: int) -> bytes:
    return idx(np.zeros(shape))


def mnist(tmp: Path, name: str = "", content: bytes | None = None) -> None:
    """60 black images in each part; file `name` holds `content`, or is missing where that is None."""
    folder = tmp / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(zeros(60, 28, 28)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(zeros(60)))
    if name and content is None:
        (folder / name).unlink()
    elif name:
        (folder / name).write_bytes(content)


def image_pair(tmp: Path) -> None:
    """Two folders of images with two classes each."""
    draw_folder(tmp / "p", 2, 6, 2, 0)
    draw_folder(tmp / "h", 2, 6, 2, 1)


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)
