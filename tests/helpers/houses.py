"""A stand-in for House Prices' train.csv."""

from pathlib import Path

import numpy as np
import pandas as pd

from immunization.data.house_prices import CATEGORICAL, NUMERIC


def make_table() -> pd.DataFrame:
    """Its columns, 700 random rows, some fields missing."""
    draw = np.random.default_rng(0)
    columns = {name: draw.integers(0, 50, 700) for name in [*NUMERIC, "LotArea", "SalePrice"]}
    columns |= {name: draw.choice(["a", "b", "NA", "None"], 700) for name in CATEGORICAL}
    columns["MSZoning"] = np.where(np.arange(700) < 350, "RL", draw.choice(["RM", "FV"], 700))
    columns["Utilities"] = np.full(700, "AllPub")
    frame = pd.DataFrame(columns)
    frame["LotFrontage"] = frame["LotFrontage"].astype(str).where(draw.random(700) > 0.1, "NA")
    return frame


def write_table(folder: Path) -> None:
    make_table().to_csv(folder / "train.csv", index=False)
