"""An attacker who reads any blocks of a net, and those who have no model."""

import itertools
import json
import operator
from collections import Counter
from functools import partial, reduce

import pytest
import torch
import torch.nn.functional as F
from helpers.matrices import gaussian
from helpers.victims import classes, colored_pair, colors_behind_a_map, net_victim, silenced, victim_of, zeroed
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.preprocessing import KernelCenterer, StandardScaler
from torch import nn
from torch.testing import assert_close

from immunization import run
from immunization.attacks import (
    BlockProbe,
    ClosedFormProbe,
    FineTune,
    FreshFrom,
    FrozenBlocks,
    Inapplicable,
    LayerProbe,
    Neighbours,
    RandomNet,
    RawInputs,
    TileProbe,
    readings,
    run_attacks,
)
from immunization.attacks.altered import renew
from immunization.attacks.blocks import block_outputs, prefix_flops
from immunization.attacks.kernels import SHARPNESS, Kernel, Rule, probabilities
from immunization.attacks.pooling import (
    INSIDE,
    POOLINGS,
    SIDE,
    SMALL,
    TILES,
    TWICE,
    Outputs,
    at_twice_the_size,
    covariance_root,
    cut,
    outputs_of,
    poolings,
)
from immunization.attacks.readings import Fit, Fitter, Reading, fewer, nested
from immunization.attacks.victim import images_of
from immunization.data.task import SPLITS, Split, Task
from immunization.errors import ConfigError
from immunization.models.blocks import find
from immunization.models.chain import NetParts, Network, pooled

pytestmark = pytest.mark.usefixtures("few_patches")

RIDGES = (0.01, 0.1)


def untouched(colors, name="test_resnet", trainable="layer4", **arguments):
    return net_victim(colors, lambda model: None, name, trainable, **arguments)


def quick(kind=BlockProbe, **options):
    """An attacker who has five images of each class, reads them as they are, and tries two ridges."""
    return kind(**{"samples": 5, "mirrored": False, "enlarged": False, "ridges": RIDGES} | options)


@pytest.mark.parametrize("shape", [(30, 7), (20, 50)])
def test_blocks_side_by_side_are_ridge_regression_on_standardized_columns(shape):
    train, others, targets = (
        gaussian(*shape, seed=0) * 3 + 1,
        gaussian(9, shape[1], seed=1),
        gaussian(shape[0], 3, seed=2),
    )
    scaler = StandardScaler().fit(train)
    alpha = 0.1 * shape[1]  # the mean of the diagonal of Z Z^T is the number of columns
    model = Ridge(alpha=alpha).fit(scaler.transform(train), targets)
    parts = [Kernel.of(a.clone(), b.clone()) for a, b in zip(train.split(4, 1), others.split(4, 1), strict=True)]
    read = reduce(operator.add, parts)
    expected = torch.tensor(model.predict(scaler.transform(others)))
    assert read.columns == shape[1]
    assert_close(read.predictions(targets, [Rule(0.1)])[0][0], expected)


def test_a_gaussian_kernel_of_blocks_side_by_side():
    train, others, targets = gaussian(20, 7, seed=0), gaussian(9, 7, seed=1), gaussian(20, 3, seed=2)
    scaler = StandardScaler().fit(train.abs().sqrt() * train.sign())
    x, z = (torch.tensor(scaler.transform(part.abs().sqrt() * part.sign())) for part in (train, others))
    gamma = 0.5 / torch.cdist(x, x).square().mean().item()
    own, other = rbf_kernel(x, gamma=gamma), rbf_kernel(z, x, gamma=gamma)
    centerer = KernelCenterer().fit(own)
    own, other = centerer.transform(own), centerer.transform(other)
    model = KernelRidge(kernel="precomputed", alpha=0.1 * own.diagonal().mean()).fit(own, targets - targets.mean(0))
    parts = [
        Kernel.of(a.clone(), b.clone(), root=True) for a, b in zip(train.split(4, 1), others.split(4, 1), strict=True)
    ]
    found = (parts[0] + parts[1]).gaussian().predictions(targets, [Rule(0.1)])[0][0]
    assert_close(found, torch.tensor(model.predict(other)) + targets.mean(0))


