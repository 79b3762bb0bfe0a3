"""Comparable runs: those that differ only in the seed and the pair of classes, in groups of one data set."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from immunization.results.collect import ATTACK, AUDITED, MEASURING, PAIR, TRAINING, Collection, Run, varying
from immunization.results.formatting import MEASURES, number
from immunization.results.seed_statistics import ROUNDING, Summary, summarize
from immunization.runs.interpretation import HELD, UNNUMBERED, UNTRAINED, at_least, attacked, successes, unbroken
from immunization.runs.records import STAGES, kind_of
from immunization.runs.result import Result
from immunization.runs.verdict import NOT_SLOWER

OTHER = "other_classes/accuracy", "other_classes/accuracy_enlarged"
"""Of the own head on classes that no method is shown, and on their images at twice the size."""

METHODS = {
    **{"identity": "#888888", "r_ill_only": "#E69F00", "imma": "#CC79A7", "opt_kappa": "#009E73"},
    **{"condition_number": "#0072B2", "closed_form": "#D55E00", "learning_curve": "#56B4E9"},
    **{"released_condition_number": "#AABB66", "clamp": "#BB0033", "encoderlock": "#2244BB", "forget": "#990077"},
    **{"learning_curve_net": "#9988FF", "ntl": "#883355", "sophon": "#226633", "tar": "#5533FF"},
    "unmodified": "#994400",
}
"""The order of rows, and colors: the baseline, the paper's methods in its order, the others; further ones by name.

