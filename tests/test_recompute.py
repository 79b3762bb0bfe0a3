"""Whoever has only a run folder and the raw data finds every figure of a linear run; rows lead back to the inputs."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import recomputation
from helpers.images import draw_folder, write_idx
from helpers.repository import ROOT
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits

from immunization import data, run
from immunization.config import build, compose
from immunization.data import image_folders
from immunization.data.task import SPLITS, Origin, Split, Task
from immunization.errors import DataError
from immunization.runs import files
from immunization.runs.filenames import ROWS
from immunization.runs.result import Result
from immunization.training import checkpoint

pytestmark = pytest.mark.trains

QUICK = ("tracker=none", "figures=false", "method.epochs=8")
FEW = (*QUICK, "evaluation.norm_ratio.steps=30", "~evaluation.leak")
"""Without `leak`, whose labeled rows are drawn by torch."""


def regression(rng: np.random.Generator, n: int, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    x = 5 + rng.normal(size=(n, 6)) @ np.diag([1, 1, 2, 3, 10, 30.0])
    return x, x @ np.array([3, -2, 1, 0, 0.1, 0.1]) + noise * rng.normal(size=n)


def given_splits(folder: Path) -> list[str]:
    """An npz file of regressions with validation and test rows of its own."""
    rng, stored = np.random.default_rng(0), {}
    for name, n in (("primary", 60), ("harmful", 50), ("primary_val", 20), ("primary_test", 25), ("harmful_test", 30)):
        stored[f"{name}_x"], stored[f"{name}_y"] = regression(rng, n)
    np.savez(folder / "pair.npz", **stored)
    return ["dataset=arrays", f"dataset.path={folder / 'pair.npz'}"]


def drawn_splits(folder: Path) -> list[str]:
    """A safetensors file of float32 inputs, three classes against two."""
    rng, stored = np.random.default_rng(1), {}
    for role, labels in (("primary", (2, 5, 7)), ("harmful", (-1, 1)), ("benign", (0, 1, 2))):
        y = rng.choice(labels, 90)
        centers = rng.normal(size=(8 + 1, 7))
        stored |= {f"{role}_x": (centers[y] + rng.normal(size=(90, 7))).astype(np.float32), f"{role}_y": y}
    save_file(stored, folder / "pair.safetensors")
    return ["dataset=arrays", f"dataset.path={folder / 'pair.safetensors'}", "dataset.normalize=each"]


def tables(folder: Path) -> list[str]:
    """CSV files, their columns in different orders."""
    rng = np.random.default_rng(2)
    for role, order in (("primary", [0, 1, 2, 3, 4, 5]), ("harmful", [5, 3, 1, 0, 2, 4])):
        x, y = regression(rng, 70)
        lines = [",".join([*(f"c{j}" for j in order), "target"])]
        lines += [",".join(map(repr, [*map(float, row[order]), float(value)])) for row, value in zip(x, y, strict=True)]
        (folder / f"{role}.csv").write_text("\n".join(lines) + "\n")
    return ["dataset=arrays", *(f"dataset.{role}_csv={folder / role}.csv" for role in ("primary", "harmful"))]


def idx_files(folder: Path, family: str = "MNIST") -> list[str]:
    rng, raw = np.random.default_rng(3), folder / family / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 160), ("t10k", 60)):
        labels = rng.integers(0, 10, n)
        pixels = np.clip(rng.normal(120, 60, (n, 28, 28)) + 8 * labels[:, None, None], 0, 255)
        write_idx(raw / f"{part}-images-idx3-ubyte.gz", pixels.astype(np.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte.gz", labels.astype(np.uint8))
    return ["dataset=mnist", f"dataset.root={folder}", "dataset.download=false"]


SETS = {
    "digits": lambda folder: ["dataset.benign=2"],
    "given": given_splits,
    "drawn": drawn_splits,
    "tables": tables,
    "mnist": idx_files,
    "fashion": lambda folder: [o.replace("=mnist", "=fashion_mnist") for o in idx_files(folder, "FashionMNIST")],
}
CASES = [
    ("digits", ()),
    ("digits", ("method=closed_form", "dataset.common_range=true")),
    ("digits", ("method=learning_curve", "seed=1")),
    ("digits", ("method=r_ill_only", "dataset.protocol=authors", "model.init=orthogonal")),
    ("digits", ("method=imma", "dtype=float32", "dataset.test_fraction=0")),
    ("given", ("method=closed_form",)),
    ("given", ("method=opt_kappa", "dataset.targets=regression", "model.init=random", "model.bias=true")),
    ("drawn", ("method=learning_curve", "method.start=model")),
    ("drawn", ("method=identity", "dataset.common_range=true", "model.init=random")),
    ("tables", ("dataset.normalize=none", "method=closed_form")),
    ("fashion", ("dataset.benign=4", "dataset.max_samples=20")),
]
LARGE = [
    ("mnist", ("method=opt_kappa", "seed=2")),
    ("mnist", ("dataset.protocol=authors",)),
    ("mnist", ("dataset.protocol=authors_pixels", "model.init=random")),
]
HOUSE = [
    ("method=closed_form", "dataset.common_range=true", "dataset.val_fraction=0", "dataset.test_fraction=0"),
    ("dataset.normalize=each", "dataset.keep_id=true"),
    ("dataset.protocol=authors", "method=learning_curve"),
]


def everything_agrees(folder: Path, metrics: dict[str, float | None]) -> None:
    """Every metric is recomputed, agrees, and is known well enough for that to mean something."""
    lines = recomputation.compare(recomputation.read(folder))
    assert [line for line in lines if not line.agrees] == []
    assert {name for name in metrics if not name.endswith("_theta0")} <= {line.name for line in lines}  # it is not kept
    assert {f"curves/{kind}/{role}" for kind in ("excess", "norm_ratio") for role in ("primary", "harmful")} <= {
        line.name for line in lines
    }
    size = {line.name: min(1, abs(line.value)) if line.value else 1 for line in lines}  # of a difference near 0: itself
    loose = [line.name for line in lines if line.allowed * size[line.name] > 1e-6]
    assert loose == []


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(name, overrides, marks=[pytest.mark.slow] * (case in LARGE), id="-".join((name, *overrides)))
        for case in CASES + LARGE
        for name, overrides in [case]
    ],
)
def test_every_figure_of_a_run_is_found_again(name, overrides, tmp_path):
    result = run([*SETS[name](tmp_path), *FEW, *overrides], tmp_path / "run")
    everything_agrees(tmp_path / "run", result.metrics)


@pytest.mark.parametrize("overrides", HOUSE, ids="-".join)
def test_every_figure_of_house_prices_is_found_again(overrides, tmp_path, data_dir):
    source = ("dataset=house_prices", f"dataset.root={data_dir / 'house_prices'}", "dataset.download=false")
    result = run([*source, *FEW, *overrides], tmp_path / "run")
    everything_agrees(tmp_path / "run", result.metrics)


@pytest.mark.slow
def test_mnist_itself_is_found_again(tmp_path, data_dir):
    source = ("dataset=mnist", f"dataset.root={data_dir / 'mnist'}", "dataset.download=false", "dataset.benign=7")
    result = run([*source, *FEW, "dataset.max_samples=60", "method.epochs=3"], tmp_path / "run")
    everything_agrees(tmp_path / "run", result.metrics)


# --- The helper is a judge of its own ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A run folder that no test changes."""
    folder = tmp_path_factory.mktemp("done") / "run"
    run([*FEW, "dataset.benign=2"], folder)
    return folder


