"""`method=forget_blocks`: its terms by hand, that it makes zeros and not small numbers, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.images import draw_folder
from helpers.methods import make_pair
from helpers.nets import build, open_pair
from torch.nn import functional as F
from torch.testing import assert_close

from immunization.errors import ConfigError, DataError
from immunization.methods import ForgetBlocks
from immunization.methods.forget import batch_statistics
from immunization.models import Linear
from immunization.theory.probe import leave_one_out
from immunization.training.batches import PairedBatches, batches_of

pytestmark = pytest.mark.trains

TRAINED = ["layer2", "layer3", "layer4"]


@pytest.fixture(scope="module")
def net(drawn):
    return open_pair(drawn[:2], val_fraction=0.2)


@pytest.fixture(scope="module")
def keeping(net, tmp_path_factory):
    """The same with five images to keep."""
    root = draw_folder(tmp_path_factory.mktemp("kept"), 1, 5, 2, seed=2)
    folders = [Path(task.folders[0]).parents[1] for task in net.tasks.values()]
    return open_pair(folders, val_fraction=0.2, keep_root=str(root / "train"))


def prepared(pair, **options):
    """A method after its setup, the model, and the first batch of both tasks."""
    model, tasks = build(pair, trainable=TRAINED).read(pair, False)
    method = ForgetBlocks(epochs=1, **{"batch_size": 16, "damping": 0.0} | options)
    method.setup(model, tasks)
    batches = next(iter(PairedBatches(tasks, 16, torch.Generator().manual_seed(0)).epoch()))
    return method, model, batches


@torch.no_grad()
def maps(model, x):
    """What each trained block gives: one tensor [N, C, H, W] each."""
    found = []
    for block in model.extractor.children():
        found.append(x := block(x))
    return found


def moved(now, before):
    """Mean square of what each block has moved by, relative to the spread over rows."""
    pairs = zip(now, before, strict=True)
    return [(m - m_0).square().mean() / (m_0 - m_0.mean(0)).square().mean() for m, m_0 in pairs]


def test_terms_by_hand(net):
    method, model, (primary, harmful) = prepared(
        net, collapse=0.5, silence=2.0, hold=3.0, distill=4.0, path=0.0, own_statistics=0.0
    )
    own = maps(model, primary.x)
    start = method.step(model, primary, harmful)
    assert (start["hold"].item(), start["distill"].item()) == pytest.approx((0, 0), abs=1e-12)
    with torch.no_grad():
        for p in model.trained().values():
            p.mul_(1.1)
    terms = method.step(model, primary, harmful)
    silence = [m.abs().mean() / m_0.abs().mean() for m, m_0 in zip(maps(model, harmful.x), own, strict=True)]
    hold = moved(maps(model, primary.x), own)
    assert len(own) == len(method.blocks) == 3
    assert_close(terms["silence"], torch.stack(silence).mean().to(terms["silence"]))
    assert_close(terms["hold"], torch.stack(hold).mean().to(terms["hold"]))
    weighted = 4 * terms["distill"] + 3 * terms["hold"] + 0.5 * terms["collapse"] + 2 * terms["silence"]
    assert_close(terms["loss"], weighted)
    method.train_head = True
    again = method.step(model, primary, harmful)
    assert_close(again["loss"], terms["task_loss"] + weighted)


@torch.no_grad()
def pooled(m):
    """Signed square roots of mean, maximum and deviation over places, relative to the size of the map."""
    m = m.flatten(2) / m.square().mean().sqrt()
    rows = torch.cat([m.mean(2), m.amax(2), (m.var(2, correction=0) + 1e-4).sqrt()], 1)
    return rows.sign() * ((rows.abs() + 0.01).sqrt() - 0.1)


def test_the_path_by_hand_with_both_statistics(net):
    """Ridges of each block, told from the other images of the batch; again with BatchNorm's statistics of the batch."""
    options = {"path": 2.0, "silence": 0.5, "own_statistics": 3.0, "ridges": [0.01, 1.0], "batch_size": 16}
    method, model, (primary, harmful) = prepared(net, **options)
    kept, y = maps(model, primary.x), method.pair.harmful.targets(harmful.y)

    def by_hand():
        blocks = maps(model, harmful.x)
        found = [leave_one_out(pooled(m), y, [0.01, 1.0]).flatten(1) for m in blocks]
        cosines = [F.cosine_similarity(p, (y - y.mean(0)).flatten(), 1).clamp(min=0).sum() for p in found]
        loud = [m.abs().mean() / m_0.abs().mean() for m, m_0 in zip(blocks, kept, strict=True)]
        return {"path": torch.stack(cosines).mean(), "silence": torch.stack(loud).mean()}

    terms, stored = method.step(model, primary, harmful), by_hand()
    with batch_statistics(model.extractor):
        own = by_hand()
    assert stored["path"] > 0.1
    assert_close([terms[name] for name in stored], [stored[name].to(terms[name]) for name in stored])
    assert_close(terms["own_statistics"], 2 * own["path"].float() + 0.5 * own["silence"].float())
    assert terms["own_statistics"] != 2 * stored["path"] + 0.5 * stored["silence"]
    weighted = 2 * terms["path"] + 0.5 * terms["silence"] + 3 * terms["own_statistics"]
    assert_close(terms["loss"], weighted + 0.3 * (terms["distill"] + terms["hold"]))


