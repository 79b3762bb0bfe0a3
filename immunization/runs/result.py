"""What a run leaves behind, read from and written to result.json: measures, curves and flags."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict

from immunization.errors import DataError, Requeued, UserError
from immunization.runs import files
from immunization.runs.interpretation import Measured
from immunization.runs.numbers import number
from immunization.runs.records import Record, Records, Role, Stage, flat, from_flat
from immunization.runs.verdict import verdict

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = ("value", "undetermined")
"""Fields of records that are rows of a table."""
INTERRUPTED = "interrupted"  # the status of a run that was told to stop


class Curve(TypedDict):
    x: list[float]
    y: list[float | None]


def by_task(curves: Mapping[str, Curve], family: str) -> dict[Role, dict[Stage, Curve]]:
    """Of each task the curves `<family>/<task>` after immunization, and `<family>/<task>/baseline` before."""
    tasks: dict[Role, dict[Stage, Curve]] = {}
    for name, curve in curves.items():
        kind, *rest = name.split("/")
        if kind == family and rest:
            tasks.setdefault(rest[0], {})["baseline" if rest[1:] == ["baseline"] else "immunized"] = curve
    return tasks


@dataclass(repr=False)
class Result:
    """One run, which counts as failed until the runner says `completed`.

    `records` are what was measured, and `reasons` those of missing values, by their flat names, and of flags. `verdict`
    says in sentences that harm became easier, and what attacks found. `curves` holds x and y by name, `seconds` the
    wall-clock time of `immunize` and `evaluate`. `about` holds the preparation of the data; under `attackers` settings
    that attackers found, under `own_measures` the metrics of the user's own evaluations. `folder` is the run folder; it
    is not part of the file.
    """

    schema: ClassVar[int] = 2
    file: ClassVar[str] = "result.json"

    seed: int
    dataset: str
    model: str
    method: str
    status: Literal["completed", "failed", "interrupted", "requeued"] = "failed"
    records: Records = field(default_factory=Records)
    reasons: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    verdict: list[str] = field(default_factory=list)
    folder: Path | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        said = f"{self.method} on {self.dataset}, {self.model}, seed {self.seed}: {self.status}"
        return f"<Result {said}, {len(self.metrics)} metrics, {len(self.flags)} flags>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, then the metrics and flags, of which long lists are cut in the middle."""
        said = "".join(f"<p>{html.escape(line)}</p>" for line in self.verdict)
        flags = "".join(f"<li>{html.escape(f'{flag}: {self.reasons.get(flag)}')}</li>" for flag in self.flags)
        table = self.to_frame().to_html(max_rows=30, na_rep="", float_format=number)
        return f"<p><b>{html.escape(repr(self)[1:-1])}</b></p>{said}{table}<ul>{flags}</ul>"

    def to_frame(self) -> pd.DataFrame:
        """A row a metric, by name: `value` (NaN for none), `low` and `high` of its 95 % interval, and `reason`."""
        import pandas as pd  # slow to load, and a run does without it

        named = self.records.by_name
        rows = {name: (getattr(record, part), record) for name, (record, part) in named.items() if part in NUMBERS}
        values = {"value": [value for value, _ in rows.values()]}
        values |= {end: [getattr(record, end) for _, record in rows.values()] for end in ("low", "high")}
        frame = pd.DataFrame(values, index=pd.Index(rows, name="metric"), dtype=float)
        return frame.assign(reason=[record.reason if value is None else "" for value, record in rows.values()])

    @property
    def interrupted(self) -> bool:
        """Whether the run was told to stop, by Ctrl-C or a signal, and `resume=true` goes on with it."""
        before = self.status == "failed" and self.error == INTERRUPTED  # as earlier versions wrote it
        return before or self.status in ("interrupted", "requeued")

    @property
    def metrics(self) -> dict[str, float | None]:
        """The values by their flat names, `rir` or `primary/accuracy`; None is a measure that does not exist."""
        return flat(self.records)[0]

    def take(self, measures: Measured) -> None:
        """Take what was measured, and make the sentences of the verdict."""
        self.records, self.reasons, self.flags = measures.records, dict(measures.reasons), list(measures.flags)
        self.curves, self.about = dict(measures.curves), {**self.about, **measures.about}
        self.verdict = verdict([self])

    @property
    def own_measures(self) -> list[str]:
        """Metrics of evaluations outside of this package, which tables show by their names."""
        return self.about.get("own_measures", [])

    def fail(self, error: BaseException) -> None:
        """Mark the run as failed by `error`, interrupted or requeued; measures taken before are kept."""
        self.status = "failed"
        if isinstance(error, UserError):
            self.error = str(error)
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.status = "requeued" if isinstance(error, Requeued) else "interrupted"
            self.error = ": ".join(filter(None, [self.status, getattr(error, "why", "")]))
        else:
            self.error = f"{type(error).__name__}: {error}"

    def as_dict(self) -> dict[str, Any]:
        """The content of result.json: non-finite numbers are None, and every metric that is None has a reason."""
        raw, own = self.metrics, {key.name: getattr(self, key.name) for key in fields(self) if key.name != "folder"}
        own = {name if name != "records" else "metrics": value for name, value in own.items()}
        content = files.plain({"schema": self.schema, **own, "metrics": raw})
        for name, value in content["metrics"].items():
            if value is None:
                why = "not computed" if raw[name] is None else f"not a finite number ({raw[name]})"
                content["reasons"].setdefault(name, why)
        return content | {"records": [files.plain(record.as_dict()) for record in self.records.values()]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], folder: Path | None = None) -> Self:
        """The result of a file's content, of this schema or the first; raises TypeError for what no run writes."""
        own = {key: value for key, value in content.items() if key not in ("schema", "records", "metrics", "verdict")}
        result, metrics = cls(**own, folder=folder), content.get("metrics", {})
        if "records" in content:
            result.records = Records(map(Record.from_dict, content["records"]))
        else:
            result.records = from_flat(metrics, result.reasons)
        curves, numbers = result.curves.values(), (*metrics.values(), *result.seconds.values())
        sound = (
            all(value is None or isinstance(value, int | float) for value in (*numbers, *result.metrics.values()))
            and all(isinstance(curve, dict) and len(curve.get("x", ())) == len(curve.get("y", "?")) for curve in curves)
            and (isinstance(result.seed, int) or result.status != "completed")  # it may be for this seed that it failed
            and isinstance(result.flags, list)
        )
        if not sound:
            raise TypeError("its content is not what a run writes")
        said = content.get("verdict")
        result.verdict = verdict([result]) if said is None else said
        return result

    def write(self, path: str | Path) -> Path:
        """Write the .json file at `path`, or result.json in that folder, with a checksum; returns its path.

        In one step. A folder that is missing is made.
        """
        path, content = Path(path), self.as_dict()
        path = path if path.suffix == ".json" else path / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, content | {"sha256": _checksum(content)})
        return path

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The result in a run folder, or in the file at `path`; raises DataError if there is none to trust."""
        path = Path(path)
        path = path / cls.file if path.is_dir() else path
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; give a run folder, or the result.json in it") from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}); it was cut off or edited, run again") from error
        if not isinstance(content, dict) or content.get("schema") not in (1, cls.schema):
            raise DataError(f"{path} is not a result of schema 1 or {cls.schema}, which this version reads")
        if (expected := content.pop("sha256", None)) is not None and expected != _checksum(content):
            raise DataError(f"{path} was edited or damaged: its checksum does not agree; run again")
        try:
            return cls.from_dict(content, path.parent)
        except (AttributeError, TypeError) as error:
            raise DataError(f"{path}: {error}; it was edited, or written by another version") from error

    @classmethod
    def completed_in(cls, folder: Path) -> bool:
        """Whether a run folder holds the sound result of a completed run."""
        try:
            return cls.read(folder).status == "completed"
        except DataError:
            return False


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
