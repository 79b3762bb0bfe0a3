"""Comparable runs: those that differ only in the seed and the pair of classes, in groups of one data set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from immunization.results.collect import ATTACK, AUDITED, MEASURING, PAIR, TRAINING, Collection, Run, varying
from immunization.results.formatting import PRIMARY
from immunization.results.seed_statistics import ROUNDING, Summary, summarize
from immunization.roles import kind_of
from immunization.runs.interpretation import HELD, UNNUMBERED, UNTRAINED, at_least, attacked, successes, unbroken
from immunization.runs.numbers import number
from immunization.runs.records import STAGES, WORST, Query, names, query_of
from immunization.runs.result import Result
from immunization.runs.verdict import NOT_SLOWER

if TYPE_CHECKING:
    import pandas as pd

OTHER = Query("other_classes/accuracy"), Query("other_classes/accuracy_enlarged")
"""Of the own head on classes that no method is shown, and on their images at twice the size."""

METHODS = {
    **{"identity": "#888888", "r_ill_only": "#E69F00", "imma": "#CC79A7", "opt_kappa": "#009E73"},
    **{"condition_number": "#0072B2", "closed_form": "#D55E00", "learning_curve": "#56B4E9"},
    **{"released_condition_number": "#AABB66", "clamp": "#BB0033", "encoderlock": "#2244BB", "forget": "#990077"},
    **{"learning_curve_net": "#9988FF", "ntl": "#883355", "sophon": "#226633", "tar": "#5533FF"},
    **{"unmodified": "#994400", "forget_blocks": "#660088", "decoys": "#6666FF"},
}
"""The order of rows, and colors: the baseline, the paper's methods in its order, the others; further ones by name.

The colors are Okabe and Ito's and, as far from these and each other as color-blind readers see, eleven more.
"""

RATIO_HARMFUL, RATIO_PRIMARY, RIR = (
    Query(*of, split="train") for of in (("ratio", "harmful"), ("ratio", "primary"), ("rir", "harmful"))
)
RATIOS = {RATIO_HARMFUL: "(i)", RATIO_PRIMARY: "(ii)", RIR: "RIR"}
BY_AUTHORS = {"ratio": "authors/ratio", "rir": "authors/rir"}
"""The measures of `RATIOS` by the released code's convention of kappa."""
IMMUNIZED, CEILING = Query("definition/immunized"), Query("ceiling/rir")
STEPS = Query("steps_ratio", split="test")
HARMFUL_STEPS, PRIMARY_STEPS, BENIGN_STEPS = (STEPS._replace(task=task) for task in ("harmful", "primary", "benign"))
SCORE = Query("alignment/score")
HEAD = ("head_accuracy", "head_r2", "head_loss")
"""What may be measured on the primary task by the model's own head."""
ACCURACIES = ("accuracy", "head_accuracy", *(of.measure for of in OTHER))
"""Measures of which tables show the mean over seeds; others can spread by orders of magnitude."""

