"""Tables as matrices: one-hot categories, dates as days, filled gaps. All of it is counted and reported."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from immunization.data.preparation import Normalize
from immunization.data.tables import require_columns
from immunization.errors import ConfigError, DataError
from immunization.roles import is_shown
from immunization.theory.spectrum import EPS, EPS32, are_integers

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

Missing = Literal["refuse", "mean", "median", "drop"]
Kind = Literal["numbers", "booleans", "dates", "durations", "categories"]
NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal", "boolean")
"""What pandas calls columns of numbers, whatever they are stored as."""
TAKEN = {"dates": "days since 1970-01-01", "durations": "days", "booleans": "0 and 1"}
GAP = "(missing)"
"""The category that missing ones become."""
DATE = r"\s*\d{1,4}[./-]\d{1,2}[./-]\d{1,4}(?!\d).*"
COMMA = r"\s*[+-]?[\d.]*\d,[\d.]*\d\s*"
CODED = "number classes 0, 1, ..."


class Column(NamedTuple):
    """A column of a table: `values` are float64, or text of categories, and NaN for gaps.

    `known` are the values beside gaps, in the type of numbers that they are even if they were stored as objects.
    """

    kind: Kind | None  # None: nothing but gaps
    values: pd.Series
    known: pd.Series
    listed: bool = False  # as categories, by the user
    single: bool = False  # stored in fewer than 64 bits


def column_of(field: pd.Series, path: str, listed: bool = False) -> Column:
    """What a column of a table holds; categories if they are `listed`. Raises DataError for what is of no Kind."""
    import pandas as pd

    if isinstance(field.dtype, pd.SparseDtype):
        field = field.sparse.to_dense()
    held = pd.api.types.infer_dtype(field, skipna=True)
    known = field[~(field.isna() | ((field == "").fillna(True) if held == "string" else False))]
    known = known.infer_objects() if held in NUMBERS else known
    kind: Kind | None = None
    single = False
    if known.empty:
        values = known.astype(float)
    elif listed or held == "categorical":
        kind, values, listed = "categories", known.astype(str), True
        if held in NUMBERS:
            values = values.str.removesuffix(".0")  # pandas makes floats of integers where one is missing
    elif held.startswith("timedelta"):
        kind, values = "durations", pd.to_timedelta(known) / pd.Timedelta(days=1)
    elif held.startswith(("date", "period")):
        kind, values = "dates", _days(known.map(lambda time: getattr(time, "start_time", time)))
    elif held in NUMBERS:
        kind, values = "booleans" if held == "boolean" else "numbers", known.astype(float)
        rounded = known.dtype.kind == "f" and known.dtype.itemsize < 8
        single = rounded and not are_integers(torch.from_numpy(values.to_numpy(copy=True)), EPS32).all()
    elif held == "string":
        kind, values = _text(known, path)
    else:
        what = {"mixed-integer": "text and numbers", "mixed": "objects of several kinds"}.get(held, f"{held} values")
        raise DataError(f"{path}, column {field.name}: {what}; expected numbers, dates, or text; {_remedy(field.name)}")
    if kind == "numbers" and np.isinf(values).any():
        _refuse(known, np.isinf(values), path, "is not finite: correct it, or empty the field if it is missing")
    stored = values.astype(object if kind == "categories" else float)
    return Column(kind, stored.reindex(field.index), known, listed, single)


def _text(known: pd.Series, path: str) -> tuple[Kind, pd.Series]:
    """What text without gaps stands for. Raises DataError for numbers, and for what is numbers or dates in part."""
    import pandas as pd

    dates = pd.to_datetime(known, format="ISO8601", utc=True, errors="coerce")
    is_number = pd.to_numeric(known, errors="coerce").notna()
    is_date, has_comma = (known.str.fullmatch(pattern).astype(bool) for pattern in (DATE, COMMA))
    mixed = "is no {}, and {} other values are: correct it, or empty the field"
    if is_number.all():
        wrong = is_number
        why = "is text of a number, or an integer above 2^64: convert it by astype(float), classes by astype(int)"
    elif is_date.all() and dates.notna().all():
        return "dates", _days(dates)
    elif is_date.all():
        wrong, why = dates.isna(), "is no date as in 2024-12-31: the order of day and month is not known"
    elif (has_comma | is_number).all():
        wrong = has_comma
        why = "has a comma: of decimals, 'dataset.csv.decimal=\",\"', or of thousands, 'dataset.csv.thousands=\",\"'"
    elif is_date.any():
        wrong, why = ~is_date, mixed.format("date", is_date.sum())
    elif is_number.any():
        wrong, why = ~is_number, mixed.format("number", is_number.sum())
    else:
        return "categories", known.astype(str)
    _refuse(known, wrong, path, f"{why}; {_remedy(known.name)}")


def _days(times: pd.Series) -> pd.Series:
    import pandas as pd

    return (pd.to_datetime(times, utc=True) - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)


def _remedy(name: object) -> str:
    return f"dataset.categorical=[{name}] takes the column as categories, dataset.drop=[{name}] leaves it out"


def _refuse(field: pd.Series, wrong: pd.Series, path: str, why: str) -> NoReturn:
    """Raise DataError for the first `wrong` value of a column."""
    row = wrong.idxmax()
    raise DataError(f"{path}, data row {row + 1}, column {field.name}: '{field[row]}' {why}")


def target_of(rows: pd.Index, path: str, column: Column) -> np.ndarray:
    """Targets [rows] of a column in rows without gaps: int64, float64, or the text of classes.

    Floats of a column with gaps are int64 if all are integers: pandas has no other integers beside NaN. Raises
    DataError for dates and for integers that are not exact.
    """
    values, field = column.values[rows], column.known[rows]
    if column.kind == "categories":
        return values.to_numpy(str)
    if column.kind in ("dates", "durations"):
        raise DataError(
            f"{path}: the target {field.name} holds {column.kind}; give it as a number, or as text of classes"
        )
    if field.dtype.kind in "biu" and (field.dtype.kind != "u" or field.max() <= np.iinfo(np.int64).max):
        return field.to_numpy(np.int64)  # float64 would not keep every digit
    known, gaps = column.known, len(column.known) < len(column.values)
    if known.dtype.kind == "f" and gaps and are_integers(torch.tensor(known.to_numpy(float)), EPS).all():
        return values.to_numpy(np.int64)
    if field.dtype.kind != "f" and values.abs().max() > 2**53 and (values == values.round()).all():
        raise DataError(f"{path}: the target {field.name} has integers above 2^53, which are not exact; {CODED}")
    return values.to_numpy(float)


class Tables:
    """The tables of all tasks, by the names of arrays they stand for: `harmful`, and `harmful_test` for its test rows.

    Rows that miss a value are refused or, by `missing`, left out, at once; other gaps are filled by `encode`.
    Of the rows that are left, `inputs` holds the columns, `targets` what `target_of` makes of them, and `rows` their
    numbers in the table; `eps` is the epsilon of the inputs as they are stored. `unlabeled` counts missing targets.
    """

    def __init__(
        self,
        frames: Mapping[str, pd.DataFrame],
        paths: Mapping[str, str],
        targets: Mapping[str, str],
        drop: Sequence[str],
        categorical: Sequence[str],
        missing: Missing,
    ) -> None:
        import pandas as pd

        self.paths, self.missing, self.about = paths, missing, dict[str, object]()
        self.inputs: dict[str, pd.DataFrame] = {}
        self.targets: dict[str, np.ndarray] = {}
        self.rows: dict[str, Tensor] = {}
        self.eps: dict[str, float] = {}
        self.unlabeled: dict[str, int] = {}
        names = _input_columns(frames, paths, targets, drop, categorical)
        columns: dict[str, dict[str, Column]] = {}
        for key, frame in frames.items():
            path, target = paths[key], targets[key]
            own = {name: column_of(frame[name], path, name in categorical) for name in [*names, target]}
            values = pd.DataFrame({name: column.values for name, column in own.items()})
            values = values[self._complete(values.isna(), target, path)]
            self.targets[key] = target_of(values.index, path, label := own.pop(target))
            if self.targets[key].dtype.kind == "i" and label.known.dtype.kind == "f":
                told = f"{path}: {target}, whole numbers beside missing ones"
                self._say("targets read as integers", f"{told}; labels unless dataset.targets=regression")
            self.unlabeled[key] = int(label.values.isna().sum())
            self.inputs[key], columns[key] = values[names], own
            self.rows[key] = torch.from_numpy(values.index.to_numpy(np.int64, copy=True))
            self.eps[key] = EPS32 if any(column.single for column in own.values()) else EPS
        self.kinds = {name: self._kind(name, {key: own[name] for key, own in columns.items()}) for name in names}

    def _complete(self, gaps: pd.DataFrame, target: str, path: str) -> pd.Series:
        """Which rows are taken [rows] (bool). Raises DataError for gaps that nothing is to be done with."""
        counts, missed = gaps.sum().to_dict(), gaps.any(axis=1)
        rows = f"{missed.sum()} of {len(gaps)}"
        if self.missing == "drop":
            if missed.all():
                raise DataError(f"{path}: every row misses a value, in {_counted(counts)}; set dataset.missing=mean")
            if missed.any():
                self._say("rows left out", f"{path}: {rows}, in {_counted(counts)}")
            return ~missed
        if missed.any() and (self.missing == "refuse" or counts[target]):
            raise DataError(
                f"{path} misses {sum(counts.values())} values in {rows} rows, in {_counted(counts)}; set "
                "dataset.missing=mean or median (of the training rows; a missing word becomes a category of its own; "
                "targets are not filled), or dataset.missing=drop, which leaves the rows out"
            )
        return missed | True

    def _say(self, what: str, text: str) -> None:
        self.about[what] = f"{self.about[what]}; {text}" if what in self.about else text
        log.warning("%s: %s", what, text)

    def _kind(self, name: str, columns: Mapping[str, Column]) -> Kind:
        """The kind of a column in all tables. Raises DataError where they differ, and for names and free text."""
        kinds = {key: column.kind for key, column in columns.items() if column.kind} or {"": "numbers"}
        (first, kind), *others = kinds.items()
        for key, other in others:
            if other != kind and {kind, other} != {"numbers", "booleans"}:
                raise DataError(
                    f"the column {name} holds {kind} in {self.paths[first]} and {other} in {self.paths[key]}; "
                    f"{_remedy(name)}"
                )
        if kind == "categories" and not any(column.listed for column in columns.values()):
            sizes = [(self.inputs[key][name].nunique(), self.inputs[key][name].count()) for key in kinds]
            if all(2 * different > rows for different, rows in sizes):
                raise DataError(
                    f"{self.paths[first]}: the column {name} holds {sizes[0][0]} different texts in {sizes[0][1]} "
                    f"rows, which look like names or free text; {_remedy(name)}"
                )
        return kind

    def encode(self, training: Mapping[str, tuple[str, Tensor]], normalize: Normalize) -> dict[str, Tensor]:
        """The inputs of every table [N, D]. `training` are the table and the rows that each role is trained on.

        Means, medians and categories are those of the training rows that methods see; with `normalize` "each", means
        and medians are those of each task's own.
        """
        import pandas as pd

        words = [name for name, kind in self.kinds.items() if kind == "categories"]
        plain = [name for name in self.kinds if name not in words]
        text, gap = dict.fromkeys(words, object), dict.fromkeys(words, GAP)
        tables = {key: table.astype(text).fillna(gap) for key, table in self.inputs.items()}
        rows = {role: tables[key].iloc[own.numpy()] for role, (key, own) in training.items()}
        shown = pd.concat([own for role, own in rows.items() if is_shown(role)])
        levels = {name: pd.CategoricalDtype(sorted(shown[name].unique())) for name in words}
        for key, table in tables.items():
            known = {name: table[name].where(table[name].isin(kind.categories)) for name, kind in levels.items()}
            tables[key] = table.assign(**known).astype(levels)
        encoded: dict[str, Tensor] = {}
        for role, (key, _) in training.items():
            own = rows[role] if normalize == "each" else shown
            if empty := [name for name in plain if own[name].isna().all()]:
                whose = f"the training rows of {role}" if normalize == "each" else "any training row"
                raise DataError(f"the column {empty[0]} has no value in {whose}; {_remedy(empty[0])}")
            filling = own[plain].agg("median" if self.missing == "median" else "mean")
            for name in {key, f"{key}_val", f"{key}_test"} & tables.keys():
                matrix = pd.get_dummies(tables[name].fillna(filling), columns=words, dtype=float)
                encoded[name] = torch.from_numpy(matrix.to_numpy(float, copy=True))
        self.about["columns"] = matrix.columns.tolist()
        self._count(len(matrix.columns) - len(plain), sum(table[words].isna().sum() for table in tables.values()))
        return encoded

    def _count(self, indicators: int, unknown: pd.Series) -> None:
        """Say what became of the columns and of their gaps; `unknown` counts categories of no training row."""
        kinds = Counter(self.kinds.values())
        taken = {"categories": f"{indicators} of 0 and 1"} | TAKEN
        if parts := [f"{kinds[kind]} of {kind}, as {what}" for kind, what in taken.items() if kinds[kind]]:
            self._say("columns encoded", f"{'; '.join(parts)}; beside {kinds['numbers']} of numbers")
        gaps = sum(table.isna().sum() for table in self.inputs.values())
        if gaps.any():
            text = gaps[unknown.index].sum()
            ways = (gaps.sum() - text, f"by the {self.missing} of the training rows"), (text, f"as the category {GAP}")
            how = " and ".join(f"{count} {way}" for count, way in ways if count)
            self._say("values filled", f"{how}, in {_counted(gaps.to_dict())}")
        if unknown.any():
            new = f"{unknown.sum()} values, all 0, in {_counted(unknown.to_dict())}"
            self._say("categories of no training row", new)


def _input_columns(
    frames: Mapping[str, pd.DataFrame],
    paths: Mapping[str, str],
    targets: Mapping[str, str],
    drop: Sequence[str],
    categorical: Sequence[str],
) -> list[str]:
    """The columns of inputs, which all tables have, in the order of the first. Raises ConfigError and DataError."""
    for key, frame in frames.items():
        if frame.columns.nlevels > 1:
            raise DataError(
                f"{paths[key]} has column names of {frame.columns.nlevels} levels, such as {frame.columns[0]}; expected"
                " one name for each column: frame.columns = ['_'.join(map(str, name)) for name in frame.columns]"
            )
    known = list(dict.fromkeys(name for frame in frames.values() for name in frame))
    for option, names in (("drop", drop), ("categorical", categorical)):
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"dataset.{option}: there is no column {unknown[0]}; there are {', '.join(map(str, known))}"
            )
    columns = {}
    for key, frame in frames.items():
        there = ", ".join(map(str, frame.columns))
        require_columns(frame, [targets[key]], paths[key], f"; set dataset.target to one of {there}")
        columns[key] = [name for name in frame if name != targets[key] and name not in drop]
    first, *others = columns
    for other in others:
        if odd := sorted(map(str, {*columns[first]} ^ {*columns[other]})):
            raise DataError(
                f"{paths[other]} and {paths[first]} have different columns: only one has {', '.join(odd)}; all tasks "
                f"need the same inputs: dataset.drop=[{','.join(odd)}] leaves these out"
            )
    if not columns[first]:
        raise DataError(
            f"{paths[first]} has no column of inputs: give one that is neither the target {targets[first]} nor in "
            "dataset.drop"
        )
    return columns[first]


def _counted(counts: Mapping[str, int]) -> str:
    """`a (3), b (1)`, the largest first, at most eight of them."""
    most = [(name, count) for name, count in Counter(counts).most_common() if count]
    more = f" and {len(most) - 8} more columns" if len(most) > 8 else ""
    return ", ".join(f"{name} ({count:,})" for name, count in most[:8]) + more
