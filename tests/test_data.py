"""Data sets: what a pair holds, the published preparations, and what damaged or impossible input is answered with."""

import gzip
import inspect
import os
import urllib.error
from pathlib import Path

import hydra
import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
import torch
import torchvision
from omegaconf import OmegaConf
from safetensors.torch import save_file

from immunization import data
from immunization.data.house_prices import CATEGORICAL, NUMERIC
from immunization.data.preparation import common_basis, moments, split_rows
from immunization.data.task import SPLITS, Split, Task
from immunization.errors import ConfigError, DataError
from immunization.theory import spectrum

CONF = Path(__file__).resolve().parents[1] / "conf" / "dataset"
IMAGE_SETS = ("digits", "mnist", "fashion_mnist")


def fails(error, *parts, call, **options):
    """Assert that `call(**options)` raises `error` with a one-line message that holds every one of `parts`."""
    with pytest.raises(error) as caught:
        call(**options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def rows_of(task):
    """Every input row of a task as bytes, in all splits."""
    return [row.numpy().tobytes() for split in SPLITS for row in getattr(task, split).x]


def same(a, b):
    return all(
        torch.equal(getattr(a.tasks[role], s).x, getattr(b.tasks[role], s).x)
        and torch.equal(getattr(a.tasks[role], s).y, getattr(b.tasks[role], s).y)
        for role in a.tasks
        for s in SPLITS
    )


# --- Configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*IMAGE_SETS, "house_prices", "arrays"])
def test_yaml_and_signature_agree(name):
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    function = hydra.utils.get_method(config.pop("_target_"))
    assert config.pop("seed") == "${seed}"
    parameters = inspect.signature(function).parameters
    assert config == {key: parameter.default for key, parameter in parameters.items() if key != "seed"}
    text = (CONF / f"{name}.yaml").read_text().splitlines()
    assert all("#" in line for line in text if not line.startswith("_target_"))


def test_hydra_instantiates_a_pair():
    config = OmegaConf.create({"seed": 3, "dataset": OmegaConf.load(CONF / "digits.yaml")})
    assert same(hydra.utils.instantiate(config.dataset, seed=config.seed), data.digits(seed=3))


# --- Common ground ---------------------------------------------------------------------------------------------------


def test_split_rows_is_stratified_disjoint_and_keeps_a_training_row():
    strata = torch.tensor([0] * 50 + [1] * 7 + [2])
    rows = split_rows(strata, 0.3, 0.5, torch.Generator().manual_seed(0))
    assert torch.cat(list(rows.values())).sort().values.equal(torch.arange(58))
    assert {name: torch.bincount(strata[index], minlength=3).tolist() for name, index in rows.items()} == {
        "train": [10, 2, 1],
        "val": [15, 2, 0],
        "test": [25, 3, 0],
    }


def test_constant_columns_become_exactly_zero():
    x = torch.full((300, 2), 0.1, dtype=torch.float64)  # its mean is not 0.1 in floating point
    x[:, 1] = torch.randn(300, dtype=torch.float64)
    mean, std = moments(x)
    z = (x - mean) / std
    assert (z[:, 0] == 0).all()
    assert z[:, 1].std().item() == pytest.approx(1)


def test_common_basis_of_known_subspaces():
    frame = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64)).Q
    spans = {"primary": frame[:, :6], "harmful": frame[:, 4:9] @ torch.randn(5, 5, dtype=torch.float64)}
    primary, harmful = (_task(torch.randn(40, span.shape[1], dtype=torch.float64) @ span.T) for span in spans.values())
    basis = common_basis(primary, harmful)
    torch.testing.assert_close(basis @ basis.T, frame[:, 4:6] @ frame[:, 4:6].T)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    apart = _task(torch.randn(40, 2, dtype=torch.float64) @ frame[:, 8:].T)
    fails(
        DataError,
        "no direction in common",
        "dataset.common_range=false",
        call=common_basis,
        primary=primary,
        harmful=apart,
    )


def _task(x):
    split = Split(x, torch.zeros(len(x), dtype=torch.float64))
    return Task("t", split, split, split)


# --- Images ----------------------------------------------------------------------------------------------------------


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    blob = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(blob) if path.suffix == ".gz" else blob)


