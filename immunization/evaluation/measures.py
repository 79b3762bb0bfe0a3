"""The return value of every evaluation: records, curves, flags with their reasons, arrays, and facts `about` them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from immunization.runs.records import SUFFIX, WORST, Record, Records, Role, Stage, flat, names
from immunization.runs.result import Curve

CONDITIONING = ("rir", "ratio", "kappa", "authors/rir", "authors/ratio")
"""Measures of spectra, in both conventions."""


@dataclass
class Measures:
    """Records, curves, flags with their reasons, arrays and facts `about` them; what is missing has its reason."""

    records: Records = field(default_factory=Records)
    curves: dict[str, Curve] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float | None]:
        """Values by their flat names."""
        return flat(self.records)[0]

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons of flags, and of values that are missing."""
        return self.flags | flat(self.records)[1]

    def add(self, *records: Record) -> None:
        """Take records; a value that is not finite becomes None with a reason, an end that is not finite NaN."""
        for record in records:
            value, reason = record.value, record.reason
            if value is not None and not math.isfinite(value):
                value, reason = None, reason or f"the value is not finite ({value})"
            elif value is not None:
                value, reason = float(value), ""
            low, high = (end if end is None or math.isfinite(end) else math.nan for end in (record.low, record.high))
            self.records.add(replace(record, value=value, reason=reason, low=low, high=high))

    def put(self, measure: str, value: float, **of: Any) -> None:
        """Record a value, `of` a task, a stage and so on (fields of `Record`), perhaps with `low` and `high`."""
        self.add(Record(measure, value, **of))

    def miss(self, reason: str, *measures: str, stage: Stage | Sequence[Stage] = "immunized", **of: Any) -> None:
        """Record that measures do not exist on a stage, or on several, with the reason."""
        stages: Sequence[Any] = [stage] if isinstance(stage, str) else stage
        self.add(*(Record(name, None, stage=own, reason=reason, **of) for name in measures for own in stages))

    def flag(self, name: str, reason: str) -> None:
        """Raise a flag, to be shown beside every score of the run."""
        self.flags[name] = reason

    def worst(self, measure: str, tasks: Iterable[Role]) -> None:
        """Put the smallest value of a measure of some tasks, as that of the task `WORST`."""
        absent = Record(measure, None, reason="not measured")
        records = [self.records.get(measure, task) or replace(absent, task=task) for task in tasks]
        if missing := [record for record in records if record.value is None]:
            self.miss(f"{names(missing[0])[0]} is missing: {missing[0].reason}", measure, task=WORST)
        else:
            smallest = min(record.value for record in records if record.value is not None)
            self.put(measure, smallest, task=WORST, split=records[0].split)

    def withhold(self, flag: str, reason: str) -> None:
        """Flag condition numbers after immunization, and what is made of them, as undetermined, and withhold them."""
        self.flag(flag, reason)
        for record in list(self.records.values()):
            of_spectra = record.measure in CONDITIONING and record.stage != "baseline"
            if record.value is not None and (of_spectra or record.measure == "definition/rir_kept"):
                self.records.add(replace(record, value=None, reason=reason, undetermined=record.value))

    def curve(self, name: str, x: Iterable[float], y: Tensor, stage: Stage = "immunized") -> None:
        """Record a curve y [T] against x; the baseline's is `<name>/baseline`."""
        self.curves[name + SUFFIX[stage].replace("_", "/")] = {"x": list(x), "y": y.tolist()}

    def merge(self, other: Measures) -> None:
        """Add everything from `other`."""
        self.add(*other.records.values())
        for name in ("curves", "flags", "arrays", "about"):
            getattr(self, name).update(getattr(other, name))
