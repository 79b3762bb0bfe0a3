"""The blocks of nets, found by what they compute."""

import copy

import pytest
import timm
import torch
from helpers.images import loader
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import immunization
from immunization.attacks.blocks import block_outputs
from immunization.models.adapted import Adapted, is_of_timm
from immunization.models.blocks import Operations, find
from immunization.models.chain import Network, take_apart

SIDE = 32


def torchvision(name, **options):
    return getattr(pytest.importorskip("torchvision.models"), name)(**options, num_classes=4)


def hugging_face():
    transformers = pytest.importorskip("transformers", "4.50")
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 32}
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=SIDE, patch_size=8))

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x).logits

    return Logits()


def listed(count, skip=1.0):
    """A net whose blocks stand in a list, and give tuples; `skip`: how much of what they read they add."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return (skip * x + self.conv(x).relu(),)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Conv2d(3, 8, 3, 2), nn.ModuleList(Block() for _ in range(count))
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                (x,) = block(x)
            return self.fc(x.mean((2, 3)))

    return Net()


def eva():
    options = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 8, "num_heads": 2, "num_reg_tokens": 4}
    return timm.models.Eva(**options, num_classes=4)


def small_swin():
    options = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2, 2], "num_heads": [1, 1, 2]}
    models = pytest.importorskip("torchvision.models")
    return models.SwinTransformer(**options, window_size=[4, 4], num_classes=4)


def small_vit():
    models = pytest.importorskip("torchvision.models")
    return models.VisionTransformer(SIDE, 8, num_layers=6, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4)


RESNET = ["conv1", *(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))]
VIT = [f"encoder.layers.encoder_layer_{i}" for i in range(6)]
SWIN = ["features.0.0", "features.0", *(f"features.{stage}.{i}" for stage in (1, 3, 5) for i in (0, 1))]
NETS = {
    "timm_resnet": (lambda: timm.create_model("resnet18", num_classes=4), RESNET),
    "timm_vit": (
        lambda: timm.create_model("test_vit", img_size=SIDE, num_classes=4),
        ["patch_embed", *(f"blocks.{i}" for i in range(6))],
    ),
    "torchvision_resnet": (lambda: torchvision("resnet18"), RESNET),
    "torchvision_vit": (small_vit, ["conv_proj", *VIT, "encoder"]),
    "torchvision_swin": (small_swin, SWIN),
    "hugging_face": (hugging_face, ["net.vit.embeddings", *(f"net.vit.layers.{i}" for i in range(6))]),
    "dinov3": (eva, ["patch_embed", *(f"blocks.{i}" for i in range(8))]),
    "list": (lambda: listed(8), ["stem", *(f"blocks.{i}" for i in range(8))]),
    "sequential": (lambda: nn.Sequential(torchvision("resnet18")), [f"0.{name}" for name in RESNET]),
}


def apart(net):
    net = net.eval()
    return take_apart(net if is_of_timm(net) else Adapted(net, torch.randn(2, 3, SIDE, SIDE)), size=SIDE)


@pytest.mark.parametrize("kind", NETS)
def test_blocks_of_nets_of_all_kinds(kind):
    make, expected = NETS[kind]
    parts = apart(make())
    blocks = [name.removeprefix("body.") for name in parts.found.blocks]
    assert [name for name in blocks if name in expected] == expected
    assert len(blocks) + 1 >= 8
    shares = [parts.found.outputs[name].end.share for name in parts.found.blocks]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5 < shares[-1] <= 1
    last = parts.last_block()
    inside = {"encoder": VIT[-1], "features.0": "features.5.1"}.get(expected[-1], expected[-1])
    assert last.removeprefix("body.") == inside
    assert len(parts.found.before([last])) >= 6
    assert last not in parts.found.before([last])


class Tokens(nn.Module):
    """Transformer layers over patches that read [T, N, C], as torch's do by default, or [N, T, C]."""

    def __init__(self, batch_first: bool, layer=nn.TransformerEncoderLayer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.batch_first = nn.Conv2d(3, 16, 8, 8), batch_first
        self.layers = nn.ModuleList(layer(16, 2, 16, batch_first=batch_first) for _ in range(6))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x).flatten(2).mT
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean(int(self.batch_first)))