@pytest.fixture(params=["", ".gz"])
def mnist_like(request, tmp_path):
    """A root in torchvision's layout with 400 + 200 random images, unpacked or packed, of both families."""
    draw = np.random.default_rng(0)
    for family in ("MNIST", "FashionMNIST"):
        folder = tmp_path / family / "raw"
        folder.mkdir(parents=True)
        for part, n in (("train", 400), ("t10k", 200)):
            write_idx(folder / f"{part}-images-idx3-ubyte{request.param}", draw.integers(0, 256, (n, 28, 28)))
            write_idx(folder / f"{part}-labels-idx1-ubyte{request.param}", np.arange(n) % 10)
    return tmp_path


@pytest.mark.parametrize("protocol", ["one_vs_rest", "authors"])
def test_digits_against_the_source(protocol):
    pair = data.digits(seed=1, primary=3, harmful=8, benign=5, protocol=protocol)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    label_of = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    mean, std = pair.tensors["mean"], pair.tensors["std"]
    seen = set()
    for (role, task), digit in zip(pair.tasks.items(), (3, 8, 5), strict=True):
        assert task.classes == 2
        assert task.constant == (protocol == "authors")
        for split in SPLITS:
            x, y = getattr(task, split).x, getattr(task, split).y
            source = [label_of[image.tobytes()] for image in ((x * std + mean) * 16).round().numpy()]
            if protocol == "authors":
                assert set(source) == {digit}
                assert set(y.tolist()) == {int(role != "primary")}
                assert len(y) == len(getattr(pair.primary, split))
            else:
                assert y.tolist() == [int(label == digit) for label in source]
                assert y.double().mean() == 0.5
                assert not {3, 8, 5} - {digit} & set(source)
        rows = rows_of(task)
        assert len(set(rows)) == len(rows)
        assert not seen & set(rows)
        seen |= set(rows)
    pixels = torch.cat([pair.primary.train.x, pair.harmful.train.x])
    assert pixels.mean().item() == pytest.approx(0, abs=1e-12)
    assert pixels.std().item() == pytest.approx(1)


def test_digits_follow_the_seed():
    assert same(data.digits(seed=0), data.digits(seed=0))
    assert not same(data.digits(seed=0), data.digits(seed=1))


def test_common_range_of_digits_keeps_spectra_and_applies_to_all_tasks():
    raw = data.digits(seed=0, benign=2)
    pair = data.digits(seed=0, benign=2, common_range=True)
    basis = pair.tensors["basis"]
    assert basis.shape == (64, pair.dim)
    assert pair.primary.rank == pair.harmful.rank == pair.dim < raw.primary.rank
    for role, task in pair.tasks.items():
        torch.testing.assert_close(task.test.x, raw.tasks[role].test.x @ basis)
    assert str(pair.dim) in pair.about["common_range"]


def test_mnist_files_packed_or_not(mnist_like):
    pair = data.mnist(seed=0, root=str(mnist_like), download=False, primary=4, harmful=7, val_fraction=0.25)
    assert pair.about["rows"]["primary"] == {"train": 60, "val": 20, "test": 40}
    assert pair.dim == 784
    fashion = data.fashion_mnist(seed=0, root=str(mnist_like), download=False, max_samples=5)
    assert fashion.about["rows"]["harmful"] == {"train": 10, "val": 8, "test": 10}
    assert not torch.equal(pair.primary.test.x[0], fashion.primary.test.x[0])


def test_mnist_of_the_authors_uses_their_moments(mnist_like):
    pair = data.mnist(seed=0, root=str(mnist_like), download=False, protocol="authors")
    assert pair.tensors["mean"].item() == 0.1307
    assert pair.tensors["std"].item() == 0.3081
    assert pair.primary.constant


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_impossible_image_options(name):
    call, base = getattr(data, name), {"seed": 0}
    fails(ConfigError, "dataset.primary=3", "dataset.harmful=3", call=call, primary=3, harmful=3, **base)
    fails(ConfigError, "dataset.benign=0", call=call, benign=0, **base)
    for digit in (10, -1, "one"):
        fails(ConfigError, "dataset.primary must be an integer", f"not {digit!r}", call=call, primary=digit, **base)
    fails(ConfigError, "dataset.protocol must be one of one_vs_rest, authors", call=call, protocol="all", **base)
    fails(
        ConfigError, "dataset.max_samples must be an integer of at least 1, or null", call=call, max_samples=0, **base
    )
    for fraction in (-0.1, 1.0, "half"):
        fails(
            ConfigError,
            "dataset.val_fraction must be a number",
            f"not {fraction!r}",
            call=call,
            val_fraction=fraction,
            **base,
        )


