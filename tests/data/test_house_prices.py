"""House Prices: preparations, what is missing or damaged, and the published figures."""

import os
import urllib.error

import numpy as np
import pytest
import sklearn.datasets
import torch
from helpers.houses import make_table
from helpers.pairs import fails, same

from immunization import data
from immunization.data.house_prices import CATEGORICAL, NUMERIC
from immunization.errors import ConfigError, DataError


@pytest.fixture
def table():
    return make_table()


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
    fails(DataError, "dataset.protocol=authors needs 300", protocol="authors", **store(table[:600], tmp_path))


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


def test_real_house_prices_of_the_authors(data_dir):
    pair = data.house_prices(seed=0, root=str(data_dir / "house_prices"), download=False, protocol="authors")
    assert (pair.dim, len(pair.primary.train), len(pair.harmful.train)) == (79, 200, 200)
