"""`method.keep`: what any method that trains layers adds to its loss to keep the rest of a net."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.methods import make_pair
from helpers.nets import build, open_pair
from torch.testing import assert_close

from immunization.config import compose
from immunization.errors import ConfigError
from immunization.experiment import assemble, resolve
from immunization.methods import CLAMP, IMMA, NTL, TAR, ConditionNumber, Encoderlock, Sophon, combined
from immunization.methods.base import checked_step
from immunization.models import Linear, reading
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

NET = ("dataset=image_folders", "dataset.size=32", "dataset.cache=null", "model=timm", "model.name=test_resnet")
NET += ("model.pretrained=false", "+model.arguments.num_classes=4")

pytestmark = pytest.mark.trains

METHODS = {
    "condition_number": lambda **options: ConditionNumber(
        lambda_P=1.0, lambda_H=1.0, epochs=2, batch_size=16, precondition="none", **options
    ),
    "imma": lambda **options: IMMA(epochs=2, batch_size=16, **options),
    "ntl": lambda **options: NTL(epochs=2, batch_size=16, **options),
    "clamp": lambda **options: CLAMP(epochs=2, batch_size=16, **options),
    "tar": lambda **options: TAR(epochs=2, batch_size=16, **options),
    "sophon": lambda **options: Sophon(epochs=2, batch_size=16, **options),
    "encoderlock": lambda **options: Encoderlock(epochs=2, batch_size=16, round_steps=4, **options),
}


@pytest.fixture(scope="module")
def net(drawn):
    return open_pair(drawn[:2], val_fraction=0.2, keep_root=str(drawn[2] / "train"))


def trained(method, net):
    """How far the training moves the features of the images to keep: mean squared distance from theta_0's."""
    model, tasks = build(net).read(net, False)
    before = copy.deepcopy(model)
    torch.manual_seed(0)
    method.setup(model, tasks)
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    train(method, model, PairedBatches(tasks, 16, torch.Generator().manual_seed(0)), adam)
    kept = model.kept()
    return (model.features(kept) - before.features(kept)).square().sum(1).mean().item()


def test_images_to_keep_that_do_not_fit_into_memory_are_refused_before_any_is_read(net, monkeypatch):
    model = build(net).read(net, False)[0]
    kept = model.kept()
    monkeypatch.setattr(reading, "memory", lambda _: 2.0 * kept.nbytes)
    assert torch.equal(model.kept(), kept)
    monkeypatch.setattr(reading, "memory", lambda _: 2.0 * kept.nbytes - 1)
    monkeypatch.setattr(type(model), "_read", None)
    with pytest.raises(ConfigError, match=r"dataset\.keep_root: 80 images take .* choose fewer with dataset\.keep\."):
        model.kept()


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_any_method_keeps_what_it_is_told_to(net, make):
    assert trained(make(keep=10.0), net) < 0.5 * trained(make(), net)


def test_the_loss_by_hand(net):
    """Features relative to the spread of theta_0's, and the divergence of the class probabilities."""
    model, tasks = build(net).read(net, False)
    method = NTL(epochs=1, batch_size=16, keep=2.0)
    method.setup(model, tasks)
    method.callbacks[0].distillation.kept = method.callbacks[0].distillation.kept[:1]
    primary, harmful = next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch()))
    rows = torch.cat([primary.x, method.callbacks[0].distillation.kept.expand_as(primary.x)])
    f_0, whole = model.features(rows), model.features(tasks.primary.train.x)
    p_0 = model.head(f_0).softmax(1)
    with torch.no_grad():
        for p in model.trained().values():
            p.mul_(1.1)
    f, spread = model.features(rows), whole.var(0, correction=0).sum()
    p = model.head(f).softmax(1)
    by_hand = (f - f_0).square().sum(1).mean() / spread + (p_0 * (p_0 / p).log()).sum(1).mean()
    alone = copy.deepcopy(method).step(model, primary, harmful)["loss"]
    terms = checked_step(method, model, primary, harmful)
    assert_close(terms["kept"], by_hand)
    assert_close(terms["loss"], alone + 2 * by_hand)


def test_several_harmful_tasks_keep_once(net):
    """The mean of the copies' losses, and L_distill beside it."""
    model, tasks = build(net).read(net, False)
    several = replace(tasks, more={"harmful_2": tasks.harmful})
    method = combined(NTL(epochs=1, batch_size=16, keep=2.0), several)
    method.setup(model, several)
    assert all(part.keep == 0 for part in method.parts.values())
    primary, harmful = next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch()))
    with torch.no_grad():
        for p in model.trained().values():
            p.mul_(1.1)
    alone = copy.deepcopy(method).step(model, primary, harmful, harmful)["loss"]
    terms = checked_step(method, model, primary, harmful, harmful)
    assert terms["kept"] > 0
    assert_close(terms["loss"], alone + 2 * terms["kept"])


def test_a_model_of_rows_has_nothing_to_distill():
    pair = make_pair()
    with pytest.raises(ConfigError, match=r"method\.keep distills trained layers, and no layer is trained"):
        NTL(epochs=1, batch_size=16, keep=1.0).setup(Linear(pair), pair)


@pytest.mark.parametrize(("options", "told"), [([], True), (["method.keep=1"], False)])
def test_images_to_keep_that_nothing_keeps_are_told(net, caplog, options, told):
    roots = [str(Path(task.folders[0]).parents[1]) for task in net.tasks.values()]
    keep = str(Path(net.keep[0].folders[0]).parent)
    data = [f"dataset.primary_root={roots[0]}", f"dataset.harmful_root={roots[1]}", f"dataset.keep_root={keep}"]
    assemble(resolve(compose([*NET, *data, "method=ntl", *options])))
    warning = "method=ntl ignores the images of dataset.keep_root; set method.keep above 0 where the method has it"
    assert (warning in caplog.text) == told
