"""Records of what a run measures, and the flat names of `metrics` that are derived from them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Literal

Role = str
"""`primary`, `harmful`, `benign`, `unseen`, or that of a further task, `harmful_8` (`TaskPair.tasks`)."""
Stage = Literal["immunized", "baseline", "start", "reference"]
"""theta_I; the baseline (raw inputs or theta_0); theta_0 where it is not the baseline; no model, or a part of it."""
STAGES: tuple[Stage, ...] = ("immunized", "baseline")
"""The two that every evaluation compares."""
WORST = "worst"
"""As a task, the harmful task with the smallest value; as an attack, the cheapest one, or what all attacks show."""

SUFFIX: Mapping[Stage, str] = {"immunized": "", "baseline": "_baseline", "start": "_start", "reference": ""}
SPECTRA = ("rir", "ratio", "kappa", "rank", "authors/rir", "authors/ratio")
PROBES = ("steps_ratio", "steps_bar", "rfd")
OWN_INTERVALS = ("worth/", "ceiling/", "transfer/")
"""Families of measures whose intervals have names beside theirs, not below `interval/`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One number, and what it is of.

    `task` is a role, `attack` the name of an attacker, `images` how many of each class they have (None: all).
    `split` is given where the measure is taken on training or test inputs. `low` and `high` are the ends of the 95 %
    interval; None where there is none, NaN for an end that is unknown or unbounded. A `value` of None has a `reason`;
    where it is withheld, the number is under `undetermined`.
    """

    measure: str
    value: float | None = None
    task: Role | None = None
    stage: Stage = "immunized"
    split: str | None = None
    attack: str | None = None
    images: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    undetermined: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but defaults, and the measure and value always; an unknown end is None."""
        own = {key.name: getattr(self, key.name) for key in fields(self)}
        given = {key.name for key in fields(self) if own[key.name] != key.default} | {"measure", "value"}
        return {key: None if isinstance(x, float) and math.isnan(x) else x for key, x in own.items() if key in given}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Record:
        """What `as_dict` gave; raises TypeError for other content."""
        unknown = {end: math.nan for end in ("low", "high") if content.get(end, math.nan) is None}
        return cls(**{**content, **unknown})


class Records(dict[tuple, Record]):
    """Records by what they are of, in the order in which that was first measured."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        super().__init__()
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take a record, in place of another one of the same."""
        key = (record.measure, record.task, record.stage, record.attack, record.images, record.split)
        self[key] = record
        self.__dict__.pop("by_name", None)

    def get(
        self,
        measure: str,
        task: Role | None = None,
        stage: Stage = "immunized",
        split: str | None = None,
        attack: str | None = None,
        images: int | None = None,
    ) -> Record | None:
        """The record of a measure; without `split`, that of the split on which the measure is taken first."""
        for place in (split,) if split else (None, "train", "test"):
            if (record := super().get((measure, task, stage, attack, images, place))) is not None:
                return record
        return None

    def value(self, measure: str, **of: Any) -> float | None:
        """The value of a measure (`get`); None where it has none or was not measured."""
        record = self.get(measure, **of)
        return None if record is None else record.value

    def where(self, **of: Any) -> list[Record]:
        """All records whose fields have these values."""
        return [record for record in self.values() if all(getattr(record, key) == value for key, value in of.items())]

    @cached_property
    def by_name(self) -> dict[str, tuple[Record, str]]:
        """The record of every flat name, and which of its fields has the number."""
        found = {}
        for record in self.values():
            found |= {name: (record, part) for name, part in zip(names(record), ("value", "low", "high"), strict=True)}
            if record.undetermined is not None:
                found[f"undetermined/{names(record)[0]}"] = record, "undetermined"
        return found


def kind_of(role: Role) -> str:
    """`harmful` for `harmful_5`."""
    return role.partition("_")[0]


def of_role(name: str, role: Role) -> str:
    """A name of something that tasks have in turn, such as a flag; plain for the first harmful task."""
    return name if role == "harmful" else f"{name}_{role}"


def names(record: Record) -> tuple[str, str, str]:
    """The flat names of a record's value and of the ends of its interval."""
    measure, task, suffix = record.measure, record.task, SUFFIX[record.stage]
    if record.attack is not None:
        group = of_role("reference" if record.stage == "reference" else "attack", task or "harmful")
        name = f"{group}/{record.attack}/{measure}{suffix}"
    elif task is None:
        name = measure + suffix
    elif measure.startswith(OWN_INTERVALS):
        group, _, key = measure.partition("/")
        images = "" if record.images is None else f"_{record.images}"
        value, low, high = (f"{of_role(group, task)}/{key}{end}{images}" for end in ("", "_low", "_high"))
        return value, low, high
    elif measure in SPECTRA:
        kind, role = ("worst/", "harmful") if task == WORST else ("test/" if record.split == "test" else "", task)
        own = of_role(measure, role) if measure.endswith("rir") else f"{measure}_{role}"
        name = f"{kind}{own}{'_theta0' if record.stage == 'start' else suffix}"
    elif task == "primary" and measure not in PROBES:
        name = f"primary/{measure}{suffix}"
    else:
        name = f"worst/{measure}" if task == WORST else f"{measure}/{task}{suffix}"
    return name, f"interval/{name}_low", f"interval/{name}_high"


