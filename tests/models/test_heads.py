"""The classifier of nets of every kind: found by trial, kept by a map, written back where layers were trained."""

import copy
import warnings
from dataclasses import replace

import pytest
import timm
import torch
from helpers.images import loader
from helpers.nets import open_pair
from timm.models.metaformer import MetaFormer
from timm.models.volo import VOLO
from torch import nn

import immunization
from immunization import ConfigError
from immunization.models.adapted import Adapted, adapted
from immunization.models.chain import data_config
from immunization.models.fold import folded_map
from immunization.models.timm import Timm

pytestmark = pytest.mark.trains

VIT = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
KINDS = {
    "convolutional": ("test_resnet", {}),
    "plain ViT": ("test_vit", {"img_size": 32}),
    "hierarchical": ("test_convnext", {}),
    "channels last": ("test_mambaout", {}),
    "two heads on two tokens": ("deit_tiny_distilled_patch16_224", VIT),
    "two heads on the same features": (
        "swiftformer_xs",
        {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)},
    ),
    "convolutional head": ("resnetv2_18", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "stem_chs": 8}),
    "list of heads": (
        "crossvit_tiny_240",
        {"img_size": 48, "img_scale": (1.0, 2 / 3), "embed_dim": (8, 16), "depth": ((1, 1, 0),), "num_heads": (2, 2)},
    ),
    "MLP head": (MetaFormer, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "norm before the head": ("shvit_s1", {"depth": (1, 1, 1), "embed_dim": (16, 16, 32), "partial_dim": (4, 4, 8)}),
    "tokens without a class token": ("test_vit", {"img_size": 32, "class_token": False, "global_pool": "avg"}),
    "wrapped": (lambda num_classes: nn.Sequential(timm.create_model("test_resnet", num_classes=num_classes)), {}),
}
TWO = ("two heads on two tokens", "list of heads")
HEADS = {
    "two heads on two tokens": ["head", "head_dist"],
    "two heads on the same features": ["head", "head_dist"],
    "convolutional head": ["head.fc"],
    "list of heads": ["head.0", "head.1"],
    "MLP head": ["head.fc.fc2"],
    "norm before the head": ["head.l"],
    "wrapped": ["0.fc"],
}


def create(kind: str) -> nn.Module:
    name, arguments = KINDS[kind]
    net = (
        timm.create_model(name, num_classes=4, **arguments)
        if isinstance(name, str)
        else name(num_classes=4, **arguments)
    )
    return net.eval()


def made(kind: str) -> nn.Module:
    """A small net of a kind whose norms and heads are not as new: as if it were trained."""
    torch.manual_seed(0)
    net = create(kind)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, 0, 0.1)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
        if 4 in (getattr(part, "out_features", 0), getattr(part, "out_channels", 0)) and part.bias is not None:
            nn.init.normal_(part.weight, 0, 0.5)
            nn.init.normal_(part.bias)
    return net


def size_of(kind: str) -> int:
    return 48 if kind == "list of heads" else 32


@torch.no_grad()
def outputs(net: nn.Module, kind: str) -> torch.Tensor:
    return net(next(iter(loader(4, 7, 8, size_of(kind))))[0])


