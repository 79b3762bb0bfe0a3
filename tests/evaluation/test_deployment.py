"""The accuracy of immunized nets in the number formats that people run nets in."""

import pytest
import timm
import torch
from helpers.nets import build, open_pair

from immunization.evaluation import Comparison, Deployment
from immunization.evaluation.deployment import FORMATS, logits_in
from immunization.methods import ClosedForm
from immunization.methods.linear_map import MAX_CONDITION

pytestmark = pytest.mark.trains


@pytest.fixture
def folded(folders):
    pair = open_pair(folders)
    return build(pair).read_tasks(pair, True)


def condition_of(net):
    sigma = torch.linalg.svdvals(net.extractor.theta.detach())
    return (sigma[0] / sigma[-1]).item()


def test_nets_are_bounded_and_keep_every_format(folded):
    net, tasks = folded
    method = ClosedForm(ridge=1e-5, max_condition="auto")
    method.setup(net, tasks)
    method.finish(net)
    assert condition_of(net) <= MAX_CONDITION * (1 + 1e-6)
    measures = Deployment()(Comparison(tasks, net))
    assert measures.metrics.keys() == {f"deployment/accuracy_{f}{s}" for f in FORMATS for s in ("", "_baseline")}
    exact = measures.metrics["deployment/accuracy_float64_baseline"]
    assert measures.metrics["deployment/accuracy_float64"] == exact
    assert exact == pytest.approx(
        tasks.primary.measure(net.baseline_logits(tasks.primary), tasks.primary.test.y).item()
    )


def test_a_torch_without_quantization_measures_the_other_formats(folded, monkeypatch):
    monkeypatch.delattr(torch.ao.quantization, "quantize_dynamic")
    net, tasks = folded
    measures = Deployment(images=4)(Comparison(tasks, net))
    assert measures.metrics["deployment/accuracy_int8"] is None
    assert "no torch.ao.quantization" in measures.reasons["deployment/accuracy_int8"]
    assert measures.metrics["deployment/accuracy_bfloat16"] is not None


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
    assert list(measures.flags) == ["breaks_in_low_precision"]
    assert f"{after:.3f}" in measures.reasons["breaks_in_low_precision"]


def test_a_trained_net_has_no_baseline_to_deploy(folders):
    pair = open_pair(folders)
    net, tasks = build(pair).read_tasks(pair, False)
    start = {name: tensor.clone() for name, tensor in net.extractor.state_dict().items()}
    kept = Deployment(images=4)(Comparison(tasks, net, start)).metrics
    assert kept["deployment/accuracy_float32_baseline"] == kept["deployment/accuracy_float32"] is not None
    measures = Deployment(images=4)(Comparison(tasks, net))
    assert measures.metrics["deployment/accuracy_float32"] is not None
    assert measures.metrics["deployment/accuracy_float32_baseline"] is None


@torch.no_grad()
def test_float16_of_a_cpu_is_that_of_a_gpu():
    """Sums in float32, results rounded: as near to torch's own float16 as that is to float32, and it overflows, too."""
    net, images = timm.create_model("test_resnet").eval(), torch.randn(4, 3, 64, 64)
    batches = [(images, torch.zeros(4))]
    half, native = logits_in(net, "float16", batches), net.half()(images.half()).float()
    scale, exact = native.abs().max(), logits_in(net.float(), "float32", batches)
    assert half.equal(half.half().float())
    assert (half - exact).abs().max() < 2e-3 * scale
    assert (half - native).abs().max() < 3e-3 * scale
    net.get_classifier().weight.fill_(6e4)
    assert not torch.isfinite(logits_in(net, "float16", batches)).any()