def flat(records: Records) -> tuple[dict[str, float | None], dict[str, str]]:
    """The metrics by their flat names, and the reason of each that is None."""
    metrics: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for record in records.values():
        name, *ends = names(record)
        metrics[name] = record.value
        if record.reason:
            reasons[name] = record.reason
        for end, value, bound in zip(ends, (record.low, record.high), ("-inf", "inf"), strict=True):
            if value is not None:
                metrics[end] = None if math.isnan(value) else value
            if value is not None and math.isnan(value):
                reasons[end] = record.reason or f"the value is not finite ({bound})"
        if record.undetermined is not None:
            metrics[f"undetermined/{name}"] = record.undetermined
    return metrics, reasons


_ROLE = r"(?:primary|harmful|benign|unseen)(?:_[A-Za-z0-9.-]+?)??"
_FORMS = (
    rf"(?P<group>attack|reference)(?:_(?P<task>{_ROLE}))?/(?P<attack>[^/]+)/(?P<measure>.+?)(?P<stage>_baseline|_start)?",
    rf"(?P<group>worth|ceiling|transfer)(?:_(?P<task>{_ROLE}))?/"
    r"(?P<measure>before|after|without|theta_0|lost|removed|worth|worth_attained|partial_.+?)(?:_(?P<images>\d+))?",
    rf"(?P<split>test/)?(?P<measure>(?:authors/)?(?:rir|ratio|kappa|rank))(?:_(?P<task>{_ROLE}))?"
    r"(?P<stage>_baseline|_theta0)?",
    rf"(?P<measure>{'|'.join(PROBES)})/(?P<task>{_ROLE})",
    r"(?P<task>primary)/(?P<measure>accuracy|r2|loss|head_accuracy|head_r2|head_loss|changed_predictions)"
    r"(?P<stage>_baseline)?",
    r"(?P<task>worst)/(?P<measure>rir|ratio(?=_harmful)|steps_ratio|rfd)(?:_harmful)?",
    r"(?P<measure>(?:deployment|other_classes)/.+?)(?P<stage>_baseline)?",
)
_STAGES: Mapping[str, Stage] = {"_baseline": "baseline", "_start": "start", "_theta0": "start"}


@cache
def _of_name(name: str) -> Record:
    """What a flat name is of; a name of no family is a measure of its own."""
    for form in map(re.compile, _FORMS):
        if (match := form.fullmatch(name)) is None:
            continue
        part = match.groupdict()
        group, task, images = part.get("group"), part.get("task"), part.get("images")
        stage, split = _STAGES.get(part.get("stage") or "", "immunized"), None
        measure = part["measure"]
        if group in ("worth", "ceiling", "transfer"):
            measure = f"{group}/{measure}"
        if group or measure.endswith("rir"):
            task = task or "harmful"
        if not group and measure in SPECTRA:
            split = "test" if part.get("split") else "train"
        elif not group and (measure in PROBES or task == "primary"):
            split = "test"
        stage = "reference" if group == "reference" else stage
        record = Record(measure, None, task, stage, split, part.get("attack"), images and int(images))
        if names(record)[0] == name:
            return record
    return Record(name)


def from_flat(metrics: Mapping[str, float | None], reasons: Mapping[str, str]) -> Records:
    """The records of a result of schema 1, which has flat metrics alone; `flat` gives these again."""
    of = {name: _of_name(name) for name in metrics}
    parts = {name: names(record)[1:] for name, record in of.items()}
    parts = {name: ends for name, ends in parts.items() if all(end in metrics for end in ends)}
    inside = {end for ends in parts.values() for end in ends}
    inside |= {f"undetermined/{name}" for name in of if metrics[name] is None}
    records = Records()
    for name, record in of.items():
        if name not in inside:
            value, ends = metrics[name], [metrics[end] for end in parts.get(name, ())]
            low, high = (math.nan if end is None else end for end in ends) if ends else (None, None)
            reason = reasons.get(name, "") if value is None else ""
            withheld = metrics.get(f"undetermined/{name}") if value is None else None
            records.add(replace(record, value=value, low=low, high=high, reason=reason, undetermined=withheld))
    return records
