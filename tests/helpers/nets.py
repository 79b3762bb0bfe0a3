"""Small nets on small folders of images."""

import torch

from immunization.data import image_folders
from immunization.models.timm import Timm


def open_pair(folders, cache=None, **options):
    return image_folders(str(folders[0]), str(folders[1]), cache=cache and str(cache), size=32, **options).to(
        "cpu", torch.float64
    )


def build(pair, name="test_resnet", trainable="last", **options) -> Timm:
    torch.manual_seed(0)
    arguments = {"num_classes": 4} | ({"img_size": 32} if "vit" in name else {})
    return Timm(pair, name, trainable, pretrained=False, arguments=arguments, **options)