The colors are Okabe and Ito's and, as far from these and each other as color-blind readers see, nine more.
"""

RATIOS = {"ratio_harmful": "(i)", "ratio_primary": "(ii)", "rir": "RIR"}

KEEPS = (
    "settings that slow harm and keep the primary task in every run: (i) > 1, Definition 3.1, a harmful steps ratio "
    "above 1 without the flag harmful_not_slower, and a primary one of at most 1"
)
"""When a setting can be marked as the best, in words."""


class Setting:
    """Runs that differ only in the seed and the pair of classes.

    In a leaderboard, `apart` says why it is listed separately, and `rank` the place of a row that has one.
    """

    def __init__(self, runs: Sequence[Run], others: Sequence[Run] = ()) -> None:
        self.runs = list(runs)
        self.apart = self.rank = ""
        self.failed, self.interrupted = ([r for r in others if r.result.interrupted is kind] for kind in (False, True))
        self.first = [*runs, *others][0]
        self.method = self.first.result.method
        self.label = self.method

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs]

    def values(self, metric: str, bound: float | None = None) -> dict[tuple[int, str, str], float]:
        """The measure of each run that has it, by seed, pair of classes, and benign and unseen classes.

        `bound` stands for every lower bound (`interpretation.at_least`).
        """
        found = {}
        for run in self.runs:
            if (value := run.result.metrics.get(metric)) is not None:
                others = str([run.settings.get(key) for key in ("dataset.benign", "dataset.unseen")])
                bounded = bound is not None and at_least(run.result, metric)
                found[run.result.seed, run.pair, others] = bound if bounded else float(value)
        return found

    def at_least(self, metric: str) -> bool:
        """Whether the median is a lower bound, since it depends on values that are."""
        values = self.values(metric, bound=math.inf).values()
        return bool(values) and statistics.median(values) != self.median(metric)

    def seeds(self, metric: str) -> list[float]:
        """The mean over all pairs of classes, for each seed."""
        by_seed: dict[int, list[float]] = {}
        for (seed, *_), value in self.values(metric).items():
            by_seed.setdefault(seed, []).append(value)
        return [sum(values) / len(values) for values in by_seed.values()]

    def summary(self, metric: str) -> Summary:
        """Mean, spread and interval over the seeds."""
        return summarize(self.seeds(metric))

    def median(self, metric: str) -> float | None:
        """Over all runs; for measures that spread by orders of magnitude."""
        values = self.values(metric).values()
        return statistics.median(values) if values else None

    def paid(self, metric: str) -> float | None:
        """The median of operations until a task is learned, or of their ratio: infinite in runs that never learn it."""
        attacked = (result.metrics for result in self.results if result.metrics.get("attack/worst/bar") is not None)
        return median(
            math.inf if metrics[metric] is None else metrics[metric] for metrics in attacked if metric in metrics
        )

    def change(self, measure: str) -> tuple[float, float] | None:
        """A measure before and after: a mean over seeds for an accuracy, else a median over runs."""
        names = measure.replace("/after", "/before") if "/after" in measure else f"{measure}_baseline", measure
        if not all(map(self.seeds, names)):
            return None
        accuracy = "accuracy" in measure or "/after" in measure
        return tuple(self.summary(name).mean if accuracy else self.median(name) for name in names)

    def pairs(self, metric: str) -> dict[tuple[str, str], float]:
        """The median over the seeds, for each pair of classes."""
        by_pair: dict[tuple[str, str], list[float]] = {}
        for (_, pair, _), value in self.values(metric).items():
            if pair:
                by_pair.setdefault(tuple(pair.split("→")), []).append(value)
        return {pair: statistics.median(values) for pair, values in by_pair.items()}

    def reason(self, metric: str) -> str | None:
        """Why runs have no value of the measure."""
        missing = [result.reasons for result in self.results if result.metrics.get(metric, ...) is None]
        first = missing[0].get(metric, "no reason given") if missing else ""
        return f"{len(missing)} of {len(self.runs)}: {first}" if missing else None

    @cached_property
    def primary(self) -> tuple[str, float, float] | None:
        """The measure of the primary task, by the model's own head where it has one, before and after (`change`)."""
        names = (f"primary/{head}{name}" for head in ("head_", "") for name in MEASURES)
        return next(((name, *change) for name in names if (change := self.change(name))), None)

    @property
    def price(self) -> float | None:
        """Loss on the primary task, in the units of its measure."""
        if self.primary is None:
            return None
        name, before, after = self.primary
        return after - before if name.endswith("loss") else before - after

    @property
    def lost(self) -> float | None:
        """The largest of `price` and the losses of accuracy on the own head's other classes (`OTHER`).

        None where one is not known, but for what no run measured.
        """
        changes = [self.change(measure) for measure in OTHER if self.values(measure)]
        losses = [self.price, *(change and change[0] - change[1] for change in changes)]
        return None if None in losses else max(losses)

    def removed(self, metric: str) -> tuple[float, float, float] | None:
        """Mean over seeds of a `worth/removed` and the ends of its interval; None unless all runs have it.

        To the runs' own intervals, which are of the same test rows, comes that of the mean over three or more seeds.
        """
        if not self.runs or any(result.metrics.get(metric) is None for result in self.results):
            return None
        task, _, measure = metric.partition("/")
        name, _, images = measure.partition("_")
        own = ("_".join(filter(None, (name, end, images))) for end in ("", "low", "high"))
        mean, *ends = (self.summary(f"{task}/{each}") for each in own)
        spread = 0.0 if math.isnan(mean.low) else mean.mean - mean.low
        low, high = (math.hypot(end.mean - mean.mean, spread) for end in ends)
        return mean.mean, mean.mean - low, mean.mean + high

    @cached_property
    def attacks(self) -> dict[str, Any]:
        """Every key below `attack` of the configuration."""
        return {key: value for key, value in self.first.settings.items() if key.startswith(ATTACK)}

    @cached_property
    def searched(self) -> list[str]:
        """Attacks that search for their settings."""
        return [key.split(".")[1] for key, value in self.attacks.items() if key.endswith(".search") and value]

    def cost(self, kind: str = "harmful", only: Sequence[str] | None = None) -> float | None:
        """Median over runs of the cheapest success relative to the baseline's; infinite if held, None without data.

        With several tasks of a kind, the cheapest task counts; `only` restricts the attacks.
        """
        costs = []
        for task in self._attacked(kind):
            ratios = []
            for result in self.results:
                after, before = (successes(result, task, stage) for stage in STAGES)
                if before := [cost for name, cost in before.items() if only is None or name in only]:
                    after = [cost for name, cost in after.items() if only is None or name in only]
                    ratios.append(min(after, default=math.inf) / min(before))
            costs.append(median(ratios))
        return min((cost for cost in costs if cost is not None), default=None)

    def unbroken(self, kind: str = "harmful") -> str:
        """The word for a setting whose task no attack learns in most runs."""
        words = {unbroken(result, task) for result in self.results for task in self._attacked(kind)}
        return next(word for word in (UNTRAINED, UNNUMBERED, HELD) if word in words)

    def _attacked(self, kind: str) -> list[str]:
        tasks = dict.fromkeys(task for result in self.results for task in attacked(result))
        return [task for task in tasks if kind_of(task) == kind]