@pytest.mark.parametrize("sizes", [(8, 8, 8), (3, 9, 14)])
@pytest.mark.parametrize("dim", [5, 40])
def test_discriminants_are_those_of_the_scatter_within_classes(sizes, dim):
    y = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    x = gaussian(len(y), dim, seed=0) + 2 * gaussian(3, dim, seed=1)[y]
    others, targets = gaussian(9, dim, seed=2), F.one_hot(y).double()
    found = Kernel.of(x.clone(), others.clone()).predictions(targets, [Rule(0.1, discriminant=True)])[0][0]
    scaler = StandardScaler().fit(x)
    x, others = (torch.tensor(scaler.transform(part)) for part in (x, others))
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    scatter = (x - means[y]).T @ (x - means[y]) + 0.1 * dim * torch.eye(dim, dtype=x.dtype)
    weights = torch.linalg.solve(scatter / len(y), means.T)
    expected = others @ weights - (means.T * weights).sum(0) / 2 + torch.tensor(sizes).log()
    assert_close(found, expected)


@pytest.mark.parametrize("images", [1, 0])
def test_a_class_of_one_training_image_or_none_is_no_obstacle(images, monkeypatch):
    monkeypatch.setattr(readings, "SEARCHED", 8)
    counts = {"train": [6, images, 6, 6], "val": [4] * 4, "test": [4] * 4}
    labels = {split: torch.arange(4).repeat_interleave(torch.tensor(n)) for split, n in counts.items()}
    read = {split: gaussian(len(y), 9, seed=1) + 4 * torch.eye(4, 9)[y] for split, y in labels.items()}
    task = Task("birds", *(Split(read[split], y) for split, y in labels.items()), classes=4)
    outputs = Outputs({("block", "average"): {split: x[None] for split, x in read.items()}}, [{"block": 1.0}])
    kept = {split: x.clone() for split, x in read.items()}
    curve = BlockProbe(mirrored=False).probe(task, outputs)
    assert all(torch.equal(outputs.columns("block", "average", split)[0], x) for split, x in kept.items())
    assert curve.scores[-1].double()[labels["test"] != 1].mean() > 0.9
    assert set(labels["train"][fewer(task, torch.arange(len(task.train)))].tolist()) == set(labels["train"].tolist())


def test_probabilities_are_as_sharp_as_the_labels_of_some_rows_say():
    labels = torch.arange(30) % 3
    sure = F.one_hot(labels, 3).double()
    unsure = sure + 2 * gaussian(30, 3, seed=0)
    found = probabilities(torch.stack([sure, 50 * unsure, 0 * sure]), labels[:20])
    assert_close(found.sum(2), torch.ones(3, 30, dtype=torch.float64))
    assert found[0].gather(1, labels[:, None]).min() > 0.99
    assert found[1].max(1).values.mean() < 0.8
    assert_close(found[2], torch.full((30, 3), 1 / 3, dtype=torch.float64))
    scores = torch.stack([sure, 50 * unsure])
    others = torch.cat([scores[:, :20], 1e6 * scores[:, 20:]], 1)
    assert torch.equal(probabilities(scores, labels[:20])[:, :20], probabilities(others, labels[:20])[:, :20])


def test_test_rows_choose_nothing():
    """The scale of scores was that of test rows, too: one large row changed what is read of the others."""
    labels = {split: torch.arange(n) % 3 for split, n in {"train": 36, "val": 30, "test": 30}.items()}
    read = {s: gaussian(len(y), 9, seed=i) + 0.7 * torch.eye(3, 9)[y] for i, (s, y) in enumerate(labels.items())}
    blocks = {"one": slice(0, 2), "two": slice(1, 6), "all": slice(0, 9)}

    def probe(test):
        rows = read | {"test": test}
        task = Task("birds", *(Split(rows[split], y) for split, y in labels.items()), classes=3)
        parts = {(b, "average"): {split: x[None, :, own] for split, x in rows.items()} for b, own in blocks.items()}
        return BlockProbe(mirrored=False).probe(task, Outputs(parts, [dict.fromkeys(blocks, 1.0)]))

    whole, moved = probe(read["test"]), probe(torch.cat([1e6 * read["test"][:1], read["test"][1:]]))
    alone = probe(read["test"][1:2].expand(30, -1))
    for other in (moved, alone):
        assert_close(whole.val, other.val, rtol=0, atol=0)
        assert whole.found == other.found
    assert torch.equal(whole.scores[:, 1:], moved.scores[:, 1:])
    assert torch.equal(whole.scores[:, 1], alone.scores[:, 1])


