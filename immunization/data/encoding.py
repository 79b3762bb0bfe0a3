"""Tables as matrices by scikit-learn: categories one-hot, dates as days, gaps filled. All of it is said and counted."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from immunization.data.preparation import Normalize
from immunization.data.tables import require_columns
from immunization.data.task import Origin, Split, Task, is_shown
from immunization.errors import ConfigError, DataError
from immunization.theory.spectrum import EPS32, are_integers

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

Missing = Literal["refuse", "mean", "median", "drop"]
Kind = Literal["numbers", "dates", "categories"]
GAP = "(missing)"
"""The category that missing ones become."""
DATE = r"\s*\d{1,4}[./-]\d{1,2}[./-]\d{1,4}(?!\d).*"
COMMA = r"\s*[+-]?[\d.]*\d,[\d.]*\d\s*"
TAKEN = {"dates": "days since 1970-01-01", "durations": "days", "booleans": "0 and 1"}
CODED = "number classes 0, 1, ..."


@dataclass(frozen=True)
class Column:
    """A column of a table: float64 with NaN for gaps (numbers, days since 1970-01-01), or text with None for them."""

    kind: Kind | None  # None: nothing but gaps
    values: np.ndarray
    gaps: np.ndarray
    given: str = ""  # what numbers were that are not numbers in the table: dates, booleans
    listed: bool = False  # as categories, by the user
    single: bool = False  # stored in fewer than 64 bits


def column_of(field: pd.Series, path: str, categories: bool = False) -> Column:
    """What a column of a table holds, with `categories` these. Raises DataError for what is of no Kind."""
    import pandas as pd

    types, gaps = pd.api.types, field.isna().to_numpy(bool)
    held = types.infer_dtype(field, skipna=True)
    if held == "string":
        gaps = gaps | (field == "").fillna(True).to_numpy(bool)
    if gaps.all():
        return Column(None, np.full(len(field), np.nan), gaps)
    known = field[~gaps]

    def column(kind: Kind, values: np.ndarray, given: str = "", listed: bool = False, single: bool = False) -> Column:
        whole = np.full(len(field), None if kind == "categories" else np.nan, None if kind == "categories" else float)
        whole[~gaps] = values
        if kind == "numbers" and np.isinf(values).any():
            _refuse(known, np.isinf(values), path, "is not finite: correct it, or empty the field if it is missing")
        return Column(kind, whole, gaps, given, listed, single)

    if categories or held == "categorical":
        return column("categories", known.astype(str).to_numpy(object), listed=True)
    if held.startswith("timedelta"):
        return column("dates", (pd.to_timedelta(known) / pd.Timedelta(days=1)).to_numpy(float), "durations")
    if held == "period":
        return column("dates", _days(known.map(lambda period: period.start_time)), "dates")
    if held.startswith("date"):
        return column("dates", _days(known), "dates")
    if held == "boolean":
        return column("numbers", known.to_numpy(float), "booleans")
    if held in ("integer", "floating", "mixed-integer-float", "decimal"):
        single = types.is_float_dtype(field.dtype) and field.dtype.itemsize < 8
        values = known.to_numpy(float)
        return column("numbers", values, single=single and not are_integers(torch.from_numpy(values), EPS32).all())
    if held != "string":
        said = {"mixed-integer": "text and numbers", "mixed": "objects of several kinds"}.get(held, f"{held} values")
        raise DataError(f"{path}, column {field.name}: {said}; expected numbers, dates, or text; {_remedy(field.name)}")
    return column(*_text(known, path))


def _text(known: pd.Series, path: str) -> tuple[Kind, np.ndarray, str]:
    """What text without gaps stands for, its values, and what they were."""
    import pandas as pd

    dates = pd.to_datetime(known, format="ISO8601", utc=True, errors="coerce")
    numbers = pd.to_numeric(known, errors="coerce").astype(float)
    is_number, is_date = numbers.notna().to_numpy(bool), known.str.fullmatch(DATE).to_numpy(bool)
    if is_number.all():
        return "numbers", numbers.to_numpy(), "text"
    if is_date.all() and dates.notna().all():
        return "dates", _days(dates), "dates"
    remedy = _remedy(known.name)
    if is_date.all():
        odd = dates.isna().to_numpy(bool)
        _refuse(known, odd, path, f"is no date as in 2024-12-31: the order of day and month is not known; {remedy}")
    with_comma = known.str.fullmatch(COMMA).to_numpy(bool)
    if with_comma.any() and (with_comma | is_number).all():
        said = "a decimal one, 'dataset.csv.decimal=\",\"', or one of thousands, 'dataset.csv.thousands=\",\"'"
        _refuse(known, with_comma, path, f"has a comma: {said}")
    if is_date.any():
        said = f"is no date, and {int(is_date.sum())} other values are: correct it, or empty the field; {remedy}"
        _refuse(known, ~is_date, path, said)
    if is_number.any():
        said = f"is no number, and {int(is_number.sum())} other values are: correct it, or empty the field; {remedy}"
        _refuse(known, ~is_number, path, said)
    return "categories", known.astype(str).to_numpy(object), ""


def _days(dates: pd.Series) -> np.ndarray:
    import pandas as pd

    return ((pd.to_datetime(dates, utc=True) - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)).to_numpy(float)


def _remedy(name: object) -> str:
    return f"dataset.categorical=[{name}] takes the column as categories, dataset.drop=[{name}] leaves it out"


def _refuse(field: pd.Series, wrong: np.ndarray, path: str, said: str) -> None:
    """Raise DataError for the first `wrong` value of a column."""
    i = int(np.flatnonzero(wrong)[0])
    raise DataError(f"{path}, data row {field.index[i] + 1}, column {field.name}: '{field.iloc[i]}' {said}")


def target_of(field: pd.Series, path: str, column: Column) -> Tensor | np.ndarray:
    """Targets [rows] of a column without gaps, int64 or float64, or the text of classes.

    Raises DataError for dates, for integers that are not exact and for text of numbers.
    """
    if column.kind == "dates":
        raise DataError(
            f"{path}: the target {field.name} holds {column.given}; give it as a number, or as text of classes"
        )
    if column.kind == "categories":
        return column.values
    if field.dtype.kind in "biu" and (field.dtype.kind != "u" or field.max() <= np.iinfo(np.int64).max):
        return torch.from_numpy(field.to_numpy(np.int64, copy=True))  # float64 would not keep every digit
    whole = column.values == np.round(column.values)
    if field.dtype.kind != "f" and abs(column.values).max() > 2**53 and whole.all():
        raise DataError(f"{path}: the target {field.name} has integers above 2^53, which are not exact; {CODED}")
    if column.given == "text":
        raise DataError(
            f"{path}: the target {field.name} is text of numbers; convert it, classes by astype(int) and a regression "
            f"by astype(float), or take the texts as classes, dataset.categorical=[{field.name}]"
        )
    return torch.from_numpy(column.values)


class Tables:
    """The tables of all tasks, by the arrays they stand for: `harmful` is harmful_x, `harmful_test` its test rows.

    Rows that miss a value are refused or, by `missing`, left out, at once; other gaps are filled by `encode`.
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
        self.paths, self.missing, self.about = paths, missing, {}
        _check_names(frames, drop, "drop")
        _check_names(frames, categorical, "categorical")
        names = _common(frames, paths, targets, drop)
        self.columns: dict[str, dict[str, Column]] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.targets: dict[str, Tensor | np.ndarray] = {}
        for key, frame in frames.items():
            found = {name: column_of(frame[name], paths[key], name in categorical) for name in [*names, targets[key]]}
            if text := [name for name in names if found[name].given == "text"]:
                raise DataError(
                    f"{paths[key]}: the column {text[0]} is text of numbers, or of integers above 2^64; convert it by "
                    f"astype(float), or: {_remedy(text[0])}"
                )
            kept = self._kept(found, targets[key], key)
            target = found.pop(targets[key])
            if not kept.all():
                found = {name: replace(c, values=c.values[kept], gaps=c.gaps[kept]) for name, c in found.items()}
                target = replace(target, values=target.values[kept], gaps=target.gaps[kept])
            self.columns[key], self.rows[key] = found, np.flatnonzero(kept)
            self.targets[key] = target_of(frame.loc[kept, targets[key]], paths[key], target)
        self.kinds = {name: self._kind(name) for name in names}

    def _kept(self, columns: Mapping[str, Column], target: str, key: str) -> np.ndarray:
        """Which rows are kept [rows] (bool). Raises DataError for gaps that nothing is to be done with."""
        counts = {name: int(column.gaps.sum()) for name, column in columns.items() if column.gaps.any()}
        gaps = np.any([column.gaps for column in columns.values()], 0)
        if self.missing == "drop":
            if gaps.all():
                raise DataError(f"{self.paths[key]}: every row misses a value, in {_counted(counts)}")
            if gaps.any():
                self._say("rows left out", f"{self.paths[key]}: {gaps.sum()} of {len(gaps)}, in {_counted(counts)}")
            return ~gaps
        if target in counts:
            raise DataError(
                f"{self.paths[key]}: the target {target} is missing in {counts[target]} of {len(gaps)} rows; leave "
                "these out, or by dataset.missing=drop all rows that miss a value"
            )
        if counts and self.missing == "refuse":
            raise DataError(
                f"{self.paths[key]} misses {sum(counts.values())} values in {gaps.sum()} of {len(gaps)} rows, in "
                f"{_counted(counts)}; set dataset.missing=mean or median (of the training rows; missing categories are "
                "one of their own), or drop, which leaves the rows out"
            )
        return np.ones(len(gaps), bool)

    def _say(self, what: str, said: str) -> None:
        self.about[what] = f"{self.about[what]}; {said}" if what in self.about else said
        log.warning("%s: %s", what, said)

    def _kind(self, name: str) -> Kind:
        """The kind of a column in all tables. Raises DataError where they differ, and for names and free text."""
        held = {key: columns[name] for key, columns in self.columns.items() if columns[name].kind}
        if not held:
            raise DataError(f"the column {name} has no value in any table; dataset.drop=[{name}] leaves it out")
        first, *others = held
        for other in others:
            if held[other].kind != held[first].kind:
                raise DataError(
                    f"the column {name} holds {held[first].kind} in {self.paths[first]} and {held[other].kind} in "
                    f"{self.paths[other]}; {_remedy(name)}"
                )
        kind = held[first].kind
        if kind == "categories" and not any(column.listed for column in held.values()):
            sizes = [(len(set(column.values[~column.gaps])), int((~column.gaps).sum())) for column in held.values()]
            if all(2 * different > rows for different, rows in sizes):
                raise DataError(
                    f"{self.paths[first]}: the column {name} holds {sizes[0][0]} different texts in {sizes[0][1]} "
                    f"rows, which look like names or free text; {_remedy(name)}"
                )
        return kind

    def arrays(self) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
        """Arrays by name, with a column in the place of the inputs until `encode`, and texts of classes by role.

        The dtype [float64, or float32 where a column is stored in fewer bits] is that of the inputs.
        """
        stored, names = {}, {}
        for key, target in self.targets.items():
            single = any(column.single for column in self.columns[key].values())
            dtype = torch.float32 if single else torch.float64
            stored[f"{key}_x"] = torch.full((len(target), 1), 0.5, dtype=dtype)  # no integers, which were not rounded
            role = re.sub("_(val|test)$", "", key)
            if isinstance(target, np.ndarray):
                of_role = [self.targets[k] for k in (role, f"{role}_val", f"{role}_test") if k in self.targets]
                if not all(isinstance(one, np.ndarray) for one in of_role):
                    raise DataError(
                        f"{self.paths[key]}: the target is text here, and numbers in the other rows of {role}"
                    )
                names[role] = np.unique(np.concatenate(of_role).astype(str)).tolist()
                target = torch.from_numpy(np.searchsorted(names[role], target.astype(str)))
            stored[f"{key}_y"] = target
        return stored, names

    def encode(self, tasks: Mapping[str, Task], normalize: Normalize) -> dict[str, Task]:
        """The tasks with their inputs. Means, medians and categories are those of the training rows that methods see.

        With `normalize` "each", means and medians are those of each task's own.
        """
        import pandas as pd
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import OneHotEncoder

        tables = {
            key: pd.DataFrame({n: self._filled(n, c) for n, c in own.items()}) for key, own in self.columns.items()
        }
        training = {role: tables[role].iloc[task.train.origin.rows.numpy()] for role, task in tasks.items()}
        shown = pd.concat([rows for role, rows in training.items() if is_shown(role)])
        words = [name for name, kind in self.kinds.items() if kind == "categories"]
        plain = [name for name in self.kinds if name not in words]
        if empty := [name for name in plain if shown[name].isna().all()]:
            raise DataError(f"the column {empty[0]} has no value in any training row; {_remedy(empty[0])}")
        levels = [np.unique(shown[name].to_numpy(str)).astype(object) for name in words]
        transformer = ColumnTransformer(
            [
                ("plain", SimpleImputer(strategy="median" if self.missing == "median" else "mean"), plain),
                ("words", OneHotEncoder(categories=levels, handle_unknown="ignore", sparse_output=False), words),
            ],
            verbose_feature_names_out=False,
        )
        encoded = {}
        for role in tasks:
            own = training[role] if normalize == "each" else shown
            if empty := [name for name in plain if own[name].isna().all()]:
                raise DataError(
                    f"the column {empty[0]} has no value in the training rows of {role}; {_remedy(empty[0])}"
                )
            transformer.fit(own)
            for key in (k for k in (role, f"{role}_val", f"{role}_test") if k in tables):
                encoded[key] = torch.from_numpy(np.asarray(transformer.transform(tables[key]), float))
        self.about["columns"] = transformer.get_feature_names_out().tolist()
        self._count(tables, dict(zip(words, levels, strict=True)))
        return {role: self._task(task, encoded) for role, task in tasks.items()}

    def _filled(self, name: str, column: Column) -> np.ndarray:
        if self.kinds[name] != "categories":
            return column.values
        return np.where(column.gaps, GAP, column.values).astype(object)

    def _task(self, task: Task, encoded: Mapping[str, Tensor]) -> Task:
        splits = {}
        for name, split in task.splits.items():
            key = split.origin.source.removesuffix("_x")
            rows = torch.from_numpy(self.rows[key])[split.origin.rows]
            splits[name] = Split(encoded[key][split.origin.rows], split.y, Origin(split.origin.source, rows))
        return replace(task, **splits)

    def _count(self, tables: Mapping[str, pd.DataFrame], levels: Mapping[str, np.ndarray]) -> None:
        """Say what became of the columns and of their gaps."""
        of = list(self.columns.values())
        given = Counter(next((c[name].given for c in of if c[name].given), "") for name in self.kinds)
        said = [f"{len(levels)} of categories, as {sum(map(len, levels.values()))} of 0 and 1"] if levels else []
        said += [f"{given[what]} of {what}, as {to}" for what, to in TAKEN.items() if given[what]]
        if said:
            self._say("columns encoded", f"{'; '.join(said)}; beside {given[''] - len(levels)} of numbers")
        gaps = Counter({name: sum(int(columns[name].gaps.sum()) for columns in of) for name in self.kinds})
        if total := gaps.total():
            text = sum(gaps[name] for name in levels)
            ways = (total - text, f"by the {self.missing} of the training rows"), (text, f"as the category {GAP}")
            how = " and ".join(f"{count} {way}" for count, way in ways if count)
            self._say("values filled", f"{how}, in {_counted(+gaps)}")
        new = {
            name: sum(int((~table[name].isin(known)).sum()) for table in tables.values())
            for name, known in levels.items()
        }
        if new := {name: count for name, count in new.items() if count}:
            self._say("categories of no training row", f"{sum(new.values())} values, all 0, in {_counted(new)}")