def test_the_path_hides_classes_and_does_not_silence(net):
    method, model, (primary, harmful) = prepared(net)
    before, optimizer = method.step(model, primary, harmful), torch.optim.Adam(model.trained().values(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        method.step(model, primary, harmful)["loss"].backward()
        optimizer.step()
    after = method.step(model, primary, harmful)
    for name in ("path", "own_statistics"):
        assert after[name] < 0.75 * before[name]
    assert after["silence"] > 0.8 * before["silence"]


def test_images_to_keep_are_held_beside_the_primary_ones(keeping):
    method, model, (primary, harmful) = prepared(keeping)
    method.distillation.kept = method.distillation.kept[:1]
    rows = torch.cat([primary.x, method.distillation.kept.repeat(len(primary.x), 1, 1, 1)])
    own = maps(model, rows)
    with torch.no_grad():
        for p in model.trained().values():
            p.mul_(1.1)
    hold = moved(maps(model, rows), own)
    terms = method.step(model, primary, harmful)
    assert_close(terms["hold"], torch.stack(hold).mean().to(terms["hold"]))


def test_harmful_images_leave_more_outputs_at_exactly_zero(net):
    """A small output is read as well as a large one; only one that is zero says nothing."""
    method, model, (primary, harmful) = prepared(net, silence=4.0, path=0.0, distill=1.0, hold=1.0)

    def zeros():
        return torch.stack([(m == 0).double().mean() for m in maps(model, harmful.x)])

    before, optimizer = zeros(), torch.optim.Adam(model.trained().values(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        method.step(model, primary, harmful)["loss"].backward()
        optimizer.step()
    assert (zeros() > before + 0.05).all()


def test_the_head_stays_as_it_is_unless_asked_for(net):
    for asked in (False, True):
        model = prepared(net, **({"train_head": True} if asked else {}))[1]
        assert all(p.requires_grad is asked for p in model.head.parameters())


@pytest.mark.parametrize("enlarged", [0.0, 0.5])
def test_a_model_without_blocks_is_refused(enlarged):
    pair = make_pair()
    with pytest.raises(ConfigError, match=r"method=forget_blocks reads blocks of a net.*method=forget"):
        ForgetBlocks(epochs=1, batch_size=16, enlarged=enlarged).setup(Linear(pair), pair)


def test_without_a_trained_block_it_says_so(net):
    model, tasks = build(net, trainable="bn1").read(net, False)
    with pytest.raises(ConfigError, match=r"none of test_resnet's blocks is trained; name some with model\.trainable"):
        ForgetBlocks(epochs=1, batch_size=16).setup(model, tasks)


def test_a_share_of_steps_reads_half_as_many_images_at_twice_the_size(keeping):
    method, model, (primary, harmful) = prepared(keeping, enlarged=0.5, shots=4)
    tasks = method.pair
    ours, kept_larger = method.distillation.larger
    for role, found in (("primary", ours), ("harmful", method.larger)):
        images = torch.cat([x for x, _ in model.image_batches(role, "train")])
        assert_close(found, model.trunk(F.interpolate(images, scale_factor=2, mode="bilinear")))
    assert_close(tasks.harmful.train.x, model.trunk(images))
    assert len(kept_larger) == len(model.kept()) == 5
    steps = [method._drawn(primary, harmful) for _ in range(40)]
    larger = [step for step in steps if step[0].shape[2] == 2 * primary.x.shape[2]]
    assert 10 < len(larger) < 30
    few = len(primary.y) // 2
    for kept, y, x, labels in larger:
        assert x.shape[2] == kept.shape[2]
        assert sorted(torch.bincount(labels, minlength=4).tolist()) == [0, 0, 4, 4]
        assert_close(tasks.harmful.train.y[_places(method.larger, x)], labels)
        assert_close(tasks.primary.train.y[_places(ours, kept[:few])], y)
        assert len(_places(kept_larger, kept[few:])) == few
    assert torch.isfinite(method.step(model, primary, harmful)["loss"])


def _places(rows, some):
    """Where each of `some` stands among the rows."""
    return [int((rows == one).flatten(1).all(1).nonzero()[0]) for one in some]


def test_of_few_images_no_others_are_enlarged(net):
    model, tasks = build(net, trainable=TRAINED).read(net, False)
    few = replace(tasks.harmful, train=tasks.harmful.train.take(tasks.harmful.few(3, 0)))
    method = ForgetBlocks(epochs=1, batch_size=16, enlarged=0.9, damping=0.0)
    method.setup(model, replace(tasks, harmful=few))
    assert len(method.larger) == len(few.train) == 12


@pytest.mark.parametrize("few", [2, 4, 6, 12])
def test_however_few_enlarged_images_are_of_two_classes(net, few):
    model, tasks = build(net, trainable=TRAINED).read(net, False)
    method = ForgetBlocks(epochs=1, batch_size=16, enlarged=0.9, damping=0.0)
    method.setup(model, tasks)
    rows = method._grouped(few)
    assert len(rows) <= few
    assert len(tasks.harmful.train.y[rows].unique()) >= 2


def test_a_net_of_one_size_enlarges_nothing(net):
    model, tasks = build(net, "vit_tiny_patch16_224", trainable="blocks.11").read(net, False)
    with pytest.raises(ConfigError, match=r"reads images of one size; set method\.enlarged=0"):
        ForgetBlocks(epochs=1, batch_size=16, enlarged=0.5).setup(model, tasks)


def test_images_are_kept_without_distillation_of_the_output(keeping):
    method = prepared(keeping, distill=0.0)[0]
    assert len(method.distillation.kept) == 5
    assert method.keeps


def test_the_path_needs_two_images_of_a_class_and_no_memory_bank(net, monkeypatch):
    monkeypatch.setattr("immunization.methods.forget.memory", lambda device: 1)
    method, _, _ = prepared(net)
    task = method.pair.harmful
    alone = replace(task, train=task.train.take((task.train.y.cumsum(0) <= 1).nonzero()[:, 0]))
    with pytest.raises(DataError, match=r"method\.path leaves one row out, and a class .* has \d training rows"):
        method.check_path(alone)


def test_images_of_loaders_are_not_grouped_and_a_warning_says_so(tmp_path, caplog):
    folders = [draw_folder(tmp_path / name, 4, 16, 4, seed) for seed, name in enumerate(("primary", "harmful"))]
    pair = open_pair(folders, augment=True)
    model, tasks = build(pair, trainable=TRAINED).read(pair, False)
    batches_of(model, tasks, 16, torch.Generator(), shots=1)
    assert "method.shots" not in caplog.text
    batches_of(model, tasks, 16, torch.Generator(), shots=4)
    assert "method.shots=4 has no effect" in caplog.text
