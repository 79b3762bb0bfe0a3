"""House Prices (Kaggle, Ames in Iowa): D_P predicts LotArea outside of zone RL, D_H predicts SalePrice inside of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from immunization.checks import Fraction, Seed, checked
from immunization.data.preparation import (
    check_training_rows,
    finish,
    map_inputs,
    moments,
    split_rows,
    standardize,
    standardize_targets,
)
from immunization.data.tables import read_table, require_columns
from immunization.data.task import Origin, Split, Task, TaskPair
from immunization.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

TARGETS = {"primary": "LotArea", "harmful": "SalePrice"}
TASKS = {"primary": "LotArea outside of zone RL", "harmful": "SalePrice in zone RL"}
NUMERIC = """
    Id MSSubClass LotFrontage OverallQual OverallCond YearBuilt YearRemodAdd MasVnrArea BsmtFinSF1 BsmtFinSF2 BsmtUnfSF
    TotalBsmtSF 1stFlrSF 2ndFlrSF LowQualFinSF GrLivArea BsmtFullBath BsmtHalfBath FullBath HalfBath BedroomAbvGr
    KitchenAbvGr TotRmsAbvGrd Fireplaces GarageYrBlt GarageCars GarageArea WoodDeckSF OpenPorchSF EnclosedPorch
    3SsnPorch ScreenPorch PoolArea MiscVal MoSold YrSold
""".split()  # noqa: SIM905
CATEGORICAL = """
    MSZoning Street Alley LotShape LandContour Utilities LotConfig LandSlope Neighborhood Condition1 Condition2 BldgType
    HouseStyle RoofStyle RoofMatl Exterior1st Exterior2nd MasVnrType ExterQual ExterCond Foundation BsmtQual BsmtCond
    BsmtExposure BsmtFinType1 BsmtFinType2 Heating HeatingQC CentralAir Electrical KitchenQual Functional FireplaceQu
    GarageType GarageFinish GarageQual GarageCond PavedDrive PoolQC Fence MiscFeature SaleType SaleCondition
""".split()  # noqa: SIM905
# "None" is a level of MasVnrType, but pandas from 2.0 on reads it as missing, and so do the published figures.
MISSING = ("", "NA", "None")
FILLED = "0 (numbers), the string '0' before coding (categories)"
CODES = "order of the sorted strings, fitted on all rows "


@checked("dataset")
def house_prices(
    seed: Seed,
    root: str = "~/.cache/immunization/house_prices",
    download: bool = True,
    protocol: Literal["full", "authors"] = "full",
    normalize: Literal["shared", "each"] = "shared",
    keep_id: bool = False,
    val_fraction: Fraction = 0.1,
    test_fraction: Fraction = 0.2,
    common_range: bool = False,
    name: str = "house_prices",
) -> TaskPair:
    """The regressions of the paper's Sec. 5.1, by conf/dataset/house_prices.yaml; raises ConfigError, DataError."""
    check_training_rows(val_fraction, test_fraction)
    path = _find(Path(root).expanduser(), download)
    table = read_table(path, na_filter=False)
    require_columns(table, [*NUMERIC, *CATEGORICAL, *TARGETS.values()], path)
    harmful = (table["MSZoning"] == "RL").to_numpy(copy=True)
    halves = {"primary": table[~harmful], "harmful": table[harmful]}
    for half, zone in zip(halves.values(), ("other than RL", "RL"), strict=True):
        if half.empty:
            raise DataError(f"{path} has no rows with MSZoning {zone}: one of the two tasks is empty")
    targets = {role: torch.from_numpy(_numbers(half, [TARGETS[role]], path)[:, 0]) for role, half in halves.items()}

    if protocol == "authors":
        return finish(_authors(name, path, halves, targets), common_range)
    columns = [column for column in table if column in {*NUMERIC, *CATEGORICAL} and (keep_id or column != "Id")]
    if normalize == "shared":
        whole = _encode(table, columns, path)
        inputs = {"primary": whole[~harmful], "harmful": whole[harmful]}
    else:
        inputs = {role: _encode(half, columns, path) for role, half in halves.items()}
    generator = torch.Generator().manual_seed(seed)
    tasks = {}
    for role, x in inputs.items():
        rows = split_rows(torch.zeros(len(x), dtype=torch.int64), val_fraction, test_fraction, generator)
        splits = {s: Split(x[i], targets[role][i], _origin(halves[role], i)) for s, i in rows.items()}
        tasks[role] = Task(TASKS[role], **splits)
    x = torch.cat([task.train.x for task in tasks.values()])
    varies = (x != x[0]).any(0)
    about = {
        "data": f"House Prices, {len(table)} rows",
        "protocol": "full: all rows; splits drawn at random, by seed, within each task",
        "normalize": f"{normalize}: mean and std (ddof = 1) of "
        + ("the training rows of both tasks together" if normalize == "shared" else "each task's training rows"),
        "label_codes": CODES + ("of both tasks together" if normalize == "shared" else "of each task by itself"),
        "missing": FILLED,
        "dropped": ([] if keep_id else ["Id"]) + [c for c, keep in zip(columns, varies, strict=True) if not keep],
        "columns": [c for c, keep in zip(columns, varies, strict=True) if keep],
    }
    pair = map_inputs(TaskPair(name, **tasks, about=about), lambda _, x: x[:, varies])
    return finish(standardize_targets(standardize(pair, normalize)), common_range)