def median(ratios: Iterable[float | None]) -> float | None:
    """The median of the known ratios; infinite only if more than half of them are, as `held` claims."""
    known = [ratio for ratio in ratios if ratio is not None]
    middle = statistics.median(known) if known else None
    return statistics.median_low(known) if middle == math.inf else middle


def settings(collection: Collection) -> list[list[Setting]]:
    """The runs in groups that can be compared, each group as its settings; failed and interrupted runs are counted."""
    groups = [named(group) for group in grouped(collection, lambda run: run.group)]
    return sorted(groups, key=lambda group: group[0].first.result.dataset)


def grouped(collection: Collection, key: Callable[[Run], str]) -> list[list[Setting]]:
    """The settings of all runs, including those that did not complete, in groups of the same `key`."""
    groups: dict[str, dict[str, tuple[list[Run], list[Run]]]] = {}
    others = [problem.run for problem in collection.problems if problem.run]
    for side, runs in enumerate((collection.runs, others)):
        for run in runs:
            groups.setdefault(key(run), {}).setdefault(run.setting, ([], []))[side].append(run)
    return [[Setting(*runs) for runs in group.values()] for group in groups.values()]


def best(group: Iterable[Setting], objective: str) -> Setting | None:
    """The setting with the largest mean of the objective among those that lack nothing; None if there is none.

    Nor if it shares no seed and pair of classes with another of them, which it cannot be compared with.
    """
    group = list(group)
    objective = in_convention(group, objective)
    candidates = [setting for setting in group if setting.seeds(objective) and not lacking(setting, objective)]
    candidates.sort(key=lambda setting: setting.summary(objective).mean, reverse=True)
    return next(iter(candidates), None) if comparable([s.values(objective) for s in candidates]) else None


def comparable(values: Sequence[Mapping[tuple, float]]) -> bool:
    """Whether the first of some settings' `Setting.values` share a seed and pair of classes with each of the others."""
    return all(values[0].keys() & others.keys() for others in values[1:])


def in_convention(group: Sequence[Setting], objective: str) -> str:
    """The objective by the authors' kappa where the data are prepared as theirs, as the table shows it."""
    return f"authors/{objective}" if by_authors(group) and objective in RATIOS else objective


def by_authors(group: Sequence[Setting]) -> bool:
    """Whether the data are prepared as the authors': the paper's figures, to compare with, are by their kappa."""
    return bool(group) and str(group[0].first.settings.get("dataset.protocol")).startswith("authors")


