"""`method.damping`: weights move little along what their layers read of images to keep."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.nets import build, open_pair
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from immunization.methods import Encoderlock, Forget, ForgetBlocks, Method, combined, distillation
from immunization.methods.base import checked_step
from immunization.methods.distillation import damp, release
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


@pytest.fixture
def layers():
    """A convolution and a linear layer in float64, and batches of images that they read one after the other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)).double()
    return net, torch.randn(3, 8, 2, 6, 6, dtype=torch.float64)


def test_a_step_moves_outputs_as_the_inverse_root_of_second_moments_says(layers):
    net, batches = layers
    before = copy.deepcopy(net)
    with torch.no_grad():
        x = batches.flatten(0, 1)
        patches = F.unfold(x, 3, padding=1, stride=2).movedim(1, 2).flatten(0, 1)
        read = {0: patches, 3: before[:3](x)}
    assert damp(net, batches, 5.0) == [net[0], net[3]]
    for place, rows in read.items():
        v = torch.randn_like(net[place].weight)
        with torch.no_grad():
            net[place].parametrizations.weight.original.copy_(v)
            moved = (net[place].weight - before[place].weight).flatten(1)
        moments = rows.T @ rows
        damped = torch.eye(len(moments)) + 5 * moments / moments.diagonal().mean()
        assert_close(moved @ damped @ moved.T, v.flatten(1) @ v.flatten(1).T)


def test_it_starts_at_theta_0_and_leaves_plain_weights_behind(layers):
    net, batches = layers
    start, x = copy.deepcopy(net.state_dict()), batches[0]
    before, plain = net(x), list(net.parameters())
    damped = damp(net, batches, 5.0)
    assert torch.equal(net(x), before)
    net(x).square().sum().backward()
    assert all(p.grad.any() for p in net.parameters())
    adam = torch.optim.Adam(net.parameters(), 0.1, fused=True)
    for _ in range(2):
        adam.step()
        after = net(x)
        with torch.no_grad():
            assert torch.equal(net(x), after)  # what is kept between steps is renewed with the weights
    assert not torch.equal(after, before)
    release(damped)
    assert start.keys() == net.state_dict().keys()
    assert [p.requires_grad for p in net.parameters()] == [True] * 4
    assert {id(p) for p in net.parameters()} == {id(p) for p in plain}
    assert_close(net(x), after)


def test_what_cannot_be_damped_is_left_alone_and_said(caplog):
    reflecting = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")  # pads before it multiplies
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, padding="same"), reflecting)
    assert damp(net, [torch.randn(2, 4, 8, 8)], 1.0) == []
    assert "method.damping has nothing to damp" in caplog.text


@pytest.fixture(scope="module")
def net(drawn):
    return open_pair(drawn[:2], val_fraction=0.2, keep_root=str(drawn[2] / "train"))


@pytest.mark.parametrize("kind", [Forget, ForgetBlocks])
def test_methods_train_damped_weights_and_leave_plain_ones(net, kind):
    def moved(damping):
        """By how much the training moves features of images to keep."""
        model, tasks = build(net, trainable="layer3").read(net, False)
        before = copy.deepcopy(model)
        method = kind(epochs=2, batch_size=16, damping=damping, distill=0.0, path=0.0, collapse=0.6, train_head=False)
        torch.manual_seed(0)
        method.setup(model, tasks)
        train(
            method,
            model,
            PairedBatches(tasks, 16, torch.Generator().manual_seed(0)),
            torch.optim.Adam(model.trained().values(), 1e-3),
        )
        method.finish(model)
        assert model.state_dict().keys() == before.state_dict().keys()
        for now, then in zip(model.trained().values(), before.trained().values(), strict=True):
            assert now.ndim == 1 or not torch.equal(now, then)
        return (model.features(kept := model.kept()) - before.features(kept)).square().mean()

    assert 0 < moved(10.0) < 0.8 * moved(0.0)


