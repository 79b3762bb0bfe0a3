"""A folded map stays in the net through what people do with models of timm, in many of its families."""

from dataclasses import replace

import pytest
import timm
import torch
from helpers.nets import open_pair
from helpers.versions import since
from timm.models._features import FeatureListNet

from immunization.models.fold import fold_into, fold_place, folded_map, unfold, weight_of
from immunization.models.timm import Timm

FAMILIES = (
    "test_byobnet",
    "test_convnext",
    "test_efficientnet",
    "test_mambaout",
    since("timm", "1.0.31", "test_maxvit"),
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "regnetx_002",
    "mobilenetv3_small_050",
)
SIZE = (3, 64, 64)


def create_net(name):
    torch.manual_seed(0)
    arguments = {"img_size": SIZE[1:]} if name in ("test_vit", "test_maxvit") else {}
    return timm.create_model(name, num_classes=4, **arguments).eval().double()


@torch.no_grad()
def features_of(net, images):
    return net.forward_head(net.forward_features(images), pre_logits=True)


def folded(name):
    """A net, the same with a random map, the place, images, and the features that it should have."""
    net, immunized = create_net(name), create_net(name)
    place = fold_place(net, SIZE)
    images = torch.randn(2, *SIZE, dtype=torch.float64)
    features = features_of(net, images)
    theta = torch.randn(features.shape[1], features.shape[1], dtype=torch.float64)
    fold_into(immunized, place.name, weight_of(theta, place))
    return net, immunized.eval(), place, images, features @ theta


@pytest.mark.parametrize("name", FAMILIES)
def test_map_survives_reset_classifier(name):
    _, immunized, place, images, expected = folded(name)
    torch.testing.assert_close(features_of(immunized, images), expected)
    assert place.stripped_by is None
    immunized.reset_classifier(10)
    immunized.double()
    torch.testing.assert_close(features_of(immunized, images), expected)
    assert immunized(images).shape == (2, 10)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "regnetx_002", "mobilenetv3_small_050"])
def test_map_survives_another_pooling(name):
    net, immunized, _, images, _ = folded(name)
    hidden = immunized.forward_features(images)
    immunized.reset_classifier(10, "max")
    assert folded_map(immunized) is not None
    if name != "mobilenetv3_small_050":  # whose features come after the pooling
        assert not torch.equal(net.forward_features(images), hidden)
    torch.testing.assert_close(immunized.double().forward_features(images), hidden)


@pytest.mark.parametrize("name", ["test_resnet", "regnetx_002"])
def test_feature_extractor_of_timm_keeps_the_map(name):
    net, immunized, _, images, _ = folded(name)
    hidden = immunized.forward_features(images)
    last = len(immunized.feature_info) - 1
    extractor = FeatureListNet(immunized, out_indices=(last,))
    torch.testing.assert_close(extractor(images)[0], hidden)
    assert not torch.equal(net.forward_features(images), hidden)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_unfold_gives_the_net_back(name):
    net, immunized, _, images, _ = folded(name)
    with torch.no_grad():
        inverse = torch.linalg.inv(folded_map(immunized))
        immunized.get_classifier().weight.copy_(net.get_classifier().weight @ inverse.T)
        logits = immunized(images)
        unfold(immunized)
        torch.testing.assert_close(logits, net(images))
        torch.testing.assert_close(immunized(images), net(images))
    assert immunized.state_dict().keys() == net.state_dict().keys()


def test_what_reset_classifier_strips_is_said(folders):
    """Behind the maximum over positions a map of the channels commutes with nothing, and the pooling is thrown away."""
    arguments = {"num_classes": 4, "global_pool": "max"}
    pair = replace(open_pair(folders), size=64).to("cpu", torch.float64)
    base = Timm(pair, "test_resnet", trainable="fold", pretrained=False, arguments=arguments)
    net, _ = base.read(base.images, True)
    facts = net.facts()
    assert facts["stripped_by"] == "reset_classifier"
    assert facts["fold"].startswith("global_pool")