@pytest.mark.parametrize("told", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("classes", [2, 7])
def test_scores_are_as_sharp_as_the_best_place_of_the_grid(told, classes):
    labels = torch.arange(classes).repeat(6)
    scores = gaussian(3, len(labels) + 5, classes, seed=0)
    scores[:, : len(labels)] += told * F.one_hot(
        labels, classes
    )  # 100: told without an error, the loss is 0 from some place on
    scores[2] = 1.5  # nothing at all
    scaled = scores / scores[:, : len(labels)].std((1, 2), keepdim=True).clamp(min=1e-300)
    losses = torch.stack(
        [
            F.nll_loss(
                torch.log_softmax(scaled[:, : len(labels)] * sharp, 2).transpose(1, 2),
                labels.expand(3, -1),
                reduction="none",
            ).mean(1)
            for sharp in SHARPNESS
        ]
    )
    expected = torch.softmax(scaled * SHARPNESS[losses.argmin(0)][:, None, None], 2)
    assert_close(probabilities(scores, labels)[:2], expected[:2])
    assert_close(probabilities(scores, labels)[2], torch.full_like(scores[2], 1 / classes))


def test_columns_that_do_not_vary_are_left_out():
    train, others = gaussian(10, 4, seed=0), gaussian(3, 4, seed=1)
    train[:, 1] = 5.0
    assert Kernel.of(train.clone(), others.clone()).columns == 3
    assert Kernel.of(train[:, :0], others[:, :0]).columns == 0
    broken = Kernel.of(
        torch.cat([train, torch.full((10, 1), torch.nan), torch.full((10, 1), torch.inf)], 1),
        torch.cat([others, torch.full((3, 2), torch.inf)], 1),
    )
    expected = Kernel.of(train, others)
    assert broken.columns == 3
    for name in ("own", "others", "squares"):
        assert_close(getattr(broken, name), getattr(expected, name))
    nothing = Kernel.of(torch.full_like(train, 2.0), others)
    assert nothing.columns == 0
    assert_close(nothing.predictions(train, [Rule(0.1)])[0][0], train.mean(0).expand(3, -1))


@pytest.mark.parametrize("wipe", ["zero", "scale"])
def test_what_layer4_has_lost_is_read_before_it(colors, wipe):
    def defend(model):
        for parameter in model.trained().values():
            parameter.mul_(0 if wipe == "zero" else 1e-6)

    victim = net_victim(colors, defend, "test_resnet", "layer4")
    curve = quick(samples=None, mirrored=True).run(victim, "immunized")
    assert curve.final > 0.9
    assert len(curve.steps) > 1
    readings = [reading["blocks"] for reading in curve.found["readings"]]
    assert readings
    assert all(any(not block.startswith("layer4") for block in blocks) for blocks in readings)
    assert_close(curve.scores.double().mean(1), curve.test)
    assert (curve.flops.diff() > 0).all()
    assert (curve.val.diff() >= 0).all()


def test_the_cost_is_that_of_the_part_that_is_passed(colors):
    victim = untouched(colors)
    network = victim.network("baseline")
    flops = prefix_flops(network, network.sample[:1])
    assert list(flops) == [name for name, _ in network.whole.blocks()]
    assert list(flops.values()) == sorted(flops.values())
    assert flops[list(flops)[-1]] == victim.flops_per_row("baseline")


@pytest.mark.parametrize("shape", [(4, 6, 8, 8), (4, 17, 6), (4, 6), (4, 6, 1, 1)])
def test_poolings_of_maps_tokens_and_rows(shape):
    x = gaussian(4, torch.Size(shape).numel() // 4, seed=0).reshape(shape)
    found = poolings(x, False, 1 if x.ndim == 3 else 0)
    assert all(part.shape[0] == 4 and part.ndim == 2 for part in found.values())
    if shape == (4, 6, 8, 8):
        assert set(found) == {name for groups in POOLINGS.values() for names in groups for name in names} - {"class"}
        assert_close(found["2x2"].reshape(4, 6, 4).mean(2), found["average"])
        assert_close(poolings(x.permute(0, 2, 3, 1), True, 0)["maximum"], found["maximum"])
    if x.ndim == 3:
        assert torch.equal(found["class"], x[:, 0])
        assert_close(found["average"], x[:, 1:].mean(1))


@pytest.mark.parametrize("shape", [(3, 5, 40), (3, 9, 6)])
def test_second_order_pooling_is_the_root_of_the_covariance(shape):
    x = gaussian(3, shape[1] * shape[2], seed=0).reshape(shape)
    x = x - x.mean(2, keepdim=True)
    root = covariance_root(x)
    expected = torch.stack([torch.cov(one, correction=0) for one in x])
    assert_close(root @ root, expected)
    assert (torch.linalg.eigvalsh(root) > -1e-12).all()
    assert torch.equal(covariance_root(torch.zeros_like(x)), torch.zeros(3, shape[1], shape[1], dtype=x.dtype))


def test_what_was_found_with_few_images_is_not_searched_again(colors, monkeypatch):
    victim, seen, real = untouched(colors), [], readings.compared
    monkeypatch.setattr(readings, "compared", lambda fitter: seen.append(len(fitter.rows)) or real(fitter))
    few = quick()
    alone = few.run(untouched(colors), "baseline")
    quick(samples=None).run(victim, "baseline")
    first = list(seen)
    again = few.run(victim, "baseline")
    assert seen == first
    assert torch.equal(alone.flops, again.flops)
    assert torch.equal(alone.test, again.test)


def test_mirror_images_are_a_second_view(colors):
    victim = untouched(colors)
    network, own = victim.network("baseline"), images_of(victim)
    outputs = outputs_of(network, own, mirrored=True)
    mirrored = outputs_of(network, {split: x.flip(-1) for split, x in own.items()}, mirrored=False)
    for block in outputs.blocks:
        assert_close(outputs.columns(block, "2x2", "val")[1], mirrored.columns(block, "2x2", "val")[0])


def test_training_images_grow_from_few_to_all(colors):
    task = untouched(colors).task
    parts = list(nested(task, torch.arange(len(task.train)), seed=0))
    assert [len(part) for part in parts] == [15, 30, len(task.train)]
    assert all(set(a.tolist()) <= set(b.tolist()) for a, b in itertools.pairwise(parts))
    few = quick().run(untouched(colors), "baseline")
    assert few.steps.max() == 15


def test_blocks_of_a_vit(colors):
    curve = quick().run(untouched(colors, "test_vit", "blocks.5", img_size=32), "baseline")
    assert curve.final > 0.6


def test_one_who_has_no_model_reads_nothing_of_it(colors):
    """Neither the weights of theta_I nor those of theta_0 decide what they find."""
    own, other = untouched(colors), untouched(colors, trainable="layer3")
    with torch.no_grad():
        for parameter in other.model.net.parameters():
            parameter.add_(1.0)
    for attack in (quick(RandomNet), RawInputs(samples=5, mirrored=False, ridges=RIDGES)):
        curves = [attack.run(own, "immunized"), attack.run(other, "baseline")]
        assert torch.equal(curves[0].test, curves[1].test)
        assert attack.reference


def test_the_random_net_is_the_same_for_all_draws_of_images(colors):
    drawn = [quick(RandomNet, samples=3, seed=seed).read(untouched(colors), "baseline") for seed in (0, 1)]
    assert all(torch.equal(x["test"], drawn[1].parts[part]["test"]) for part, x in drawn[0].parts.items())


def test_a_net_drawn_anew_from_a_block_on_is_theta_0_before_it_and_random_behind_it(colors):
    victim = untouched(colors)
    attacks = quick(FreshFrom, scope="layer3"), quick(renewed=True), quick(RandomNet), quick(FreshFrom, scope="conv1")
    half, renewed, random, whole = (attack.read(victim, "baseline").parts for attack in attacks)
    for part in half:
        before = not part[0].startswith(("layer3", "layer4"))
        assert torch.allclose(half[part]["test"], renewed[part]["test"]) == before
        assert torch.equal(whole[part]["test"], random[part]["test"])


def test_who_has_a_part_of_theta_0_is_no_attacker_without_the_model(colors):
    victim = net_victim(colors, lambda model: None, "test_resnet", "layer4")
    attacks = {
        "blocks": quick(),
        "half": quick(FreshFrom, scope="layer3"),
        "fresh": quick(FreshFrom),
        "random": quick(RandomNet),
    }
    measures = run_attacks(attacks, victim)
    values = measures.metrics
    assert measures.about["drawn_anew"] == {"half": "layer3", "fresh": "trained"}
    assert values["worth/partial_half"] == max(values[f"reference/{name}/final"] for name in ("half", "random"))
    assert values["worth/without"] == values["reference/random/final"]
    assert values["attack/worst/attacks"] == 1
    with pytest.raises(ConfigError, match="no block of the net is called so"):
        FreshFrom(scope="layer9").check(victim.model)
    with pytest.raises(ConfigError, match="scope=full: name a block"):
        FreshFrom(scope="full").check(victim.model)
    RandomNet().check(victim.model)


def test_a_search_pays_for_what_it_tried_on_fewer_images(colors, monkeypatch):
    attack, victim = quick(samples=None), untouched(colors)
    whole = attack.run(untouched(colors), "baseline").others
    monkeypatch.setattr(readings, "SEARCHED", 15)
    curve = attack.run(victim, "baseline")
    assert 0 < curve.others < whole
    assert curve.flops[-1] + curve.others > victim.flops_per_row("baseline") * len(victim.task.train)


def test_with_many_images_the_readings_that_were_best_on_fewer_are_compared_again(colors, monkeypatch):
    attack, victim = quick(samples=None, mirrored=True), untouched(colors)
    outputs, rows = attack.read(victim, "baseline"), torch.arange(len(victim.task.train))
    monkeypatch.setattr(readings, "SEARCHED", 15)
    found, _ = readings.searched(victim.task, outputs, rows, RIDGES, ())
    best = readings.best_readings(found)
    assert len(best) == readings.CANDIDATES
    assert {fit.reading.views for fit in found} == {1, 2}
    again, cost = readings.searched(victim.task, outputs, rows, RIDGES, best)
    assert Counter(fit.reading for fit in again) == Counter(fit.reading for fit in found)
    assert cost == sum(fit.flops for fit in again)


def test_predictions_that_complement_each_other_are_averaged(colors):
    task = untouched(colors).task
    right, wrong = (F.one_hot(y, task.classes).double() for y in (task.val.y, (task.val.y + 1) % task.classes))
    first = (torch.arange(len(right)) % 2).bool()[:, None]
    halves = [torch.where(known, right, 0.4 * wrong) for known in (first, ~first)]
    fits = [
        Fit(Reading((name,), "average"), Rule(0.1), 1.0, task.measure(x, task.val.y).item(), 10.0, x, x[:0])
        for name, x in zip("ab", halves, strict=True)
    ]
    outputs = Outputs({}, [{"a": 1.0, "b": 3.0}])
    blend = readings.blended(task, outputs, torch.arange(6), fits)
    assert [fit.val for fit in fits] == [0.5, 0.5]
    assert blend.val == 1.0
    assert [reading["weight"] for reading in blend.described] == [0.5, 0.5]
    assert blend.flops == 6 * 3 + 20


def test_a_net_that_nobody_changed_is_attacked_once(colors, monkeypatch):
    victim, attack, seen = untouched(colors), quick(), []
    real = BlockProbe.run
    monkeypatch.setattr(BlockProbe, "run", lambda self, *args: seen.append(args[1]) or real(self, *args))
    metrics = run_attacks({"it": attack}, victim).metrics
    assert seen == ["baseline"]
    assert metrics["attack/it/final"] == metrics["attack/it/final_baseline"] > 0.6
    assert torch.equal(real(attack, victim, "immunized").test, real(attack, victim, "baseline").test)


def test_what_stands_before_the_immunized_part_is_read_once_for_both_stages(colors, monkeypatch):
    victim, attack, seen = net_victim(colors, zeroed, "test_resnet", "layer3*"), quick(FrozenBlocks), []
    real = FrozenBlocks.run
    monkeypatch.setattr(FrozenBlocks, "run", lambda self, *args: seen.append(args[1]) or real(self, *args))
    measures = run_attacks({"it": attack}, victim)
    assert seen == ["baseline"]
    assert measures.metrics["attack/it/final"] == measures.metrics["attack/it/final_baseline"] > 0.6
    readings = measures.about["attackers"]["it"]["immunized"]["readings"]
    assert all(b.startswith(("conv1", "layer1", "layer2")) for reading in readings for b in reading["blocks"])
    assert torch.equal(real(attack, victim, "immunized").test, real(attack, victim, "baseline").test)
    assert victim.same_outside("layer3")
    assert not victim.same_outside("layer4")
    with pytest.raises(Inapplicable, match="no block of the net precedes it"):
        FrozenBlocks(scope="conv1").run(victim, "baseline")
    with pytest.raises(ConfigError, match="layer9"):
        FrozenBlocks(scope="layer9").check(victim.model)


def test_behind_a_folded_map_every_block_is_left(tmp_path):
    victim = colors_behind_a_map(tmp_path, size=16)
    assert not victim.same_outside("trained")
    for attack in (quick(FrozenBlocks), quick()):
        assert attack.untouched(victim)
        values = run_attacks({"it": attack}, victim).metrics
        assert values["attack/it/final"] == values["attack/it/final_baseline"] > 0.6
        assert torch.equal(attack.run(victim, "immunized").test, attack.run(victim, "baseline").test)


def test_small_images_are_read_at_twice_their_size_too(colors):
    victim = net_victim(colors, lambda model: None, "test_resnet", "layer4")
    attack = quick(renewed=True, enlarged=True)
    outputs, rows = attack.read(victim, "baseline"), len(victim.task.train)
    own = [block for block in outputs.blocks if not block.endswith(TWICE)]
    assert outputs.blocks == own + [block + TWICE for block in own]
    plain, larger = (flops[last] for flops, last in zip(outputs.passes, (own[-1], own[-1] + TWICE), strict=True))
    assert 3 * plain < larger < 5 * plain
    assert outputs.cost(outputs.blocks, 7) == (7 + rows) * (plain + larger)
    assert outputs.cost(own, 7) == (7 + rows) * plain  # who reads nothing at twice the size renews nothing there
    alone = quick(renewed=True).read(victim, "baseline")
    assert_close(outputs.columns(own[0], "2x2", "test"), alone.columns(own[0], "2x2", "test"))
    frozen = FrozenBlocks().readable(victim, outputs).blocks
    assert frozen == [block for block in outputs.blocks if not block.startswith("layer4")]


def test_images_are_read_beside_the_blocks_and_are_left_where_the_net_is_dead(colors):
    def erase(model):
        for parameter in model.net.parameters():
            parameter.zero_()

    victim = net_victim(colors, erase, "test_resnet", "layer4")
    attack, raw = quick(images=True), RawInputs(samples=5, mirrored=False, ridges=RIDGES)
    outputs, alone = attack.read(victim, "immunized"), raw.read(victim, "baseline")
    assert outputs.blocks == [name for name, _ in victim.network("baseline").whole.blocks()] + alone.blocks
    assert outputs.columns("patches6", "2x2", "test") is alone.columns("patches6", "2x2", "test")
    frozen = quick(FrozenBlocks, images=True).readable(victim, outputs).blocks
    assert frozen == [block for block in outputs.blocks if not block.startswith("layer4")]
    with pytest.raises(Inapplicable, match="no block of the net tells"):
        quick().run(victim, "immunized")
    found, without = attack.run(victim, "immunized"), raw.run(victim, "baseline")
    assert found.final > 0.9
    assert found.final >= without.final - 0.05


def test_neither_large_images_nor_those_of_a_net_of_one_size_are_enlarged():
    maps, rows = (partial(nn.Conv2d, 3, 4, 3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2)))
    small, large = (torch.rand(2, 3, side, side) for side in (SMALL, SMALL + 1))
    assert at_twice_the_size(maps(), small)(small).shape == (2, 4, 2 * SMALL - 2, 2 * SMALL - 2)
    assert at_twice_the_size(rows(), small) is None
    assert at_twice_the_size(maps(), large) is None


def test_a_net_without_batchnorm_is_read_at_twice_its_size_too(colors):
    victim = net_victim(colors, lambda model: None, "test_vit", "blocks.5", img_size=32)
    outputs = quick(enlarged=True).read(victim, "baseline")
    assert len(outputs.passes) == 2
    assert list(outputs.renewed) == [0, 0]


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


def test_blocks_come_as_they_run_and_of_a_tuple_the_first_tensor_is_read():
    net, x = Odd(), torch.rand(20, 3)
    found = find(net, net.forward_features, x[:2])
    network = Network(NetParts(net, nn.Identity(), "", {}, [], x[:2], found))
    outputs = outputs_of(network, {"train": x, "val": x, "test": x}, mirrored=False)
    assert outputs.blocks == ["first", "pair", "second"]
    assert_close(outputs.columns("pair", "average", "test")[0], net.pair(net.first(x))[0])
    assert_close(outputs.columns("second", "average", "test")[0], network(x))
    assert list(block_outputs(network, x, lambda *_: None)) == ["first", "pair", "second"]
    assert not any(module._forward_hooks for module in network.modules())


def test_pooling():
    x = torch.rand(2, 3, 4, 5)
    assert_close(pooled(x)[1, 2], x[1, 2].mean())
    assert_close(pooled(x, channels_last=True)[1, 2], x[1, :, :, 2].mean())
    assert_close(pooled(x[0])[1, 2], x[0, 1, :, 2].mean())
    assert_close(pooled(x[0, 0]), x[0, 0])


def test_statistics_that_silence_the_net_are_renewed_at_the_cost_of_a_pass(colors):
    victim = net_victim(colors, silenced, "test_resnet", "layer1")
    before = {key: tensor.clone() for key, tensor in victim.model.state_dict().items()}
    attacks = {"features": ClosedFormProbe(), "blocks": quick()}
    attacks["renewed"] = quick(renewed=True)
    measures = run_attacks(attacks, victim)
    values = measures.metrics
    assert values["attack/renewed/final"] > 0.6
    assert values["attack/features/final"] == victim.task.chance
    assert "features" in measures.reasons["attacks_blind"]
    assert all(torch.equal(tensor, before[key]) for key, tensor in victim.model.state_dict().items())
    rows = [attack.read(victim, "baseline").renewed for attack in (attacks["blocks"], attacks["renewed"])]
    assert [list(found) for found in rows] == [[0], [len(victim.task.train)]]


def test_a_net_without_batchnorm_has_none_to_renew(colors):
    victim = net_victim(colors, silenced, "test_vit", "blocks.5", img_size=32)
    found = run_attacks({"it": BlockProbe(renewed=True)}, victim)
    assert found.metrics["attack/it/final"] is None
    assert "no BatchNorm" in found.reasons["attack/it/final"]


def test_statistics_are_those_of_the_images_and_nothing_is_drawn():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)).eval()
    x = torch.randn(40, 3, dtype=torch.float64) * 2 + 5
    net.double()
    before = torch.get_rng_state()
    renew(net, x.split(20))
    assert torch.equal(torch.get_rng_state(), before)
    assert not net[1].training
    assert_close(net[1].running_mean, x.mean(0))
    assert_close(net[1].running_var, torch.stack([part.var(0) for part in x.split(20)]).mean(0))


