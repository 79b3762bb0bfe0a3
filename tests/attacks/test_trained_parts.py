"""Attackers who train a part of the net: what was immunized, all from a block on, or the same drawn anew."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.victims import classes, colors_behind_a_map, net_victim, regression, victim_of
from torch import nn

from immunization.attacks import (
    Adam,
    BlockProbe,
    ClosedFormProbe,
    Distilled,
    FineTune,
    FreshPart,
    Inapplicable,
    LogisticProbe,
    LoRA,
    Pruned,
    Scratch,
    Victim,
    optimizers,
    tuning,
    victim,
)
from immunization.attacks.altered import redrawn
from immunization.attacks.recipes import Budget, Recipe
from immunization.attacks.tuning import Tuner
from immunization.errors import ConfigError

pytestmark = pytest.mark.trains

PLAIN = Recipe(0.01, "sgd", 12, "trained", 0.0)


@pytest.fixture(scope="module")
def resnet(colors):
    return net_victim(colors, lambda model: None, "test_resnet", ["layer3", "layer4"])


@pytest.fixture(scope="module")
def vit(colors):
    return net_victim(colors, lambda model: None, "test_vit", "blocks.3", img_size=32, patch_size=8)


def tuner_of(net: Victim, kept: bool = True, attack: FineTune | None = None) -> Tuner:
    splits = {split: net.images(split) for split in ("train", "val", "test")}
    attack = attack or FineTune()
    activations = [partial(net.activations, "immunized", None, None)] if kept else []
    network, teacher = partial(attack.network, net, "immunized"), attack.teacher(net, "immunized")
    return Tuner(net.task, splits, network, attack.adapt, *activations, teacher=teacher)


def test_a_part_is_what_was_trained_or_all_from_a_block_on(resnet, vit):
    network = resnet.network("immunized")
    net = network.whole.net
    assert network.part("trained") == [net.layer3, net.layer4]
    assert network.part("layer4") == [net.layer4, net.global_pool]
    names = {"layer4": {"layer4"}, "layer3": {"layer3", "layer4"}, "conv1": {name for name, _ in net.named_children()}}
    for name, expected in names.items():
        inside = {p for child in expected for p in net.get_submodule(child).parameters()}
        assert set(FineTune().adapt(network, name)[0]) == inside
    trained = vit.network("immunized")
    own = FineTune().adapt(trained, "blocks.3")[0]
    ends = (trained.whole.net.blocks[3:], trained.whole.net.norm, trained.whole.net.fc_norm)
    assert set(own) == {p for module in ends for p in module.parameters()}
    with pytest.raises(ConfigError, match=r"scope=layer9: no block .* trained or one of conv1\.0, .*layer4\.0"):
        FineTune(scope="layer9").check(resnet.model)
    with pytest.raises(ConfigError, match="layer9"):
        FineTune(scope="layer9", steps=1).run(resnet, "immunized")


def test_an_attack_trains_all_where_it_trains_what_was_immunized(resnet):
    covers = {
        scope: FineTune(scope=scope).trains_all(resnet) for scope in ("full", "trained", "layer3", "layer4", "head")
    }
    assert covers == {"full": True, "trained": True, "layer3": True, "layer4": False, "head": False}
    assert not FreshPart().trains_all(resnet)
    assert not LoRA().trains_all(resnet)


def test_what_another_net_has_of_its_own_is_what_was_trained(colors):
    net = net_victim(colors, lambda model: None, "test_resnet", "last")
    before = copy.deepcopy(net.model)
    norm = net.model.net.layer3[0].bn1
    norm.running_mean.add_(1)
    net.model.compare_with(before)
    network = net.network("immunized")
    assert network.part("trained") == [network.whole.net.layer3[0].bn1]
    assert FineTune(scope="layer3").trains_all(net)
    assert not FineTune(scope="last").trains_all(net)


@pytest.mark.parametrize("part", ["trained", "layer4"])
def test_what_stands_before_the_part_is_passed_once(resnet, part, monkeypatch):
    own, recipe = tuner_of(resnet), replace(PLAIN, part=part, mirror=True)
    opened = own.open(recipe, 0)
    assert opened.start > 1
    for mirrored in (False, True):
        images = resnet.images("test")[0]
        with torch.no_grad():
            expected = opened.network(images.flip(-1) if mirrored else images)
            found = opened.network(opened.rows("test", slice(None), mirrored), opened.start)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    before, behind = own._passes(opened.network, opened.start)
    assert before + behind == pytest.approx(resnet.flops_per_row("immunized"))
    assert opened.flops == 2 * own.rows * before
    cost = own.step_cost(recipe)
    monkeypatch.setattr(tuning, "WHOLE", ("trained", "layer4"))
    whole = tuner_of(resnet)
    assert whole.step_cost(recipe) - cost == 12 * before
    assert whole.open(recipe, 0).flops == 0


def test_what_does_not_fit_is_passed_again_and_paid_for_once(resnet, monkeypatch):
    attack = FineTune(scope="layer4", rates=[0.01], steps=2, batch_size=12)
    kept = attack.run(resnet, "immunized")
    assert tuner_of(resnet).open(PLAIN, 0).start > 0
    resnet.kept.clear()
    monkeypatch.setattr(victim, "KEPT_IMAGES", 1e-6)
    assert tuner_of(resnet).open(PLAIN, 0).start == 0
    assert torch.equal(attack.run(resnet, "immunized").flops, kept.flops)


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_a_part_drawn_anew_is_trained_behind_the_rest(name, request):
    net = request.getfixturevalue(name)
    torch.manual_seed(0)
    network, old = FreshPart().network(net, "immunized", "trained"), net.network("immunized")
    fresh = {name for module in network.trained for name in network.state_dict() if name.startswith(f"{module}.")}
    for key, value in network.state_dict().items():
        assert torch.equal(value, old.state_dict()[key]) or key in fresh
    assert any(not torch.equal(network.state_dict()[key], old.state_dict()[key]) for key in fresh)
    curve = FreshPart(rates=[1e-2], steps=16, batch_size=12).run(net, "immunized")
    assert curve.final > 0.6


def test_a_part_that_nobody_can_draw_is_not_drawn(resnet):
    network = resnet.network("immunized")
    network.whole.net.layer3.extra = nn.Parameter(torch.ones(3))
    redrawn(network, "layer4")
    with pytest.raises(Inapplicable, match=r"no initializer is known for the weights .*layer3\.extra"):
        redrawn(network, "trained")


def test_a_layer_scaled_against_one_recipe_is_found_by_another(colors):
    """All that layer4 says of an image is a ten-thousandth of what it always says."""

    def immunize(model):
        for module in model.net.layer4.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.mul_(1e-4)
                module.bias.fill_(1.0)

    net = net_victim(colors, immunize, "test_resnet", "layer4")
    small = {"steps": 8, "batch_size": 12}
    one = FineTune(scope="trained", optimizer="sgd", rates=[1e-3], **small)
    assert one.run(net, "immunized").final < 0.5
    assert one.run(net, "baseline").scores.shape[1] == len(net.task.test)
    for other in (
        FineTune(scope="trained", optimizer="sgd", rates=[1e-3], head_first=True, **small),
        FreshPart(rates=[1e-2], steps=32),
    ):
        assert other.run(net, "immunized").final > 0.9


@pytest.fixture
def heads(monkeypatch) -> list:
    """Weights of the head at every step that is measured."""
    seen, measures = [], Tuner._measures

    def spied(self, opened, recipe):
        seen.append(opened.head.weight.detach().clone())
        return measures(self, opened, recipe)

    monkeypatch.setattr(Tuner, "_measures", spied)
    return seen


def test_weights_are_averaged_in_the_second_half(resnet, heads):
    own = tuner_of(resnet)
    recipe = replace(PLAIN, mirror=True)
    budget = Budget([1, 2, 3, 4], own.step_cost(recipe), own.open(recipe, 0).flops)
    own.train(recipe, budget, 0)
    plain = heads[:]
    heads.clear()
    own.train(replace(recipe, average=True), budget, 0)
    expected = [*plain[:3], (plain[2] + plain[3]) / 2]
    for found, head in zip(heads, expected, strict=True):
        torch.testing.assert_close(found, head)


def test_a_head_solved_first_knows_something_before_it_is_trained(resnet):
    own, recipe = tuner_of(resnet), replace(PLAIN, rate=0.0, head_first=True)
    start = own.open(recipe, 0).flops
    assert start > own.rows * resnet.flops_per_row("immunized")
    course = own.train(recipe, Budget([1, 2], own.step_cost(recipe), start), 0)
    assert course.val[0] > 0.9
    poor = own.train(recipe, Budget([1], start / 2), 0)
    assert (poor.val, poor.steps, poor.spent) == ([resnet.task.chance], [-1], 0.0)


def test_masks_are_drawn_by_the_attackers_own_seed(colors):
    dropping = net_victim(
        colors, lambda model: None, "test_vit", "blocks.3", img_size=32, patch_size=8, proj_drop_rate=0.5
    )
    tuner = tuner_of(dropping)
    budget = Budget([0, 4], tuner.step_cost(PLAIN), tuner.open(PLAIN, 0).flops)
    first, again = (tuner.train(PLAIN, budget, seed=0) for _ in range(2))
    assert torch.equal(first.scores[-1], again.scores[-1])
    before = torch.get_rng_state()
    tuner.train(PLAIN, budget, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_features_of_any_size_have_a_mean_square_of_1(scale):
    features = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * scale
    assert (features * tuning._unit(features)).square().mean().item() == pytest.approx(1, rel=1e-5)
    assert tuning._unit(torch.zeros(3, 2)) == 1


def test_earlier_blocks_have_smaller_rates(resnet, monkeypatch):
    made = []

    def optimizer(groups, **options):
        made.append(torch.optim.SGD(groups, **options))
        return made[-1]

    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", optimizer)
    own = tuner_of(resnet)
    own.train(replace(PLAIN, part="full", decay=0.5), Budget([1], own.step_cost(replace(PLAIN, part="full"))), 0)
    shares = [group["share"] for group in made[-1].param_groups]
    assert sorted(shares, reverse=True) == [0.5**depth for depth in range(len(shares))]
    assert [len(group["params"]) for group in made[-1].param_groups if group["share"] == 1] == [2]
    network = resnet.network("immunized")
    depths, net = network.depths(), network.whole.net
    assert depths[net.layer4[0].conv1.weight] == depths[net.layer4[0].bn2.bias] < depths[net.layer3[0].conv1.weight]


def test_adapters_of_the_stem_are_as_deep_as_the_stem(resnet):
    network = resnet.network("immunized")
    before = network.depths()[next(network.units[0][1].parameters())]
    LoRA(rank=2).adapt(network, "full")
    adapters = {name: p for name, p in network.named_parameters() if "lora_" in name}
    depths = network.depths()
    assert [depths[p] for name, p in adapters.items() if "net.conv1.0." in name] == [before] * 2
    assert network.start_of(adapters.values()) == 0


ATTACKS = {
    "trained": FineTune(
        scope="trained", optimizer="sgd", rates=[0.01, 0.1], steps=2, batch_size=12, smoothing=0.1, mirror=True
    ),
    "full": FineTune(rates=[0.01], steps=2, batch_size=12),
    "lora": LoRA(rates=[0.01], steps=1, rank=2, batch_size=12),
    "scratch": Scratch(rates=[0.01], steps=2, batch_size=12),
    "closed": ClosedFormProbe(),
    "renewed": BlockProbe(samples=5, renewed=True, mirrored=False, enlarged=False, ridges=[0.1]),
    "logistic": LogisticProbe(),
    "adam": Adam(steps=8),
    "adan": FineTune(optimizer="adan", rates=[0.01], steps=2, batch_size=12),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_scores_of_test_rows_have_the_measure_as_their_mean(name, resnet):
    curve = ATTACKS[name].run(resnet, "immunized")
    assert curve.scores.dtype == torch.bool
    assert curve.scores.shape == (len(curve.test), len(resnet.task.test))
    torch.testing.assert_close(curve.scores.double().mean(1), curve.test)


def test_scores_of_a_regression_do_too():
    x = classes().train.x
    net = victim_of(regression(x, x @ torch.arange(6.0, dtype=torch.float64)), torch.eye(6, dtype=torch.float64))
    curve = Adam(steps=8).run(net, "immunized")
    assert curve.scores.dtype == torch.float32
    torch.testing.assert_close(curve.scores.double().mean(1), curve.test, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [True, False])
def test_a_distilled_part_begins_anew_and_learns_the_features_of_the_net(resnet, kept):
    tuner = tuner_of(resnet, kept, Distilled(scope="trained"))
    opened = tuner.open(PLAIN, seed=0)
    before = resnet.network("immunized")
    own = {
        name
        for name, p in before.named_parameters()
        if any(p is q for m in before.part("trained") for q in m.parameters())
    }
    drawn = dict(opened.network.named_parameters())
    assert {name for name, p in before.named_parameters() if not torch.equal(p, drawn[name])} <= own
    batch = torch.arange(12)
    x, y = opened.rows("train", batch), resnet.images("train")[1][batch]
    taught = tuner.teacher(resnet.images("train")[0][batch]).detach()
    optimizer = torch.optim.Adam(opened.parameters, lr=0.01)
    losses = []
    for _ in range(40):
        losses.append(tuner.loss(opened, PLAIN, x, y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    features, taught = (x * x.square().mean().rsqrt() for x in (opened.read(x), taught))
    distance = (features - taught).square().mean()
    torch.testing.assert_close(tuner.loss(opened, PLAIN, x, y), distance + resnet.task.loss(opened.logits(x), y))
    assert 2 * distance < losses[0] - math.log(resnet.task.classes)  # the head begins at 0
    assert tuner.step_cost(PLAIN) > tuner_of(resnet, kept, FreshPart()).step_cost(PLAIN)
    assert Distilled(scope="trained", steps=2, rates=[0.01]).run(resnet, "immunized").val.isfinite().all()


def test_a_map_folded_in_is_pruned_too(tmp_path):
    network = Pruned(scope="full", pruned=0.5).network(colors_behind_a_map(tmp_path, size=16), "immunized", "full")
    assert all((p == 0).double().mean() >= 0.4 for p in network.parameters() if p.ndim > 1)


def test_the_smallest_weights_of_what_was_immunized_are_pruned_and_no_others(resnet):
    before = resnet.network("immunized")
    pruned = dict(Pruned(pruned=0.25).network(resnet, "immunized", "trained").named_parameters())
    own = {parameter for module in before.part("trained") for parameter in module.parameters()}
    for name, weight in before.named_parameters():
        gone = pruned[name] == 0
        if weight in own and weight.ndim > 1:
            assert gone.double().mean().item() == pytest.approx(0.25, abs=1 / weight.numel())
            assert weight[gone].abs().max() <= weight[~gone].abs().min()
        assert torch.equal(pruned[name][~gone], weight[~gone])
        assert weight in own or torch.equal(pruned[name], weight)
    assert Pruned(scope="trained", steps=2, rates=[0.01]).run(resnet, "immunized").val.isfinite().all()
