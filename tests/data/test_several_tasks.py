"""Any number of harmful, benign and unseen tasks: their roles, what shapes the data, and what is refused."""

import numpy as np
import pytest
import torch
from helpers import recomputation
from helpers.images import draw_folder

from immunization import run
from immunization.config import build, compose
from immunization.data import arrays, digits, digits_deep, image_folders
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError
from immunization.roles import roles_of

QUICK = ("tracker=none", "figures=false", "dataset.max_samples=40")


def test_roles_are_the_kind_and_then_its_names():
    assert roles_of("harmful", [3, 5, 7]) == ["harmful", "harmful_5", "harmful_7"]
    assert roles_of("unseen", ["my cars", "a/b", ""]) == ["unseen", "unseen_a-b", "unseen_3"]
    assert roles_of("harmful", ["a", "a"]) == ["harmful", "harmful_a-2"]


def test_digits_take_any_number_of_tasks():
    pair = digits(seed=0, primary=0, harmful=[3, 5], benign=[7], unseen=[8, 9])
    assert list(pair.tasks) == ["primary", "harmful", "benign", "harmful_5", "unseen", "unseen_9"]
    assert list(pair.shown) == ["primary", "harmful", "harmful_5"]
    assert list(pair.attacked) == ["harmful", "harmful_5", "unseen", "unseen_9"]
    assert pair.about["tasks"]["harmful_5"] == pair.tasks["harmful_5"].name == "class 5 against the rest"
    rows = torch.cat([origin.rows for origin in pair.origins.values()])
    assert len(rows) == len(rows.unique())  # no image in two tasks
    shown = torch.cat([task.train.x for task in pair.shown.values()])
    assert abs(shown.mean()) < 1e-12
    assert abs(shown.std() - 1) < 1e-12


def test_a_list_of_one_is_that_one():
    one, listed = digits(seed=1, harmful=3, benign=5), digits(seed=1, harmful=[3], benign=[5])
    assert one.about == listed.about
    assert "tasks" not in one.about
    for role in one.tasks:
        for split in SPLITS:
            assert torch.equal(getattr(one.tasks[role], split).x, getattr(listed.tasks[role], split).x)


def test_many_tasks_share_the_images_that_are_no_tasks():
    pair = digits(seed=0, primary=0, harmful=[1, 2, 3], unseen=[4, 5, 6, 7])
    for task in pair.tasks.values():
        assert len(task.train) > 50
        assert task.train.y.double().mean() == 0.5


def test_the_common_range_is_that_of_all_shown_tasks():
    whole, pair = (digits(seed=0, harmful=[3, 5], unseen=8, common_range=common) for common in (False, True))
    basis = pair.tensors["basis"]
    assert 0 < basis.shape[1] < 64
    for task in whole.shown.values():
        v = torch.linalg.svd(task.root, full_matrices=False).Vh
        assert (basis - v.T @ (v @ basis)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"harmful": [3, 3]}, "every task needs its own classes"),
        ({"harmful": [3, 5], "unseen": 5}, r"dataset\.harmful=\[3, 5\], dataset\.unseen=5: every task needs its own"),
        ({"harmful": []}, r"dataset\.harmful is an empty list"),
        ({"unseen": []}, r"dataset\.unseen is an empty list"),
        ({"harmful": [3, 10]}, r"dataset\.harmful must be .*not \[3, 10\]"),
        ({"harmful": [1, 2, 3, 4], "unseen": [5, 6, 7, 8, 9]}, "leave no class"),
    ],
)
def test_digits_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        digits(seed=0, **options)


@pytest.fixture
def matrices(tmp_path):
    """An npz file with two harmful, a benign and an unseen task; the function writes it with other content."""
    rng = np.random.default_rng(0)
    stored = {}
    for role in ("primary", "harmful", "benign", "harmful_b", "unseen"):
        stored[f"{role}_x"] = rng.normal(size=(60, 6))
        stored[f"{role}_y"] = rng.integers(0, 2, 60)

    def write(without=(), **changes):
        content = {name: value for name, value in (stored | changes).items() if not name.startswith(tuple(without))}
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.npz"
        np.savez(path, **content)
        return str(path), content

    return write