def test_tokens_that_come_before_the_batch_are_read_alike():
    images = torch.randn(5, 3, SIDE, SIDE)
    first, second = (Network(apart(Tokens(batch_first))) for batch_first in (True, False))
    assert second.found.blocks == first.found.blocks
    assert second.last_block == first.last_block == "body.layers.5"
    read = [block_outputs(net, images, lambda x, *_: x) for net in (first, second)]
    assert read[1].keys() == read[0].keys() == {"body", "body.embed", *(f"body.layers.{i}" for i in range(6))}
    for name, x in read[0].items():
        torch.testing.assert_close(read[1][name], x)


def test_two_of_something_else_than_inputs_are_no_rows():
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(4, 4)

        def forward(self, x):
            return self.inside(x.flatten(1).view(-1, 2, 4))  # a row for every 8 pixels

    net = nn.Sequential(nn.Conv2d(3, 8, 8, 8), Pairs())
    assert find(net, net, torch.randn(2, 3, SIDE, SIDE)).blocks == ("0",)


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_are_blocks(batch_first):
    class Recurrent(Tokens):
        def forward(self, x):
            x = self.embed(x).flatten(2).mT
            x = x if self.batch_first else x.transpose(0, 1)
            for layer in self.layers:
                x, _ = layer(x)
            return self.fc(x.mean(int(self.batch_first)))

    found = apart(Recurrent(batch_first, lambda width, *_, **where: nn.GRU(width, width, **where))).found
    assert found.innermost == ["body.embed", *(f"body.layers.{i}" for i in range(6))]


@pytest.mark.parametrize("named", [True, False])
def test_of_several_tensors_the_one_counts_that_is_read_on(named):
    """A block that says something beside what goes on, and says it first."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            x = x + self.conv(x).relu()
            return {"norm": x.flatten(2).norm(dim=2), "x": x} if named else (x.flatten(2).norm(dim=2), x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Conv2d(3, 8, 3, 2), nn.ModuleList(Block() for _ in range(8))
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)["x"] if named else block(x)[1]
            return self.fc(x.mean((2, 3)))

    net = Network(apart(Net()))
    read = block_outputs(net, torch.randn(5, 3, SIDE, SIDE), lambda x, *_: x)
    assert [read[f"body.blocks.{i}"].ndim for i in range(7)] == [4] * 7  # nothing reads on behind the last one


def test_tokens_and_maps_are_told_apart():
    expected = {"timm_vit": (True, 1), "dinov3": (True, 5), "torchvision_vit": (True, 1), "torchvision_swin": (True, 0)}
    for kind, layout in expected.items():
        found = apart(NETS[kind][0]()).found
        block = found.outputs[found.innermost[-1]]
        assert (block.last, block.prefix) == layout
    found = apart(timm.create_model("test_convnext", num_classes=4)).found
    assert not any(found.outputs[name].last for name in found.blocks[:-1])


def test_a_class_token_that_comes_late_is_none_of_the_first_patches():
    net = timm.models.Cait(img_size=SIDE, patch_size=8, embed_dim=16, depth=6, num_heads=2, num_classes=4)
    net.num_prefix_tokens = 1  # as early versions of timm do not say
    found = apart(net).found
    assert [found.outputs[f"blocks.{i}"].prefix for i in range(6)] == [0] * 6


class Square(nn.Module):
    """As many channels as the sides of its maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, 2, 1), nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.first(x).permute(0, 2, 3, 1))


@pytest.mark.parametrize("size", [(32, 32), (32, 64), (48, 20)])
def test_sides_of_maps_are_as_those_of_images(size):
    net = Square()
    found = find(net, net, torch.randn(2, 3, *size))
    assert [(name, found.outputs[name].last) for name in found.blocks] == [("first", False), ("last", True)]


def test_few_blocks_are_taken_apart_and_what_is_added_up_is_one_more():
    found = apart(listed(2)).found
    inside = ["stem", "blocks.0.conv", "blocks.0", "blocks.1.conv", "blocks.1"]
    assert found.blocks == (*(f"body.{name}" for name in inside), "body")
    assert found.innermost[-1] == "body.blocks.1.conv"


