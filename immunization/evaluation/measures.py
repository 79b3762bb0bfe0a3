"""The return value of every evaluation: flat numbers, curves, flags and arrays, with reasons for missing values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from immunization.errors import ConfigError
from immunization.runs.result import Curve

if TYPE_CHECKING:
    from immunization.evaluation.comparison import Comparison

Role = str
"""`primary`, `harmful`, `benign`, or that of a further task (`TaskPair.tasks`)."""
Stage = Literal["immunized", "baseline", "start"]
"""theta_I, the baseline (raw inputs or theta_0), and theta_0 if it is not the baseline."""
SUFFIX: dict[Stage, str] = {"immunized": "", "baseline": "_baseline"}
"""Endings of metric names; curves of the baseline end in `/baseline`."""

CONDITIONING = ("rir", "ratio_harmful", "ratio_primary", "kappa_harmful", "kappa_primary")
"""Measures of the spectra after immunization, on training inputs."""

OF_SPECTRA = re.compile(
    r"(authors/|test/)?(rir|ratio|kappa)(_[\w.-]+)?(?<!_baseline)|worst/(rir|ratio_harmful)|definition/rir_kept"
)
"""Measures of spectra after immunization, of every task and split, in both conventions, and what is made of them."""

AUTHORS = ("authors/rir", "authors/ratio_harmful", "authors/ratio_primary")
"""Ratios by the released code's convention of kappa."""


@dataclass
class Measures:
    """Flat numbers, curves, flags, arrays and facts `about` them; what is missing (None) or flagged has its reason."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    arrays: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: float) -> None:
        """Record a metric; None with a reason where it is not finite."""
        if math.isfinite(value):
            self.metrics[name] = float(value)
        else:
            self.miss(f"the value is not finite ({value})", name)

    def interval(self, name: str, low: float, high: float) -> None:
        """Record the ends of the 95 % interval of a metric."""
        self.put(f"interval/{name}_low", low)
        self.put(f"interval/{name}_high", high)

    def miss(self, reason: str, *names: str) -> None:
        """Record metrics that do not exist, with the reason."""
        for name in names:
            self.metrics[name], self.reasons[name] = None, reason

    def flag(self, name: str, reason: str) -> None:
        """Raise a flag, to be shown beside every score of the run."""
        self.reasons[name] = reason
        if name not in self.flags:
            self.flags.append(name)

    def worst(self, name: str, of: Iterable[str]) -> None:
        """Put the smallest of some metrics."""
        values = {key: self.metrics.get(key) for key in of}
        if missing := [key for key, value in values.items() if value is None]:
            self.miss(f"{missing[0]} is missing: {self.reasons.get(missing[0], 'not measured')}", name)
        else:
            self.put(name, min(values.values()))

    def withhold(self, flag: str, reason: str) -> None:
        """Flag condition numbers and their ratios as undetermined, and move them to `undetermined/<name>`."""
        self.flag(flag, reason)
        for name in list(filter(OF_SPECTRA.fullmatch, self.metrics)):
            if self.metrics.get(name) is not None:
                self.metrics[f"undetermined/{name}"] = self.metrics[name]
                self.miss(reason, name)

    def curve(self, name: str, x: Iterable[float], y: Tensor, stage: Stage = "immunized") -> None:
        """Record a curve y [T] against x; the baseline's is `<name>/baseline`."""
        self.curves[name + SUFFIX[stage].replace("_", "/")] = {"x": list(x), "y": y.tolist()}

    def merge(self, other: Measures) -> None:
        """Add everything from `other`."""
        for name in ("metrics", "reasons", "curves", "arrays", "about"):
            getattr(self, name).update(getattr(other, name))
        self.flags.extend(flag for flag in other.flags if flag not in self.flags)


def evaluate(evaluations: Mapping[str, Callable[[Comparison], Measures]], comparison: Comparison) -> Measures:
    """What all evaluations measure; raises ConfigError for one of the user's own that gives no or others' measures."""
    measures, own = Measures(), {}
    for name, evaluation in evaluations.items():
        found = evaluation(comparison)
        ours = type(evaluation).__module__.startswith("immunization.")
        if not isinstance(found, Measures):
            raise ConfigError(f"evaluation.{name} gives {type(found).__name__}, no Measures")
        if both := (own if ours else measures.metrics).keys() & found.metrics:
            raise ConfigError(f"evaluation.{name} measures {min(both)}, as another evaluation does: rename one")
        measures.merge(found)
        own |= {} if ours else found.metrics
    if own:
        measures.about["own_measures"] = list(own)
    return measures
