"""Small nets on small folders of images."""

from pathlib import Path

import torch

from immunization.data import image_folders
from immunization.data.images import ImagePair
from immunization.models.timm import Timm


def open_pair(folders, cache: str | Path | None = "beside", **options) -> ImagePair:
    """The images; what a net makes of them is kept beside the folders, or in `cache`, or with None nowhere."""
    cache = cache and str(folders[0].parent / "kept" if cache == "beside" else cache)
    return image_folders(str(folders[0]), str(folders[1]), cache=cache, size=32, **options).to("cpu", torch.float64)


def build(pair, name="test_resnet", trainable="last", **options) -> Timm:
    torch.manual_seed(0)
    arguments = {"num_classes": 4} | ({"img_size": 32} if "vit" in name else {})
    return Timm(pair, name, trainable=trainable, pretrained=False, arguments=arguments, **options)