@pytest.mark.trains
def test_a_run_says_what_was_read(tmp_path):
    """From the command line: the blocks stand in result.json, and in a file for each task that was attacked."""
    options = ["experiment=digits_deep", "dataset.size=16", "tracker=none", "figures=false", "evaluation=[]"]
    options += ["method=identity", "model.fit_epochs=1"]
    tasks = ["dataset.primary=[0,1]", "dataset.harmful=[4,5]", "dataset.benign=null", "dataset.unseen=[7,8]"]
    attack = ["attack=[block_probe]", *(f"attack.block_probe.{key}=false" for key in ("mirrored", "enlarged"))]
    attack += ["attack.block_probe.samples=5"]
    result = run([*options, *tasks, *attack], folder=tmp_path)
    for kind in ("", "_unseen"):
        file = tmp_path / f"attack{kind}_block_probe.json"
        assert json.loads(file.read_text()) == result.about[f"attackers{kind}"]["block_probe"]
    found = result.about["attackers"]["block_probe"]
    assert found["immunized"] == found["baseline"]


@pytest.mark.parametrize(
    "attack",
    [
        quick(),
        Neighbours(),
        pytest.param(FineTune(scope="trained", steps=2), marks=pytest.mark.trains),
    ],
)
def test_without_validation_images_the_attacker_holds_back_training_images(tmp_path, attack):
    victim = untouched(colored_pair(tmp_path, val_fraction=0))
    assert not len(victim.comparison.tasks["harmful"].val)
    curve = attack.run(victim, "baseline")
    assert len(victim.images("val")[1]) == len(victim.task.val) == 12  # of 3 x 16
    assert len(victim.images("train")[1]) == 36
    few = victim.images("train", (0, 5))
    assert torch.equal(few[0], victim.images("train")[0][[0, 5]])
    assert torch.equal(victim.task.val.y, victim.images("val")[1])
    assert torch.isfinite(curve.val).all()


