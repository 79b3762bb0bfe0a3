"""CSV files read strictly: a damaged row, a missing column or a field that is no number is an error, never a guess."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from immunization.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


POINTS = "decimal points (1.5)"


def read_table(path: Path) -> pd.DataFrame:
    """A CSV file with a header line; missing values stay the text they are written as.

    pandas fills a row that is cut short with NaN, so the fields of every row are counted first. A file cut off within
    its last field does not end with a line break. Raises DataError naming the file and the line.
    """
    import pandas as pd

    again = "the file is damaged or cut off, get it again"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _check_header(header, reader, path)
            rows = 0
            for row in reader:
                rows += bool(row)
                if row and len(row) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} fields, the header has {len(header)}; {again}"
                        + f", or write {POINTS} if its numbers have commas" * (len(row) > len(header))
                    )
        if len(set(header)) < len(header):
            raise DataError(f"{path}: the header names a column twice; give every column a name of its own")
        if not header or not rows:
            raise DataError(f"{path} has no rows below a header line; {again}")
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() not in (b"\n", b"\r"):
                raise DataError(
                    f"{path} does not end with a line break, so its last row may be cut off; "
                    "get the file again, or add the line break if the row is whole"
                )
        old = tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1)  # there the default may miss the last bit
        exact: Any = {"float_precision": "round_trip"} if old else {}
        return pd.read_csv(path, na_filter=False, low_memory=False, encoding="utf-8-sig", **exact)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a CSV file in UTF-8: {error}") from error


def _check_header(header: Sequence[str], rows: Iterator[Sequence[str]], path: Path) -> None:
    """Raise DataError for columns that are not separated by commas, and for one without a name."""
    separator = next((mark for mark in ";\t" if len(header) == 1 and mark in header[0]), None)
    if separator:
        found, how = f"columns are separated by {separator!r}", f"sep={separator!r}"
        if len(next(rows, [])) > 1:
            found, how = f"{found} and numbers have decimal commas", f"{how}, decimal=','"
        raise DataError(
            f"{path}: its {found}; write commas and points, pandas.read_csv(file, {how}).to_csv(file, index=False)"
        )
    # pandas calls a column that it has read without a name Unnamed
    unnamed = next((i for i, name in enumerate(header, 1) if re.fullmatch(r"\s*|Unnamed: \d+", name)), None)
    if unnamed:
        raise DataError(
            f"{path}: column {unnamed} has no name in the header; row numbers, as DataFrame.to_csv writes them, are no "
            "input: write the file with index=False, or give the column a name"
        )


def require_columns(table: pd.DataFrame, columns: Sequence[str], path: Path, remedy: str = "") -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise DataError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}{remedy}")


def numbers(table: pd.DataFrame, columns: Sequence[str], path: Path, missing: Sequence[str] = ()) -> np.ndarray:
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
        text = str(value).strip()
        remedy = "; fill in the value, or leave the row out"
        if re.fullmatch(r"[+-]?\d*,\d+", text):
            remedy = f"; write {POINTS}"
        elif text[:1].isalpha() and text.lower() not in ("nan", "inf", "infinity"):
            remedy = "; encode text as numbers (classes as 0, 1, ...), or leave out a column of inputs"
        raise DataError(
            f"{path}, data row {table.index[i] + 1}, column {columns[j]}: '{value}' is not a finite number{remedy}"
        )
    return parsed
