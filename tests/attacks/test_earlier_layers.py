"""An attacker who cuts the net: a probe behind every block."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.victims import classes, colored_pair, net_victim, victim_of
from torch import nn
from torch.testing import assert_close

from immunization import run
from immunization.attacks import EarlierLayers, RenewedEarlierLayers, RenewedStatistics, Victim, run_attacks
from immunization.attacks.earlier import pooled_outputs
from immunization.data.task import Split
from immunization.models.chain import Network, pooled

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return colored_pair(tmp_path_factory.mktemp("images"))


def forget(model):
    for parameter in model.trained().values():
        parameter.zero_()


def forgetful(images, name="test_resnet", trainable="layer4", **arguments) -> Victim:
    """A net whose trained layers make the same of every image."""
    return net_victim(images, forget, name, trainable, **arguments)


@pytest.mark.parametrize(
    ("name", "trainable", "arguments", "before"),
    [("test_resnet", "layer4", {}, "layer3.0"), ("test_vit", "blocks.5", {"img_size": 32}, "blocks.4")],
)
def test_what_the_last_block_has_lost_is_found_before_it(images, name, trainable, arguments, before):
    victim = forgetful(images, name, trainable, **arguments)
    measures = run_attacks({"it": EarlierLayers()}, victim)
    values, found = measures.metrics, measures.about["attackers"]["it"]
    assert values["attack/it/final"] > 0.6
    blocks = found["immunized"]["blocks"]
    assert before in blocks
    assert blocks[found["immunized"]["block"]] == values["attack/it/final"]
    assert found["immunized"]["ridge"] == values["attack/it/setting"]
    assert values["attack/it/final_baseline"] > 0.6


def test_the_output_of_the_last_block_is_what_other_probes_have(images):
    victim = forgetful(images)
    network, (x, _) = victim.network("baseline"), victim.images("test")
    outputs = pooled_outputs(network, x)
    assert list(outputs)[-1].startswith("layer4")
    assert_close(list(outputs.values())[-1], victim.features("baseline", "test").double(), rtol=1e-4, atol=1e-5)
    assert [name for name, _ in network.whole.blocks()] == list(outputs)
    assert not any(module._forward_hooks for module in network.modules())


def test_every_block_with_the_attackers_statistics(images):
    """Its output is what RenewedStatistics probes, at no other cost; the net of the model stays as it is."""
    victim = forgetful(images)
    renewed, attack = RenewedStatistics(), RenewedEarlierLayers()
    state = {name: tensor.clone() for name, tensor in victim.model.net.state_dict().items()}
    curve, at_the_end = attack.run(victim, "baseline"), renewed.run(victim, "baseline")
    blocks = curve.found["blocks"]
    assert blocks[list(blocks)[-1]] == pytest.approx(at_the_end.final)
    assert blocks != EarlierLayers().run(victim, "baseline").found["blocks"]
    assert_close(curve.flops - EarlierLayers().run(victim, "baseline").flops, passes(victim))
    assert all(torch.equal(tensor, state[name]) for name, tensor in victim.model.net.state_dict().items())


def passes(victim):
    """Operations of one pass over the training images."""
    return torch.tensor([victim.flops_per_row() * len(victim.task.train)], dtype=torch.float64)


class Odd(nn.Module):
    """Its blocks run in another order than they are defined in, one twice, and one gives a tuple."""

    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    def __init__(self):
        super().__init__()
        self.second, self.first, self.pair = nn.Linear(3, 3), nn.Linear(3, 3), self.Pair(3, 3)

    def forward_features(self, x):
        return self.second(self.second(self.pair(self.first(x))[0]))

    def forward_head(self, x, pre_logits):
        return x


def test_blocks_come_as_they_run_and_those_without_a_tensor_are_left_out():
    network, x = Network(Odd(), "second", (3,)), torch.rand(70, 3)
    outputs = pooled_outputs(network, x)
    assert list(outputs) == ["first", "second"]
    assert_close(outputs["second"], network(x).double())


def test_pooling():
    x = torch.rand(2, 3, 4, 5)
    assert_close(pooled(x)[1, 2], x[1, 2].mean())
    assert_close(pooled(x, channels_last=True)[1, 2], x[1, :, :, 2].mean())
    assert_close(pooled(x[0])[1, 2], x[0, 1, :, 2].mean())
    assert_close(pooled(x[0, 0]), x[0, 0])


def test_a_linear_model_has_no_blocks():
    measures = run_attacks({"it": EarlierLayers()}, victim_of(classes(), torch.eye(6, dtype=torch.float64)))
    assert "needs a deep net" in measures.reasons["attack/it/final"]


def test_it_says_where_it_cut(tmp_path):
    """From the command line: the block stands in result.json, and in a file for each task that was attacked."""
    options = ["experiment=digits_deep", "tracker=none", "figures=false", "evaluation=[]", "method=identity"]
    tasks = ["dataset.benign=null", "dataset.unseen=[7,8]"]
    result = run([*options, *tasks, "attack=[earlier_layers]"], folder=tmp_path)
    for kind in ("", "_unseen"):
        file = tmp_path / f"attack{kind}_earlier_layers.json"
        assert json.loads(file.read_text()) == result.about[f"attackers{kind}"]["earlier_layers"]
    found = result.about["attackers"]["earlier_layers"]
    assert found["immunized"] == found["baseline"]
    assert found["baseline"]["blocks"][found["baseline"]["block"]] == result.metrics["attack/earlier_layers/final"]


@pytest.mark.parametrize("attack", [EarlierLayers(), RenewedEarlierLayers(), RenewedStatistics()])
def test_without_validation_images_they_do_not_apply(images, attack):
    victim = forgetful(images)
    victim.task = replace(victim.task, val=Split(victim.task.val.x[:0], victim.task.val.y[:0]))
    measures = run_attacks({"it": attack}, victim)
    assert "has no val split: set dataset.val_fraction above 0" in measures.reasons["attack/it/final"]
