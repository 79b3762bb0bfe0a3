"""What a run leaves behind, read from and written to result.json: measures, curves, flags, and what its attacks say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal, TypedDict

from immunization.errors import DataError, UserError
from immunization.runs import strict_json

ATTACK = "attack/"
"""Starts the names of what the attacks measure."""


class Curve(TypedDict):
    x: list[float]
    y: list[float]


@dataclass
class Result:
    """One run. It counts as failed until the runner says `completed`.

    `metrics` holds flat names (`rir`, `primary/accuracy`); None is a measure that does not exist. `reasons` says why,
    for such a metric and for every flag. `curves` holds x and y by name, `seconds` the wall-clock time of `immunize`
    and `evaluate`, `about` the preparation of the data. `folder` is the run folder; it is not part of the file.
    """

    schema: ClassVar[int] = 1
    file: ClassVar[str] = "result.json"

    seed: int
    dataset: str
    model: str
    method: str
    status: Literal["completed", "failed"] = "failed"
    metrics: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False)

    @property
    def verdict(self) -> list[str]:
        """What the attacks of the run say of its immunization, in sentences; none where there were none."""
        return verdict([self])

    def fail(self, error: BaseException) -> None:
        """Mark the run as failed by `error`; measures taken before are kept."""
        self.status = "failed"
        if isinstance(error, UserError):
            self.error = str(error)
        else:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            self.error = "interrupted" if stopped else f"{type(error).__name__}: {error}"

    def as_dict(self) -> dict[str, Any]:
        """The content of result.json: non-finite numbers are None, and every metric that is None has a reason."""
        content = {"schema": self.schema} | {key.name: getattr(self, key.name) for key in fields(self)}
        del content["folder"]
        content = strict_json.plain(content)
        for name, value in content["metrics"].items():
            if value is None:
                raw = self.metrics[name]
                why = "not computed" if raw is None else f"not a finite number ({raw})"
                content["reasons"].setdefault(name, why)
        return content

    def write(self, folder: str | Path) -> Path:
        """Write result.json, which ends in a checksum of its content, into `folder` in one step and return its path."""
        path, content = Path(folder) / self.file, self.as_dict()
        strict_json.write(path, content | {"sha256": _checksum(content)})
        return path

    @classmethod
    def read(cls, path: str | Path) -> Result:
        """The result in a run folder, or in the file at `path`; raises DataError if there is none to trust."""
        path = Path(path)
        path = path / cls.file if path.is_dir() else path
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; give a run folder, or the result.json in it") from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}); it was cut off or edited, run again") from error
        if not isinstance(content, dict) or content.get("schema") != cls.schema:
            raise DataError(f"{path} is not a result of schema {cls.schema}, the only one this version reads")
        if (expected := content.pop("sha256", None)) is not None and expected != _checksum(content):
            raise DataError(f"{path} was edited or damaged: its checksum does not agree; run again")
        del content["schema"]
        try:
            return cls(**content, folder=path.parent)
        except TypeError as error:
            raise DataError(f"{path}: {error}; it was edited, or written by another version") from error


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def attack_names(result: Result) -> list[str]:
    """The attacks of a run, in their order; those that did not apply are left out."""
    found = (key.split("/")[1] for key, value in result.metrics.items() if key.startswith(ATTACK) and value is not None)
    return [name for name in dict.fromkeys(found) if name != "worst"]


def successes(result: Result) -> dict[str, float]:
    """Attacks that learn the harmful task with theta_I, cheapest first: name -> operations."""
    costs = {name: result.metrics.get(f"{ATTACK}{name}/cost") for name in attack_names(result)}
    return dict(sorted(((name, cost) for name, cost in costs.items() if cost is not None), key=lambda item: item[1]))


def verdict(results: Sequence[Result]) -> list[str]:
    """Sentences on one run, or on several of one setting; none where there were no attacks."""
    results = [result for result in results if result.metrics.get("attack/worst/bar") is not None]
    if not results:
        return []
    if len(results) > 1:
        return _several(results)
    (result,) = results
    found, tried = successes(result), attack_names(result)
    measure = "accuracy" if "primary/accuracy" in result.metrics or _classes(result) else "R²"
    bar = result.metrics["attack/worst/bar"]
    doubts = [f"Mind: {result.reasons[flag]}." for flag in ("other_data", "unknown_data") if flag in result.flags]
    if found:
        name, cost = next(iter(found.items()))
        ratio = result.metrics.get("attack/worst/flops_ratio")
        lines = [
            f"It does not hold: {len(found)} of {len(tried)} attacks learn the harmful task, held-out {measure} "
            f"{bar:.3f} or more (90 % of the way from chance to the best that any attack makes of the baseline).",
            f"The cheapest is {name}, with {cost:.2g} operations"
            + ("" if ratio is None else f", {ratio:.2g} times those of the cheapest attack on the baseline")
            + ".",
        ]
    else:
        lines = [
            f"None of {len(tried)} attacks learns the harmful task within its budget, held-out {measure} {bar:.3f}; "
            f"the best comes to {result.metrics['attack/worst/final']:.3f}. That is no proof: others may."
        ]
    held = [name for name in tried if name not in found and result.metrics.get(f"{ATTACK}{name}/final") is not None]
    if held and found:
        lines.append(f"It holds, within their budgets, against {', '.join(held)}.")
    lost = [name for name in tried if result.metrics.get(f"{ATTACK}{name}/final") is None]
    if lost:
        reason = result.reasons.get("attacks_diverged", "not measured")
        lines.append(f"Nothing is known of {', '.join(lost)}: {reason}.")
    return doubts + lines


def _several(results: Sequence[Result]) -> list[str]:
    broken = [successes(result) for result in results]
    cheapest = [next(iter(found)) for found in broken if found]
    ratios = [r for result in results if (r := result.metrics.get("attack/worst/flops_ratio")) is not None]
    line = f"In {len(cheapest)} of {len(results)} runs an attack learns the harmful task"
    if cheapest:
        most = max(dict.fromkeys(cheapest), key=cheapest.count)
        line += f"; the cheapest is {most} in {cheapest.count(most)} of them"
    if ratios:
        line += f", and takes {median(ratios):.2g} times the operations that the baseline takes (median)"
    return [f"{line}."]


def _classes(result: Result) -> bool:
    return any(key.startswith(ATTACK) and key.endswith("/accuracy") for key in result.curves)