def test_fractions_that_leave_nothing():
    fails(
        ConfigError,
        "val_fraction=0.5",
        "test_fraction=0.5",
        call=data.digits,
        seed=0,
        val_fraction=0.5,
        test_fraction=0.5,
    )


def test_mnist_absent(tmp_path, monkeypatch):
    absent = {"call": data.mnist, "seed": 0, "root": str(tmp_path)}
    fails(DataError, "train-images-idx3-ubyte", "dataset.root", "dataset.download=true", download=False, **absent)

    def no_network(root, download):
        raise RuntimeError("Error downloading\nno network")

    monkeypatch.setattr(torchvision.datasets, "MNIST", no_network)
    fails(DataError, "train-images-idx3-ubyte", "no network", "dataset.root", download=True, **absent)


def test_mnist_damaged(mnist_like):
    folder = mnist_like / "MNIST" / "raw"
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 0xFF
        damages = {"cut": whole[:-20], "header only": whole[:6], "empty": b"", "no idx": b"<html>" + whole}
        if path.suffix == ".gz":
            damages["bit errors"] = bytes(flipped)
        for damage in damages.values():
            path.write_bytes(damage)
            fails(DataError, path, "delete", "dataset.download=true", call=data.mnist, seed=0, root=str(mnist_like))
        path.write_bytes(whole)
    data.mnist(seed=0, root=str(mnist_like))


def test_mnist_inconsistent(mnist_like):
    folder = mnist_like / "MNIST" / "raw"
    (labels,) = folder.glob("train-labels*")
    call = {"call": data.mnist, "seed": 0, "root": str(mnist_like)}
    write_idx(labels, np.arange(399) % 10)
    fails(DataError, folder, "399", **call)
    write_idx(labels, np.arange(400) % 11)
    fails(DataError, folder, "0 to 9", **call)
    write_idx(labels, np.arange(400) % 9)
    fails(DataError, "class 9", "dataset.benign", "empty", benign=9, **call)
    (images,) = folder.glob("train-images*")
    write_idx(images, np.zeros((400, 28, 28)))
    fails(DataError, "rank 0", **call)


def test_real_mnist(data_dir, tmp_path):
    pair = data.mnist(seed=0, root=str(data_dir / "mnist"), download=False, max_samples=100)
    assert pair.about["rows"]["primary"] == {"train": 200, "val": 200, "test": 200}
    truncated = tmp_path / "MNIST" / "raw"
    truncated.mkdir(parents=True)
    for path in (data_dir / "mnist" / "MNIST" / "raw").iterdir():
        (truncated / path.name).write_bytes(path.read_bytes()[:-1000])
    fails(DataError, truncated / "train-images-idx3-ubyte.gz", call=data.mnist, seed=0, root=str(tmp_path))


# --- House Prices ----------------------------------------------------------------------------------------------------


@pytest.fixture
def table():
    """A stand-in for train.csv: its columns, 700 random rows, some fields missing."""
    draw = np.random.default_rng(0)
    columns = {name: draw.integers(0, 50, 700) for name in [*NUMERIC, "LotArea", "SalePrice"]}
    columns |= {name: draw.choice(["a", "b", "NA", "None"], 700) for name in CATEGORICAL}
    columns["MSZoning"] = np.where(np.arange(700) < 350, "RL", draw.choice(["RM", "FV"], 700))
    columns["Utilities"] = np.full(700, "AllPub")
    frame = pd.DataFrame(columns)
    frame["LotFrontage"] = frame["LotFrontage"].astype(str).where(draw.random(700) > 0.1, "NA")
    return frame


def store(table, folder):
    table.to_csv(folder / "train.csv", index=False)
    return {"call": data.house_prices, "seed": 0, "root": str(folder), "download": False}