def test_what_hardly_has_weights_is_not_trained_as_the_last():
    body = nn.Conv2d(3, 64, 3, 2), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    parts = apart(nn.Sequential(*body, nn.Linear(2, 4)))
    assert parts.found.innermost == ["body.0", "body.1", "body.2"]
    assert parts.last_block() == "body.1"


@pytest.mark.parametrize("first", [True, False])
def test_a_shortcut_is_not_trained_as_the_last_whenever_it_runs(first):
    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(), nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
            )
            self.shortcut = nn.Sequential(nn.Conv2d(width, 2 * width, 1, 2), nn.BatchNorm2d(2 * width))

        def forward(self, x):
            return self.shortcut(x) + self.main(x) if first else self.main(x) + self.shortcut(x)

    body = nn.Conv2d(3, 8, 3), Residual(8), Residual(16), Residual(32), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    parts = apart(nn.Sequential(*body, nn.Linear(64, 4)))
    assert parts.found.innermost[-1] == ("body.3.main.2" if first else "body.3.shortcut.0")
    assert parts.last_block() == "body.3.main.2"


@pytest.mark.parametrize("count", [3, 9])
def test_what_adds_to_its_input_in_place_is_no_shortcut(count):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.fc = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 4)
            self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1) for _ in range(count))

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x += block(x)
            return self.fc(x.mean((2, 3)))

    assert apart(Net()).last_block() == f"body.blocks.{count - 1}"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_of_recurrent_layers_all_outputs_are_read_and_no_states(layers):
    """A state [layers, N, D] of two layers looks like rows of two inputs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = nn.GRU(3 * SIDE, 8, layers, batch_first=True), nn.LayerNorm(8)
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.norm(self.rnn(x.transpose(1, 2).flatten(2))[1])[-1])

    net = Network(apart(Net()))
    read = block_outputs(net, torch.randn(5, 3, SIDE, SIDE), lambda x, *_: x)
    assert read["body.rnn"].shape[0] == 5
    assert net.found.unread == (0, 0)  # torch counts no operation of recurrent layers


def test_modules_may_read_sparse_tensors():
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, links):
            return torch.sparse.mm(links, self.layer(x).T).T

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.graph = nn.Conv2d(3, 8, SIDE), Graph()

        def forward(self, x):
            return self.graph(self.stem(x).flatten(1), torch.eye(8).to_sparse())

    net = Net()
    assert find(net, net, torch.randn(2, 3, SIDE, SIDE)).innermost == ["stem", "graph.layer"]


def test_a_part_that_is_trained_ends_what_stands_before_it():
    parts = apart(timm.create_model("test_resnet", num_classes=4))
    before = {
        "layer3": ["conv1.0", "conv1.3", "conv1.6", "layer1.0", "layer2.0"],
        "layer1.0.bn2": ["conv1.0", "conv1.3", "conv1.6"],
        "conv1.1": ["conv1.0"],
        "conv1": [],
    }
    for name, expected in before.items():
        assert parts.found.before([name, "layer4"]) == expected
    assert parts.found.before([]) == list(parts.found.blocks)
    assert apart(eva()).found.before(["blocks"]) == ["patch_embed"]  # a list, which is never called


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_operations_are_those_that_torch_counts(name):
    net, images = timm.create_model(name), torch.randn(2, 3, 160, 160)
    with torch.no_grad(), Operations() as ours, FlopCounterMode(display=False) as torchs:
        net(images)
    assert ours.total == torchs.get_total_flops() > 0


def test_operations_of_attention_are_counted_with_gradients_and_without():
    """Torch's own count leaves out the fast path that is taken without gradients."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    net, tokens = nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 9, 16)
    counts = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), Operations() as counted:
            net(tokens)
        counts.append(counted.total)
    assert counts[0] == counts[1] >= 3 * 2 * 2 * 9 * 6 * 16 * 16  # of all linear layers
    assert torch.backends.mha.get_fastpath_enabled()


QUICK = {"attacks": ["block_probe"], "block_probe__mirrored": False, "block_probe__ridges": [0.1]}


def audited(net, dead, wrap, **options):
    """What an audit finds of `dead`, with `net` as the reference."""
    parts = [wrap(copy.deepcopy(part)) for part in (dead, net)]
    return immunization.audit(parts[0], harmful_loader=loader(3, 1, 90), reference=parts[1], **(QUICK | options))