def test_readings_are_tried_in_one_order(colors, monkeypatch):
    """Of equals the first is chosen: an order that changes from process to process would change the figures."""
    real, seen = Fitter.fit, []
    monkeypatch.setattr(Fitter, "fit", lambda self, *args: seen.append(args[0]) or real(self, *args))
    quick().run(untouched(colors), "baseline")
    varied = [reading for reading in seen if reading.root or reading.radial]
    ways = [(True, False), (False, True), (True, True)]
    assert [(reading.root, reading.radial) for reading in varied[:6]] == ways + ways
    assert [reading.poolings for reading in varied[3:6]] == ["fine"] * 3


def test_linear_maps_have_no_blocks():
    victim = victim_of(classes(), torch.eye(6, dtype=torch.float64))
    for attack in (BlockProbe(), RandomNet(), RawInputs()):
        with pytest.raises(Inapplicable, match="deep net"):
            attack.run(victim, "immunized")
    curve = Neighbours().run(victim, "immunized")
    assert curve.final > 0.8


def test_layers_inside_of_blocks_are_read_side_by_side(colors):
    """Each block has one more: every layer but BatchNorm, pooled alike. All else is as `block_probe` reads it."""
    network, x = untouched(colors).network("immunized"), torch.rand(3, 3, 32, 32)
    drawn = dict.fromkeys(("train", "val", "test"), x)
    plain, more = (outputs_of(network, drawn, mirrored=False, inside=inside) for inside in (False, True))
    assert [block for block in more.blocks if not block.endswith(INSIDE)] == plain.blocks
    for part, found in plain.parts.items():
        assert_close(more.parts[part], found)
    seen = block_outputs(network, x, lambda *_: None, lambda x, *_: x.mean((2, 3)))
    layers = [mean for name, mean in seen.items() if name.startswith("layer2.0/")]
    assert len(layers) > 2
    assert_close(more.parts["layer2.0" + INSIDE, "average"]["test"][0], torch.cat(layers, 1).float())
    assert not any("bn" in name.partition("/")[2] for name in seen)