def test_house_prices_full(table, tmp_path):
    source = store(table, tmp_path)
    pair = data.house_prices(0, str(tmp_path), download=False, val_fraction=0.2, test_fraction=0.3)
    assert pair.about["rows"]["primary"] == {"train": 175, "val": 70, "test": 105}
    assert pair.about["dropped"] == ["Id", "Utilities"]
    assert pair.dim == len(pair.about["columns"]) == 77
    both = torch.cat([pair.primary.train.x, pair.harmful.train.x])
    torch.testing.assert_close(both.mean(0), torch.zeros(77, dtype=torch.float64))
    torch.testing.assert_close(both.std(0), torch.ones(77, dtype=torch.float64))
    assert pair.primary.train.y.std().item() == pytest.approx(1)
    assert pair.harmful.train.y.mean().item() == pytest.approx(0, abs=1e-12)
    # The stored moments lead back to the file: codes of the sorted strings ("0" for missing, "a", "b"), 0 for a gap.
    raw = both * pair.tensors["std"] + pair.tensors["mean"]
    street, frontage = (raw[:, pair.about["columns"].index(name)] for name in ("Street", "LotFrontage"))
    assert set(street.round().tolist()) == {0, 1, 2}
    assert set(frontage.round().int().tolist()) <= {0, *map(int, set(table["LotFrontage"]) - {"NA"})}
    assert same(pair, source["call"](0, str(tmp_path), val_fraction=0.2, test_fraction=0.3))


def test_house_prices_each_half_by_itself(table, tmp_path):
    source = store(table, tmp_path)
    pair = source["call"](0, str(tmp_path), normalize="each", keep_id=True)
    assert "Id" in pair.about["columns"]
    for role, task in pair.tasks.items():
        varies = task.train.x.std(0) > 0
        assert varies[pair.about["columns"].index("MSZoning")] == (role == "primary")
        assert (task.train.x[:, ~varies] == 0).all()
        torch.testing.assert_close(task.train.x[:, varies].mean(0), torch.zeros(int(varies.sum()), dtype=torch.float64))
        assert pair.tensors[f"{role}/mean"].shape == (pair.dim,)


def test_house_prices_of_the_authors(table, tmp_path):
    source = store(table, tmp_path)
    pair = source["call"](0, str(tmp_path), protocol="authors")
    assert pair.about["rows"]["harmful"] == {"train": 200, "val": 50, "test": 50}
    assert pair.dim == 79
    rows = table[table.MSZoning == "RL"]
    year = pair.about["columns"].index("YrSold")
    expected = ((rows.YrSold - rows.YrSold.mean()) / rows.YrSold.std()).to_numpy(np.float32)
    assert pair.harmful.train.x[:, year].tolist() == pytest.approx(expected[:200].tolist())
    assert pair.harmful.test.x[:, year].tolist() == pytest.approx(expected[250:300].tolist())
    assert pair.harmful.eps == torch.finfo(torch.float32).eps
    assert torch.equal(pair.harmful.train.x, pair.harmful.train.x.float().double())
    fails(DataError, "authors", "300 rows", protocol="authors", **store(table[:600], tmp_path))


def test_house_prices_missing(tmp_path, monkeypatch):
    absent = {"call": data.house_prices, "seed": 0, "root": str(tmp_path / "new")}
    path = tmp_path / "new" / "train.csv"
    fails(DataError, path, "kaggle.com", "dataset.root", "dataset.download=true", download=False, **absent)

    def no_network(**_):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", no_network)
    fails(DataError, path, "no network", "kaggle.com", **absent)
    assert not path.exists()


def test_house_prices_from_openml_is_cached(table, tmp_path, monkeypatch):
    frame = table.replace("NA", None)  # as OpenML has it: gaps, not strings
    bunch = sklearn.utils.Bunch(frame=frame)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda **_: bunch)
    first = data.house_prices(seed=0, root=str(tmp_path / "openml"))
    monkeypatch.delattr(sklearn.datasets, "fetch_openml")
    assert same(first, data.house_prices(seed=0, root=str(tmp_path / "openml")))
    assert os.listdir(tmp_path / "openml") == ["train.csv"]
    store(table, tmp_path)
    assert same(first, data.house_prices(seed=0, root=str(tmp_path)))


