"""The user's own matrices, as npz, safetensors or CSV."""

import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.pairs import fails, same
from safetensors.torch import save_file

from immunization import data, run
from immunization.compute import machine
from immunization.errors import ConfigError, DataError


@pytest.fixture
def matrices():
    draw = np.random.default_rng(0)
    return {
        "primary_x": draw.normal(2, 3, (60, 5)),
        "primary_y": draw.normal(5, 2, 60),
        "harmful_x": draw.normal(0, 1, (80, 5)),
        "harmful_y": draw.choice([-1, 4, 7], 80),
    }


@pytest.fixture
def stored(matrices, tmp_path):
    """Writes the matrices, changed, as an npz file, and returns how to read them."""

    def write(changes=None, /, **more):
        np.savez(tmp_path / "m.npz", **(matrices | (changes or {}) | more))
        return {"call": data.arrays, "seed": 0, "path": str(tmp_path / "m.npz")}

    return write


@pytest.fixture
def tables(matrices, tmp_path):
    """Writes both tasks as CSV files, by options of DataFrame.to_csv, and returns how to read them."""

    def write(**options):
        files = {f"{role}_csv": str(tmp_path / f"{role}.csv") for role in ("primary", "harmful")}
        for role in ("primary", "harmful"):
            frame = pd.DataFrame(matrices[f"{role}_x"], columns=list("abcde")).assign(target=matrices[f"{role}_y"])
            frame.to_csv(files[f"{role}_csv"], **{"index": False} | options)
        return {"call": data.arrays, "seed": 0} | files

    return write


def read(stored, **options):
    """The pair that is read as `stored` says."""
    return data.arrays(**{key: value for key, value in (stored | options).items() if key != "call"})


def test_arrays(matrices, stored):
    whole = stored(benign_x=matrices["harmful_x"][:40], benign_y=matrices["harmful_y"][:40] > 0)
    pair = read(whole, val_fraction=0.25, test_fraction=0.25)
    assert {role: task.classes for role, task in pair.tasks.items()} == {"primary": 0, "harmful": 3, "benign": 2}
    assert pair.about["rows"]["primary"] == {"train": 30, "val": 15, "test": 15}
    assert pair.about["labels"]["harmful"] == "classes [-1, 4, 7] coded 0 to 2"
    both = torch.cat([pair.primary.train.x, pair.harmful.train.x])
    torch.testing.assert_close(both.std(0), torch.ones(5, dtype=torch.float64))
    assert pair.primary.train.y.std().item() == pytest.approx(1)
    original = {row.tobytes(): y for row, y in zip(matrices["harmful_x"], matrices["harmful_y"], strict=True)}
    for row, y in zip(*(getattr(read(whole, normalize="none").harmful.val, part) for part in "xy"), strict=True):
        assert [-1, 4, 7][y] == original[row.numpy().tobytes()]


def test_arrays_with_splits_of_their_own(stored):
    own = stored(primary_test_x=np.ones((4, 5)), primary_test_y=np.ones(4))
    pair = read(own, normalize="none", val_fraction=0.5)
    assert pair.about["rows"]["primary"] == {"train": 30, "val": 30, "test": 4}
    assert (pair.primary.test.x == 1).all()


def test_arrays_from_safetensors_and_csv_are_those_from_npz(matrices, stored, tables, tmp_path):
    options = {"normalize": "each", "common_range": True}
    pair = read(stored(), **options)
    save_file({key: torch.from_numpy(value) for key, value in matrices.items()}, tmp_path / "m.safetensors")
    assert same(pair, data.arrays(0, str(tmp_path / "m.safetensors"), **options))
    assert same(pair, read(tables(), **options))


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int32", "bool", "float16"])
def test_arrays_of_any_real_kind(stored, kind):
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 2, (60, 5)).astype(kind), draw.integers(0, 2, 60).astype(kind)
    own = {"primary_x": x, "primary_y": y, "primary_test_x": x[:9], "primary_test_y": y[:9].astype(np.float32)}
    pair = read(stored(own), normalize="none")
    assert pair.primary.classes == (0 if kind == "float16" else 2)
    assert pair.primary.test.x.tolist() == x[:9].astype(float).tolist()


def test_arrays_keep_the_epsilon_of_their_kind(matrices, stored, caplog):
    pair = read(stored(harmful_x=matrices["harmful_x"].astype(np.float32)))
    assert (pair.primary.eps, pair.harmful.eps) == tuple(
        torch.finfo(kind).eps for kind in (torch.float64, torch.float32)
    )
    half = stored(harmful_x=matrices["harmful_x"].astype(np.float16))
    assert read(half, normalize="none").harmful.eps == 2.0**-10
    assert "has 16 bits, which show no condition number above 1e+06; store float32" in caplog.text