def _check_names(frames: Mapping[str, pd.DataFrame], names: Sequence[str], key: str) -> None:
    known = list(dict.fromkeys(name for frame in frames.values() for name in frame))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"dataset.{key}: there is no column {unknown[0]}; there are {', '.join(map(str, known))}")


def _common(
    frames: Mapping[str, pd.DataFrame], paths: Mapping[str, str], targets: Mapping[str, str], drop: Sequence[str]
) -> list[str]:
    """The columns of inputs, which all tables have, in the order of the first. Raises DataError."""
    columns = {}
    for key, frame in frames.items():
        known = ", ".join(map(str, frame.columns))
        require_columns(frame, [targets[key]], paths[key], f"; set dataset.target to one of {known}")
        columns[key] = [name for name in frame if name != targets[key] and name not in drop]
    first, *others = columns
    for other in others:
        if odd := [*(set(columns[first]) ^ set(columns[other]))]:
            odd = sorted(map(str, odd))
            raise DataError(
                f"{paths[other]} and {paths[first]} have different columns, in one alone: {', '.join(odd)}; all tasks "
                f"need the same inputs: dataset.drop=[{','.join(odd)}] leaves these out"
            )
    if not columns[first]:
        raise DataError(f"{paths[first]} has no column of inputs beside the target {targets[first]}")
    return columns[first]


def _counted(counts: Mapping[str, int]) -> str:
    """`a (3), b (1)`, the largest first, at most eight of them."""
    most = Counter(counts).most_common()
    more = f" and {len(most) - 8} more columns" if len(most) > 8 else ""
    return ", ".join(f"{name} ({count:,})" for name, count in most[:8]) + more
