"""The user's own matrices, as npz, safetensors or CSV."""

import zipfile

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


def test_arrays_of_16_bits_are_said_to_show_no_large_condition_number(matrices, tmp_path, caplog):
    path = save(tmp_path, matrices | {"harmful_x": matrices["harmful_x"].astype(np.float16)})["path"]
    assert data.arrays(0, path, normalize="none").harmful.eps == 2.0**-10
    assert "'harmful_x' in" in caplog.text
    assert "has 16 bits, which show no condition number above 1e+06; store float32" in caplog.text


def test_what_was_rounded_beside_a_large_mean_is_coarser_without_it(tmp_path):
    """Sums of two columns, rounded to float32 at 1e4 +- 1, are no directions of their own; columns of integers are."""
    draw = np.random.default_rng(0)
    stored = {}
    for role in ("primary", "harmful"):
        x = 1e4 + draw.normal(0, 1, (500, 3))
        years = draw.integers(100_000, 100_010, (500, 1))
        x = np.concatenate([x, x[:, :1] + x[:, 1:2], years, years + draw.integers(0, 2, (500, 1))], 1)
        stored |= {f"{role}_x": x.astype(np.float32), f"{role}_y": draw.normal(0, 1, 500)}
    for normalize in ("shared", "each"):
        pair = data.arrays(0, save(tmp_path, stored)["path"], normalize=normalize)
        assert {task.rank for task in pair.tasks.values()} == {5}
    counted = {key: np.round(x) if key.endswith("_x") else x for key, x in stored.items()}
    exact = data.arrays(0, save(tmp_path, counted)["path"])
    assert {(task.eps, task.rank) for task in exact.tasks.values()} == {(2.0**-52, 6)}


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