def test_the_layer_probe_reads_them(colors):
    victim = untouched(colors)
    attack = quick(LayerProbe)
    assert any(block.endswith(INSIDE) for block in attack.read(victim, "immunized").blocks)
    assert attack.run(victim, "immunized").final > 0.5


def test_maps_of_tiles_stand_side_by_side_as_the_tiles_did():
    images = torch.rand(2, 3, 16, 16)
    tiles = cut(images)
    assert tiles.shape == (2 * SIDE**2, 3, 8, 8)
    places = [(i, j) for i in (0, 4, 8) for j in (0, 4, 8)]
    for tile, (i, j) in zip(tiles.split(1)[SIDE**2 :], places, strict=True):
        assert torch.equal(tile[0], images[1, :, i : i + 8, j : j + 8])
    found = poolings(tiles, False, 0, side=SIDE)
    rows = [tiles[SIDE * i : SIDE * (i + 1)].transpose(0, 1).transpose(1, 2).flatten(2) for i in range(2 * SIDE)]
    whole = torch.stack([torch.cat(rows[SIDE * n : SIDE * (n + 1)], 1) for n in range(2)])
    assert whole.shape == (2, 3, 24, 24)
    for name, alone in poolings(whole, False, 0).items():
        assert_close(found[name], alone)
    last = poolings(tiles.permute(0, 2, 3, 1), True, 0, side=SIDE)
    assert_close(last["3x3"], found["3x3"])
    tokens = torch.cat([tiles.mean((2, 3))[:, None], tiles.flatten(2).transpose(1, 2)], 1)
    as_tokens = poolings(tokens, False, 1, side=SIDE)
    assert_close(as_tokens["class"], tiles.mean((2, 3)).unflatten(0, (2, 9)).mean(1))
    assert_close(as_tokens["covariance"], found["covariance"])