def lacking(setting: Setting, objective: str = "rir") -> list[str]:
    """What of `KEEPS` does not hold in all runs of a setting, and in how many it fails: `primary steps > 1: 2/3`.

    Measures that no run has are skipped, except (i), which is read in the objective's convention of kappa.
    """
    harmful = ("authors/" if objective.startswith("authors/") else "") + "ratio_harmful"
    above, at_most = (lambda value: value > 1 + ROUNDING), (lambda value: value <= 1 + ROUNDING)
    criteria: list[tuple[str, str, Sequence[str], Callable[[float], bool]]] = [
        ("(i)", " ≤ 1", (harmful,), above),
        ("Def. 3.1", " fails", ("definition/immunized",), bool),
        ("harmful steps", " ≤ 1", ("worst/steps_ratio", "steps_ratio/harmful"), above),
        ("primary steps", " > 1", ("steps_ratio/primary",), at_most),
    ]
    runs, found = [result.metrics for result in setting.results], []
    for name, fails, measures, good in criteria:
        own = [next((metrics[key] for key in measures if key in metrics), None) for metrics in runs]
        unknown, failed = own.count(None), sum(value is not None and not good(value) for value in own)
        found += [f"{name}{fails}: {failed}/{len(runs)}"] if failed else []
        found += (
            [f"{name} unknown: {unknown}/{len(runs)}"] if unknown and (name == "(i)" or unknown < len(runs)) else []
        )
    doubted = sum(NOT_SLOWER in result.flags for result in setting.results)
    return found + [f"{NOT_SLOWER}: {doubted}/{len(runs)}"] * bool(doubted)


def short_labels(group: Sequence[Setting]) -> dict[Setting, str]:
    """Labels for a legend: without the method where all settings are of one."""
    one = len({setting.method for setting in group}) == 1
    return {s: (s.label.removeprefix(s.method).strip() if one else "") or s.label for s in group}


def title(group: Sequence[Setting], others: Sequence[Sequence[Setting]] = ()) -> str:
    """A group's title: data set, model, and the keys in which groups differ."""
    first = group[0].first
    words = [f"{first.result.dataset}, {first.result.model}"]
    same = [other[0].first for other in others if other[0].first.result.dataset == first.result.dataset]
    names = dict.fromkeys(["dataset.protocol"] if "dataset.protocol" in first.settings else [])
    differing = varying([run.settings for run in same])
    names |= dict.fromkeys(name for name in differing if not name.startswith(TRAINING) and name not in PAIR)
    known = {name: first.settings[name] for name in names if first.settings.get(name) is not None}
    # evaluations and attacks that only some have, by name: their keys would fill a page
    some = sorted(name for name in names if name.startswith(MEASURING) and name.endswith("._target_"))
    apart = tuple(name.removesuffix("_target_") for name in some)
    words += [f"{name.removeprefix('dataset.')}={_value(v)}" for name, v in known.items() if not name.startswith(apart)]
    chosen = [name.removesuffix("._target_") for name in some if name in known]
    return ", ".join([*words, *chosen[:3], *([f"{len(chosen) - 3} more"] if len(chosen) > 3 else [])])


def correlations(group: Sequence[Setting]) -> dict[str, dict[tuple[str, str], float]]:
    """By pair of classes: the ceiling of RIR, and the RIR of each setting, which alignment may predict."""
    measured = [setting for setting in group if len(setting.pairs("alignment/score")) > 2]
    ceilings = next((found for setting in measured if (found := setting.pairs("ceiling/rir"))), {})
    return {"ceiling": ceilings} | {setting.label: setting.pairs("rir") for setting in measured} if measured else {}


def named(group: Sequence[Setting], without: tuple[str, ...] = ("dataset.",)) -> list[Setting]:
    """The settings of one group, sorted by method and labeled by method and the keys in which they differ.

    Labels leave out keys that start with one of `without`.
    """
    for setting in group:
        same = [other.first.settings for other in group if other.method == setting.method]
        names = [name for name in varying(same) if not name.startswith(without) and not name.endswith("_partial_")]
        setting.label = " ".join([setting.method, *(_label(name, setting.first.settings.get(name)) for name in names)])
    return sorted(group, key=lambda setting: (place(setting), setting.method))


def place(setting: Setting) -> int:
    """Among METHODS; all others come last."""
    return [*METHODS, setting.method].index(setting.method)


def _label(name: str, value: object) -> str:
    """One key and its value as a part of a label; a class by its name alone, a run by the end of its path."""
    if name.endswith("._target_"):
        return f"{name.removesuffix('._target_')}={str(value).rpartition('.')[2]}"
    if name == AUDITED:
        return "/".join(Path(str(value)).parts[-2:])
    return f"{name.removeprefix('method.')}={_value(value)}"


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