def test_what_was_rounded_beside_a_large_mean_is_coarser_without_it(stored):
    """Sums of two columns, rounded to float32 at 1e4 +- 1, are no directions of their own; columns of integers are."""
    draw = np.random.default_rng(0)
    inexact = {}
    for role in ("primary", "harmful"):
        x = 1e4 + draw.normal(0, 1, (500, 3))
        years = draw.integers(100_000, 100_010, (500, 1))
        x = np.concatenate([x, x[:, :1] + x[:, 1:2], years, years + draw.integers(0, 2, (500, 1))], 1)
        inexact |= {f"{role}_x": x.astype(np.float32), f"{role}_y": draw.normal(0, 1, 500)}
    for normalize in ("shared", "each"):
        assert {task.rank for task in read(stored(inexact), normalize=normalize).tasks.values()} == {5}
    counted = {key: np.round(x) if key.endswith("_x") else x for key, x in inexact.items()}
    assert {(task.eps, task.rank) for task in read(stored(counted)).tasks.values()} == {(2.0**-52, 6)}


@pytest.mark.parametrize(("scale", "size"), [(1e-200, "small"), (1e200, "large")])
def test_values_whose_squares_leave_the_range_of_floats(matrices, stored, scale, size):
    inputs = {f"{role}_x": matrices[f"{role}_x"] * scale for role in ("primary", "harmful")}
    told = f"column 0 are so {size} that their squares leave the range of float64; rescale the data"
    fails(DataError, f"the inputs: the values of {told}", **stored(inputs))
    fails(DataError, f"the inputs of primary: the values of {told}", **stored(inputs), normalize="each")
    fails(DataError, f"the targets of primary: the values of {told}", **stored(primary_y=matrices["primary_y"] * scale))


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
        ({"primary_x": np.array([{}] * 60)}, ("m.npz", "holds Python objects; number classes 0, 1, ...")),
        ({"primary_val_x": np.ones((3, 5))}, ("primary_val_y",)),
        ({"primary_test_y": np.ones(3)}, ("lacks the array 'primary_test_x'",)),
        ({"primary_val_x": np.ones((3, 4)), "primary_val_y": np.ones(3)}, ("'primary_val_x'", "4 columns")),
        ({"primary_y": np.arange(60)}, ("primary_y", "60 different integers", "dataset.targets=regression")),
        ({"harmful_y": np.full(80, 3)}, ("harmful_y", "one class", "two classes")),
        ({"primary_y": np.full(60, 0.5)}, ("primary", "target is constant")),
        ({"harmful_test_x": np.ones((2, 5)), "harmful_test_y": np.array([4, 9])}, ("'harmful_test_y'", "9")),
        ({"harmful_y": np.arange(80, dtype=np.uint64) + 2**63}, ("integers above 2^63", "number classes")),
        ({"Primary_x": np.ones((60, 5))}, ("m.npz", "'Primary_x'", "rename it to 'primary_x'")),
        ({"benign-X": np.ones((60, 5))}, ("'benign-X'", "rename it to 'benign_x'")),
        ({"harmful_valid_x": np.ones((3, 5))}, ("'harmful_valid_x'", "rename it to 'harmful_val_x'")),
        ({"harmful_train_y": np.ones(3)}, ("'harmful_train_y'", "rename it to 'harmful_y'")),
        ({"primary_x_test": np.ones((3, 5))}, ("'primary_x_test'", "rename it to 'primary_test_x', or leave it out")),
        ({"y_harmful_Dev": np.ones(3)}, ("'y_harmful_Dev'", "rename it to 'harmful_val_y'")),
        ({"benign_test_x": np.ones((3, 5)), "benign_test_y": np.ones(3)}, ("lacks the array 'benign_x'",)),
    ],
    ids=str,
)
def test_arrays_that_cannot_be_used(stored, change, parts):
    with pytest.raises((ConfigError, DataError)) as caught:
        read(stored(change))
    assert all(part in str(caught.value) for part in parts)