def test_unseen_arrays_change_nothing_that_is_trained(matrices):
    (all_of_them, _), (known, _) = matrices(), matrices(without=["unseen"])
    pair, without = arrays(seed=0, path=all_of_them), arrays(seed=0, path=known)
    assert list(pair.tasks) == [*without.tasks, "unseen"]
    for role in without.tasks:
        for split in SPLITS:
            assert torch.equal(getattr(pair.tasks[role], split).x, getattr(without.tasks[role], split).x)
    overrides = ["dataset=arrays", "method=closed_form", "tracker=none", "figures=false"]
    results = [run([*overrides, f"dataset.path={path}"], f"{path}.run", quiet=True) for path in (all_of_them, known)]
    same = [name for name in results[1].metrics if results[0].metrics[name] == results[1].metrics[name]]
    assert set(same) == set(results[1].metrics)
    assert "steps_ratio/unseen" in results[0].metrics


@pytest.mark.parametrize("kind", ["harmful_b", "unseen"])
def test_arrays_that_share_rows_or_lack_the_first_task(matrices, kind):
    _, content = matrices()
    shared = {f"{kind}_x": content["harmful_x"][:30], f"{kind}_y": content["harmful_y"][:30]}
    with pytest.raises(DataError, match=rf"{kind}.* task share rows"):
        arrays(seed=0, path=matrices(**shared)[0])
    path, _ = matrices(without=["unseen_x", "unseen_y"], unseen_b_x=content["unseen_x"], unseen_b_y=content["unseen_y"])
    with pytest.raises(DataError, match="'unseen_b_x': name the first of its kind"):
        arrays(seed=0, path=path)


def test_two_labels_of_the_same_inputs_are_named(matrices, caplog):
    _, content = matrices()
    arrays(seed=0, path=matrices(harmful_x=content["primary_x"], harmful_y=1 - content["primary_y"])[0])
    assert "the primary and the harmful task have the same inputs: RIR is 1 with any model" in caplog.text


def test_csv_files_of_several_tasks(matrices, tmp_path):
    _, content = matrices()
    paths = {}
    for role in ("primary", "harmful", "harmful_b", "unseen"):
        rows = np.column_stack([content[f"{role}_x"], content[f"{role}_y"]])
        paths[role] = str(tmp_path / f"{role}.csv")
        lines = [",".join([*map(repr, map(float, row[:-1])), str(int(row[-1]))]) for row in rows]
        (tmp_path / f"{role}.csv").write_text("\n".join(["a,b,c,d,e,f,target", *lines, ""]))
    files = {"primary_csv": paths["primary"], "harmful_csv": [paths["harmful"], paths["harmful_b"]]}
    pair = arrays(seed=0, unseen_csv=paths["unseen"], **files)
    assert list(pair.tasks) == ["primary", "harmful", "harmful_harmful-b", "unseen"]
    with pytest.raises(ConfigError, match="is both the harmful and the unseen task"):
        arrays(seed=0, unseen_csv=paths["harmful"], **files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(draw_folder(tmp_path_factory.mktemp("images"), 8, 6, 2, 0))


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    return str(draw_folder(tmp_path_factory.mktemp("primary"), 3, 6, 2, 1))


def test_class_ranges_of_one_folder_are_known_and_unseen_tasks(folder, primary):
    known, unseen = {"classes": "0:4"}, {"classes": ["class4", "class5", 6]}
    pair = image_folders(primary, folder, unseen_root=folder, harmful=known, unseen=unseen, cache=None)
    assert pair.tasks["harmful"].classes == ("class0", "class1", "class2", "class3")
    assert pair.tasks["unseen"].classes == ("class4", "class5", "class6")
    for role, count in {"harmful": 4, "unseen": 3}.items():
        for split in pair.tasks[role].splits.values():
            labels = {split.dataset.samples[int(i)][1] for i in split.origin.rows}
            assert labels <= set(range(count))
        assert len(pair.tasks[role].splits["test"]) == 2 * count
    assert pair.about["classes"] == {"primary": 3, "harmful": 4, "unseen": 3}
    whole, every = (image_folders(primary, folder, harmful=h, cache=None) for h in (None, {"classes": "0:8"}))
    for split in SPLITS:  # all classes in either way: the activations' key stays
        assert whole.tasks["harmful"].splits[split].identity == every.tasks["harmful"].splits[split].identity


def test_several_roots(folder, primary, tmp_path):
    other = str(draw_folder(tmp_path / "other", 3, 4, 2, 2))
    pair = image_folders(primary, [folder, other], cache=None)
    assert list(pair.tasks) == ["primary", "harmful", "harmful_other"]
    with pytest.raises(ConfigError, match=r"class folder .* belongs to the harmful task and to the harmful_"):
        image_folders(primary, [folder, folder], cache=None)
    with pytest.raises(ConfigError, match=r"dataset\.harmful_root is not set"):
        image_folders(primary, [], cache=None)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("5:5", r"dataset\.unseen\.classes=5:5 is outside of the 8 classes; write a range such as 0:8"),
        ("9:12", "is outside of the 8 classes"),
        ("4", "is outside of the 8 classes"),
        ("a:b", "is outside of the 8 classes"),
        ([4, 9], "9 is neither one of the 8 class folders"),
        (["class4", "wagon"], "wagon is neither one of the 8 class folders"),
        ("4:5", "at least two different classes"),
        ([4, "class4"], "at least two different classes"),
        ("2:6", r"class2 belongs to the harmful task and to the unseen task.*dataset\.unseen\.classes chooses"),
        (None, "belongs to the harmful task and to the unseen task"),
        (7.5, r"dataset\.unseen\.classes must be"),
    ],
)
def test_class_ranges_that_cannot_be(folder, primary, classes, message):
    with pytest.raises(ConfigError, match=message):
        image_folders(
            primary, folder, unseen_root=folder, harmful={"classes": "0:4"}, unseen={"classes": classes}, cache=None
        )