def test_house_prices_damaged(table, tmp_path):
    source, path = store(table, tmp_path), tmp_path / "train.csv"
    text = path.read_text()
    path.write_text(text[: text.rindex(",", 0, len(text) // 2) - 40])
    fails(DataError, path, "line", "fields", "cut off", **source)
    path.write_text(text[:-2])  # within the last field: the number of fields is right
    fails(DataError, path, "line break", "cut off", **source)
    path.write_text(text.replace("\n", ",1\n", 2).replace(",1\n", "\n", 1))
    fails(DataError, f"{path}, line 2: 82 fields", **source)
    path.write_text(text.replace("RL", '"RL', 1))
    fails(DataError, path, **source)
    path.write_bytes(b"\xff\xfe" + text.encode())
    fails(DataError, path, "UTF-8", **source)
    for nothing in ("", "\n", text.splitlines()[0] + "\n"):
        path.write_text(nothing)
        fails(DataError, path, "no rows", **source)
    path.write_text(text.replace("MSSubClass", "Id"))
    fails(DataError, path, "twice", **source)


def test_house_prices_bad_columns(table, tmp_path):
    for column in ("SalePrice", "MSZoning", "GrLivArea"):
        fails(
            DataError, tmp_path / "train.csv", "lacks the column", column, **store(table.drop(columns=column), tmp_path)
        )
    for value in ("many", "inf", "nan"):
        bad = table.astype({"GrLivArea": object})
        bad.loc[20, "GrLivArea"] = value
        for normalize in ("shared", "each"):
            fails(DataError, "row 21", "GrLivArea", f"'{value}'", normalize=normalize, **store(bad, tmp_path))
    bad = table.astype({"SalePrice": object})
    bad.loc[3, "SalePrice"] = "NA"  # a target that is missing is no 0
    fails(DataError, "row 4", "SalePrice", **store(bad, tmp_path))
    fails(DataError, "MSZoning other than RL", **store(table[:350], tmp_path))
    fails(DataError, "MSZoning RL", **store(table[350:], tmp_path))
    flat = table.assign(**dict.fromkeys([*NUMERIC, *CATEGORICAL], 1)).assign(MSZoning=table.MSZoning)
    flat.loc[flat.MSZoning == "RL", "Street"] = np.arange(350) % 2
    fails(DataError, "LotArea", "rank 0", **store(flat.replace("FV", "RM"), tmp_path))
    fails(DataError, "LotArea", "target is constant", **store(table.assign(LotArea=7), tmp_path))
    fails(ConfigError, "dataset.normalize must be one of shared, each", normalize="none", **store(table, tmp_path))
    fails(ConfigError, "dataset.protocol must be one of full, authors", protocol="paper", **store(table, tmp_path))


@pytest.mark.parametrize(
    ("options", "dim", "kappa_primary", "kappa_harmful", "kappa_m", "ceiling"),
    [
        ({"normalize": "each", "keep_id": True}, 71, 207.6, 156.9, 49.11, 64.99),
        ({"normalize": "shared", "keep_id": False}, 74, 8654, 6206, 4.346e6, 6.059e6),
    ],
)
def test_published_ceilings_of_house_prices(data_dir, options, dim, kappa_primary, kappa_harmful, kappa_m, ceiling):
    root = str(data_dir / "house_prices")
    whole = {"val_fraction": 0.0, "test_fraction": 0.0, "common_range": True}
    pair = data.house_prices(seed=0, root=root, download=False, **options, **whole)
    assert (len(pair.primary.train), len(pair.harmful.train), pair.dim) == (309, 1151, dim)
    found_p, found_h = (spectrum.condition_number(task.train.x) for task in (pair.primary, pair.harmful))
    # M = K_P^-1/2 K_H K_P^-1/2 has the spectrum of R^-T K_H R^-1, K_P = R^T R
    whitener = torch.linalg.inv(torch.linalg.qr(pair.primary.train.x, mode="r").R)
    found_m = spectrum.condition_number(pair.harmful.train.x @ whitener)
    found = [found_p, found_h, found_m, found_m * found_p / found_h]
    assert [float(f"{value:.4g}") for value in found] == [kappa_primary, kappa_harmful, kappa_m, ceiling]


def test_real_house_prices_of_the_authors(data_dir):
    pair = data.house_prices(seed=0, root=str(data_dir / "house_prices"), download=False, protocol="authors")
    assert (pair.dim, len(pair.primary.train), len(pair.harmful.train)) == (79, 200, 200)


# --- The user's own matrices -----------------------------------------------------------------------------------------


@pytest.fixture
def matrices():
    draw = np.random.default_rng(0)
    return {
        "primary_x": draw.normal(2, 3, (60, 5)),
        "primary_y": draw.normal(5, 2, 60),
        "harmful_x": draw.normal(0, 1, (80, 5)),
        "harmful_y": draw.choice([-1, 4, 7], 80),
    }


def save(folder, matrices):
    np.savez(folder / "m.npz", **matrices)
    return {"call": data.arrays, "seed": 0, "path": str(folder / "m.npz")}


def test_arrays(matrices, tmp_path):
    benign = {"benign_x": matrices["harmful_x"][:40], "benign_y": matrices["harmful_y"][:40] > 0}
    pair = data.arrays(0, save(tmp_path, matrices | benign)["path"], val_fraction=0.25, test_fraction=0.25)
    assert {role: task.classes for role, task in pair.tasks.items()} == {"primary": 0, "harmful": 3, "benign": 2}
    assert pair.about["rows"]["primary"] == {"train": 30, "val": 15, "test": 15}
    assert pair.about["labels"]["harmful"] == "classes [-1, 4, 7] coded 0 to 2"
    both = torch.cat([pair.primary.train.x, pair.harmful.train.x])
    torch.testing.assert_close(both.std(0), torch.ones(5, dtype=torch.float64))
    assert pair.primary.train.y.std().item() == pytest.approx(1)
    original = {row.tobytes(): y for row, y in zip(matrices["harmful_x"], matrices["harmful_y"], strict=True)}
    plain = data.arrays(0, str(tmp_path / "m.npz"), normalize="none")
    for row, y in zip(plain.harmful.val.x, plain.harmful.val.y, strict=True):
        assert [-1, 4, 7][y] == original[row.numpy().tobytes()]


def test_arrays_with_splits_of_their_own(matrices, tmp_path):
    own = {"primary_test_x": np.ones((4, 5)), "primary_test_y": np.ones(4)}
    pair = data.arrays(0, save(tmp_path, matrices | own)["path"], normalize="none", val_fraction=0.5)
    assert pair.about["rows"]["primary"] == {"train": 30, "val": 30, "test": 4}
    assert (pair.primary.test.x == 1).all()


def test_arrays_from_safetensors_and_csv_are_those_from_npz(matrices, tmp_path):
    options = {"normalize": "each", "common_range": True}
    pair = data.arrays(0, save(tmp_path, matrices)["path"], **options)
    save_file({key: torch.from_numpy(value) for key, value in matrices.items()}, tmp_path / "m.safetensors")
    assert same(pair, data.arrays(0, str(tmp_path / "m.safetensors"), **options))
    files = {}
    for role in ("primary", "harmful"):
        frame = pd.DataFrame(matrices[f"{role}_x"], columns=list("abcde")).assign(z=matrices[f"{role}_y"])
        files[f"{role}_csv"] = str(tmp_path / f"{role}.csv")
        frame.to_csv(files[f"{role}_csv"], index=False)
    assert same(pair, data.arrays(0, **files, target="z", **options))
    fails(DataError, "lacks the column target", call=data.arrays, seed=0, **files)
    frame.drop(columns="e").to_csv(files["harmful_csv"], index=False)
    fails(DataError, files["harmful_csv"], "different columns", call=data.arrays, seed=0, target="z", **files)
    frame.astype(object).replace({"a": {frame.a[2]: "x"}}).to_csv(files["harmful_csv"], index=False)
    fails(DataError, files["harmful_csv"], "row 3", "column a", call=data.arrays, seed=0, target="z", **files)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int32", "bool", "float16"])
def test_arrays_of_any_real_kind(matrices, tmp_path, kind):
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 2, (60, 5)).astype(kind), draw.integers(0, 2, 60).astype(kind)
    own = {"primary_x": x, "primary_y": y, "primary_test_x": x[:9], "primary_test_y": y[:9].astype(np.float32)}
    pair = data.arrays(0, save(tmp_path, matrices | own)["path"], targets="auto", normalize="none")
    assert pair.primary.classes == (0 if kind == "float16" else 2)
    assert pair.primary.test.x.tolist() == x[:9].astype(float).tolist()


def test_arrays_of_floats_keep_their_epsilon(matrices, tmp_path):
    stored = save(tmp_path, matrices | {"harmful_x": matrices["harmful_x"].astype(np.float32)})
    pair = data.arrays(0, stored["path"])
    assert pair.primary.eps == torch.finfo(torch.float64).eps
    assert pair.harmful.eps == torch.finfo(torch.float32).eps


def test_arrays_targets(matrices, tmp_path):
    prices = save(tmp_path, matrices | {"primary_y": np.arange(60)})
    fails(ConfigError, "primary_y", "60 different", "dataset.targets=regression", **prices)
    assert data.arrays(0, prices["path"], targets="regression").harmful.classes == 0
    one = save(tmp_path, matrices | {"harmful_y": np.full(80, 3)})
    fails(DataError, "harmful_y", "one class", "empty", **one)
    flat = save(tmp_path, matrices | {"primary_y": np.full(60, 0.5)})
    fails(DataError, "primary", "target is constant", **flat)
    labels = {"harmful_test_x": np.ones((2, 5)), "harmful_test_y": np.array([4, 9])}
    fails(DataError, "'harmful_test_y'", "9", **save(tmp_path, matrices | labels))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"primary_x": np.full((60, 5), np.nan)}, ("'primary_x'", "300 NaN or infinite", "[0, 0]")),
        ({"harmful_y": np.full(80, np.inf)}, ("'harmful_y'", "80 NaN or infinite")),
        ({"harmful_x": np.ones((80, 5))}, ("harmful", "constant", "rank 0")),
        ({"harmful_x": np.ones((80, 6)) * np.arange(80)[:, None]}, ("'primary': 5", "'harmful': 6")),
        ({"primary_x": np.ones((60, 5, 2))}, ("'primary_x'", "[60, 5, 2]", "[rows, columns]")),
        ({"primary_x": np.ones((0, 5)), "primary_y": np.ones(0)}, ("'primary_x'", "not empty")),
        ({"primary_y": np.ones((60, 2))}, ("'primary_y'", "[60, 2]", "[rows]")),
        ({"primary_y": np.arange(59.0)}, ("'primary_x'", "60 rows", "59 targets")),
        ({"primary_x": np.array(["a"] * 60)}, ("m.npz", "npz file of numbers")),
        ({"primary_x": np.array([{}] * 60)}, ("m.npz", "allow_pickle=False")),
        ({"primary_val_x": np.ones((3, 5))}, ("primary_val_y",)),
        ({"primary_val_x": np.ones((3, 4)), "primary_val_y": np.ones(3)}, ("'primary_val_x'", "4 columns")),
    ],
)
def test_arrays_that_cannot_be_used(matrices, tmp_path, change, parts):
    fails(DataError, *parts, **save(tmp_path, matrices | change))


