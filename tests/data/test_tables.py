"""Tables with text, dates, booleans and missing values, from files and from Python."""

import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.pairs import fails, same
from sklearn import datasets

from immunization import data, run
from immunization.compute import machine
from immunization.errors import ConfigError, DataError

TOLD = (
    "columns encoded: 1 of categories, as 3 of 0 and 1; 1 of dates, as days since 1970-01-01; 1 of booleans, as 0 and 1"
)
N = 60


def frame(seed, **more):
    """A table of every kind of column, its target the text `label`."""
    draw = np.random.default_rng(seed)
    columns = {
        "when": pd.date_range(f"202{seed}-01-01", periods=N).strftime("%Y-%m-%d"),
        "amount": draw.normal(size=N),
        "member": draw.random(N) > 0.5,
        "city": draw.choice(["Köln", "Paris", "Rom"], N),
        "label": draw.choice(["ja", "nein"], N),
    }
    return pd.DataFrame(columns).assign(**more)


@pytest.fixture
def frames():
    return {"primary": frame(0), "harmful": frame(1)}


def read(frames, **options):
    return data.arrays(0, tables=frames, **{"target": "label", "normalize": "none"} | options)


def refused(error, *parts, frames, **options):
    fails(error, *parts, call=read, frames=frames, **options)


def whole(task):
    """Inputs and targets of all splits in the order of the table."""
    rows = torch.cat([split.origin.rows for split in task.splits.values()]).argsort()
    return torch.cat([s.x for s in task.splits.values()])[rows], torch.cat([s.y for s in task.splits.values()])[rows]


def test_every_kind_of_column_has_the_right_numbers_and_is_counted(frames, caplog):
    pair = read(frames)
    assert pair.about["columns"] == ["when", "amount", "member", "city_Köln", "city_Paris", "city_Rom"]
    for role, task in pair.tasks.items():
        table, (x, y) = frames[role], whole(task)
        days = (pd.to_datetime(table.when) - pd.Timestamp("1970-01-01")).dt.days
        cities = [table.city == city for city in ("Köln", "Paris", "Rom")]
        expected = np.stack([days, table.amount, table.member, *cities], 1).astype(float)
        assert torch.equal(x, torch.from_numpy(expected))
        assert y.tolist() == (table.label == "nein").astype(int).tolist()
        assert pair.about["labels"][role] == "classes ['ja', 'nein'] coded 0 to 1"
    assert f"{TOLD}; beside 1 of numbers" in caplog.text