def immunize(net: nn.Module, kind: str, method: str, **options) -> nn.Module:
    size = size_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random nets, few rows
        return immunization.immunize(net, loader(4, 0, 60, size), loader(3, 1, 60, size), method, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_classifier_give_the_output(kind):
    net = made(kind)
    images, expected = next(iter(loader(4, 7, 8, size_of(kind))))[0], outputs(net, kind)
    before = copy.deepcopy(net.state_dict())
    form = adapted(net, images)
    assert getattr(form, "paths", None) == HEADS.get(kind)
    with torch.no_grad():
        features = form.forward_head(form.forward_features(images), pre_logits=True)
        torch.testing.assert_close(form.get_classifier()(features), expected, rtol=0, atol=1e-5)
    if isinstance(form, Adapted):
        assert form.released() is net
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_keeps_the_outputs_and_is_saved(kind, tmp_path):
    net = made(kind)
    if kind in TWO:
        with pytest.raises(ConfigError, match=r"which read different features: no single linear map is before"):
            immunize(net, kind, "closed_form", ridge=1e-2)
        return
    model = immunize(net, kind, "closed_form", ridge=1e-2)
    assert type(model) is type(net)
    assert folded_map(model) is not None
    torch.testing.assert_close(outputs(model, kind), outputs(net, kind), rtol=0, atol=1e-3)
    name, arguments = KINDS[kind]
    immunization.save(model, tmp_path, **(arguments if isinstance(name, str) else {}))  # early versions forget them
    loaded = immunization.load(tmp_path, *([] if isinstance(name, str) else [net]))
    assert torch.equal(outputs(loaded, kind), outputs(model, kind))
    if not isinstance(name, str):
        return
    names: dict[str, object] = {}
    card = (tmp_path / "model_card.md").read_text()
    code = next(block for block in card.split("```python\n")[1:] if "timm.create_model" in block).split("```")[0]
    exec(code.replace("immunized.safetensors", str(tmp_path / "immunized.safetensors")), names)
    assert torch.equal(outputs(names["model"], kind), outputs(model, kind))


class Bounded(timm.models.ResNet):
    """What is not linear stands behind all of its modules but the classifier."""

    def forward_head(self, x, pre_logits=False):
        x = self.global_pool(x).tanh()
        return x if pre_logits else self.fc(x)


def test_a_map_without_a_place_in_the_last_block_stands_before_the_classifier(tmp_path):
    torch.manual_seed(0)
    net = Bounded(timm.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=4, channels=(8, 8, 16, 16)).eval()
    model = immunize(net, "convolutional", "closed_form", ridge=1e-2)
    assert [name for name, _ in model.named_modules() if name.endswith("immunization")] == ["fc.immunization"]
    torch.testing.assert_close(outputs(model, "convolutional"), outputs(net, "convolutional"), rtol=0, atol=1e-3)
    immunization.save(model, tmp_path)
    assert "Stripped by replacing the classifier" in (tmp_path / "model_card.md").read_text()
    assert torch.equal(outputs(immunization.load(tmp_path, net), "convolutional"), outputs(model, "convolutional"))


@pytest.mark.parametrize("kind", KINDS)
def test_trained_layers_are_those_of_the_net(kind, tmp_path):
    net = made(kind)
    options = {"epochs": 1, "batch_size": 30, "optimizer__lr": 1e-2}
    model = immunize(net, kind, "condition_number", **options)
    assert not torch.allclose(outputs(model, kind), outputs(net, kind))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, net.state_dict()[name])}
    assert changed >= {f"{path}.{name}" for path in HEADS.get(kind, []) for name in ("weight", "bias")}
    plain = create(kind)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(outputs(plain, kind), outputs(model, kind))
    if kind == "two heads on two tokens":
        immunization.save(model, tmp_path, **VIT)
        assert torch.equal(outputs(immunization.load(tmp_path), kind), outputs(model, kind))


def test_a_map_before_two_heads_is_told_from_the_net():
    """The audit takes the map away again: it then has the features and outputs of the net before."""
    kind = "two heads on the same features"
    net = made(kind)
    model = immunize(net, kind, "closed_form", ridge=1e-2)
    assert [name for name, _ in model.named_modules() if name.endswith("immunization")] == [
        "head.immunization",
        "head_dist.immunization",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = immunization.audit(
            model, loader(4, 0, 60, 32), loader(3, 1, 60, 32), attacks=["undo", "linear_probe"], undo__steps=64
        )
    assert result.metrics["primary/changed_predictions"] == 0
    assert result.metrics["attack/undo/steps"] == result.metrics["attack/undo/steps_baseline"]


def test_a_map_before_two_heads_is_undone_by_each():
    kind = "two heads on the same features"
    net = made(kind).double()
    model = immunize(net, kind, "closed_form", ridge=1e-2)
    for name in ("head", "head_dist"):
        folded, own = model.get_submodule(name), net.get_submodule(name)
        x = torch.randn(5, own.in_features, dtype=torch.float64)
        torch.testing.assert_close(folded(x), own(x))


def test_a_head_without_bias_is_saved_and_loaded(tmp_path):
    for method, options in (("closed_form", {"ridge": 1e-2}), ("condition_number", {"epochs": 1, "batch_size": 30})):
        net = timm.create_model("test_resnet", num_classes=4).eval()
        net.fc = nn.Linear(net.num_features, 4, bias=False)
        model = immunize(net, "convolutional", method, **options)
        immunization.save(model, tmp_path / method)
        loaded = immunization.load(tmp_path / method)
        assert loaded.fc.bias is None
        assert torch.equal(outputs(loaded, "convolutional"), outputs(model, "convolutional"))
        assert "model.get_classifier().bias = None" in (tmp_path / method / "model_card.md").read_text()


@pytest.mark.parametrize(
    ("name", "arguments", "channels"),
    [
        ("tresnet_m", {"layers": (1, 1, 1, 1), "width_factor": 0.25}, 3),
        ("csatv2", {}, 3),
        ("test_resnet", {"in_chans": 5}, 5),
    ],
)
def test_channels_are_those_that_the_net_reads(name, arguments, channels):
    config = data_config(timm.create_model(name, num_classes=4, **arguments))
    assert (config["input_size"][0], len(config["mean"])) == (channels, channels)


class Logits(dict):
    """Outputs by name and by key, as those of Hugging Face."""

    __getattr__ = dict.__getitem__


class Tokens(nn.Module):
    """A head at every token without a bias, of which one is picked, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> Logits:
        x = self.embed(x).relu().flatten(2).mT
        return Logits(logits=self.score(x)[:, 1], hidden_states=x)


class Mean(Tokens):
    """The head's outputs are averaged over tokens, and a second head, which is given beside, is no part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Logits:
        x = self.embed(x).relu().flatten(2).mT
        return Logits(logits=self.score(x).mean(1) * 2, auxiliary=self.other(x))


@pytest.mark.parametrize("kind", [Tokens, Mean])
def test_heads_of_tokens(kind, tmp_path):
    net = kind().eval()
    images = next(iter(loader(4, 7, 8, 32)))[0]
    form = adapted(copy.deepcopy(net), images)
    assert (form.paths, form.heads[0].share) == (["score"], 1 if kind is Tokens else 2)
    model = immunize(net, "convolutional", "closed_form", ridge=1e-2)
    torch.testing.assert_close(model(images)["logits"], net(images)["logits"], rtol=0, atol=1e-3)
    immunization.save(model, tmp_path)
    assert torch.equal(immunization.load(tmp_path, net)(images)["logits"], model(images)["logits"])
    trained = immunize(net, "convolutional", "condition_number", trainable="embed", epochs=1, batch_size=30)
    assert not torch.equal(trained.score.weight, net.score.weight)
    assert trained.state_dict().keys() == net.state_dict().keys()


class Dropping(nn.Sequential):
    def forward(self, x):
        return self[1](nn.functional.dropout(self[0](x).relu().mean((2, 3)), 0.5))


class Counting(nn.Sequential):
    """It changes a tensor of its own in eval mode, too."""

    calls = torch.zeros(())

    def forward(self, x):
        self.calls = self.calls + 1
        return self[1](self[0](x).relu().mean((2, 3))) * self.calls


class Positions(nn.Sequential):
    def forward(self, x):
        raise KeyError("positions")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Dropping,
            "Dropping gives other outputs for the same inputs from call to call, in eval mode: its forward draws",
        ),
        (
            Counting,
            r"Counting gives other .*: its forward draws random numbers \(.*\) or changes a buffer; let it do so in",
        ),
        (Positions, r"Positions cannot read inputs of shape \(3, 32, 32\): 'positions'"),
    ],
)
def test_what_cannot_be_taken_is_told(kind, message):
    net = kind(nn.Conv2d(3, 8, 3), nn.Linear(8, 4))
    with pytest.raises(ConfigError, match=message):
        immunize(net, "convolutional", "closed_form")