def test_it_runs_without_this_package_and_without_torch():
    command = [sys.executable, "-X", "importtime", "-c", "import helpers.recomputation"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ended.stderr.splitlines()}
    assert {"numpy", "scipy", "sklearn"} <= imported
    assert not {"torch", "immunization", "timm", "omegaconf", "hydra"} & imported


def test_every_figure_may_be_the_wrong_one(done):
    """A change in the fifth digit of any metric, and of any one point of a curve, is noticed; so is a null."""
    read = recomputation.read(done)
    sound = {line.name for line in recomputation.compare(read) if line.name in read.stored and line.agrees}
    assert sound == set(read.stored)
    for place in (0, -1):
        for name, value in read.stored.items():
            changed = np.array(value if value is not None else 1.0, dtype=float)
            changed.flat[place] += 1e-5 * abs(changed.flat[place]) or 1e-5
            read.stored[name] = changed if changed.ndim else float(changed)
        assert [line.name for line in recomputation.compare(read) if line.name in sound and line.agrees] == []
        read = recomputation.read(done)
    read.stored = dict.fromkeys(read.stored)
    agreeing = {line.name for line in recomputation.compare(read) if line.name in sound and line.agrees}
    assert agreeing == {"ceiling/rir", "ceiling/attained"}  # which are null in this run


def test_other_rows_than_the_run_took_are_found(done, tmp_path):
    copy = shutil.copytree(done, tmp_path / "run")
    tensors, sources = files.read_tensors(copy / ROWS)
    tensors["primary/train"][0] = tensors["benign/train"][0]
    files.write_tensors(copy / ROWS, tensors, sources)
    with pytest.raises(AssertionError, match="a row is in two places"):
        recomputation.read(copy)


def test_gradient_descent_in_closed_form_is_gradient_descent_itself():
    rng = np.random.default_rng(0)
    f = rng.normal(size=(30, 5)) @ np.diag([1, 1, 0.5, 0.1, 0.02])
    y = rng.normal(size=(30, 2))
    probe, steps = recomputation.Probe(f, y, 5), 3000
    w, rate = np.zeros((5, 2)), 1 / np.linalg.norm(f, 2) ** 2
    path = [w := w - rate * f.T @ (f @ w - y) for _ in range(steps)]
    t = np.array([1, 2, 17, 300, steps])
    np.testing.assert_allclose(probe.descended(t), [path[i - 1] for i in t], rtol=1e-10)
    least = np.linalg.lstsq(f, y, rcond=None)[0]
    np.testing.assert_allclose(probe.least_squares(), least, rtol=1e-12)
    loss = [((f @ path[i - 1] - y) ** 2).sum() - ((f @ least - y) ** 2).sum() for i in t]
    start = (y**2).sum() - ((f @ least - y) ** 2).sum()
    np.testing.assert_allclose(probe.excess(t), np.array(loss) / start, rtol=1e-7)


