"""Records of what a run measures, and the flat names of `metrics` that are derived from them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

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
OWN_INTERVALS = ("worth/", "ceiling/", "transfer/", "leak/")
"""Families of measures whose intervals have names beside theirs, not below `interval/`."""


class Query(NamedTuple):
    """What a number is of, in the words of `Record`; without a split, it is of the one that is measured first."""

    measure: str
    task: Role | None = None
    stage: Stage = "immunized"
    split: str | None = None
    attack: str | None = None
    images: int | None = None

    @property
    def name(self) -> str:
        """The flat name of the value."""
        return names(self)[0]


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

    @property
    def of(self) -> Query:
        return Query(self.measure, self.task, self.stage, self.split, self.attack, self.images)

    @property
    def number(self) -> float:
        """The value; NaN for none."""
        return math.nan if self.value is None else self.value

    @property
    def role(self) -> Role:
        """The task; empty for none."""
        return self.task or ""

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


class Records(dict[Query, Record]):
    """Records by what they are of, in the order in which that was first measured."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        super().__init__()
        self.add(*records)

    def add(self, *records: Record) -> None:
        """Take records, each in place of another one of the same."""
        for record in records:
            self[record.of] = record
        self.__dict__.pop("by_name", None)

    def get(  # type: ignore[override]
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
            if (record := super().get(Query(measure, task, stage, place, attack, images))) is not None:
                return record
        return None

    def value(self, *of: Any, **more: Any) -> float | None:
        """The value of a measure (`get`); None where it has none or was not measured."""
        record = self.get(*of, **more)
        return None if record is None else record.value

    def number(self, *of: Any, **more: Any) -> float:
        """The same as a float: NaN for none."""
        value = self.value(*of, **more)
        return math.nan if value is None else value

    def where(self, **of: Any) -> list[Record]:
        """All records whose fields have these values."""
        return [record for record in self.values() if all(getattr(record, key) == value for key, value in of.items())]

    def tasks(self, measure: str) -> list[Role]:
        """The tasks of which a measure was taken, but `WORST`: the usual ones, then the others by name."""
        return in_order(record.task for record in self.where(measure=measure, attack=None) if record.task != WORST)

    def family(self, start: str, end: str = "", **of: Any) -> dict[str, Record]:
        """Records of measures with a parameter, `sgrc_<epochs>` or `selectivity/<layer>/lost`, by that parameter."""
        own = [
            record for record in self.where(**of) if record.measure.startswith(start) and record.measure.endswith(end)
        ]
        return {record.measure.removeprefix(start).removesuffix(end): record for record in own}

    @cached_property
    def by_name(self) -> dict[str, tuple[Record, str]]:
        """The record of every flat name, and which of its fields has the number."""
        numbers = {}
        for record in self.values():
            name, *ends = names(record)
            numbers[name] = record, "value"
            for end, part in zip(ends, ("low", "high"), strict=True):
                if getattr(record, part) is not None:
                    numbers[end] = record, part
            if record.undetermined is not None:
                numbers[f"undetermined/{name}"] = record, "undetermined"
        return numbers


def in_order(roles: Iterable[Role | None], first: Iterable[Role] = ("harmful", "primary", "benign")) -> list[Role]:
    """Each of some tasks once: those of `first`, then the others by name."""
    known = {role for role in roles if role}
    usual = [role for role in first if role in known]
    return usual + sorted(known - set(usual))


def of_role(name: str, role: Role) -> str:
    """A name of something that tasks have in turn, such as a flag; plain for the first harmful task."""
    return name if role == "harmful" else f"{name}_{role}"


def names(record: Record | Query) -> tuple[str, str, str]:
    """The flat names of a value and of the ends of its interval."""
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
    for name, (record, part) in records.by_name.items():
        metrics[name], reason = getattr(record, part), record.reason if part == "value" else ""
        if part in ("low", "high") and math.isnan(getattr(record, part)):
            metrics[name] = None
            reason = record.reason or f"the value is not finite ({'-inf' if part == 'low' else 'inf'})"
        if reason:
            reasons[name] = reason
    return metrics, reasons


_ROLE = r"(?:primary|harmful|benign|unseen)(?:_[A-Za-z0-9.-]+?)??"
_FORMS = (
    rf"(?P<group>attack|reference)(?:_(?P<task>{_ROLE}))?/(?P<attack>[^/]+)/(?P<measure>.+?)(?P<stage>_baseline|_start)?",
    rf"(?P<group>worth|ceiling|transfer|leak)(?:_(?P<task>{_ROLE}))?/"
    r"(?P<measure>auc|auc_random|with|before|after|without|theta_0|lost|removed|worth|worth_attained|partial_.+?)(?:_(?P<images>\d+))?",
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
def query_of(name: str) -> Query:
    """What a flat name is of; a name of no family is a measure of its own."""
    for form in map(re.compile, _FORMS):
        if (match := form.fullmatch(name)) is None:
            continue
        part = match.groupdict()
        group, task, images = part.get("group"), part.get("task"), part.get("images")
        stage, split = _STAGES.get(part.get("stage") or "", "immunized"), None
        measure = part["measure"]
        if group in ("worth", "ceiling", "transfer", "leak"):
            measure = f"{group}/{measure}"
        if group or measure.endswith("rir"):
            task = task or "harmful"
        if not group and measure in SPECTRA:
            split = "test" if part.get("split") else "train"
        elif not group and (measure in PROBES or task == "primary"):
            split = "test"
        stage = "reference" if group == "reference" else stage
        query = Query(measure, task, stage, split, part.get("attack"), int(images) if images else None)
        if query.name == name:
            return query
    return Query(name)


def from_flat(metrics: Mapping[str, float | None], reasons: Mapping[str, str]) -> Records:
    """The records of a result of schema 1, which has flat metrics alone; `flat` gives these again."""
    of = {name: query_of(name) for name in metrics}
    parts = {name: names(query)[1:] for name, query in of.items()}
    parts = {name: ends for name, ends in parts.items() if all(end in metrics for end in ends)}
    inside = {end for ends in parts.values() for end in ends}
    inside |= {f"undetermined/{name}" for name in of if metrics[name] is None}
    records = Records()
    for name, query in of.items():
        if name not in inside:
            value, ends = metrics[name], [metrics[end] for end in parts.get(name, ())]
            low, high = (math.nan if end is None else end for end in ends) if ends else (None, None)
            reason = reasons.get(name, "") if value is None else ""
            withheld = metrics.get(f"undetermined/{name}") if value is None else None
            own: dict[str, Any] = {"value": value, "low": low, "high": high, "reason": reason, "undetermined": withheld}
            records.add(Record(**query._asdict(), **own))
    return records