def test_array_files_that_cannot_be_used(matrices, stored, tmp_path):
    own, path = stored(), tmp_path / "m.npz"
    whole = path.read_bytes()
    np.save(tmp_path / "one.npy", matrices["primary_x"])
    for damage in (whole[:-50], whole[:1000], b"", b"no npz", (tmp_path / "one.npy").read_bytes()):
        path.write_bytes(damage)
        fails(DataError, path, **own)
    other = tmp_path / "m.safetensors"
    fails(DataError, other, **own | {"path": str(other)})
    other.write_bytes(whole)
    fails(DataError, other, "safetensors", **own | {"path": str(other)})
    np.savez(path, primary_x=matrices["primary_x"])
    fails(DataError, path, "'primary_y'", **own)
    np.savez(path, primary_x=matrices["primary_x"], primary_y=matrices["primary_y"])
    fails(DataError, path, "'harmful_x'", **own)
    fails(ConfigError, "m.pt", ".npz or .safetensors", **own | {"path": "m.pt"})
    fails(ConfigError, "dataset.path", "dataset.primary_csv", **own | {"path": None})
    fails(ConfigError, "dataset.path", "choose one", **own, primary_csv="b.csv")


def test_an_npz_file_that_claims_more_than_it_holds_or_memory_has_is_refused(matrices, stored, tmp_path, monkeypatch):
    own, size = stored(), sum(array.nbytes + 128 for array in matrices.values())
    monkeypatch.setattr(machine, "memory", lambda device: 2 * size)
    assert read(own).dim == 5
    monkeypatch.setattr(machine, "memory", lambda device: 2 * size - 1)
    fails(DataError, "m.npz", "GiB of memory, and half of", **own)
    monkeypatch.undo()
    del matrices["harmful_x"]
    with zipfile.ZipFile(stored()["path"], "a") as archive, archive.open("harmful_x.npy", "w") as member:
        claimed = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
        np.lib.format.write_array_header_1_0(member, claimed)
        member.write(b"\0" * 80)
    fails(DataError, "m.npz cannot be read as an npz file", **own)


def test_row_numbers_are_no_input(tables):
    own = tables(index=True)
    for _ in range(2):
        fails(DataError, "primary.csv", "column 1 has no name", "index=False", **own)
        for role in ("primary", "harmful"):  # with what pandas calls that column when it reads it
            pd.read_csv(own[f"{role}_csv"]).to_csv(own[f"{role}_csv"], index=False)


def test_other_separators_and_decimal_commas_are_named_with_the_remedy(tables):
    pair, commas = read(tables()), {"sep": ";", "decimal": ","}
    own = tables(**commas)
    told = "its columns are separated by ';'"
    fails(DataError, told, "'dataset.csv.sep=\";\"'", "for decimal commas 'dataset.csv.decimal=\",\"'", **own)
    assert same(pair, read(own, csv=commas))
    own = tables(sep="\t", encoding="utf-16")
    fails(DataError, "primary.csv is not text in UTF-8", "dataset.csv.encoding=cp1252", **own)
    fails(DataError, r"separated by '\t'", r"""'dataset.csv.sep="\t"'""", csv={"encoding": "utf-16"}, **own)
    assert same(pair, read(own, csv={"encoding": "utf-16", "sep": r"\t"}))
    own = tables(decimal=",")  # between quotes
    fails(DataError, "data row 1, column a: ", "has a comma: of decimals, 'dataset.csv.decimal", **own)
    assert same(pair, read(own, csv={"decimal": ","}))
    for role in ("primary", "harmful"):
        Path(own[f"{role}_csv"]).write_text(Path(own[f"{role}_csv"]).read_text().replace('"', ""))
    fails(DataError, "line 2: 12 fields, the header has 6", "write decimal points", **own)
    Path(own["primary_csv"]).write_text("x,target\n\n")
    fails(DataError, "has no rows below a header line", **own)


@pytest.mark.parametrize("csv", [{"sep": ";;"}, {"decimal": None}, {"engine": "python"}, {"encoding": "no such"}])
def test_dialects_that_are_none_are_refused(tables, csv):
    fails(ConfigError, f"dataset.csv.{next(iter(csv))}", csv=csv, **tables())


def test_names_of_further_tasks_and_of_what_is_not_read(matrices, stored, caplog):
    names = {"Cats": 1, "b.c-2": 2}
    further = {f"harmful_{name}_{end}": matrices[f"primary_{end}"] + by for name, by in names.items() for end in "xy"}
    other = {"harmful2_x": np.ones((3, 5)), "unsen_y": np.ones(3), "ids": np.arange(60)}
    assert {"harmful_Cats", "harmful_b.c-2"} <= set(read(stored(further | other)).tasks)
    told = "not read are harmful2_x (closest name: harmful_x), unsen_y (closest name: unseen_y), ids; tasks are primary"
    assert told in caplog.text
    caplog.clear()
    read(stored(primary_x_mean=np.ones(5), harmful_test=np.ones(3)))
    assert "not read are primary_x_mean (closest name: primary_x), harmful_test (closest name: harmful_t" in caplog.text
    read(stored(harmful_x_mean=np.ones(5), classes_harmful_y=np.ones(3)))
    assert "not read are harmful_x_mean" in caplog.text


