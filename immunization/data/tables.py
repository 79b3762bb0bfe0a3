"""Tables read by pandas, strictly: a damaged row or a column without a name is an error, never a guess."""

from __future__ import annotations

import csv
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from immunization.compute.machine import check_room, memory
from immunization.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd

AGAIN = "the file is damaged or cut off, get it again"
DIALECT = {"sep": ",", "decimal": ".", "thousands": None, "encoding": "utf-8-sig"}


def dialect_of(given: Mapping[str, Any] | None) -> dict[str, str | None]:
    """`sep`, `decimal`, `thousands` and `encoding` as `dataset.csv` gives them; raises ConfigError for other values."""
    found = DIALECT | dict(given or {})
    found["sep"] = "\t" if found["sep"] == "\\t" else found["sep"]
    found["encoding"] = DIALECT["encoding"] if found["encoding"] in ("utf-8", "utf8") else found["encoding"]
    for key, value in found.items():
        single = isinstance(value, str) and (len(value) == 1 or key == "encoding")
        if key not in DIALECT or not (single or (value is None and key == "thousands")):
            kinds = "sep, decimal and thousands are one character each, encoding is a name such as cp1252"
            raise ConfigError(f"dataset.csv.{key}={value!r}: {kinds}")
    try:
        "".encode(str(found["encoding"]))
    except LookupError as error:
        raise ConfigError(f"dataset.csv.encoding={found['encoding']}: {error}") from error
    return found


def read_table(path: Path, dialect: Mapping[str, str | None] = DIALECT, **options: Any) -> pd.DataFrame:
    """A table with a header line, CSV (plain, or gzip as .gz) or .parquet. `options` are those of pandas.read_csv.

    Raises DataError naming the file and, where there is one, the line, and ConfigError for parquet without pyarrow.
    """
    import pandas as pd

    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        _check_lines(path, dialect)
        old = tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1)  # there the default may miss the last bit
        exact: Any = {"float_precision": "round_trip"} if old else {}
        packed = "gzip" if path.suffix == ".gz" else None
        return pd.read_csv(path, low_memory=False, compression=packed, **dialect, **exact, **options)
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8, or for dataset=arrays name its encoding, such as dataset.csv.encoding=cp1252"
        raise DataError(f"{path} is no text in {error.encoding.upper()}: {error.reason}; {remedy}") from error
    except (OSError, EOFError, ValueError, zlib.error, csv.Error, MemoryError) as error:
        said = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as a table: {said or type(error).__name__}") from error


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: parquet needs pyarrow; pip install 'pyarrow>=14.0.1', or write the table as CSV"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            check_room(sum(group.total_byte_size for group in groups))
        return pd.read_parquet(path, engine="pyarrow", dtype_backend="numpy_nullable").reset_index(drop=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a parquet file: {' '.join(str(error).split())}") from error


def _check_lines(path: Path, dialect: Mapping[str, str | None]) -> None:
    """Raise DataError for rows of another length than the header's, which pandas fills with gaps, and for a cut end.

    A file cut off within its last field does not end with a line break.
    """
    last, size, room = "", 0, memory(torch.device("cpu")) / 2

    def lines(file: Iterable[str]) -> Iterator[str]:
        nonlocal last, size
        for last in file:
            size += len(last)
            if size > room:  # of a packed file, whose length says nothing
                check_room(size)
            yield last

    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding=dialect["encoding"]) as file:
        reader = csv.reader(lines(file), delimiter=str(dialect["sep"]), strict=True)
        header, rows = next(reader, []), 0
        _check_header(header, path, dialect)
        for row in reader:
            rows += bool(row)
            if row and len(row) != len(header):
                commas = dialect["sep"] == "," and len(row) > len(header)
                remedy = ", or write decimal points (1.5) if its numbers have commas" if commas else ""
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(row)} fields, the header has {len(header)}; {AGAIN}{remedy}"
                )
    if not rows:
        raise DataError(f"{path} has no rows below a header line; {AGAIN}")
    if not last.endswith(("\n", "\r")):
        raise DataError(
            f"{path} does not end with a line break, so its last row may be cut off; "
            "get the file again, or add the line break if the row is whole"
        )


def _check_header(header: Sequence[str], path: Path, dialect: Mapping[str, str | None]) -> None:
    """Raise DataError for columns that another character separates, and for one without a name of its own."""
    other = next((mark for mark in ";\t" if len(header) == 1 and mark in header[0] and mark != dialect["sep"]), None)
    if other:
        named = "\\t" if other == "\t" else other
        raise DataError(
            f"{path}: its columns are separated by {other!r}; for dataset=arrays set 'dataset.csv.sep=\"{named}\"', "
            "and for decimal commas 'dataset.csv.decimal=\",\"'"
        )
    # pandas calls a column that it has read without a name Unnamed
    unnamed = next((i for i, name in enumerate(header, 1) if re.fullmatch(r"\s*|Unnamed: \d+", name)), None)
    if unnamed:
        raise DataError(
            f"{path}: column {unnamed} has no name in the header; row numbers, as DataFrame.to_csv writes them, are no "
            "input: write the file with index=False, or give the column a name"
        )
    if len(set(header)) < len(header):
        raise DataError(f"{path}: the header names a column twice; give every column a name of its own")


def digest(name: str, frame: object) -> str:
    """A name of the content of a DataFrame: of its columns, their dtypes and values. Raises ConfigError, DataError."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise ConfigError(f"tables[{name!r}] must be a pandas.DataFrame, not {type(frame).__name__}")
    try:
        rows = pd.util.hash_pandas_object(frame, index=False)
    except TypeError as error:
        raise DataError(f"tables[{name!r}]: {error}; expected numbers, dates or text in every column") from error
    content = repr([(name, str(kind)) for name, kind in frame.dtypes.items()]).encode() + rows.to_numpy().tobytes()
    return f"sha256-{hashlib.sha256(content).hexdigest()[:32]}"


def require_columns(table: pd.DataFrame, columns: Sequence[str], path: object, remedy: str = "") -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise DataError(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}{remedy}")