def _authors(name: str, path: Path, halves: dict[str, pd.DataFrame], targets: dict[str, torch.Tensor]) -> TaskPair:
    """The release's preparation: all 79 features, each half by the moments of all its rows, in float32."""
    columns = [column for column in halves["primary"] if column not in TARGETS.values()]
    bounds = {"train": slice(0, 200), "val": slice(200, 250), "test": slice(250, 300)}
    tasks, tensors = {}, {}
    for role, half in halves.items():
        if len(half) < 300:
            raise DataError(f"{path}: dataset.protocol=authors needs 300 rows of each task, '{role}' has {len(half)}")
        x, y = _encode(half, columns, path), targets[role]
        (mean, std), (y_mean, y_std) = moments(x), moments(y[:, None])
        x, y = ((x - mean) / std).float().double(), ((y - y_mean) / y_std).float().double()
        splits = {split: Split(x[rows], y[rows], _origin(half, rows)) for split, rows in bounds.items()}
        tasks[role] = Task(TASKS[role], **splits, eps=torch.finfo(torch.float32).eps)
        tensors |= {f"{role}/mean": mean, f"{role}/std": std}
        tensors |= {f"{role}/target_mean": y_mean[0], f"{role}/target_std": y_std[0]}
    about = {
        "data": f"House Prices, {sum(map(len, halves.values()))} rows",
        "protocol": "authors: rows 0-199 of each task train, 200-249 validate, 250-299 test (the release: 200-299)",
        "normalize": "each: mean and std (ddof = 1) of all rows of each task, targets too; then rounded to float32",
        "label_codes": CODES + "of each task by itself",
        "missing": FILLED,
        "dropped": [],
        "columns": columns,
    }
    return TaskPair(name, **tasks, about=about, tensors=tensors)


def _origin(half: pd.DataFrame, rows: torch.Tensor | slice) -> Origin:
    return Origin("train.csv", torch.from_numpy(half.index.to_numpy(copy=True))[rows])


def _encode(table: pd.DataFrame, columns: list[str], path: Path) -> torch.Tensor:
    """Columns as float64 [rows, columns]: numbers, 0 where missing; categories as codes of the sorted strings."""
    x = np.empty((len(table), len(columns)))
    for j, column in enumerate(columns):
        if column in NUMERIC:
            x[:, [j]] = _numbers(table, [column], path, MISSING)
        else:
            text = table[column].astype(str)
            x[:, j] = np.unique(text.mask(text.isin(MISSING), "0").to_numpy(str), return_inverse=True)[1]
    return torch.from_numpy(x)


def _numbers(table: pd.DataFrame, columns: Sequence[str], path: Path, missing: Sequence[str] = ()) -> np.ndarray:
    """Columns as float64 [rows, columns]; texts in `missing` are 0; other text, NaN or infinity is an error."""
    import pandas as pd

    parsed = np.empty((len(table), len(columns)))
    for j, name in enumerate(columns):
        field = table[name]
        if not pd.api.types.is_numeric_dtype(field):
            field = field.mask(field.isin(missing), "0")
        parsed[:, j] = pd.to_numeric(field, errors="coerce")
    bad = np.argwhere(~np.isfinite(parsed))
    if len(bad):
        i, j = bad[0]
        value = table[columns[j]].iloc[i]
        raise DataError(
            f"{path}, data row {table.index[i] + 1}, column {columns[j]}: '{value}' is not a finite number; correct it"
        )
    return parsed


def _find(root: Path, download: bool) -> Path:
    """`root`/train.csv; where it is absent and `download` is true, OpenML's copy of the table is written there."""
    path = root / "train.csv"
    if path.is_file():
        return path
    remedy = (
        "get train.csv from https://www.kaggle.com/c/house-prices-advanced-regression-techniques/data "
        "and set dataset.root to the folder that holds it"
    )
    if not download:
        raise DataError(f"{path} does not exist: {remedy}, or set dataset.download=true (OpenML)")
    from sklearn.datasets import fetch_openml

    try:
        with warnings.catch_warnings(action="ignore"):  # of every further try
            table = fetch_openml(name="house_prices", version=1, as_frame=True).frame
        root.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        table.to_csv(partial, index=False, na_rep="NA")
        partial.replace(path)
    except (OSError, ValueError) as error:  # URLError is an OSError, scikit-learn's OpenMLError a ValueError
        raise DataError(f"{path} does not exist and could not be had from OpenML ({error}): {remedy}") from error
    return path