def test_tiles_tell_what_a_net_hides_in_whole_images(colors):
    """This one passes on nothing of images of its own size."""
    victim = untouched(colors)
    network, x = victim.network("immunized"), {split: victim.images(split)[0] for split in SPLITS}
    side = x["train"].shape[2]
    network.register_forward_pre_hook(lambda _net, inputs: inputs[0] * (inputs[0].shape[2] < side))
    whole = outputs_of(network, x, mirrored=False)
    network.register_forward_pre_hook(lambda _net, inputs: cut(inputs[0]), prepend=True)
    tiled = outputs_of(network, x, mirrored=False, side=SIDE)
    assert whole.blocks == tiled.blocks
    for block in whole.blocks:
        hidden, told = (outputs.columns(block, "average", "train")[0].std(0).max() for outputs in (whole, tiled))
        assert hidden < 1e-6 < 1e-3 < told


def test_the_tile_probe_reads_them_beside_the_rest(colors):
    victim = untouched(colors)
    attack, plain = quick(TileProbe, enlarged=True), quick(enlarged=True)
    own, outputs = plain.read(victim, "baseline"), attack.read(victim, "baseline")
    first = [block for block in own.blocks if not block.endswith(TWICE)]
    assert outputs.blocks == own.blocks + [block + TILES for block in first]
    assert outputs.columns(first[0], "2x2", "test") is own.columns(first[0], "2x2", "test")  # passed once
    costs = [flops[block] for flops, block in zip(outputs.passes[::2], (first[-1], first[-1] + TILES), strict=True)]
    assert 1.5 * costs[0] < costs[1] < 4 * costs[0]  # nine quarters, or more where maps are padded
    assert attack.run(victim, "immunized").final > 0.5
