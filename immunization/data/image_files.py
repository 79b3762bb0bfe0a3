"""Image files: which formats are read, and how a file becomes pixels. The content decides, not the name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from immunization.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
"""Pillow's decoders that a file may choose among, and the suffixes by which files are taken for images.

Others start programs (EPS) or are hardly ever used, and so hardly ever checked.
"""
SUFFIXES = frozenset(suffix for own in FORMATS.values() for suffix in own)
READ_AS = "upright, first frame"
"""What else than the files decides the pixels; part of the name under which what is computed from them is kept."""

KINDS = {"1": "black and white", "L": "gray", "LA": "gray"}
"""Modes of Pillow in words; others are known by their names (CMYK, RGBA, P)."""
DEEP, DARK = "16 bit", "16 bit, all below 4096"
"""Kinds of images of more than 8 bits. No file says what its white is: the second may hold 8 or 12 bits in 16."""
ORIENTATION = 0x0112
UPRIGHT = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))
"""Pillow's transposition for each value of the EXIF tag."""


def is_system(name: str) -> bool:
    """Whether a file or folder of this name belongs to an operating system or an editor: hidden ones and the like."""
    known = ("__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "thumbs.db")
    return name.startswith(".") or name.lower() in (*known, "desktop.ini")


def read_image(path: str, mode: str = "RGB") -> tuple[Image, list[str]]:
    """The image in a file, as `decoded` gives it; raises DataError, which names the file, if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise DataError(f"{path}: it is not a regular file")
        with Path(path).open("rb") as stream:
            return decoded(stream, path, mode)
    except FileNotFoundError as error:
        reason = "the link leads nowhere" if os.path.islink(path) else "the file is gone"
        raise DataError(f"{path}: {reason}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def decoded(stream: BinaryIO, name: str, mode: str = "RGB") -> tuple[Image, list[str]]:
    """The first frame of an image, upright and in `mode`, and what it was before, in words, where it was not that.

    Closes the stream. Raises DataError, which says `name`, for one that cannot be read.
    """
    from PIL import Image

    Image.init()
    try:
        with stream, Image.open(stream, formats=[known for known in FORMATS if known in Image.OPEN]) as image:
            return _converted(image, mode)
    except Image.UnidentifiedImageError:
        reason = f"no image of {', '.join(FORMATS)}"
    except Exception as error:  # decoders raise a dozen kinds, struct.error and IndexError among them
        reason = str(error) or type(error).__name__
    raise DataError(f"{name}: {' '.join(reason.split())}")


def _converted(image: Image, mode: str) -> tuple[Image, list[str]]:
    from PIL import Image

    kinds = [] if image.mode == "RGB" or image.mode[0] == "I" else [KINDS.get(image.mode, image.mode)]
    # of 16 bits of a color, Pillow reads the upper 8 alone
    deep = image.mode[0] == "I" or (bool(image.tile) and ";16" in str(image.tile[0]))
    if image.size == (1, 1):
        kinds.append("1 x 1 pixel")
    if getattr(image, "is_animated", False):
        kinds.append("first of several frames")
        image.seek(0)
    before = _orientation(image)
    image.load()
    turned = _orientation(image)  # 1 where the decoder turned it itself, as that of TIFF does
    if before in UPRIGHT or turned in UPRIGHT:
        kinds.append("turned by its EXIF tag")
    upright = image.transpose(Image.Transpose(UPRIGHT[turned])) if turned in UPRIGHT else image
    if upright.mode[0] in "IF":
        values = np.asarray(upright)
        if upright.mode == "F" or values.min() < 0 or values.max() >= 2**16:
            raise ValueError("its pixels have neither 8 nor 16 bits")
        if values.min() < values.max() < 2**8:
            raise ValueError("its pixels have 16 bits, all below 256, which would be black: save it with 8 bits")
        upright = Image.fromarray((values >> 8).astype(np.uint8))  # the upper 8; Pillow itself would clip at 255
    converted = upright.convert(mode)
    if deep:
        kinds.append(DARK if np.max(converted) < 2**4 else DEEP)
    return converted, kinds


def _orientation(image: Image) -> int:
    try:
        tag = image.getexif().get(ORIENTATION, 1)
    except Exception:  # a damaged tag says nothing, and the pixels are sound
        return 1
    return tag if isinstance(tag, int) else 1