@pytest.mark.parametrize(("scale", "size"), [(1e-200, "small"), (1e200, "large")])
def test_values_whose_squares_leave_the_range_of_floats(matrices, tmp_path, scale, size):
    inputs = {f"{role}_x": matrices[f"{role}_x"] * scale for role in ("primary", "harmful")}
    told = f"column 0 are so {size} that their squares leave the range of float64; rescale the data"
    stored = save(tmp_path, matrices | inputs)
    fails(DataError, f"the inputs: the values of {told}", **stored)
    fails(DataError, f"the inputs of primary: the values of {told}", **stored, normalize="each")
    targets = save(tmp_path, matrices | {"primary_y": matrices["primary_y"] * scale})
    fails(DataError, f"the targets of primary: the values of {told}", **targets)


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


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_an_npz_file_that_claims_more_than_it_holds_is_refused_before_it_is_read(matrices, tmp_path, version):
    stored, claimed = save(tmp_path, matrices), {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    write = np.lib.format.write_array_header_1_0 if version == (1, 0) else np.lib.format.write_array_header_2_0
    del matrices["harmful_x"]
    save(tmp_path, matrices)
    with zipfile.ZipFile(stored["path"], "a") as archive, archive.open("harmful_x.npy", "w") as member:
        write(member, claimed)
        member.write(b"\0" * 80)
    told = "'harmful_x' claims float64 [1000000, 1000000], 8,000,000,000,000 bytes, and holds 80"
    fails(DataError, "m.npz", told, **stored)


def test_an_npz_file_that_memory_has_no_room_for_is_refused(matrices, tmp_path, monkeypatch):
    stored, size = save(tmp_path, matrices), sum(array.nbytes for array in matrices.values())
    monkeypatch.setattr(machine, "memory", lambda device: 2 * size)
    assert data.arrays(0, stored["path"]).dim == 5
    monkeypatch.setattr(machine, "memory", lambda device: 2 * size - 1)
    fails(DataError, "m.npz", "GiB of memory, and half of", **stored)


@pytest.fixture
def tables(matrices, tmp_path):
    """Writes both tasks as CSV files, by options of DataFrame.to_csv, and returns how to read them."""

    def write(**options):
        files = {f"{role}_csv": str(tmp_path / f"{role}.csv") for role in ("primary", "harmful")}
        for role in ("primary", "harmful"):
            frame = pd.DataFrame(matrices[f"{role}_x"], columns=list("abcde")).assign(target=matrices[f"{role}_y"])
            frame.to_csv(files[f"{role}_csv"], **options)
        return {"call": data.arrays, "seed": 0} | files

    return write


def called(stored):
    """The options among these."""
    return {key: value for key, value in stored.items() if key != "call"}


def test_row_numbers_are_no_input(tables):
    stored = tables()
    fails(DataError, "primary.csv", "column 1 has no name", "index=False", **stored)
    for role in ("primary", "harmful"):  # with what pandas calls that column when it reads it
        pd.read_csv(stored[f"{role}_csv"]).to_csv(stored[f"{role}_csv"], index=False)
    fails(DataError, "primary.csv", "column 1 has no name", "index=False", **stored)
    assert data.arrays(**called(tables(index=False))).dim == 5


def test_other_separators_and_decimal_commas_are_named_with_the_remedy(tables):
    pair = data.arrays(**called(tables(index=False)))
    commas = {"sep": ";", "decimal": ","}
    stored = tables(index=False, **commas)
    told = "its columns are separated by ';'"
    fails(DataError, told, "'dataset.csv.sep=\";\"'", "for decimal commas 'dataset.csv.decimal=\",\"'", **stored)
    assert same(pair, data.arrays(**called(stored), csv=commas))
    stored = tables(index=False, sep="\t", encoding="utf-16")
    fails(DataError, "primary.csv is no text in UTF-8", "dataset.csv.encoding=cp1252", **stored)
    fails(DataError, r"separated by '\t'", r"""'dataset.csv.sep="\t"'""", csv={"encoding": "utf-16"}, **stored)
    assert same(pair, data.arrays(**called(stored), csv={"encoding": "utf-16", "sep": r"\t"}))
    stored = tables(index=False, decimal=",")  # between quotes
    fails(DataError, "data row 1, column a: ", "has a comma: a decimal one, 'dataset.csv.decimal", **stored)
    assert same(pair, data.arrays(**called(stored), csv={"decimal": ","}))
    for role in ("primary", "harmful"):
        with open(stored[f"{role}_csv"]) as file:
            text = file.read().replace('"', "")
        with open(stored[f"{role}_csv"], "w") as file:
            file.write(text)
    fails(DataError, "line 2: 12 fields, the header has 6", "write decimal points", **stored)
    with open(stored["primary_csv"], "w") as file:
        file.write("x,target\n\n")
    fails(DataError, "has no rows below a header line", **stored)


@pytest.mark.parametrize("csv", [{"sep": ";;"}, {"decimal": None}, {"engine": "python"}, {"encoding": "no such"}])
def test_dialects_that_are_none_are_refused(tables, csv):
    fails(ConfigError, f"dataset.csv.{next(iter(csv))}", csv=csv, **tables(index=False))


def test_names_that_are_nearly_right_are_refused(matrices, tmp_path):
    renamed = {"Primary_x" if name == "primary_x" else name: value for name, value in matrices.items()}
    fails(DataError, "m.npz", "'Primary_x'", "rename it to 'primary_x'", **save(tmp_path, renamed))
    further = matrices | {"benign-X": matrices["primary_x"], "ids": np.arange(60)}
    fails(DataError, "'benign-X'", "rename it to 'benign_x'", **save(tmp_path, further))
    save_file({key: torch.from_numpy(value) for key, value in renamed.items()}, tmp_path / "m.safetensors")
    fails(DataError, "rename it to 'primary_x'", call=data.arrays, seed=0, path=str(tmp_path / "m.safetensors"))


def test_further_tasks_have_names_of_any_letters(matrices, tmp_path):
    names = {"Cats": 1, "b.c-2": 2}
    further = {f"harmful_{name}_{end}": matrices[f"primary_{end}"] + by for name, by in names.items() for end in "xy"}
    pair = data.arrays(0, save(tmp_path, matrices | further)["path"])
    assert {"harmful_Cats", "harmful_b.c-2"} <= set(pair.tasks)


def test_names_of_splits_that_are_not_ours_are_no_further_tasks(matrices, tmp_path, caplog):
    for name, meant in {"harmful_valid_x": "harmful_val_x", "harmful_train_y": "harmful_y"}.items():
        fails(DataError, f"'{name}'", f"rename it to '{meant}'", **save(tmp_path, matrices | {name: np.ones((3, 5))}))
    stored = save(tmp_path, matrices | {"harmful2_x": np.ones((3, 5)), "unsen_y": np.ones(3), "ids": np.arange(60)})
    data.arrays(0, stored["path"])
    assert "not read are harmful2_x, unsen_y; tasks are primary, harmful, benign, unseen" in caplog.text


@pytest.mark.parametrize("base", [0, 2**53, 2**62])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, ">i8"])
def test_class_labels_keep_all_their_digits(matrices, tables, tmp_path, base, dtype):
    matrices["harmful_y"] = (np.arange(80) % 3 + base).astype(dtype)
    pairs = [data.arrays(0, save(tmp_path, matrices)["path"])]
    pairs.append(data.arrays(**called(tables(index=False))))
    for pair in pairs:
        assert pair.about["labels"]["harmful"] == f"classes {[base, base + 1, base + 2]} coded 0 to 2"


