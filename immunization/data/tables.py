"""Tables read by pandas, strictly: a damaged row or a column without a name is an error, never a guess."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Len, doc

from immunization.checks import check_options
from immunization.compute.machine import check_room
from immunization.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd

AGAIN = "the file is damaged or cut off, get it again"
BLOCK = 2**24  # bytes that are read at once
Character = Annotated[str, Len(1, 1), doc("one character")]


@dataclass(frozen=True)
class Dialect:
    """The key `dataset.csv`, options of pandas.read_csv; raises ConfigError for an unknown encoding."""

    sep: Character | Literal["\\t"] = ","
    decimal: Character = "."
    thousands: Character | None = None
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding)
        except LookupError as error:
            raise ConfigError(f"dataset.csv.encoding={self.encoding}: {error}") from error


def dialect_of(given: Mapping[str, Any] | None) -> Dialect:
    """The dialect of `dataset.csv`; raises ConfigError for other keys and values."""
    check_options(Dialect, given or {}, "dataset.csv")
    return Dialect(**given or {})


def read_table(path: Path, dialect: Dialect | None = None, **options: Any) -> pd.DataFrame:
    """A table with a header line, CSV (plain, or gzip as .gz) or .parquet. `options` are those of pandas.read_csv.

    Raises DataError naming the file and, where there is one, the line, and ConfigError for parquet without pyarrow.
    """
    import pandas as pd

    dialect = dialect or Dialect()
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        text, sep = _text(path, dialect.encoding), dialect.sep.replace("\\t", "\t")
        _check_lines(path, text, sep)
        if tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1):  # there the default may miss the last bit
            options["float_precision"] = "round_trip"
        marks = {"sep": sep, "decimal": dialect.decimal, "thousands": dialect.thousands}
        return pd.read_csv(io.StringIO(text), low_memory=False, **marks, **options)
    except UnicodeDecodeError as error:
        remedy = "save it as UTF-8, or name its encoding (dataset=arrays, text), such as dataset.csv.encoding=cp1252"
        raise DataError(f"{path} is not text in {error.encoding.upper()}: {error.reason}; {remedy}") from error
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


def _text(path: Path, encoding: str) -> str:
    """The text of a file, packed or not, for which there has to be room in memory."""
    content = io.BytesIO()
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        while block := file.read(BLOCK):
            check_room(content.tell() + len(block))
            content.write(block)
    return str(content.getbuffer(), encoding).removeprefix("\ufeff")


def _check_lines(path: Path, text: str, sep: str) -> None:
    """Raise DataError for rows of another length than the header's, which pandas fills with gaps, and for a cut end.

    A file cut off within its last field does not end with a line break.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=sep, strict=True)
    header, rows = next(reader, []), 0
    _check_header(header, path, sep)
    for row in reader:
        rows += bool(row)
        if row and len(row) != len(header):
            commas = sep == "," and len(row) > len(header)
            remedy = ", or write decimal points (1.5) if its numbers have commas" if commas else ""
            raise DataError(
                f"{path}, line {reader.line_num}: {len(row)} fields, the header has {len(header)}; {AGAIN}{remedy}"
            )
    if not rows:
        raise DataError(f"{path} has no rows below a header line; {AGAIN}")
    if not text.endswith(("\n", "\r")):
        raise DataError(
            f"{path} does not end with a line break, so its last row may be cut off; "
            "get the file again, or add the line break if the row is whole"
        )


def _check_header(header: Sequence[str], path: Path, sep: str) -> None:
    """Raise DataError for columns that another character separates, and for one without a name of its own."""
    other = next((mark for mark in ";\t" if len(header) == 1 and mark in header[0] and mark != sep), None)
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
