"""Filters made of patches of images."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.matrices import gaussian
from torch.testing import assert_close

from immunization.attacks import patches as module
from immunization.attacks.patches import FLAT, THRESHOLD, Patches

pytestmark = pytest.mark.usefixtures("few_patches")


def images(count=4, channels=3, side=12, seed=0):
    return gaussian(count, channels * side**2, seed=seed).reshape(count, channels, side, side) * 3 + 1


@pytest.mark.parametrize("channels", [1, 3])
def test_maps_are_inner_products_of_standardized_patches_with_filters(channels):
    x = images(channels=channels)
    patches = Patches(x, 6)
    found = patches(x)
    assert found.shape == (4, 2 * module.FILTERS, 7, 7)
    cut = F.unfold(x, 6).transpose(1, 2)
    cut = cut - cut.mean(2, keepdim=True)
    cut = cut / (cut.var(2, correction=0, keepdim=True) + FLAT).sqrt()
    fit = (cut @ patches.weight.flatten(1).T - patches.bias).transpose(1, 2).unflatten(2, (7, 7))
    assert_close(found, torch.cat([(fit - THRESHOLD).relu(), (-fit - THRESHOLD).relu()], 1))
    assert patches.flops(x) == 2 * module.FILTERS * 36 * channels * 49


def test_a_whitened_patch_fits_a_filter_by_its_length_along_it():
    """Over the patches that filters were made of, fits have mean 0 and, whitened, variance of about 1."""
    x = images(count=40)
    patches = Patches(x, 4)
    fit = (patches(x)[:, : module.FILTERS] - patches(x)[:, module.FILTERS :]).abs()
    lost = fit[fit > 0] + THRESHOLD
    assert 1 < lost.square().mean() < 4  # of a normal variable beyond .5: its square is 1.7 in the mean
    plain = patches(torch.full_like(x, 7.0))
    assert_close(plain, plain[:1, :, :1, :1].expand_as(plain))  # a plain image is the same everywhere


def test_filters_are_the_same_for_the_same_images_and_fit_small_ones():
    x = images(side=5)
    one, other = Patches(x, 8), Patches(x.clone(), 8)
    assert one.side == 5
    assert torch.equal(one(x), other(x))
    assert not torch.equal(one.weight, Patches(x, 8, seed=1).weight)
    assert one(x[:1]).shape == (1, 2 * module.FILTERS, 1, 1)


def test_large_images_are_compared_at_every_second_pixel():
    x = images(side=64)
    patches = Patches(x, 8)
    dense = copy.copy(patches)
    dense.stride = 1
    assert_close(patches(x[:3]), dense(x[:3])[:, :, ::2, ::2])
    assert patches.flops(x) == 2 * module.FILTERS * 64 * 3 * 29**2