def test_labels_beyond_int64_are_refused(matrices, tables, tmp_path):
    matrices["harmful_y"] = np.arange(80, dtype=np.uint64) % 2 + 2**63
    fails(DataError, "'harmful_y' holds integers above 2^63", "number classes", **save(tmp_path, matrices))
    fails(DataError, "harmful.csv", "integers above 2^53", "number classes", **tables(index=False))
    matrices["harmful_y"] = np.array([2**64, 2**64 + 1] * 40, dtype=object)
    fails(DataError, "harmful.csv", "integers above 2^53", "number classes", **tables(index=False))


def test_large_targets_of_a_regression_are_taken(matrices, tables):
    matrices["primary_y"] = matrices["primary_y"] * 1e20
    options = tables(index=False)
    assert options.pop("call")(**options).primary.classes == 0


def test_booleans_of_a_csv_file_are_classes_as_those_of_an_npz_file(matrices, tables, tmp_path):
    matrices["harmful_y"] = matrices["harmful_y"] > 0
    for stored in (save(tmp_path, matrices), tables(index=False)):
        assert data.arrays(**called(stored)).harmful.classes == 2


def test_float_targets_of_two_values_are_said_to_be_a_regression(matrices, tmp_path, caplog):
    labels = {"harmful_y": np.arange(80) % 2.0}
    path = save(tmp_path, matrices | labels)["path"]
    assert data.arrays(0, path).harmful.classes == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the targets of harmful are floats of two values, taken as regression")
    assert "dataset.targets=classes" in line
    caplog.clear()
    two = matrices | labels | {"primary_y": np.arange(60) % 2.0}
    assert data.arrays(0, save(tmp_path, two)["path"], targets="classes").harmful.classes == 2
    assert data.arrays(0, save(tmp_path, two)["path"], targets="regression").harmful.classes == 0
    assert not caplog.records


def test_equal_tasks_are_refused(matrices, tables, tmp_path):
    order = np.random.default_rng(2).permutation(60)
    copy = {"harmful_x": matrices["primary_x"][order], "harmful_y": matrices["primary_y"][order]}
    fails(DataError, "harmful task and the primary task share rows", **save(tmp_path, matrices | copy))
    benign = {"benign_x": matrices["harmful_x"], "benign_y": matrices["harmful_y"]}
    fails(DataError, "benign task and the harmful task share rows", **save(tmp_path, matrices | benign))
    labels = {"harmful_x": matrices["primary_x"], "harmful_y": np.arange(60) % 2, "primary_y": np.arange(60) // 2 % 2}
    assert data.arrays(0, save(tmp_path, matrices | labels)["path"]).dim == 5  # the same inputs with other labels
    stored = tables(index=False)
    stored["harmful_csv"] = stored["primary_csv"]
    fails(ConfigError, "primary.csv is both the primary and the harmful task", **stored)


@pytest.mark.trains
def test_a_run_on_many_float32_rows_has_the_kappa_of_the_data(tmp_path):
    """max(N, D) eps cut 1e6 and 2.5e5 to 2e5 or less, with only `rank_deficient` flags."""
    draw, stored, rotation = (
        np.random.default_rng(0),
        {},
        np.linalg.qr(np.random.default_rng(1).normal(size=(10, 10)))[0],
    )
    kappa = {"primary": 1e6, "harmful": 2.5e5}
    for role in kappa:
        x = draw.normal(size=(20_000, 10)) * np.logspace(0, -np.log10(kappa[role]) / 2, 10) @ rotation.T
        stored |= {f"{role}_x": x.astype(np.float32), f"{role}_y": x[:, 0] + draw.normal(size=len(x))}
    path = save(tmp_path, stored)["path"]
    options = ("dataset=arrays", "dataset.normalize=none", "method=identity", "tracker=none", "figures=false")
    found = run([*options, f"dataset.path={path}", "evaluation=[rir]"], folder=tmp_path / "run")
    for role, value in kappa.items():
        assert found.metrics[f"kappa_{role}_baseline"] == pytest.approx(value, rel=0.05)
        assert found.metrics[f"rank_{role}"] == 10
    assert not found.flags