def test_a_largest_output_over_tokens_is_not_linear():
    net = VOLO((1, 1, 1, 1), 32, num_classes=4, stem_hidden_dim=8, embed_dims=(16,) * 4, num_heads=(2,) * 4)
    with pytest.raises(ConfigError, match="nor a weighted sum of the last linear layers"):
        immunize(net, "convolutional", "closed_form")


def test_fewer_rows_than_features_are_said():
    with pytest.warns(UserWarning, match="the harmful task has 54 training rows for 96 features: the rank"):
        immunization.immunize(
            timm.create_model("test_resnet", num_classes=4), loader(4, 0, 60, 32), loader(3, 1, 60, 32), "closed_form"
        )


@pytest.mark.parametrize("kind", ["convolutional head", "two heads on the same features"])
def test_a_run_is_loaded_and_read_as_a_checkpoint(kind, folders, tmp_path):
    name, arguments = KINDS[kind]
    overrides = ["dataset=image_folders", f"dataset.primary_root={folders[0]}", f"dataset.harmful_root={folders[1]}"]
    overrides += ["dataset.cache=null", "dataset.size=32", "model=timm", f"model.name={name}", "tracker=none"]
    told = ", ".join(f"{key}: {list(value) if isinstance(value, tuple) else value}" for key, value in arguments.items())
    overrides += ["model.pretrained=false", f"model.arguments={{num_classes: 4, {told}}}", "figures=false"]
    immunization.run([*overrides, "evaluation=[]", "method=closed_form", "method.ridge=1e-2"], tmp_path / "run")
    loaded = immunization.load(tmp_path / "run")
    assert folded_map(loaded) is not None
    pair = replace(open_pair(folders), size=32)
    options = {"trainable": "fold", "pretrained": False, "checkpoint": str(tmp_path / "run"), "arguments": None}
    model = Timm(pair, name, **options)
    state = model.export()
    assert all(torch.equal(state[key].float(), tensor) for key, tensor in loaded.state_dict().items())
    images = next(iter(loader(4, 7, 8, 32)))[0].double()
    with torch.no_grad():
        logits = [made.deployed()(images) for made in (model, model.before)]
        torch.testing.assert_close(*logits, rtol=0, atol=1e-3)
        torch.testing.assert_close(logits[0].float(), loaded(images.float()), rtol=0, atol=1e-4)
    assert folded_map(model.before.net) is None
