"""An attacker who renews BatchNorm's statistics: what stands in them alone holds nobody off."""

import pytest
import torch
from helpers.victims import colored_pair, net_victim

from immunization.attacks import ClosedFormProbe, RenewedStatistics, run_attacks
from immunization.attacks.renewed import renew

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return colored_pair(tmp_path_factory.mktemp("images"))


def silence(model):
    for key, buffer in model.extractor.named_buffers():
        if key.endswith("running_mean"):
            buffer += 1e6  # behind it every ReLU is silent


def test_statistics_that_silence_the_net_are_renewed(images):
    victim = net_victim(images, silence, "test_resnet", "layer4")
    before = {key: tensor.clone() for key, tensor in victim.model.state_dict().items()}
    attacks = {"as_it_is": ClosedFormProbe(), "renewed": RenewedStatistics(), "few": RenewedStatistics(samples=2)}
    values = run_attacks(attacks, victim).metrics
    assert values["attack/renewed/final"] > 0.6
    assert values["attack/as_it_is/final"] is None or values["attack/as_it_is/final"] < 0.5
    assert values["attack/few/final"] is not None
    assert all(torch.equal(tensor, before[key]) for key, tensor in victim.model.state_dict().items())


def test_it_costs_a_pass_over_the_images(images):
    victim = net_victim(images, silence, "test_resnet", "layer4")
    once, twice = (attack.run(victim, "baseline").flops.item() for attack in (ClosedFormProbe(), RenewedStatistics()))
    assert twice == once + victim.flops_per_row() * len(victim.task.train)


def test_a_net_without_batchnorm_has_none_to_renew(images):
    victim = net_victim(images, silence, "test_vit", "blocks.5", img_size=32)
    found = run_attacks({"it": RenewedStatistics()}, victim)
    assert found.metrics["attack/it/final"] is None
    assert "no BatchNorm" in found.reasons["attack/it/final"]


def test_statistics_are_those_of_the_images_and_nothing_is_drawn():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3)).eval()
    x = torch.randn(40, 3, dtype=torch.float64) * 2 + 5
    net.double()
    before = torch.get_rng_state()
    renew(net, x.split(20))
    assert torch.equal(torch.get_rng_state(), before)
    assert not net[1].training
    torch.testing.assert_close(net[1].running_mean, x.mean(0))
    torch.testing.assert_close(net[1].running_var, torch.stack([part.var(0) for part in x.split(20)]).mean(0))
