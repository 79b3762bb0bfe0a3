"""What is computed once for two nets, or for several attackers, is what each of them would compute alone."""

import copy

import pytest
import torch
from helpers.victims import net_victim, silenced, zeroed
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from immunization import audit
from immunization.attacks import BlockProbe, FrozenBlocks, LayerProbe, RawInputs, TileProbe
from immunization.attacks.pooling import Remembered
from immunization.attacks.readings import Fitter, Reading, best_fit
from immunization.data.task import SPLITS
from immunization.models.chain import same_code

pytestmark = pytest.mark.usefixtures("few_patches")

NETS = [
    ("test_resnet", "layer4", {}),
    ("test_vit", "blocks.1", {"img_size": 32}),
    ("test_efficientnet", "blocks.3", {}),
]


def quick(kind=BlockProbe, **options):
    return kind(**{"samples": 5, "mirrored": False, "enlarged": False, "ridges": (0.01, 0.1), "images": True} | options)


def halved(model):
    for parameter in model.trained().values():
        parameter.mul_(0.5)


@pytest.mark.parametrize(("name", "trainable", "arguments"), NETS)
@pytest.mark.parametrize(
    "kind", [{"enlarged": True}, {"renewed": True}, {"kind": LayerProbe, "mirrored": True}, {"kind": TileProbe}]
)
def test_images_pass_the_units_that_two_nets_share_once(colors, name, trainable, arguments, kind, monkeypatch):
    if ("renewed" in kind or kind.get("kind") is TileProbe) and "vit" in name:
        pytest.skip("no BatchNorm, and images of one size")
    victim, alone = (net_victim(colors, halved, name, trainable, **arguments) for _ in range(2))
    assert victim.same_until() > 0
    attack = quick(images=False, **kind)
    monkeypatch.setattr(type(alone), "same_until", lambda self: 0 if self is alone else victim._same_until())
    for stage in ("baseline", "immunized"):
        found, expected = attack.read(victim, stage), attack.read(alone, stage)
        assert found.blocks == expected.blocks
        assert found.passes == expected.passes
        assert found.parts.keys() == expected.parts.keys()
        for part, splits in expected.parts.items():
            assert all(torch.equal(found.parts[part][split], x) for split, x in splits.items()), part
    before, after = (attack.read(victim, stage).origin for stage in ("baseline", "immunized"))
    read_anew = {block for block, number in after.items() if before[block] != number}
    assert read_anew
    assert read_anew < before.keys()
    for block in read_anew:
        x, y = (attack.read(victim, stage).columns(block, "average", "val") for stage in ("baseline", "immunized"))
        assert not torch.equal(x, y)


class Gate(nn.Module):
    """Dark images are as they were; it has no weights, and nobody sees it in a state dict."""

    def forward(self, x):
        return x * (x.mean((1, 2, 3), keepdim=True) < 1e6)


class Same(nn.Module):
    def forward(self, x):
        return x


def test_the_first_changed_unit(colors):
    units = net_victim(colors, halved, "test_resnet", "layer4").network("baseline").units
    last = next(number for number, (name, _) in enumerate(units) if name.startswith("layer4"))
    assert net_victim(colors, halved, "test_resnet", "layer4").same_until() == last
    assert net_victim(colors, silenced, "test_resnet", "layer4").same_until() == last  # its statistics alone
    assert net_victim(colors, zeroed, "test_resnet", "conv1").same_until() == 0


def test_other_code_with_the_same_weights_is_another_net():
    nets = [nn.Sequential(first, nn.Conv2d(3, 8, 3), nn.ReLU()) for first in (Same(), Same(), Gate())]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    assert same_code(nets[0], nets[1])
    assert not same_code(nets[0], nets[2])
    nets[1][2].register_forward_hook(lambda *_: None)
    assert not same_code(nets[0], nets[1])
    assert not same_code(nn.Threshold(0.5, 0.0), nn.Threshold(0.6, 0.0))


def test_a_module_that_runs_twice_is_not_shared():
    torch.manual_seed(0)
    act, pool = nn.ReLU(), nn.MaxPool2d(2)
    blocks = [nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 8), (8, 8))]
    net = nn.Sequential(
        blocks[0], act, pool, blocks[1], act, pool, blocks[2], act, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    net.append(nn.Linear(8, 4))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[6].weight.mul_(0.5)
    images = torch.randn(40, 3, 32, 32)
    labels = torch.arange(4).repeat(10)
    images += labels[:, None, None, None] * 0.3
    pairs = [TensorDataset(images, labels), TensorDataset(images.flip(-1), labels)]
    result = audit(other, *(DataLoader(pair, 10) for pair in pairs), net, attacks="block_probe")
    assert result.metrics["attack/block_probe/final"] is not None


def test_attackers_who_read_the_same_blocks_fit_them_once(colors, monkeypatch):
    fits, real = [], Fitter._fit
    monkeypatch.setattr(Fitter, "_fit", lambda self, reading, rules: fits.append(reading) or real(self, reading, rules))

    def fresh():
        return net_victim(colors, halved, "test_resnet", "layer4")

    raw = RawInputs(samples=5, mirrored=False, ridges=(0.01, 0.1))
    attacks = [raw, quick(), quick(FrozenBlocks, scope="trained")]
    alone = [attack.run(fresh(), stage) for attack in attacks for stage in ("baseline", "immunized")]
    separate = len(fits)
    fits.clear()
    victim = fresh()
    together = [attack.run(victim, stage) for attack in attacks for stage in ("baseline", "immunized")]
    assert len(fits) < 0.7 * separate
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.test, other.test)
        assert torch.equal(one.flops, other.flops)
        assert one.found == other.found


def test_what_is_remembered_takes_so_many_bytes():
    remembered, made = Remembered(most=100), []

    def value(key):
        return remembered(key, lambda: made.append(key) or key, lambda _: 40)

    assert [value(key) for key in "abacab"] == list("abacab")
    assert made == ["a", "b", "c", "b"]
    assert remembered.held <= 100


@pytest.mark.parametrize("radial", [False, True])
@pytest.mark.parametrize("root", [False, True])
def test_test_rows_are_predicted_as_by_their_inner_products(colors, radial, root):
    victim = net_victim(colors, halved, "test_resnet", "layer4")
    outputs = quick(mirrored=True).read(victim, "immunized")
    fitter = Fitter(victim.task, outputs, torch.arange(12), (0.01, 0.1))
    readings = [Reading(("layer2.0", "layer4.0"), name, 2, root, radial) for name in ("rich", "fine")]
    fits = [fitter.fit(reading) for reading in readings]
    fitter.read_test(fits)
    for reading, fit in zip(readings, fits, strict=True):
        kernel = fitter.kernel_of(reading, SPLITS)
        kernel = kernel.gaussian() if radial else kernel
        whole = best_fit(victim.task, fitter.rows, reading, kernel, [fit.rule])
        assert_close(fit.predicted, whole.predicted, rtol=1e-10, atol=1e-12)
        assert_close(fit.on_val, whole.on_val, rtol=1e-10, atol=1e-12)
