"""scikit-learn's digits for a small net: some are D_P, to which the net is fitted, others D_H, benign or unseen."""

from collections.abc import Sequence

import numpy as np
import torch

from immunization.checks import AtLeastOne, Fraction, Seed, checked
from immunization.compute import keys
from immunization.data.images import ImagePair, ImageSplit, ImageTask, Pictures, description
from immunization.data.pixels import sklearn_digits
from immunization.data.preparation import check_training_rows, split_rows
from immunization.data.task import kind_of, roles_of
from immunization.errors import ConfigError


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
