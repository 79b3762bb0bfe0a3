"""CIFAR-10 of folders: no image in two tasks, the benign task by withheld images, and mistakes that are named."""

import numpy as np
import pytest
import torch
from PIL import Image

from immunization import run
from immunization.data import cifar10
from immunization.data.small_images import CLASSES
from immunization.errors import ConfigError, DataError
from immunization.runs.result import Result

pytestmark = pytest.mark.trains

TRAIN, TEST = 24, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of small noisy images, each class around a color of its own."""
    folder, random = tmp_path_factory.mktemp("cifar10"), np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("val", TEST)):
        for label, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            color = np.array([label % 2, label // 2 % 2, label // 4]) * 120 + 60
            for i in range(count):
                pixels = (color + random.normal(0, 25, (32, 32, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i:02d}.png")
    return folder


def test_the_benign_task_takes_images_that_no_other_task_has(root):
    pair = cifar10(str(root), val_fraction=0.25)
    counted = {role: {s: len(split) for s, split in task.splits.items()} for role, task in pair.tasks.items()}
    share = TRAIN // 5
    own = TRAIN - share
    assert counted["primary"] == {"train": 5 * (own - own // 4), "val": 5 * (own // 4), "test": 5 * (TEST - TEST // 5)}
    assert counted["harmful"] == {"train": 4 * 18, "val": 4 * 6, "test": 4 * TEST}
    assert sum(counted["benign"].values()) == TRAIN + 5 * share + 2 * TEST
    assert pair.tasks["benign"].classes == ("primary classes", "truck")
    for part, splits in {"train": ("train", "val"), "test": ("test",)}.items():
        rows = torch.cat([task.splits[s].rows for task in pair.tasks.values() for s in splits])
        assert len(rows.unique()) == len(rows), part
    image, label = pair.tasks["benign"].splits["test"].dataset[int(pair.tasks["benign"].splits["test"].rows[-1])]
    assert (image.size, label) == ((32, 32), 1)


def test_fewer_images_of_each_class(root):
    pair = cifar10(str(root), max_samples=5, benign=None)
    assert set(pair.tasks) == {"primary", "harmful"}
    assert {len(pair.tasks["primary"].splits[s]) for s in ("train", "test")} == {25}
    few = cifar10(str(root), max_samples=3)  # each primary class lends one image to the benign task
    assert {len(task.splits["train"]) for task in few.tasks.values()} == {10, 12, 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"primary": [0, 5]}, "every task needs its own classes"),
        ({"benign": 0}, "every task needs its own classes"),
        ({"harmful": [5]}, r"dataset\.harmful=\[5\]: at least two different classes"),
        ({"harmful": [5, 12]}, "at least two different classes of 0 to 9"),
    ],
)
def test_classes_that_cannot_be(root, changes, message):
    with pytest.raises(ConfigError, match=message):
        cifar10(str(root), **changes)


def test_files_that_are_absent_or_damaged(root, tmp_path):
    with pytest.raises(
        DataError, match=r"CIFAR-10 in dataset\.root=.*: put a folder per class .*dataset\.download=true"
    ):
        cifar10(str(tmp_path), download=False)
    (tmp_path / "train" / "airplane").mkdir(parents=True)
    with pytest.raises(DataError, match=r"train.airplane: the class folder is empty"):
        cifar10(str(tmp_path))
    (tmp_path / "train" / "airplane" / "0.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"train.automobile: the folder of images cannot be read"):
        cifar10(str(tmp_path))
    for name in CLASSES[1:]:
        (tmp_path / "train" / name).symlink_to(root / "train" / name)
    with pytest.raises(DataError, match=r"0\.png: .* cannot be read: repair or remove it"):
        cifar10(str(tmp_path))
    Image.new("RGB", (28, 28)).save(tmp_path / "train" / "airplane" / "0.png")
    with pytest.raises(DataError, match=r"28 x 28 pixels, CIFAR-10 has 32 x 32"):
        cifar10(str(tmp_path))


@pytest.mark.slow
def test_the_quick_track_runs_and_keeps_its_net(root, tmp_path):
    """One job of leaderboard/cifar_quick: the fitted net is kept, attackers search, and scratch is the reference."""
    small = ["attack=[full_finetune,searched_finetune,scratch]", "attack.searched_finetune.search=1"]
    small += ["attack.scratch.search=1", "evaluation=[rir,definition,primary,own_head]", "dataset.val_fraction=0.2"]
    options = ["experiment=leaderboard/cifar_quick", f"dataset.root={root}", f"cache={tmp_path}", "method=clamp"]
    result = run([*options, *small, "method.epochs=1", "figures=false"], folder=tmp_path / "run", quiet=True)
    assert result.status == "completed"
    assert {"primary/head_accuracy_baseline", "reference/scratch/final"} <= set(result.metrics)
    assert len(list((tmp_path / "fitted").glob("*.safetensors"))) == 1
    assert Result.read(tmp_path / "run").about["attackers"].keys() >= {"searched_finetune"}
    with pytest.raises(DataError, match="mini-batches of 64, and the primary task has 10 training images"):
        run([*options, "dataset.max_samples=3"], folder=tmp_path / "few", quiet=True)


def test_augmented_images_are_computed_anew_and_cannot_be_fewer_for_the_method(root, tmp_path):
    options = ["experiment=leaderboard/cifar", f"dataset.root={root}", f"cache={tmp_path}", "method=clamp"]
    options += ["dataset.augment=true", "dataset.max_samples=20", "model.fit_epochs=1", "dataset.val_fraction=0.2"]
    options += ["attack=[]", "evaluation=[own_head,deployment]", "method.epochs=1", "method.batch_size=8"]
    options += ["figures=false"]
    result = run(options, folder=tmp_path / "run", quiet=True)
    assert "computed from the images every time" in (tmp_path / "run" / "run.log").read_text()
    assert result.status == "completed"
    assert 0 <= result.metrics["deployment/accuracy_float32"] <= 1
    with pytest.raises(
        ConfigError, match=r"harmful_samples needs activations that are kept: set dataset\.augment=false"
    ):
        run([*options, "harmful_samples=2"], folder=tmp_path / "few", quiet=True)