def test_images_at_twice_the_size_damp_too(net, monkeypatch):
    read = []
    monkeypatch.setattr(distillation, "damp", lambda _net, batches, _damping: read.extend(batches) or [])
    monkeypatch.setattr(distillation, "DAMPED", 40)
    model, tasks = build(net, trainable=["layer3", "layer4"]).read(net, False)
    method = ForgetBlocks(epochs=1, batch_size=16, enlarged=0.5, damping=10.0)
    method.setup(model, tasks)
    sources = tasks.primary.train.x, model.kept(), *method.distillation.larger
    expected = [
        rows[torch.linspace(0, len(rows) - 1, most).long()] for rows, most in zip(sources, (8, 40, 2, 10), strict=True)
    ]
    assert [len(batch) for batch in read] == [8, 40, 2, 10]
    assert all(torch.equal(batch, rows) for batch, rows in zip(read, expected, strict=True))


def test_weights_are_damped_once_for_several_harmful_tasks(net):
    model, tasks = build(net, trainable="layer3").read(net, False)
    two = replace(tasks, more={"harmful_b": tasks.harmful})
    names, theta_0 = model.state_dict().keys(), copy.deepcopy(model.state_dict())
    method = combined(Forget(epochs=1, batch_size=16, damping=10.0, path=0.0, max_accuracy_drop=1.0), two)
    method.setup(model, two)
    adam = torch.optim.Adam(model.trained().values(), 1e-3)
    train(method, model, PairedBatches(two, 16, torch.Generator().manual_seed(0)), adam)
    assert all(
        len(layer.parametrizations.weight) == 1 for layer in next(iter(method.parts.values())).distillation.layers
    )
    method.finish(model)
    assert names == model.state_dict().keys()
    assert any(
        not torch.equal(p, theta_0[name]) for name, p in model.state_dict().items() if name.endswith("conv1.weight")
    )


@pytest.mark.parametrize("several", [False, True])
def test_who_loses_too_much_goes_back_to_theta_0(net, several, monkeypatch):
    model, tasks = build(net, trainable="layer3").read(net, False)
    tasks = replace(tasks, more={"harmful_b": tasks.harmful}) if several else tasks
    theta_0, accuracy = copy.deepcopy(model.extractor.state_dict()), [1.0]
    monkeypatch.setattr(Method, "accuracy", lambda *_: accuracy[0])
    method = combined(Forget(epochs=2, batch_size=16, damping=10.0, path=0.0, max_accuracy_drop=0.1), tasks)
    method.setup(model, tasks)
    accuracy[0] = 0.0
    adam = torch.optim.Adam(model.trained().values(), 1e-3)
    train(method, model, PairedBatches(tasks, 16, torch.Generator().manual_seed(0)), adam)
    method.finish(model)
    after = model.extractor.state_dict()
    assert "stopped_early" in method.flags
    assert after.keys() == theta_0.keys()
    assert all(torch.equal(after[name], before) for name, before in theta_0.items())


def test_encoderlock_keeps_within_its_masks_for_several_tasks_too(net):
    model, tasks = build(net, trainable="layer3").read(net, False)
    two = replace(tasks, more={"harmful_b": tasks.harmful})
    method = combined(Encoderlock(epochs=1, batch_size=16, weights=5, keep=10.0), two)
    method.setup(model, two)
    batch = PairedBatches(two, 16, torch.Generator().manual_seed(0))
    checked_step(method, model, *next(iter(batch.epoch())))["loss"].backward()
    moved = sum((p.grad != 0).sum().item() for p in model.trained().values() if p.grad is not None)
    assert 0 < moved <= 2 * 5


def test_layers_that_are_not_called_are_left_as_they_are():
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert damp(net, [torch.randn(3, 5, 4)], 1.0) == [net.linear1, net.linear2]


def test_images_to_keep_are_read_for_it_alone():
    assert not Forget(distill=0.0).keeps
    assert Forget(distill=0.0, damping=1.0).keeps