@pytest.mark.parametrize("base", [0, 2**53, 2**62])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, ">i8"])
def test_class_labels_keep_all_their_digits(matrices, stored, tables, base, dtype):
    matrices["harmful_y"] = (np.arange(80) % 3 + base).astype(dtype)
    for own in (stored(), tables()):
        assert read(own).about["labels"]["harmful"] == f"classes {[base, base + 1, base + 2]} coded 0 to 2"


def test_targets_of_a_table_beyond_int64(matrices, tables):
    matrices["harmful_y"] = np.arange(80, dtype=np.uint64) % 2 + 2**63
    fails(DataError, "harmful.csv", "integers above 2^53", "number classes", **tables())
    matrices["harmful_y"] = np.array([2**64, 2**64 + 1] * 40, dtype=object)
    fails(DataError, "harmful.csv", "an integer above 2^64", **tables())
    matrices |= {"primary_y": matrices["primary_y"] * 1e20, "harmful_y": matrices["harmful_y"] > 2**64}
    pair = read(tables())
    assert (pair.primary.classes, pair.harmful.classes) == (0, 2)  # large floats and booleans


def test_float_targets_that_may_be_labels_are_said_to_be_a_regression(stored, caplog):
    for targets, values in ((np.arange(80) % 2 + 0.5, 2), (np.arange(80) % 7.0, 7)):
        caplog.clear()
        assert read(stored(harmful_y=targets)).harmful.classes == 0
        told = f"the targets of harmful ({values} values) are floats, taken as regression; for labels set"
        assert [record.getMessage() for record in caplog.records] == [f"{told} dataset.targets=classes"]
    caplog.clear()
    assert read(stored(harmful_y=np.arange(80) % 7 + 0.5)).harmful.classes == 0
    two = stored(harmful_y=np.arange(80) % 2.0, primary_y=np.arange(60) % 2.0)
    assert [read(two, targets=targets).harmful.classes for targets in ("classes", "regression")] == [2, 0]
    assert not caplog.records


def test_equal_tasks_are_refused(matrices, stored, tables):
    order = np.random.default_rng(2).permutation(60)
    copy = {"harmful_x": matrices["primary_x"][order], "harmful_y": matrices["primary_y"][order]}
    fails(DataError, "harmful task and the primary task share rows", **stored(copy))
    benign = stored(benign_x=matrices["harmful_x"], benign_y=matrices["harmful_y"])
    fails(DataError, "benign task and the harmful task share rows", **benign)
    labels = {"harmful_x": matrices["primary_x"], "harmful_y": np.arange(60) % 2, "primary_y": np.arange(60) // 2 % 2}
    assert read(stored(labels)).dim == 5  # the same inputs with other labels
    own = tables()
    fails(
        ConfigError, "primary.csv is both the primary and the harmful task", **own | {"harmful_csv": own["primary_csv"]}
    )


@pytest.mark.trains
def test_a_run_on_many_float32_rows_has_the_kappa_of_the_data(stored, tmp_path):
    """max(N, D) eps cut 1e6 and 2.5e5 to 2e5 or less, with only `rank_deficient` flags."""
    draw, inexact = np.random.default_rng(0), {}
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(10, 10)))[0]
    kappa = {"primary": 1e6, "harmful": 2.5e5}
    for role in kappa:
        x = draw.normal(size=(20_000, 10)) * np.logspace(0, -np.log10(kappa[role]) / 2, 10) @ rotation.T
        inexact |= {f"{role}_x": x.astype(np.float32), f"{role}_y": x[:, 0] + draw.normal(size=len(x))}
    options = ["dataset=arrays", "dataset.normalize=none", "method=identity", "tracker=none", "figures=false"]
    options += [f"dataset.path={stored(inexact)['path']}", "evaluation=[rir]"]
    result = run(options, folder=tmp_path / "run")
    for role, value in kappa.items():
        assert result.metrics[f"kappa_{role}_baseline"] == pytest.approx(value, rel=0.05)
        assert result.metrics[f"rank_{role}"] == 10
    assert not result.flags
