"""`method=forget`: its terms by hand, what it makes of features, its memory bank, and what it refuses."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.images import draw_folder
from helpers.methods import full_batches, make_pair
from helpers.nets import build, open_pair
from helpers.runs import DEEP
from torch.testing import assert_close

from immunization import run
from immunization.data import image_folders
from immunization.data.task import TaskPair
from immunization.errors import ConfigError, DataError
from immunization.methods import Forget, combined, forget
from immunization.models import Linear
from immunization.theory.probe import leave_one_out
from immunization.training.batches import PairedBatches, batches_of
from immunization.training.loop import train

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def net(drawn):
    return open_pair(drawn[:2], val_fraction=0.2)


def opened(pair, trainable="last"):
    return build(pair, trainable=trainable).read(pair, False)


def stepped(method, model, tasks, batch_size=16):
    """Its terms of the first pair of batches, and these."""
    method.setup(model, tasks)
    batches = next(iter(PairedBatches(tasks, batch_size, torch.Generator().manual_seed(0)).epoch()))
    return method.step(model, *batches), batches


# --- The terms --------------------------------------------------------------------------------------------------------


def test_without_a_head_to_train_there_is_no_loss_of_labels(net):
    """It would turn the trained layers into those of a net for the classes of D_P."""
    terms, _ = stepped(Forget(epochs=1, batch_size=16, train_head=False), *opened(net))
    weighted = 2 * terms["distill"] + 0.6 * terms["collapse"] + terms["path"]
    assert terms["task_loss"] > 0
    assert_close(terms["loss"], weighted)


def test_images_without_labels_are_kept_as_they_are(net, tmp_path):
    """Those of class folders and those that stand in none."""
    flat = tmp_path / "flat"
    draw_folder(tmp_path / "folder", 3, 5, 2, seed=2)
    (tmp_path / "folder" / "train" / "class0").rename(flat)
    folders = [Path(task.folders[0]).parents[1] for task in net.tasks.values()]
    pair = open_pair(folders, val_fraction=0.2, keep_root=[str(flat), str(tmp_path / "folder")])
    model, tasks = opened(pair)
    assert pair.about["keep"] == {str(flat): 5, str(tmp_path / "folder"): 16}
    method = Forget(epochs=1, batch_size=16)
    method.setup(model, tasks)
    assert len(method.distillation.kept) == 21


def test_classes_are_chosen_of_each_folder_to_keep(net, tmp_path):
    roots = [draw_folder(tmp_path / name, 3, 5, 2, seed) / "train" for seed, name in enumerate("ab")]
    folders = [Path(task.folders[0]).parents[1] for task in net.tasks.values()]
    pair = open_pair(folders, keep_root=[str(root) for root in roots], keep={"classes": ["0:1", None]})
    assert [len(task.splits["train"]) for task in pair.keep] == [5, 15]
    both = open_pair(folders, keep_root=[str(root) for root in roots], keep={"classes": "0:2"})
    assert [len(task.splits["train"]) for task in both.keep] == [10, 10]


def test_images_of_a_task_are_not_kept(net):
    harmful = net.tasks["harmful"].folders[0]
    roots = [str(Path(task.folders[0]).parents[1]) for task in net.tasks.values()]
    with pytest.raises(ConfigError, match=f"{harmful} belongs to dataset.keep_root and to the harmful task"):
        image_folders(*roots, keep_root=str(harmful.parent))
    for root in roots:
        with pytest.raises(ConfigError, match=f"{root}/val/class0 belongs to dataset.keep_root and to the"):
            image_folders(*roots, keep_root=f"{root}/val")  # held out
    with pytest.raises(DataError, match=r"keep_root: folder .*nowhere not found"):
        image_folders(*roots, keep_root="nowhere")
    with pytest.raises(ConfigError, match=r"dataset\.keep\.classes=7:9 is outside of"):
        image_folders(*roots, keep_root=str(harmful.parent), keep={"classes": "7:9"})
    with pytest.raises(ConfigError, match=r"dataset\.keep\.classes=\['0:1'\]: give an entry for each of 2 folders"):
        image_folders(*roots, keep_root=["a", "b"], keep={"classes": ["0:1"]})


@pytest.mark.parametrize("target", ["zero", "mean"])
def test_collapse_by_hand(net, target):
    model, tasks = opened(net)
    terms, (_, harmful) = stepped(Forget(epochs=1, batch_size=16, path=0, target=target, floor=0.01), model, tasks)
    primary = model.features(tasks.primary.train.x)
    point = 0 if target == "zero" else primary.mean(0)
    distances = (model.features(harmful.x) - point).square().sum(1) / primary.square().sum(1).mean()
    assert_close(terms["collapse"], (1 + distances / 0.01).log().mean())
    assert "path" not in terms


def test_collapse_under_the_statistics_of_the_batch(net):
    """As in train mode, but nothing of the net moves."""
    model, tasks = opened(net)
    before = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    terms, (_, harmful) = stepped(Forget(epochs=1, batch_size=16, path=0, own_statistics=1.0), model, tasks)
    after = model.extractor.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(part.training for part in model.extractor.modules())
    size = model.features(tasks.primary.train.x).square().sum(1).mean()
    model.extractor.train()  # from here on, statistics move
    distances = model.training_features(harmful.x).square().sum(1) / size
    assert_close(terms["own_statistics"], (1 + distances / 0.02).log().mean())
    assert not torch.isclose(terms["own_statistics"], terms["collapse"])


def test_collapse_of_inner_blocks_by_hand(net):
    """Outputs of trained blocks before the last, pooled, relative to what theta_0 makes of D_P there."""
    model, tasks = opened(net, ["layer2", "layer3", "layer4"])
    terms, (_, harmful) = stepped(Forget(epochs=1, batch_size=16, path=0, inner=1.0, floor=0.01), model, tasks)

    @torch.no_grad()
    def cut(x):
        """What the first two of the three give: [N, C], [N, C]."""
        found = []
        for block in list(model.extractor.children())[:2]:
            x = block(x)
            found.append(x.mean((2, 3)))
        return found

    collapsed = [
        (1 + theirs.square().sum(1) / (0.01 * own.square().sum(1).mean())).log().mean()
        for theirs, own in zip(cut(harmful.x), cut(tasks.primary.train.x), strict=True)
    ]
    assert_close(terms["inner"], torch.stack(collapsed).mean())
    assert_close(terms["loss"], terms["task_loss"] + 0.6 * terms["collapse"] + terms["inner"])


def test_without_inner_blocks_it_says_so(net, caplog):
    terms, _ = stepped(Forget(epochs=1, batch_size=16, inner=1.0), *opened(net))
    assert "inner" not in terms
    assert "method.inner has no effect" in caplog.text


def test_the_path_is_that_of_the_batch_and_the_rows_that_this_pass_has_shown():
    """Rows of earlier steps stand in the bank as they were then, and none is in it twice."""
    pair = make_pair((24, 24), classes=3)
    model, method = Linear(pair, "random"), Forget(epochs=2, batch_size=8, ridges=[0.1])
    method.setup(model, pair)
    batches = PairedBatches(pair, 8, torch.Generator().manual_seed(0))
    for _ in range(2):
        rows, labels = [], []
        for primary, harmful in batches.epoch():
            terms = method.step(model, primary, harmful)
            rows, labels = [*rows, model.features(harmful.x)], [*labels, harmful.y]
            y = pair.harmful.targets(torch.cat(labels))
            y_c, found = y - y.mean(0), leave_one_out(torch.cat(rows), y, [0.1])[0]
            cosine = (found * y_c).sum() / found.norm() / y_c.norm()
            assert terms["path"].item() == pytest.approx(max(0, cosine.item()), abs=1e-9)
            model.extractor.theta.data.mul_(torch.rand(4, dtype=torch.float64))
        assert len(method.bank) == 24


def test_no_row_is_twice_in_the_bank_of_a_harmful_task_that_cycles():
    """A pass over a further harmful task may begin within an epoch, and go on after it."""
    pair = make_pair((24, 40), classes=3)
    others = make_pair((16, 56), classes=3)
    pair = replace(pair, more={"harmful_short": others.primary, "harmful_long": others.harmful})
    model, method = Linear(pair, "random"), combined(Forget(epochs=3, batch_size=8), pair)
    method.setup(model, pair)
    batches, seen = PairedBatches(pair, 8, torch.Generator().manual_seed(0)), {role: [] for role in pair.harmful_tasks}
    for _ in range(3):
        for tasks in batches.epoch():
            method.step(model, *tasks)
            for batch, (role, part) in zip(tasks[1:], method.parts.items(), strict=True):
                seen[role].append(batch.x)
                rows = torch.cat(seen[role])[-len(part.bank) :]
                assert len(rows) == len(rows.unique(dim=0)) <= len(pair.tasks[role].train)
                assert_close(part.bank, model.features(rows))
    assert [len(part.bank) for part in method.parts.values()] == [40, 8, 8]


def test_gradients_flow_into_the_batch_alone():
    pair = make_pair((24, 24), classes=3)
    model, method = Linear(pair, "random"), Forget(epochs=2, batch_size=8)
    method.setup(model, pair)
    for primary, harmful in PairedBatches(pair, 8, torch.Generator()).epoch():
        terms = method.step(model, primary, harmful)
    assert not method.bank.requires_grad
    (slope,) = torch.autograd.grad(terms["path"], model.extractor.theta)
    assert slope.norm() > 0


# --- What it makes of features ----------------------------------------------------------------------------------------


def test_features_that_are_forgotten_already_stay_finite():
    pair = make_pair(classes=2)
    model, method = Linear(pair, "identity"), Forget(epochs=1, batch_size=None)
    method.setup(model, pair)
    model.extractor.theta.data.zero_()
    terms = method.step(model, *full_batches(pair))
    terms["loss"].backward()
    assert terms["path"] == terms["collapse"] == 0
    assert torch.isfinite(model.extractor.theta.grad).all()


@pytest.mark.parametrize("train_head", [True, False])
def test_it_trains_a_net_and_nothing_else_of_it(net, train_head):
    model, tasks = opened(net)
    before = {name: tensor.clone() for name, tensor in model.export().items()}
    method, seen = Forget(epochs=4, batch_size=16, train_head=train_head), []
    method.setup(model, tasks)
    optimizer = torch.optim.Adam(model.groups(), lr=1e-3)
    batches = PairedBatches(tasks, 16, torch.Generator().manual_seed(0))
    train(method, model, batches, optimizer, lambda _, terms: seen.append(terms["collapse"].item()))
    changed = {name for name, tensor in model.export().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith((model.trainable[0], "fc")) for name in changed)
    assert any(name.startswith("fc") for name in changed) == train_head
    assert not any("running" in name for name in changed)
    assert seen[-1] < seen[0]


def test_augmented_images_of_both_tasks(tmp_path):
    """The bank holds what a pass has shown, augmented as it was."""
    folders = [draw_folder(tmp_path / name, 4, 16, 4, seed) for seed, name in enumerate(("primary", "harmful"))]
    model, tasks = opened(open_pair(folders, augment=True))
    method, banks = Forget(epochs=2, batch_size=16), []
    method.setup(model, tasks)
    optimizer = torch.optim.Adam(model.groups(), lr=1e-4)
    batches = batches_of(model, tasks, 16, torch.Generator())
    train(method, model, batches, optimizer, lambda *_: banks.append(len(method.bank)))
    rows = len(tasks.harmful.train)
    assert banks == 2 * [min(16 * step, rows) for step in range(1, len(banks) // 2 + 1)]


def test_the_score_is_of_validation_rows_of_both_tasks(net):
    model, tasks = opened(net)
    method = Forget(epochs=1, batch_size=16)
    method.setup(model, tasks)
    own = tasks.primary.measure(model.logits(tasks.primary.val.x), tasks.primary.val.y).item()
    assert own - 1 <= method.score(model) <= own - 0.25  # the best of the ridges is at least as good as guessing
    with torch.no_grad():
        model.trained()[next(iter(model.trained()))].zero_()
    assert math.isfinite(method.score(model))


# --- Runs, and what is refused ----------------------------------------------------------------------------------------


def test_fewer_than_two_rows_of_a_class(net):
    model, tasks = opened(net)
    lonely = replace(tasks.harmful, classes=tasks.harmful.classes + 1)
    with pytest.raises(DataError, match=r"a class of .* has 0 training rows: give at least two of each class"):
        Forget(epochs=1, batch_size=16).setup(model, TaskPair("lonely", tasks.primary, lonely))
    Forget(epochs=1, batch_size=16, path=0).setup(model, TaskPair("lonely", tasks.primary, lonely))


def test_a_memory_bank_larger_than_memory_says_its_size(net, monkeypatch):
    model, tasks = opened(net)
    monkeypatch.setattr(forget, "memory", lambda _: 1024.0)
    rows, width = len(tasks.harmful.train), tasks.dim
    with pytest.raises(ConfigError, match=rf"memory bank of {rows} rows x {width} features, .* GiB in float64"):
        Forget(epochs=1, batch_size=16).setup(model, tasks)


def test_a_net_without_a_trained_layer(net):
    model, tasks = opened(net, "fold")
    with pytest.raises(ConfigError, match=r"method=forget needs trained layers, and there are none.*model\.trainable"):
        Forget(epochs=1, batch_size=16).setup(model, tasks)


@pytest.mark.parametrize("further", [{}, {"harmful_too": make_pair(classes=2).harmful}])
@pytest.mark.parametrize("option", ["patience", "max_accuracy_drop"])
def test_a_score_needs_validation_rows(option, further):
    pair = make_pair(classes=2)
    pair = replace(pair, primary=replace(pair.primary, val=pair.primary.train), more=further)
    method = combined(Forget(epochs=1, **{option: 1}), pair)
    with pytest.raises(ConfigError, match=rf"method\.{option} needs validation rows of both tasks"):
        method.setup(Linear(pair), pair)


@pytest.mark.slow
def test_it_holds_off_direct_solvers_on_a_small_net(tmp_path):
    options = ["method=forget", "attack=[closed_form_probe,whitened_probe]", "evaluation=[primary]"]
    result = run([*DEEP[:3], *options], folder=tmp_path)
    for attack in ("closed_form_probe", "whitened_probe"):
        values = [result.metrics[f"attack/{attack}/final{stage}"] for stage in ("", "_baseline")]
        assert values[0] < values[1] - 0.2
    assert result.metrics["primary/head_accuracy"] > 0.95


@pytest.mark.parametrize("damping", [0.0, 10.0])
def test_weights_go_back_a_part_of_the_way_to_theta_0(net, damping):
    """Also those of the head, and with one copy of the method for each of two harmful tasks once."""
    found = {}
    for interpolate in (1.0, 0.25):
        model, tasks = build(net, trainable="layer3").read(net, False)
        start = copy.deepcopy(model.state_dict())
        two = replace(tasks, more={"harmful_b": tasks.harmful})
        method = combined(Forget(epochs=1, batch_size=16, path=0.0, damping=damping, interpolate=interpolate), two)
        method.setup(model, two)
        assert bool(method.parts["harmful"].distillation.layers) is (damping > 0)
        adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
        train(method, model, PairedBatches(two, 16, torch.Generator().manual_seed(0)), adam)
        method.finish(model)
        found[interpolate] = model.state_dict()
    moved = [name for name, tensor in found[1.0].items() if not torch.equal(tensor, start[name])]
    assert any("head" in name for name in moved)
    assert any("head" not in name for name in moved)
    for name, before in start.items():
        assert_close(found[0.25][name], before + 0.25 * (found[1.0][name] - before), check_dtype=False)
