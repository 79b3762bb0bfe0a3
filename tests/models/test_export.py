"""Exported nets: in the dtype of the original, and what rounding does to them."""

import warnings

import pytest
import timm
import torch
from helpers.images import loader
from helpers.nets import build, open_pair

import immunization
from immunization.methods import ClosedForm
from immunization.models.fold import folded_map
from immunization.models.timm import Timm
from immunization.models.weights import TOLERANCE, exported, rounding_flag
from immunization.runs.filenames import WEIGHTS
from immunization.runs.files import write_weights

pytestmark = pytest.mark.trains


@pytest.fixture
def folded(folders):
    """A net with a folded map, computed in float64, and its tasks."""
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, True)
    method = ClosedForm(ridge=1e-3)
    method.setup(model, tasks)
    method.finish(model)
    return model, tasks


def test_a_run_in_float64_exports_the_dtype_of_the_net(folded):
    model, tasks = folded
    tensors, facts = exported(model, tasks.primary)
    assert (facts["dtype"], facts["computed_in"]) == ("float32", "float64")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float32}


def test_an_exported_net_is_audited_without_its_map(folded, folders, tmp_path):
    model, tasks = folded
    write_weights(tmp_path / WEIGHTS, *exported(model, tasks.primary))
    pair = open_pair(folders)
    again = Timm(pair, "test_resnet", checkpoint=str(tmp_path))
    _, read = again.read(pair, False)
    outputs, before = again.logits(read.primary.test.x), again.baseline_logits(read.primary)
    torch.testing.assert_close(outputs, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ridge", [1e-6, 1e-4, 1e-2])
def test_outputs_move_by_at_most_kappa_eps(ridge):
    """As docs/deploy.md says; and the measured figure is that of the net itself on other images."""
    torch.manual_seed(0)
    net = timm.create_model("test_resnet", pretrained=False, num_classes=4).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        immunized = immunization.immunize(net, loader(4, 0), loader(3, 1), "closed_form", ridge=ridge)
    error = immunized.immunized_by["rounding"]
    kappa = torch.linalg.cond(folded_map(immunized).double()).item()
    assert 0 < error < kappa * torch.finfo(torch.float32).eps
    assert any("float32, the dtype of the original net, does not hold" in str(w.message) for w in caught) == (
        error > TOLERANCE
    )
    images = next(iter(loader(4, 7)))[0]
    with torch.no_grad():
        outputs, expected = immunized(images), net(images)
    assert (outputs - expected).abs().max() < 3 * error * expected.abs().max()


def test_what_the_dtype_does_not_hold_is_flagged():
    assert rounding_flag({"dtype": "float32", "rounding": 1e-4}) is None
    assert rounding_flag({"dtype": "float32"}) is None
    assert "differ from the original's by up to 0.02 of the largest" in rounding_flag(
        {"dtype": "float16", "rounding": 0.02}
    )