def test_array_files_that_cannot_be_used(matrices, tmp_path):
    stored, path = save(tmp_path, matrices), tmp_path / "m.npz"
    whole = path.read_bytes()
    for damage in (whole[:-50], whole[:1000], b"", b"no npz"):
        path.write_bytes(damage)
        fails(DataError, path, **stored)
    np.save(tmp_path / "one.npy", matrices["primary_x"])
    path.write_bytes((tmp_path / "one.npy").read_bytes())
    fails(DataError, path, **stored)
    other = tmp_path / "m.safetensors"
    fails(DataError, other, call=data.arrays, seed=0, path=str(other))
    other.write_bytes(whole)
    fails(DataError, other, "safetensors", call=data.arrays, seed=0, path=str(other))
    save(tmp_path, {"primary_x": matrices["primary_x"]})
    fails(DataError, path, "'primary_y'", **stored)
    fails(ConfigError, "m.pt", ".npz or .safetensors", call=data.arrays, seed=0, path="m.pt")
    fails(ConfigError, "dataset.path", "dataset.primary_csv", call=data.arrays, seed=0)
    fails(ConfigError, "dataset.path", "choose one", call=data.arrays, seed=0, path="a.npz", primary_csv="b.csv")
    fails(DataError, "b.csv", call=data.arrays, seed=0, primary_csv="b.csv", harmful_csv="c.csv")