def test_unseen_digits_of_a_net():
    pair = digits_deep(harmful=[[4, 5], [6, 7]], benign=None, unseen=[8, 9])
    assert list(pair.tasks) == ["primary", "harmful", "harmful_6-7", "unseen"]
    with pytest.raises(ConfigError, match="every task needs its own classes"):
        digits_deep(unseen=[6, 9], benign=None)
    with pytest.raises(ConfigError, match=r"dataset\.unseen=\[\]: at least two"):
        digits_deep(unseen=[], benign=None)
    dataset = build(compose(["dataset=digits_deep", "dataset.harmful=[[4,5],[6,7]]", "dataset.benign=null"]), "dataset")
    assert list(dataset.tasks) == ["primary", "harmful", "harmful_6-7"]


def test_every_measure_and_attack_is_taken_of_unseen_tasks(tmp_path):
    overrides = [*QUICK, "method=closed_form", "dataset.harmful=[3,5]", "dataset.unseen=8", "attack=[linear_probe]"]
    overrides.append("dataset.common_range=true")
    overrides += ["attack.linear_probe.steps=64", "evaluation.norm_ratio.steps=30"]
    metrics = run(overrides, folder=tmp_path / "run", quiet=True).metrics
    for role in ("harmful", "harmful_5", "unseen"):
        prefix = "attack" if role == "harmful" else f"attack_{role}"
        names = [f"kappa_{role}", f"kappa_{role}_baseline", f"ratio_{role}", f"rank_{role}", f"steps_ratio/{role}"]
        assert {*names, f"rfd/{role}", f"{prefix}/linear_probe/gap", f"{prefix}/worst/final"} <= set(metrics)
    assert metrics["worst/steps_ratio"] == min(metrics["steps_ratio/harmful"], metrics["steps_ratio/harmful_5"])
    assert metrics["worst/rir"] == min(metrics["rir"], metrics["rir_harmful_5"])
    again = run([*overrides, "resume=true"], folder=tmp_path / "run", quiet=True)
    assert again.metrics == metrics
    lines = recomputation.compare(recomputation.read(tmp_path / "run"))
    assert {"kappa_unseen", "rir_harmful_5", "worst/rir"} <= {line.name for line in lines}
    assert [line for line in lines if not line.agrees] == []
