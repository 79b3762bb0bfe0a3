"""Every kind of file the program reads, cut off, emptied and with one byte changed: named, and never trusted."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.data_files import IMAGES, MNIST, NPZ, csv, image_pair, npz, table
from helpers.images import write_idx
from helpers.runs import QUICK, outcome
from PIL import Image
from safetensors.torch import load_file, save_file

import immunization
from immunization import Result, run
from immunization.errors import UserError
from immunization.results.collect import collect
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.tracker import history

pytestmark = [pytest.mark.slow, pytest.mark.trains]


def flipped(content: bytes) -> bytes:
    """Three quarters in, where files keep what they are about."""
    place = 3 * len(content) // 4
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: 2 * len(content) // 3],
    "emptied": lambda content: b"",
    "flipped": flipped,
}


@pytest.fixture(params=DAMAGES)
def damage(request) -> Callable[[Path], str]:
    """Damages a file; returns its name as a pattern."""

    def do(path: Path) -> str:
        path.write_bytes(DAMAGES[request.param](path.read_bytes()))
        return re.escape(path.name)

    do.kind = request.param
    return do


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("done") / "run"
    run([*QUICK, "method.epochs=3"], folder=folder)
    return folder


@pytest.mark.parametrize("name", ["result.json", "immunized.safetensors"])
def test_run_folders(name, done, damage, tmp_path, capsys, count):
    """Going on does the run again; the aggregate counts the folder as unreadable; weights are not loaded."""
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    pattern = damage(folder / name)
    if name == "result.json":
        (problem,) = collect([folder]).problems
        assert problem.kind == "unreadable"
        assert re.search(pattern, problem.message)
    else:
        with pytest.raises(UserError, match=pattern):
            immunization.load(folder)
    run([*QUICK, "method.epochs=3", "resume=true"], folder=folder)
    assert re.search(f"{pattern}.*the run is done again", capsys.readouterr().err)
    assert outcome(folder) == outcome(done)
    count["damaged files"] += 1


def test_checkpoints(damage, done, tmp_path, capsys, monkeypatch, count):
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run([*QUICK, "method.epochs=3", "checkpoint.every=2"], folder=tmp_path / "run")
    pattern = damage(tmp_path / "run" / CHECKPOINT)
    run([*QUICK, "method.epochs=3", "resume=true"], folder=tmp_path / "run")
    assert re.search(f"{pattern}.*starts from the beginning", capsys.readouterr().err)
    assert outcome(tmp_path / "run") == outcome(done)
    count["damaged files"] += 1


def test_histories_are_read_up_to_the_damage(done, tmp_path):
    shutil.copy(done / "metrics.jsonl", tmp_path)
    whole = history(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    cut = history(tmp_path)
    assert cut["rir"]["x"] == whole["rir"]["x"][:-1]


def test_kept_activations(damage, tmp_path, capsys, count):
    image_pair(tmp_path)
    options = [o.replace("{tmp}", str(tmp_path)) for o in (*QUICK[:1], *QUICK[2:], *IMAGES)]
    first = run(options, folder=tmp_path / "first")
    assert run(options, folder=tmp_path / "warm").metrics == first.metrics
    for path in (tmp_path / "c").glob("*.safetensors"):
        damage(path)
    capsys.readouterr()
    again = run(options, folder=tmp_path / "again")
    assert again.metrics == first.metrics
    assert re.search(r"activations in .* are damaged .* and are computed again", capsys.readouterr().err)
    count["damaged files"] += 1


def test_the_net_of_the_digits(damage, tmp_path, capsys, count):
    options = ["experiment=digits_deep", *QUICK[:1], *QUICK[2:], f"model.cache={tmp_path / 'c'}", "model.fit_epochs=1"]
    options += ["method=identity"]
    first = run(options, folder=tmp_path / "first")
    (path,) = (tmp_path / "c").glob("*.safetensors")
    damage(path)
    assert run(options, folder=tmp_path / "again").metrics == first.metrics
    assert "the net is fitted again" in capsys.readouterr().err
    count["damaged files"] += 1


def refused(overrides: tuple[str, ...], tmp_path: Path, pattern: str) -> None:
    options = [o.replace("{tmp}", str(tmp_path)) for o in ("tracker=none", "evaluation=[rir]", *overrides)]
    with pytest.raises(UserError, match=pattern):
        run(options, folder=tmp_path / "run")
    assert Result.read(tmp_path / "run").status == "failed"


def test_npz_files(damage, tmp_path, count):
    npz(tmp_path)
    refused(NPZ, tmp_path, damage(tmp_path / "pair.npz"))
    count["damaged files"] += 1


def test_mnist_files(damage, tmp_path, count):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, size in (("train", 600), ("t10k", 200)):
        for name, shape, top in (("images-idx3", (size, 28, 28), 256), ("labels-idx1", (size,), 10)):
            write_idx(folder / f"{part}-{name}-ubyte.gz", rng.integers(0, top, shape))
    refused(MNIST, tmp_path, damage(folder / "train-images-idx3-ubyte.gz"))
    count["damaged files"] += 1


@pytest.mark.parametrize("kind", ["csv", "safetensors", "png"])
def test_files_without_a_checksum_of_their_own(kind, damage, tmp_path, count):
    """Cut off or emptied they are found; nobody can tell that a digit of a CSV file was another one before."""
    if damage.kind == "flipped":
        pytest.skip("not to be seen")
    if kind == "csv":
        csv(tmp_path, table())
        overrides, path = ("dataset=arrays", "method.epochs=1"), tmp_path / "harmful.csv"
        overrides += tuple(f"dataset.{role}_csv={tmp_path / role}.csv" for role in ("primary", "harmful"))
    elif kind == "safetensors":
        npz(tmp_path)
        from torch import from_numpy

        save_file({k: from_numpy(v) for k, v in np.load(tmp_path / "pair.npz").items()}, tmp_path / "pair.safetensors")
        assert load_file(tmp_path / "pair.safetensors")
        overrides = ("dataset=arrays", "method.epochs=1", f"dataset.path={tmp_path / 'pair.safetensors'}")
        path = tmp_path / "pair.safetensors"
    else:
        image_pair(tmp_path)
        overrides, path = IMAGES, tmp_path / "h" / "train" / "class0" / "1.png"
        with Image.open(path) as image:
            assert image.size == (40, 36)
    refused(overrides, tmp_path, damage(path))
    count["damaged files"] += 1
