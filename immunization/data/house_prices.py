"""House Prices (Kaggle, Ames in Iowa): D_P predicts LotArea outside of zone RL, D_H predicts SalePrice inside of it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from immunization.checks import Fraction, Seed, checked
from immunization.data.preparation import (
    check_training_rows,
    fetched,
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
from immunization.theory.spectrum import EPS, EPS32

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
# "None" is a level of MasVnrType, but pandas from 2.0 on reads it as missing, and so do the published numbers.
MISSING = ("", "NA", "None")
KAGGLE = "https://www.kaggle.com/c/house-prices-advanced-regression-techniques/data"
AUTHORS = {"train": slice(0, 200), "val": slice(200, 250), "test": slice(250, 300)}
PROTOCOLS = {
    "full": "full: all rows; splits drawn at random, by seed, within each task",
    "authors": "authors: rows 0-199 of each task train, 200-249 validate, 250-299 test (the release: 200-299)",
}
NORMALIZED = {
    "shared": "shared: mean and std (ddof = 1) of the training rows of both tasks together",
    "each": "each: mean and std (ddof = 1) of each task's training rows",
    "authors": "each: mean and std (ddof = 1) of all rows of each task, targets too; then rounded to float32",
}


@checked("dataset/house_prices")
def house_prices(
    seed: Seed,
    root: str,
    download: bool,
    protocol: Literal["full", "authors"],
    normalize: Literal["shared", "each"],
    keep_id: bool,
    val_fraction: Fraction,
    test_fraction: Fraction,
    common_range: bool,
    name: str,
) -> TaskPair:
    """The regressions of the paper's Sec. 5.1, by conf/dataset/house_prices.yaml; raises ConfigError, DataError."""
    check_training_rows(val_fraction, test_fraction)
    path, authors = Path(root).expanduser() / "train.csv", protocol == "authors"
    if not path.is_file():
        fetched(
            lambda: _download(path), path, f"get train.csv from {KAGGLE} and set dataset.root to its folder", download
        )
    table = read_table(path, na_filter=False)
    require_columns(table, [*NUMERIC, *CATEGORICAL, *TARGETS.values()], path)
    harmful = table["MSZoning"] == "RL"
    halves = {"primary": table[~harmful], "harmful": table[harmful]}
    for half, zone in zip(halves.values(), ("other than RL", "RL"), strict=True):
        if len(half) < (least := AUTHORS["test"].stop if authors else 1):
            raise DataError(
                f"{path} has {len(half)} rows with MSZoning {zone}, dataset.protocol={protocol} needs {least}"
            )
    numbers = {role: torch.from_numpy(half.index.to_numpy(copy=True)) for role, half in halves.items()}
    columns = [c for c in table if c in {*NUMERIC, *CATEGORICAL} and (keep_id or authors or c != "Id")]
    together = normalize == "shared" and not authors
    whole = _encoded(table, columns, path) if together else None
    generator, tensors, tasks = torch.Generator().manual_seed(seed), {}, {}
    for role, half in halves.items():
        x, y = whole[numbers[role]] if together else _encoded(half, columns, path), _finite(half[[TARGETS[role]]], path)
        if authors:
            (mean, std), (y_mean, y_std) = moments(x), moments(y)
            x, y = ((x - mean) / std).float().double(), ((y - y_mean) / y_std).float().double()
            tensors |= {f"{role}/mean": mean, f"{role}/std": std}
            tensors |= {f"{role}/target_mean": y_mean[0], f"{role}/target_std": y_std[0]}
            rows = {split: torch.arange(len(x))[part] for split, part in AUTHORS.items()}
        else:
            rows = split_rows(torch.zeros(len(x), dtype=torch.int64), val_fraction, test_fraction, generator)
        splits = {s: Split(x[i], y[i, 0], Origin("train.csv", numbers[role][i])) for s, i in rows.items()}
        tasks[role] = Task(TASKS[role], **splits, eps=EPS32 if authors else EPS)
    fitted = "both tasks together" if together else "each task by itself"
    about = {
        "data": f"House Prices, {len(table)} rows",
        "protocol": PROTOCOLS[protocol],
        "normalize": NORMALIZED["authors" if authors else normalize],
        "label_codes": f"order of the sorted strings, fitted on all rows of {fitted}",
        "missing": "0 (numbers), the string '0' before coding (categories)",
    }
    pair = TaskPair(name, **tasks, about=about, tensors=tensors)
    if authors:
        pair.about.update(dropped=[], columns=columns)
        return finish(pair, common_range)
    varies = (both := torch.cat([task.train.x for task in tasks.values()])).ne(both[0]).any(0)
    constant = [c for c, keep in zip(columns, varies, strict=True) if not keep]
    pair.about.update(
        dropped=[*([] if keep_id else ["Id"]), *constant], columns=[c for c in columns if c not in constant]
    )
    pair = map_inputs(pair, lambda _, x: x[:, varies])
    return finish(standardize_targets(standardize(pair, normalize)), common_range)


def _encoded(table: pd.DataFrame, columns: list[str], path: Path) -> Tensor:
    """Columns as float64 [rows, columns]: numbers, 0 where missing; categories as codes of the sorted strings."""
    filled = table[columns].astype(object).mask(table[columns].isin(MISSING), "0")
    words = [column for column in columns if column in CATEGORICAL]
    codes = filled[words].astype(str).apply(lambda field: field.factorize(sort=True)[0])
    return _finite(filled.assign(**codes), path)


def _finite(table: pd.DataFrame, path: Path) -> Tensor:
    """Columns as float64 [rows, columns]. Raises DataError for text, NaN or infinity."""
    import pandas as pd

    numbers = table.apply(pd.to_numeric, errors="coerce").to_numpy(float)
    if len(wrong := np.argwhere(~np.isfinite(numbers))):
        i, j = wrong[0]
        raise DataError(
            f"{path}, data row {table.index[i] + 1}, column {table.columns[j]}: '{table.iloc[i, j]}' is not a finite "
            "number; correct it"
        )
    return torch.tensor(numbers)


def _download(path: Path) -> None:
    """Write OpenML's copy of the table."""
    from sklearn.datasets import fetch_openml

    with warnings.catch_warnings(action="ignore"):  # of every further try
        table = fetch_openml(name="house_prices", version=1, as_frame=True).frame
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    table.to_csv(partial, index=False, na_rep="NA")
    partial.replace(path)
