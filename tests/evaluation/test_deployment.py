"""A net in number formats: its own task, and whether what a map slows stays slow."""

import pytest
import torch
from helpers.nets import build, open_pair
from helpers.victims import colored_pair, net_victim

from immunization.errors import ConfigError
from immunization.evaluation import Comparison, Deployment
from immunization.evaluation.deployment import outputs_in
from immunization.methods import ClosedForm
from immunization.methods.decoys import discriminants
from immunization.methods.linear_map import MAX_CONDITION, probe_of_inputs
from immunization.models.formats import FORMATS

pytestmark = pytest.mark.trains


@pytest.fixture
def folded(folders):
    pair = open_pair(folders)
    return build(pair).read(pair, True)


def condition_of(net):
    sigma = torch.linalg.svdvals(net.extractor.theta.detach())
    return (sigma[0] / sigma[-1]).item()


def test_nets_are_bounded_and_keep_every_format(folded):
    net, tasks = folded
    method = ClosedForm(ridge=1e-5, max_condition="auto")
    method.setup(net, tasks)
    method.finish(net)
    assert condition_of(net) <= MAX_CONDITION * (1 + 1e-6)
    measures = Deployment(formats=None)(Comparison(tasks, net))
    named = {f"deployment/accuracy_{f}{s}" for f in FORMATS for s in ("", "_baseline")}
    named |= {f"deployment/{measure}_{f}" for f in FORMATS for measure in ("steps", "few")}
    assert measures.metrics.keys() == named | {"deployment/few_float32_baseline"}
    exact = measures.metrics["deployment/accuracy_float64_baseline"]
    assert measures.metrics["deployment/accuracy_float64"] == exact
    assert exact == pytest.approx(
        tasks.primary.measure(net.baseline_logits(tasks.primary), tasks.primary.test.y).item()
    )


def test_a_map_without_a_bound_is_flagged(folded):
    net, tasks = folded
    fitted = Comparison(tasks, net).probe("primary", "baseline").optimum().T  # a head with accuracy to lose
    for weight in (net.base.head.weight, net.head.omega):
        weight.data.copy_(fitted)
    u, _ = torch.linalg.qr(torch.randn_like(net.extractor.theta))
    v, _ = torch.linalg.qr(torch.randn_like(u))
    net.extractor.theta.data = u * torch.logspace(0, -6, len(u), dtype=u.dtype) @ v
    measures = Deployment()(Comparison(tasks, net))
    before, after = (measures.metrics[f"deployment/accuracy_bfloat16{end}"] for end in ("_baseline", ""))
    assert after < before - 0.1
    assert "breaks_in_bfloat16" in measures.flags
    assert "breaks_in_float32" not in measures.flags
    assert f"{after:.3f}" in measures.reasons["breaks_in_bfloat16"]


def test_a_trained_net_has_no_baseline_to_deploy(folders):
    pair = open_pair(folders)
    net, tasks = build(pair).read(pair, False)
    start = {name: tensor.clone() for name, tensor in net.extractor.state_dict().items()}
    kept = Deployment(images=4)(Comparison(tasks, net, start)).metrics
    assert kept["deployment/accuracy_float32_baseline"] == kept["deployment/accuracy_float32"] is not None
    measures = Deployment(images=4)(Comparison(tasks, net))
    assert measures.metrics["deployment/accuracy_float32"] is not None
    assert measures.metrics["deployment/accuracy_float32_baseline"] is None


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_what_the_last_linear_layer_reads_are_the_features_of_an_attacker(tmp_path, name):
    victim = net_victim(colored_pair(tmp_path), lambda model: model.extractor.theta.mul_(2.0), name, "fold")
    images, _ = victim.images("test")
    features, logits = outputs_in(victim.model.deployed(), "float64", [images], [])
    torch.testing.assert_close(features, victim.features("immunized", "test").cpu(), atol=1e-5, rtol=1e-5)
    assert logits.shape == (len(images), 3)


def test_a_map_that_four_bits_take_away_is_flagged(tmp_path):
    """Three colors behind a random net, whose directions a map squeezes to 1/2000: eight bits see that, four do not."""

    def squeeze(model):
        task = victims[0].task if victims else None
        theta = model.extractor.theta
        basis = torch.linalg.qr(discriminants(probe_of_inputs(task), 0.1)).Q if task else theta[:, :0]
        theta.copy_(torch.eye(len(theta)) - (1 - 1 / 2000) * (basis @ basis.T).to(theta))

    victims, pair = [], colored_pair(tmp_path)
    victims.append(net_victim(pair, squeeze, "test_resnet", "fold"))
    comparison = net_victim(pair, squeeze, "test_resnet", "fold").comparison
    measures = Deployment(formats=["float32", "int4"])(comparison)
    exact, coarse = (measures.metrics[f"deployment/steps_{form}"] for form in ("float32", "int4"))
    assert exact > 8 * coarse
    assert list(measures.flags) == ["immunization_lost_in_int4"]
    assert f"in float32 {exact:.3g}" in measures.reasons["immunization_lost_in_int4"]


def test_a_format_that_there_is_not():
    with pytest.raises(ConfigError, match="int5 is not a number format; choose from float64"):
        Deployment(formats=["int5"])