def test_dates_are_days_however_they_are_given():
    days = [18262.0, 18262.5]
    for given in (
        ["2020-01-01", "2020-01-01T12:00:00"],
        ["2020-01-01 02:00+02:00", "2020-01-01 12:00Z"],
        pd.to_datetime(["2020-01-01 00:00", "2020-01-01 12:00"]),
        pd.to_datetime(["2020-01-01 02:00", "2020-01-01 14:00"]).tz_localize("Europe/Athens"),
        pd.to_timedelta([18262, 18262.5], unit="D"),
        pd.period_range("2020-01-01", periods=2, freq="12h"),
        [pd.Timestamp("2020-01-01").to_pydatetime(), pd.Timestamp("2020-01-01 12:00").to_pydatetime()],
    ):
        pair = read({role: frame(seed, when=list(given) * (N // 2)) for role, seed in (("primary", 0), ("harmful", 1))})
        assert whole(pair.primary)[0][:, 0].tolist() == days * (N // 2)


def test_scaling_and_filling_are_of_the_training_rows(frames):
    for table in frames.values():
        table.loc[::7, "amount"] = np.nan
        table.loc[::9, "city"] = None
    for normalize in ("shared", "each"):
        pair = read(frames, missing="mean", normalize=normalize)
        assert "city_(missing)" in pair.about["columns"]
        raw = read(frames, missing="mean", normalize="each" if normalize == "each" else "none")
        train = {role: frames[role].loc[task.train.origin.rows.tolist(), "amount"] for role, task in pair.tasks.items()}
        both = pd.concat(train.values())
        for role, task in pair.tasks.items():
            mean = (train[role] if normalize == "each" else both).mean()
            gaps = torch.from_numpy(frames[role].amount.isna().to_numpy(copy=True))
            filled = whole(raw.tasks[role])[0][gaps, 1]
            if normalize == "each":
                filled = filled * raw.tensors[f"{role}/std"][1] + raw.tensors[f"{role}/mean"][1]
            torch.testing.assert_close(filled, torch.full_like(filled, mean))
            if normalize == "each":
                torch.testing.assert_close(task.train.x[:, 1].mean(), torch.tensor(0.0, dtype=torch.float64))


def test_missing_values_are_refused_unless_something_is_to_be_done_with_them(frames, caplog):
    frames["harmful"].loc[[3, 5], "amount"] = np.nan
    frames["harmful"].loc[5, "city"] = None
    told = (
        "tables['harmful'] misses 3 values in 2 of 60 rows, in amount (2), city (1); set dataset.missing=mean or median"
    )
    refused(DataError, told, frames=frames)
    pair = read(frames, missing="drop")
    assert "rows left out: tables['harmful']: 2 of 60, in amount (2), city (1)" in caplog.text
    rows = torch.cat([split.origin.rows for split in pair.harmful.splits.values()]).sort().values
    assert rows.tolist() == [row for row in range(N) if row not in (3, 5)]
    x = whole(pair.harmful)[0]
    assert x[:, 1].tolist() == frames["harmful"].amount.drop([3, 5]).tolist()
    read(frames, missing="median")
    assert (
        "2 by the median of the training rows and 1 as the category (missing), in amount (2), city (1)" in caplog.text
    )
    frames["harmful"].loc[7, "label"] = None
    refused(DataError, "label (1)", "targets are not filled), or dataset.missing=drop", frames=frames, missing="mean")
    assert len(whole(read(frames, missing="drop").harmful)[0]) == N - 3


def test_categories_of_no_training_row_are_all_zero_and_counted(frames, caplog):
    row = read(frames).harmful.test.origin.rows[0].item()
    frames["harmful"].loc[row, "city"] = "Oslo"
    pair = read(frames)
    assert pair.harmful.test.x[0, 3:].tolist() == [0, 0, 0]
    assert "categories of no training row: 1 values, all 0, in city (1)" in caplog.text


@pytest.mark.parametrize(
    ("column", "parts"),
    [
        ({"when": ["31.12.2020"] * N}, ("data row 1, column when: '31.12.2020' is no date as in 2024-12-31",)),
        ({"when": ["2020-13-01"] + ["2020-12-01"] * (N - 1)}, ("data row 1, column when: '2020-13-01' is no date",)),
        ({"when": ["2020-12-01"] * 9 + ["later"] * (N - 9)}, ("row 10, column when: 'later' is no date, and 9 other",)),
        (
            {"amount": ["1"] * 9 + ["near"] + ["2"] * (N - 10)},
            ("data row 10, column amount: 'near' is no number", "59"),
        ),
        ({"amount": ["1,5"] * N}, ("'1,5' has a comma", "dataset.csv.decimal", "dataset.csv.thousands")),
        ({"amount": ["1", "2"] * (N // 2)}, ("column amount: '1' is text of a number", "astype(float)")),
        ({"amount": [np.inf] + [1.0] * (N - 1)}, ("data row 1, column amount: 'inf' is not finite",)),
        ({"amount": [1, "a"] * (N // 2)}, ("column amount: text and numbers", "dataset.drop=[amount]")),
        ({"amount": [1j] * N}, ("column amount: complex values",)),
        ({"city": [f"note {i}" for i in range(N)]}, ("city holds 60 different texts in 60 rows", "free text")),
        ({"city": [None] * N}, ("the column city has no value in any training row",)),
        ({"label": ["0", "1"] * (N // 2)}, ("column label: '0' is text of a number", "astype(int)")),
        ({"label": pd.date_range("2020-01-01", periods=N)}, ("the target label holds dates",)),
        ({"label": "ja"}, ("one class only, ja",)),
    ],
)
def test_columns_that_are_none_are_refused_with_what_to_do(column, parts):
    told = {"frames": {"primary": frame(0, **column), "harmful": frame(1, **column)}, "missing": "mean"}
    refused(DataError, *parts, **told)


def test_columns_of_different_kinds_or_names_are_refused(frames):
    odd = frames | {"harmful": frame(1, amount=["much", "little"] * (N // 2))}
    refused(DataError, "amount holds numbers in tables['primary'] and categories in tables['harmful']", frames=odd)
    odd = frames | {"harmful": frame(1, extra=1.0)}
    refused(DataError, "different columns: only one has extra", "dataset.drop=[extra]", frames=odd)
    assert read(odd, drop=["extra"]).dim == 6
    refused(ConfigError, "dataset.drop: there is no column nope; there are when, amount", frames=frames, drop=["nope"])
    meant = {"Primary": "primary", "primary_train": "primary", "harmful_x": "harmful"}
    for key, right in (meant | {"harmful_valid": "harmful_val", "test_primary": "primary_test"}).items():
        told = f"tables: {key!r} names no task; rename it to {right!r}; tasks are primary, harmful"
        refused(ConfigError, told, frames={key: frame(2)} | frames)
    refused(ConfigError, "'first' names no task; tasks are primary", frames={"first": frame(2)} | frames)
    refused(DataError, "tables lacks the DataFrame 'harmful'; it holds those of primary", frames={"primary": frame(0)})
    odd = frames | {"benign_test": frame(2)}
    refused(DataError, "lacks the DataFrame 'benign'; it holds those of primary, harmful, benign_test", frames=odd)
    refused(ConfigError, "was a DataFrame in Python; give it again", frames={"primary": "sha256-0"} | {"harmful": "x"})
    refused(
        ConfigError, "dataset.targets=regression: the targets of primary are text", frames=frames, targets="regression"
    )


def test_names_of_columns_that_are_not_one_text_each_are_refused(frames):
    levels = {role: table.set_axis(pd.MultiIndex.from_product([table, [""]]), axis=1) for role, table in frames.items()}
    refused(DataError, "tables['primary'] has column names of 2 levels, such as ('when', '')", frames=levels)
    flat = {
        role: table.set_axis(["_".join(map(str, name)) for name in table], axis=1) for role, table in levels.items()
    }
    assert same(read(flat, target="label_"), read(frames))  # as the message says
    twice = frames | {"harmful": frame(1, **{"1": 0.5}).assign(**{"x": 0.25}).rename(columns={"x": 1})}
    refused(ConfigError, "tables['harmful'] has several columns '1'", frames=twice)


@pytest.mark.parametrize("kind", ["int64", "bool", "float32", "float64", "uint8"])
@pytest.mark.parametrize("stored", [object, "Sparse"])
def test_columns_count_by_what_they_hold_however_they_are_stored(kind, stored):
    draw, native, other = np.random.default_rng(0), {}, {}
    for role in ("primary", "harmful"):
        values = {name: draw.choice([0, 1.1, 2.7], N).astype(kind) for name in ("a", "b", "label")}
        native[role] = pd.DataFrame(values).assign(c=draw.normal(size=N))
        kinds = dict.fromkeys(values, object if stored is object else pd.SparseDtype(kind))
        other[role] = native[role].astype(kinds)
        if stored is object and kind == "float32":  # pandas has made Python's floats of them
            objects = {name: pd.Series(list(own), dtype=object) for name, own in values.items()}
            other[role] = other[role].assign(**objects)
    expected, pair = (read(tables, targets="auto") for tables in (native, other))
    assert same(pair, expected)
    assert (pair.harmful.classes > 0) == (not kind.startswith("float"))
    assert (pair.about["labels"], pair.harmful.eps) == (expected.about["labels"], expected.harmful.eps)


def test_integer_labels_beside_missing_ones_are_those_of_the_file(tmp_path, caplog):
    """A DataFrame has floats where a label is missing: with the row left out they are integers again, as in CSV."""
    draw = np.random.default_rng(0)
    label = pd.Series(draw.choice([3, 5, 8], N), dtype="Int64").where(np.arange(N) != 4)
    whole = {role: pd.DataFrame({"x": draw.normal(size=N), "label": label}) for role in ("primary", "harmful")}
    kinds = {"file": "Int64", "floats": float, "objects": object}
    pairs = {}
    for name, kind in kinds.items():
        caplog.clear()
        tables = {role: table.astype({"label": kind}) for role, table in whole.items()}
        files = {f"{role}_csv": str(tmp_path / f"{role}.csv") for role in tables}
        for role, table in tables.items():
            table.to_csv(files[f"{role}_csv"], index=False)
        options = {"target": "label", "normalize": "none", "missing": "drop"}
        for source in (files, {"tables": tables}):
            pairs[name] = data.arrays(0, **source, **options)
            assert pairs[name].about["labels"] == dict.fromkeys(whole, "classes [3, 5, 8] coded 0 to 2")
            assert same(pairs[name], pairs["file"])
        told = "targets read as integers: tables['harmful']: label, whole numbers beside missing ones; labels unless"
        assert (told in caplog.text) == (name == "floats")
    assert read(tables, missing="drop", targets="regression").harmful.classes == 0
    tables["harmful"].loc[7, "label"] = 3.5
    assert [task.classes for task in read(tables, missing="drop").tasks.values()] == [3, 0]


def test_the_only_class_beside_rows_that_were_left_out_is_said_so(tmp_path):
    files = {f"{role}_csv": str(tmp_path / f"{role}.csv") for role in ("primary", "harmful")}
    for seed, path in enumerate(files.values()):
        table = frame(seed)
        table.assign(label=table.label.where(table.label == "ja", "NA")).to_csv(path, index=False)
    lost = (frame(0).label != "ja").sum()
    told = f"holds one class only, ja; give rows of two classes or more; {lost} rows without a label were left out"
    fails(DataError, told, "NA", call=data.arrays, seed=0, target="label", missing="drop", **files)


def test_listed_numbers_are_the_same_categories_beside_missing_ones(frames):
    codes = np.random.default_rng(0).choice([7, 10], N)
    tables = {role: table.assign(code=codes) for role, table in frames.items()}
    columns = read(tables, categorical=["code"]).about["columns"]
    tables["harmful"].loc[3, "code"] = np.nan  # which makes floats of the others
    pair = read(tables, categorical=["code"], missing="mean")
    assert pair.about["columns"] == [*columns[:-2], "code_(missing)", "code_10", "code_7"]
    assert columns[-2:] == ["code_10", "code_7"]


def test_listed_columns_are_categories_whatever_they_hold(tmp_path):
    codes = np.random.default_rng(0).choice(["007", "010", "10"], N)
    for role in (paths := {"primary": 0, "harmful": 1}):
        frame(paths[role], code=codes).to_csv(tmp_path / f"{role}.csv", index=False)
    files = {f"{role}_csv": str(tmp_path / f"{role}.csv") for role in paths}
    pair = data.arrays(0, **files, target="label", normalize="none", categorical=["code"])
    assert pair.about["columns"][-3:] == ["code_007", "code_010", "code_10"]
    assert torch.equal(
        whole(pair.primary)[0][:, -3:].argmax(1), torch.from_numpy(np.unique(codes, return_inverse=True)[1])
    )


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_files_of_every_kind_give_the_same_pair(frames, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    files = {f"{role}_csv": str(tmp_path / f"{role}.{suffix}") for role in frames}
    for role, table in frames.items():
        if suffix == "parquet":
            table.to_parquet(files[f"{role}_csv"])
        else:
            table.to_csv(files[f"{role}_csv"], index=False, encoding="utf-8-sig")
    assert same(read(frames), data.arrays(0, **files, target="label", normalize="none"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    files = {"primary_csv": str(tmp_path / "a.parquet"), "harmful_csv": "b.parquet"}
    fails(ConfigError, "a.parquet: parquet needs pyarrow; pip install", call=data.arrays, seed=0, **files)


def test_a_packed_table_is_as_whole_and_no_larger_than_there_is_room_for(frames, tmp_path, monkeypatch):
    files = {f"{role}_csv": str(tmp_path / f"{role}.csv.gz") for role in frames}
    for role, table in frames.items():
        table.to_csv(files[f"{role}_csv"], index=False)
    stored = {"call": data.arrays, "seed": 0, "target": "label"} | files
    monkeypatch.setattr(machine, "memory", lambda device: 2000)
    fails(DataError, "primary.csv.gz cannot be read as a table: it takes", "half of", **stored)
    monkeypatch.undo()
    path = tmp_path / "primary.csv.gz"
    path.write_bytes(path.read_bytes()[:-20])
    fails(DataError, "primary.csv.gz cannot be read as a table", **stored)
    path.unlink()
    fails(DataError, "primary.csv.gz cannot be read as a table: No such file or directory", **stored)


def test_a_target_of_another_name_in_each_table(frames):
    frames["harmful"] = frames["harmful"].rename(columns={"label": "answer"})
    names = {"primary": "label", "harmful": "answer"}
    assert read(frames, target=names).dim == 6
    refused(ConfigError, "dataset.target names no column for harmful", frames=frames, target={"primary": "label"})
    refused(DataError, "tables['harmful'] lacks the column label; set dataset.target", frames=frames)


def test_rows_for_test_have_a_table_of_their_own(frames):
    pair = read(frames | {"harmful_test": frame(2).head(9)})
    assert len(pair.harmful.test) == 9
    assert pair.harmful.test.origin.source == "harmful_test_x"
    assert pair.harmful.test.x[:, 1].tolist() == frame(2).amount.head(9).tolist()
    unknown = frames | {"harmful_test": frame(2, label="vielleicht")}
    refused(DataError, "holds the label vielleicht, which 'harmful_y' lacks", frames=unknown)


def test_columns_of_float32_set_the_epsilon(frames):
    pair = read({role: table.astype({"amount": "float32"}) for role, table in frames.items()})
    assert pair.primary.eps == torch.finfo(torch.float32).eps
    assert read(frames).primary.eps == torch.finfo(torch.float64).eps


@pytest.mark.trains
def test_tables_from_python_run_and_resume_by_their_content(frames, tmp_path):
    options = ["dataset=arrays", "dataset.target=label", "tracker=none", "figures=false", "method.epochs=1"]
    first = run([*options, "evaluation=[rir]"], tmp_path, tables=frames)
    assert first.about["columns"][-1] == "city_Rom"
    again = run([*options, "evaluation=[rir]", "resume=true"], tmp_path, tables=frames)
    assert again.metrics == first.metrics
    other = frames | {"harmful": frame(3)}
    with pytest.raises(ConfigError, match=r"dataset\.tables\.harmful: sha256-\w+ -> sha256-"):
        run([*options, "evaluation=[rir]", "resume=true"], tmp_path, tables=other)
    with pytest.raises(ConfigError, match=r"there is no key dataset\.tables"):
        run(["dataset=digits"], tmp_path / "other", tables=frames)
    audit = ["experiment=audit", f"model.checkpoint={tmp_path}", "attack=[linear_probe]", *options[:4]]
    assert "attack/linear_probe/steps_ratio" in run(audit, tmp_path / "audit", tables=frames).metrics
    with pytest.raises(ConfigError, match="was a DataFrame in Python; give it again"):
        run(audit, tmp_path / "without")


@pytest.mark.parametrize(
    ("name", "dim", "classes"),
    [("load_iris", 4, 3), ("load_wine", 13, 3), ("load_breast_cancer", 30, 2), ("load_diabetes", 10, 0)],
)
def test_tables_of_scikit_learn(name, dim, classes, caplog):
    table = getattr(datasets, name)(as_frame=True).frame
    pair = data.arrays(0, tables={"primary": table.iloc[::2], "harmful": table.iloc[1::2]})
    assert (pair.dim, pair.primary.classes) == (dim, classes)
    assert not re.search("columns encoded|values filled", caplog.text)


def test_house_prices_as_they_come(data_dir):
    table = pd.read_csv(data_dir / "house_prices" / "train.csv")
    halves = {"primary": table[table.MSZoning != "RL"], "harmful": table[table.MSZoning == "RL"]}
    options = {"target": {"primary": "LotArea", "harmful": "SalePrice"}, "drop": ["LotArea", "SalePrice", "Id"]}
    refused(
        DataError, "tables['primary'] misses 1765 values in 309 of 309 rows", "PoolQC (309)", frames=halves, **options
    )
    pair = read(halves, missing="mean", targets="regression", **options)
    numbers = int(table[["LotFrontage", "MasVnrArea", "GarageYrBlt"]].isna().sum().sum())
    text = int(table.isna().sum().sum()) - numbers
    told = f"{numbers} by the mean of the training rows and {text} as the category (missing), in PoolQC (1,453), "
    assert pair.about["values filled"].startswith(told)
    assert len(whole(pair.primary)[0]) + len(whole(pair.harmful)[0]) == 1460