KEEPS = (
    "settings that slow the harmful probe and keep the primary task in every run. These settings have (i) > 1, satisfy "
    "Definition 3.1, and have a harmful steps ratio above 1 (without the flag harmful_not_slower) and a primary steps "
    "ratio of at most 1"
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
        self._known: dict[str, pd.Series] = {}
        self.varied: dict[str, str] = {}  # the keys in which it differs from others of its method, and its values

    @property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a run, by seed, pair of classes and further classes; a column a number, by its flat name."""
        import pandas as pd  # slow to load, and a run that only prints its sheet does without it

        index = pd.MultiIndex.from_tuples([run.place for run in self.runs], names=["seed", "pair", "others"])
        frame = pd.DataFrame([run.result.metrics for run in self.runs], index=index, dtype=float)
        return frame[~frame.index.duplicated(keep="last")]

    def values(self, of: Query) -> pd.Series:
        """The number of each run that has it, by seed, pair of classes, and benign and unseen classes."""
        return self._values(of.name)

    def _values(self, name: str) -> pd.Series:
        if name not in self._known:  # a report asks for one again and again
            self._known[name] = self.frame.reindex(columns=[name])[name].dropna()
        return self._known[name]

    def bounded(self, of: Query) -> pd.Series:
        """`values`, with infinity for every lower bound (`interpretation.at_least`)."""
        values, records = self.values(of), ((run, run.result.records.get(*of)) for run in self.runs)
        bounds = [run.place for run, record in records if record and at_least(run.result, record)]
        return values.mask(values.index.isin(bounds), math.inf) if bounds else values

    def at_least(self, of: Query) -> bool:
        """Whether the median is a lower bound, since it depends on values that are."""
        values = self.values(of)
        return bool(len(values)) and bool(values.median() != self.bounded(of).median())

    def seeds(self, of: Query) -> pd.Series:
        """The mean over all pairs of classes, for each seed."""
        return self.values(of).groupby(level="seed", sort=False).mean()

    def summary(self, of: Query) -> Summary:
        """Mean, spread and interval over the seeds."""
        return summarize(self.seeds(of))

    def median(self, of: Query) -> float | None:
        """Over all runs; for measures that spread by orders of magnitude."""
        values = self.values(of)
        return float(values.median()) if len(values) else None

    def paid(self, of: Query) -> float | None:
        """The median of operations until a task is learned, or of their ratio: infinite in runs that never learn it."""
        attacked = (r.records for r in self.results if r.records.value("bar", task="harmful", attack=WORST) is not None)
        records = [record for own in attacked if (record := own.get(*of))]
        return median(math.inf if record.value is None else record.value for record in records)

    def change(self, of: Query) -> tuple[float, float] | None:
        """A measure before and after: a mean over seeds for an accuracy, else a median over runs."""
        transfer = of.measure == "transfer/after"
        before = of._replace(measure="transfer/before") if transfer else of._replace(stage="baseline")
        if not (len(self.values(before)) and len(self.values(of))):
            return None
        accuracy = transfer or of.measure in ACCURACIES
        first, last = (self.summary(of).mean if accuracy else float(self.values(of).median()) for of in (before, of))
        return first, last

    def pairs(self, of: Query) -> pd.Series:
        """The median over the seeds, for each pair of classes, by the primary and the harmful one."""
        values = self.values(of).groupby(level="pair", sort=False).median()
        values = values[values.index != ""]
        return values.set_axis(values.index.map(lambda pair: tuple(pair.split("→"))))

    def reason(self, of: Query) -> str | None:
        """Why runs have no value of the measure."""
        records = [(result.reasons, result.records.get(*of)) for result in self.results]
        missing = [reasons for reasons, record in records if record and record.value is None]
        first = missing[0].get(of.name, "no reason given") if missing else ""
        return f"{len(missing)} of {len(self.runs)}: {first}" if missing else None

    @cached_property
    def primary(self) -> tuple[Query, float, float] | None:
        """The measure of the primary task, by the model's own head where it has one, before and after (`change`)."""
        queries = (Query(measure, "primary") for measure in (*HEAD, *PRIMARY))
        return next(((query, *change) for query in queries if (change := self.change(query))), None)

    @property
    def price(self) -> float | None:
        """Loss on the primary task, in the units of its measure."""
        if self.primary is None:
            return None
        of, before, after = self.primary
        return after - before if of.measure in ("loss", "head_loss") else before - after

    @property
    def lost(self) -> float | None:
        """The largest of `price` and the losses of accuracy on the own head's other classes (`OTHER`).

        None where one is not known, but for what no run measured.
        """
        changes = [self.change(of) for of in OTHER if len(self.values(of))]
        losses = [self.price, *(change and change[0] - change[1] for change in changes)]
        known = [loss for loss in losses if loss is not None]
        return max(known) if len(known) == len(losses) else None

    def removed(self, of: Query) -> tuple[float, float, float] | None:
        """Mean over seeds of a `worth/removed` and the ends of its interval; None unless all runs have it.

        To the runs' own intervals, which are of the same test rows, comes that of the mean over three or more seeds.
        """
        if not self.runs or any(result.records.value(*of) is None for result in self.results):
            return None
        mean, *ends = (summarize(self._values(name).groupby(level="seed", sort=False).mean()) for name in names(of))
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
                learned = (successes(result, task, stage).items() for stage in STAGES)
                after, before = ([cost for name, cost in own if only is None or name in only] for own in learned)
                if before:
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
    of = in_convention(group, objective)
    candidates = [setting for setting in group if len(setting.values(of)) and not lacking(setting, of)]
    candidates.sort(key=lambda setting: setting.summary(of).mean, reverse=True)
    return next(iter(candidates), None) if comparable([s.values(of) for s in candidates]) else None


def comparable(values: Sequence[pd.Series]) -> bool:
    """Whether the first of some settings' `Setting.values` share a seed and pair of classes with each of the others."""
    return all(values[0].index.isin(others.index).any() for others in values[1:])


def in_convention(group: Sequence[Setting], objective: str) -> Query:
    """The objective by the authors' kappa where the data are prepared as theirs, as the table shows it."""
    of = query_of(objective)
    return authors(of) if by_authors(group) and of in RATIOS else of


def authors(of: Query) -> Query:
    """A ratio or RIR by the authors' kappa."""
    return of._replace(measure=BY_AUTHORS[of.measure])


def by_authors(group: Sequence[Setting]) -> bool:
    """Whether the data are prepared as the authors': the paper's numbers, to compare with, are by their kappa."""
    return bool(group) and str(group[0].first.settings.get("dataset.protocol")).startswith("authors")


def lacking(setting: Setting, objective: Query = RIR) -> list[str]:
    """What of `KEEPS` does not hold in all runs of a setting, and in how many it fails: `primary steps > 1: 2/3`.

    Measures that no run has are skipped, except (i), which is read in the objective's convention of kappa.
    """
    harmful = authors(RATIO_HARMFUL) if objective.measure in BY_AUTHORS.values() else RATIO_HARMFUL
    criteria: list[tuple[str, str, Sequence[Query], Callable[[float], bool]]] = [
        ("(i)", " ≤ 1", (harmful,), above_1),
        ("Def. 3.1", " fails", (IMMUNIZED,), bool),
        ("harmful steps", " ≤ 1", (HARMFUL_STEPS._replace(task=WORST), HARMFUL_STEPS), above_1),
        ("primary steps", " > 1", (PRIMARY_STEPS,), at_most_1),
    ]
    runs, reasons = [result.records for result in setting.results], []
    for name, fails, queries, good in criteria:
        records = [next(filter(None, (own.get(*of) for of in queries)), None) for own in runs]
        own = [record.value if record else None for record in records]
        unknown, failed = own.count(None), sum(value is not None and not good(value) for value in own)
        reasons += [f"{name}{fails}: {failed}/{len(runs)}"] if failed else []
        reasons += [f"{name} unknown: {unknown}/{len(runs)}"] * (unknown > 0 and (name == "(i)" or unknown < len(runs)))
    doubted = sum(NOT_SLOWER in result.flags for result in setting.results)
    return reasons + [f"{NOT_SLOWER}: {doubted}/{len(runs)}"] * bool(doubted)


def above_1(value: float) -> bool:
    """Whether a ratio is above 1, and not only by rounding."""
    return value > 1 + ROUNDING


def at_most_1(value: float) -> bool:
    return not above_1(value)


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


def correlations(group: Sequence[Setting]) -> dict[str, pd.Series]:
    """By pair of classes: the ceiling of RIR, and the RIR of each setting, which alignment may predict."""
    measured = [setting for setting in group if len(setting.pairs(SCORE)) > 2]
    if not measured:
        return {}
    ceiling = first_pairs(measured, CEILING)
    return {"ceiling": ceiling} | {setting.label: setting.pairs(RIR) for setting in measured}


def first_pairs(group: Sequence[Setting], of: Query) -> pd.Series:
    """A measure by pair of classes, of the first setting that has it."""
    return next((values for setting in group if len(values := setting.pairs(of))), group[0].pairs(of))


def named(group: Sequence[Setting], without: tuple[str, ...] = ("dataset.",)) -> list[Setting]:
    """The settings of one group, sorted by method and labeled by method and the keys in which they differ.

    Labels leave out keys that start with one of `without`.
    """
    for setting in group:
        same = [other.first.settings for other in group if other.method == setting.method]
        names = [name for name in varying(same) if not name.startswith(without) and not name.endswith("_partial_")]
        words = [_label(name, setting.first.settings.get(name)) for name in names]
        setting.label = " ".join([setting.method, *words])
        setting.varied = {key: value or key for key, _, value in (word.partition("=") for word in words)}
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
