"""Nets of other libraries than timm."""

import copy

import pytest
import timm
import torch
from helpers.images import loader
from torch import nn

import immunization
from immunization import ConfigError
from immunization.models.adapted import Adapted, adapted
from immunization.models.chain import units_of
from immunization.models.fold import Folded, folded_map

pytestmark = pytest.mark.trains


class Small(nn.Module):
    """A chain, a flattening between modules, and a linear layer of another name, whose dtype the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.top(self.pool(self.block(self.stem(images))).flatten(1).to(self.top[1].weight.dtype))


@pytest.fixture
def net() -> nn.Module:
    return Small().eval()


@pytest.fixture
def images() -> torch.Tensor:
    return next(iter(loader(4, 5, count=8, size=32)))[0]


@pytest.mark.parametrize("method", ["closed_form", "learning_curve"])
def test_a_map_before_the_classifier(net, images, method):
    options = {"epochs": 5} if method == "learning_curve" else {"ridge": 1e-3}
    immunized = immunization.immunize(net, loader(4, 0), loader(3, 1), method=method, **options)
    assert type(immunized) is Small
    assert folded_map(immunized).shape == (16, 16)
    with torch.no_grad():
        torch.testing.assert_close(immunized(images), net(images), rtol=1e-3, atol=1e-3)
    again = Adapted(immunized, images)
    assert (again.paths, again.classifier.in_features) == (["top.1"], 16)
    result = immunization.audit(
        again.released(), loader(4, 0), loader(3, 1), attacks=["linear_probe", "undo"], undo__steps=64
    )
    assert result.metrics["attack/undo/steps"] == result.metrics["attack/undo/steps_baseline"]
    assert result.metrics["primary/changed_predictions"] == 0


@pytest.mark.parametrize("trainable", ["last", "stem"])
def test_training_a_part(net, trainable):
    options = {"epochs": 1, "batch_size": 32, "optimizer__lr": 1e-3}
    primary, harmful = loader(4, 0), loader(3, 1)
    immunized = immunization.immunize(net, primary, harmful, "condition_number", trainable=trainable, **options)
    before = net.state_dict()
    changed = {name for name, tensor in immunized.state_dict().items() if not torch.equal(tensor, before[name])}
    part = "block" if trainable == "last" else trainable
    assert f"{part}.0.weight" in changed
    assert all(name.startswith((part, "top.1")) for name in changed)


def test_torchvision(images):
    models = pytest.importorskip("torchvision.models")
    for name, path in (("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3")):
        assert Adapted(getattr(models, name)(num_classes=3), images).paths == [path]


class Tuple(Small):
    def forward(self, images):
        return (super().forward(images),)


class Softmax(Small):
    def forward(self, images):
        return super().forward(images).softmax(1)


def test_mistakes_are_named(net):
    pairs = loader(4, 0), loader(3, 1)
    with pytest.raises(ConfigError, match="Tuple gives a tuple of 1; wrap it in a module whose forward returns logits"):
        immunization.immunize(Tuple(), *pairs)
    with pytest.raises(ConfigError, match=r"Softmax has no linear classifier: its output is not that of top\.1"):
        immunization.immunize(Softmax(), *pairs)
    with pytest.raises(ConfigError, match=r"Small cannot read inputs of shape \(2, 8, 8\)"):
        immunization.immunize(net, [(torch.randn(4, 2, 8, 8), torch.arange(4))], pairs[1])
    with pytest.raises(ConfigError, match=r"the model must be an nn\.Module, not str"):
        immunization.immunize("resnet18", *pairs)


class Shifted(Small):
    """A net that writes into its input, or not."""

    inplace = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.inplace:
            images -= 0.5
            return super().forward(images)
        return super().forward(images - 0.5)


def test_a_forward_that_writes_into_its_input_changes_no_measure():
    found = []
    for inplace in (False, True):
        net = Shifted()
        net.inplace = inplace
        batches = [(x.clone(), y) for x, y in loader(4, 0)]
        found.append(
            immunization.audit(net, batches, loader(3, 1), copy.deepcopy(net), attacks="whitened_probe").metrics
        )
        assert all(torch.equal(x, own) for (x, _), (own, _) in zip(batches, loader(4, 0), strict=True))
    assert found[0] == found[1]


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))])
def test_a_chain_that_writes_into_its_input_leaves_it_alone(first, images):
    net = Adapted(nn.Sequential(first, nn.Flatten(), nn.Linear(images[0].numel(), 4), nn.Linear(4, 3)), images)
    before = images.clone()
    x = images
    for _, unit in units_of(net, images):
        x = unit(x)
    assert torch.equal(images, before)


def test_a_transformer_of_another_image_size():
    net = timm.create_model("test_vit", img_size=32, num_classes=4)
    immunized = immunization.immunize(net, loader(4, 0, size=32), loader(3, 1, size=32), "closed_form", ridge=1e-3)
    immunization.audit(immunized, loader(4, 0, size=32), loader(3, 1, size=32), net, attacks="whitened_probe")


def test_features_without_a_graph_and_several_dtypes_are_named():
    net = Small()
    net.block.register_forward_hook(lambda module, x, output: output.detach())
    with pytest.raises(ConfigError, match=r"features of Small have no gradients; .* use method=closed_form, "):
        immunization.immunize(net, loader(4, 0), loader(3, 1), "condition_number", trainable="stem", epochs=1)
    net = Small()
    net.aux = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"trainable=aux: what is trained never runs in the forward of Small; name"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), "condition_number", trainable="aux", epochs=1)
    net = Small()
    net.stem.half()
    with pytest.raises(ConfigError, match="has weights of float16 and float32; give it in one dtype"):
        immunization.immunize(net, loader(4, 0), loader(3, 1))


class Cast(Small):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).double()


def test_a_net_that_changes_what_its_classifier_gives_is_refused(images):
    with pytest.raises(ConfigError, match=r"its output is not that of top\.1, .* another dtype"):
        Adapted(Cast(), images)


def test_a_net_of_timm_with_a_forward_of_its_own_is_taken_as_a_whole(images):
    net = timm.create_model("test_resnet", num_classes=4).eval()
    assert adapted(net, images) is net
    net.register_forward_pre_hook(lambda module, x: (x[0] / 2 + 1,))
    immunized = immunization.immunize(net, loader(4, 0), loader(3, 1), "closed_form", ridge=1e-3)
    assert isinstance(immunized.fc, Folded)
    torch.testing.assert_close(immunized(images), net(images), rtol=1e-3, atol=1e-3)


def test_weights_in_two_places_are_saved(images, tmp_path):
    net = Small()
    net.again = net.block
    immunized = immunization.immunize(net, loader(4, 0), loader(3, 1), "closed_form", ridge=1e-3)
    immunization.save(immunized, tmp_path)
    assert torch.equal(immunization.load(tmp_path, net)(images), immunized(images))
