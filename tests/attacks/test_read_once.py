"""What is computed once for two nets, or for several attackers, is what each of them would compute alone."""

import pytest
import torch
from helpers.victims import net_victim, silenced, zeroed

from immunization.attacks import BlockProbe, FrozenBlocks, RawInputs
from immunization.attacks.pooling import Remembered
from immunization.attacks.readings import Fitter
from immunization.models.chain import Network

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
@pytest.mark.parametrize("kind", [{"enlarged": True}, {"renewed": True}])
def test_images_pass_the_units_that_two_nets_share_once(colors, name, trainable, arguments, kind, monkeypatch):
    if "renewed" in kind and "vit" in name:
        pytest.skip("no BatchNorm")
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


def test_the_first_changed_unit_is_found_by_statistics_too_and_by_no_state_alone(colors):
    assert net_victim(colors, silenced, "test_resnet", "layer4").same_until() > 0
    assert net_victim(colors, zeroed, "test_resnet", "conv1").same_until() == 0
    victim = net_victim(colors, halved, "test_resnet", "layer4")
    start, real = victim._same_until(), Network.before
    nets = []

    def before(self, images, start):
        nets.append(self)
        return real(self, images, start) + (self is nets[0])  # the same weights, and another output

    Network.before = before
    try:
        assert start > 0
        assert victim._same_until() == 0
    finally:
        Network.before = real


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
