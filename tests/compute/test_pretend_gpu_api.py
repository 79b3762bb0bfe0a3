"""The Python interface where models, loaders and references are on the CPU or on a pretended GPU, in any way."""

import copy
from itertools import product

import pytest
import timm
import torch
from helpers.both_devices import agree
from helpers.images import loader
from helpers.pretend_gpu import pretended_gpu

import immunization
from immunization.models.fold import LinearMap

pytestmark = pytest.mark.trains

DEVICES = ("cpu", "cuda")
PLACES = [places for places in product(DEVICES, DEVICES) if "cuda" in places]
PROBES = {"attacks": ["linear_probe", "undo"], "linear_probe__steps": 8, "undo__steps": 8}
TRAINED = {"method": "condition_number", "epochs": 1, "batch_size": 16}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", pretrained=False, num_classes=4).eval().double()


@pytest.fixture(scope="module")
def on_cpu() -> dict:
    """What `net` becomes without a GPU, by options."""
    return {}


def on(device, batches):
    return [(x.to(device), y.to(device)) for x, y in batches]


def images(device, count=60):
    """Primary and harmful batches."""
    return on(device, loader(4, 0, count)), on(device, loader(3, 1, count))


def rows(device, seed):
    drawn = torch.randn(6, 20, 8, generator=torch.Generator().manual_seed(seed))
    return on(device, [(x, torch.arange(20) % 2) for x in drawn])


HOW = {
    "folded": {"method": "closed_form", "ridge": 1e-4},
    "trained": TRAINED,
    "augmented": {**TRAINED, "augmented": True},
}
APART = {"folded": ("cpu", "cuda"), "trained": ("cuda", "cpu"), "augmented": ("cuda", "cuda")}


@pytest.mark.parametrize(
    ("how", "model", "data"),
    [
        pytest.param(how, *places, marks=[] if APART[how] == places else pytest.mark.slow)
        for how, places in product(HOW, PLACES)
    ],
)
def test_immunize(net, on_cpu, how, model, data):
    options = HOW[how]
    if str(options) not in on_cpu:
        on_cpu[str(options)] = immunization.immunize(net, *images("cpu"), **options).state_dict()
    expected = on_cpu[str(options)]
    with pretended_gpu():
        immunized = immunization.immunize(copy.deepcopy(net).to(model), *images(data), **options)
        assert {p.device.type for p in immunized.parameters()} == {model}
        found = {name: tensor.cpu() for name, tensor in immunized.state_dict().items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "data"),
    [pytest.param(*places, marks=[] if places == ("cuda", "cuda") else pytest.mark.slow) for places in PLACES],
)
def test_audit_of_a_linear_map(model, data):
    theta = torch.randn(8, 8, dtype=torch.float64)
    expected = immunization.audit(LinearMap(theta.clone()), rows("cpu", 0), rows("cpu", 1), **PROBES)
    with pretended_gpu():
        result = immunization.audit(LinearMap(theta.clone()).to(model), rows(data, 0), rows(data, 1), **PROBES)
    agree(expected, result)


@pytest.mark.slow
def test_audit_of_a_net_against_a_reference_elsewhere(net):
    immune = immunization.immunize(net, *images("cpu"), method="closed_form", ridge=1e-4)
    options = {**PROBES, "attacks": [*PROBES["attacks"], "full_finetune"], "full_finetune__steps": 2}
    expected = immunization.audit(immune, *images("cpu"), **options)
    with pretended_gpu():
        result = immunization.audit(immune.to("cuda"), *images("cuda"), net, **options)
    for name, value in expected.metrics.items():
        if value is not None and result.metrics[name] is not None:  # with a reference there are more measures
            assert result.metrics[name] == pytest.approx(value, rel=1e-6), name


def test_condition_numbers(net):
    features = [torch.randn(50, 5, dtype=torch.float64) for _ in range(4)]
    with pretended_gpu():
        for conditioning in ("rank", "authors"):
            found = immunization.condition_number(features[0].cuda(), conditioning=conditioning)
            assert found == pytest.approx(immunization.condition_number(features[0], conditioning=conditioning))
        assert immunization.rir(*(x.cuda() for x in features)) == pytest.approx(immunization.rir(*features))


def test_a_net_of_the_gpu_is_saved_and_loaded(net, tmp_path):
    with pretended_gpu():
        immune = immunization.immunize(net.to("cuda"), *images("cuda"), method="closed_form", ridge=1e-4)
        immunization.save(immune, tmp_path)
        expected = {name: tensor.cpu() for name, tensor in immune.state_dict().items()}
    loaded = immunization.load(tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
