"""Digits and files in MNIST's format: both protocols, and files that are absent, damaged or inconsistent."""

from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch
import torchvision
from helpers.images import write_idx
from helpers.pairs import fails, rows_of, same

from immunization import data
from immunization.data.pixels import sklearn_digits
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError

IMAGE_SETS = ("digits", "mnist", "fashion_mnist")


def test_digits_are_those_of_scikit_learn_to_the_bit():
    """That they are read without its import is asserted in tests/results/test_present.py."""
    own = sklearn.datasets.load_digits(return_X_y=True)
    for mine, array in zip((tensor.numpy() for tensor in sklearn_digits()), own, strict=True):
        assert (mine == array).all()
        assert (mine.dtype, mine.strides) == (array.dtype, array.strides)


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


def test_of_an_unseen_class_there_may_be_fewer_images():
    pair = data.digits(primary=0, harmful=1, unseen=8, protocol="authors", seed=0)
    unseen, harmful = pair.tasks["unseen"].train, pair.tasks["harmful"].train
    assert len(unseen.x) == len(unseen.y) < len(harmful.y)


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


@pytest.mark.parametrize(("protocol", "mean", "std"), [("authors", 0.1307, 0.3081), ("authors_pixels", 0.0, 1.0)])
def test_mnist_of_the_authors_has_given_moments(mnist_like, protocol, mean, std):
    pair = data.mnist(seed=0, root=str(mnist_like), download=False, protocol=protocol)
    assert pair.tensors["mean"].item() == mean
    assert pair.tensors["std"].item() == std
    assert pair.primary.constant
    pixels = pair.primary.train.x * std + mean
    assert 0 <= pixels.min() < pixels.max() <= 1 + 1e-12


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_impossible_image_options(name):
    call, base = getattr(data, name), {"seed": 0}
    fails(ConfigError, "dataset.primary=3", "dataset.harmful=3", call=call, primary=3, harmful=3, **base)
    fails(ConfigError, "dataset.benign=0", call=call, benign=0, **base)
    for digit in (10, -1, "one"):
        fails(ConfigError, "dataset.primary must be an integer", f"not {digit!r}", call=call, primary=digit, **base)
    fails(ConfigError, "dataset.protocol must be one of one_vs_rest, authors", call=call, protocol="all", **base)
    at_least = "dataset.max_samples must be an integer of at least 1, or null"
    fails(ConfigError, at_least, call=call, max_samples=0, **base)
    for wrong in (-0.1, 1.0, "half"):
        message = "dataset.val_fraction must be a number", f"not {wrong!r}"
        fails(ConfigError, *message, call=call, val_fraction=wrong, **base)
    if name == "digits":
        told = "val_fraction=0.5", "test_fraction=0.5"
        fails(ConfigError, *told, call=call, val_fraction=0.5, test_fraction=0.5, **base)


def test_mnist_absent(tmp_path, monkeypatch):
    absent = {"call": data.mnist, "seed": 0, "root": str(tmp_path)}
    fails(DataError, "train-images-idx3-ubyte", "dataset.root", "dataset.download=true", download=False, **absent)

    def killed(root, download):
        Path(root, "MNIST", "raw").mkdir(parents=True)
        Path(root, "MNIST", "raw", "train-images-idx3-ubyte").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torchvision.datasets, "MNIST", killed)
    with pytest.raises(KeyboardInterrupt):
        data.mnist(seed=0, root=str(tmp_path))
    assert not list(tmp_path.rglob("*-ubyte"))

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