def planted(net, block):
    dead = copy.deepcopy(net)
    for parameter in dead.get_submodule(block).parameters():
        parameter.data.zero_()
    return dead


@pytest.mark.trains
@pytest.mark.parametrize("kind", ["timm", "list"])
def test_a_dead_last_block_is_found_out_alike_wrapped_or_not(kind):
    torch.manual_seed(0)
    if kind == "timm":
        net, block, before = timm.create_model("test_resnet", num_classes=4).eval(), "layer4", 6
    else:
        net, block, before = listed(8, skip=0.0).eval(), "blocks.7", 8
    dead = planted(net, block)
    finals = []
    for result in (audited(net, dead, wrap) for wrap in (lambda net: net, nn.Sequential)):
        after, baseline = (result.metrics[f"attack/block_probe/final{stage}"] for stage in ("", "_baseline"))
        assert after > 0.9
        assert abs(after - baseline) < 0.05
        read = result.about["blocks"]
        assert read["before"][-1].removeprefix("0.").startswith(("layer3", "blocks.6"))
        assert len(read["before"]) == before
        assert (
            0.5 < read["changed"] <= min(share for name, share in read["depth"].items() if name not in read["before"])
        )
        assert any(
            line.startswith("Attackers read ") and f" {before} of them before" in line for line in result.verdict
        )
        finals.append(after)
    assert abs(finals[0] - finals[1]) < 0.05


class Hidden(nn.Module):
    """A net that computes most of what it does outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 3, 3, 3) / 5)
        self.block, self.fc = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = nn.functional.conv2d(x, self.weight).relu().mean((2, 3))
        return self.fc(self.block(x))


@pytest.mark.trains
def test_nothing_is_said_of_worth_where_nobody_reads_before_what_was_changed():
    torch.manual_seed(0)
    net = Hidden()
    options = {"attacks": ["block_probe", "raw_inputs"], "raw_inputs__mirrored": False}
    result = audited(net, planted(net, "block"), lambda net: net, **options)
    assert result.about["blocks"]["before"] == []
    assert "blocks_unread" in result.flags
    assert result.metrics["worth/removed"] is None
    said = next(line for line in result.verdict if line.startswith("The worth of theta_0 is unknown: "))
    assert "of the net's operations are done before what was changed begins" in said
    whole = audited(net, planted(net, "fc"), lambda net: net, **options)
    assert "blocks_unread" not in whole.flags


class Doubled(nn.Module):
    """Images and mirror images side by side in the batch: half of the rows of every module stand for no input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.convs = nn.Conv2d(3, 4, 4, 4), nn.ModuleList(nn.Conv2d(4, 4, 3, 1, 1) for _ in range(6))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, x.flip(3)])
        for conv in self.convs:
            x = x + conv(x).relu()
        return self.fc(sum(x.mean((2, 3)).chunk(2)) / 2)


@pytest.mark.trains
def test_a_long_part_that_nobody_can_read_is_told(caplog):
    torch.manual_seed(0)
    net, tasks = Doubled(), (loader(4, 0), loader(3, 1))
    with caplog.at_level("WARNING"):
        immunization.immunize(net, *tasks, "condition_number", epochs=1, batch_size=32)
    assert "trainable=last is stem, and 90% of the operations follow it: no module behind it gives one" in caplog.text
    options = {"attacks": ["block_probe", "raw_inputs"], "raw_inputs__mirrored": False}
    result = audited(net, planted(net, "convs.5"), lambda net: net, **options)
    assert result.about["blocks"]["unread"] == pytest.approx([0.1, 1], abs=0.01)
    assert result.metrics["worth/removed"] is None
    assert "no module gives one output for each input" in result.reasons["blocks_unread"]


@pytest.mark.trains
def test_a_last_block_with_much_of_the_weights_is_named(caplog):
    body = nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 32, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net, tasks, options = nn.Sequential(*body, nn.Linear(32, 4)), (loader(4, 0), loader(3, 1)), {"batch_size": 32}
    with caplog.at_level("WARNING"):
        immunization.immunize(net, *tasks, "condition_number", trainable="0", epochs=1, **options)
        assert "trainable=last" not in caplog.text
        immunization.immunize(net, *tasks, "condition_number", epochs=1, **options)
    assert "trainable=last is 2, which has 91% of the weights of Sequential" in caplog.text