# --- The rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_rows_lead_back_to_the_inputs(name, tmp_path):
    """And those of another seed, where rows are drawn, are others."""
    overrides = [*SETS[name](tmp_path), *QUICK, "evaluation=[rir]", "method=identity"]
    pair = build(compose(overrides), "dataset")
    run(overrides, tmp_path / "run")
    found = recomputation.read(tmp_path / "run").tasks
    assert set(found) == set(pair.tasks)
    for role, task in pair.tasks.items():
        for split in SPLITS:
            part = getattr(task, split)
            np.testing.assert_allclose(found[role].x[split], part.x.numpy(), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(found[role].y[split].ravel(), part.y.numpy(), rtol=1e-12, atol=1e-12)
    run([*overrides, "seed=5"], tmp_path / "other")
    rows, others = (load_file(tmp_path / folder / ROWS) for folder in ("run", "other"))
    assert set(rows) == {f"{role}/{split}" for role in pair.tasks for split in SPLITS}
    assert all(array.dtype == np.int64 for array in rows.values())
    for key, array in rows.items():
        fixed = name == "given" and key in ("primary/train", "primary/val", "primary/test", "harmful/test")
        assert np.array_equal(array, others[key]) == fixed


def test_rows_of_images_are_those_of_their_files(tmp_path):
    root, other = (draw_folder(tmp_path / name, 2, 12, 3, seed=0) for name in ("images", "others"))
    pair = image_folders(primary_root=str(root), harmful_root=str(other / "train"), test_fraction=0.25)
    listed = [f"class{label}/{i}.png" for label in range(2) for i in range(12)]  # 2.png before 10.png
    for role, source in (("primary", "dataset.primary_root/train"), ("harmful", "dataset.harmful_root")):
        splits = pair.tasks[role].splits
        assert splits["train"].origin.source == f"images below {source}, in natural order of their paths"
        taken, samples = splits["train"].origin.rows.tolist(), splits["train"].dataset.samples
        assert [listed[row] for row in taken] == ["/".join(Path(samples[row][0]).parts[-2:]) for row in taken]
    assert pair.tasks["primary"].splits["test"].origin.rows.tolist() == list(range(6))


def test_rows_of_a_net_lead_to_its_labels(tmp_path):
    options = ["experiment=digits_deep", "tracker=none", "figures=false", "evaluation=[rir]", "method=identity"]
    run([*options, "dataset.size=16", f"model.cache={tmp_path / 'cache'}", "model.fit_epochs=1"], tmp_path / "run")
    rows, (pixels, labels) = load_file(tmp_path / "run" / ROWS), load_digits(return_X_y=True)
    images = data.digits_deep()
    for role, digits in (("primary", [0, 1, 2, 3]), ("harmful", [4, 5, 6]), ("benign", [7, 8, 9])):
        taken = np.concatenate([rows[f"{role}/{split}"] for split in SPLITS])
        assert sorted(taken) == np.flatnonzero(np.isin(labels, digits)).tolist()
        part = images.tasks[role].splits["test"]
        for row in rows[f"{role}/test"][:3]:
            image, label = part.dataset[row]
            assert digits[label] == labels[row]
            assert np.array_equal(np.asarray(image), np.round(pixels[row].reshape(8, 8) * 255 / 16))


def test_rows_are_written_whole_and_anew(tmp_path, monkeypatch, capsys):
    """Damaged, they are work to do again; a run that begins removes those of an unfinished one; without, none."""
    options = [*QUICK, "evaluation=[rir]"]
    run(options, tmp_path / "run")
    path = tmp_path / "run" / ROWS
    content = path.read_bytes()
    path.write_bytes(content[:-8] + b"12345678")
    run([*options, "resume=true"], tmp_path / "run")
    assert "splits.safetensors was altered or damaged" in capsys.readouterr().err
    assert path.read_bytes() == content

    (tmp_path / "run" / "result.json").unlink()
    seen = []
    monkeypatch.setattr(checkpoint.Checkpointer, "finish", lambda *_: seen.append(path.exists()))
    run(options, tmp_path / "run")
    assert seen == [False]
    assert path.read_bytes() == content
    assert Result.read(tmp_path / "run").status == "completed"


def test_as_many_rows_as_inputs(tmp_path):
    split = build(compose([]), "dataset").primary.train
    short = Split(split.x, split.y, Origin("somewhere", split.origin.rows[1:]))
    with pytest.raises(DataError, match=r"train split: 215 rows of 'somewhere' for 216 inputs"):
        Task("task", short, short, short, classes=2)
