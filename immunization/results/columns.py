"""Columns of every table: a query, a heading, the cell made of a setting's runs, and the tables that show it.

To show a measure of your own in all tables, add one entry to MEASURES.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from immunization.results.collect import Run
from immunization.results.formatting import NONE, PRIMARY, Cell
from immunization.results.seed_statistics import ROUNDING
from immunization.results.settings import (
    BENIGN_STEPS,
    HARMFUL_STEPS,
    IMMUNIZED,
    OTHER,
    PRIMARY_STEPS,
    RATIOS,
    RIR,
    STEPS,
    Setting,
    above_1,
    at_most_1,
    authors,
    by_authors,
    lacking,
    median,
)
from immunization.runs.interpretation import (
    attack_names,
    breaks,
    interval_of,
    rows_tested,
    successes,
    undecided,
    weakest,
)
from immunization.runs.numbers import number
from immunization.runs.records import STAGES, WORST, Query, Record, Role, in_order, query_of
from immunization.runs.result import Result
from immunization.theory.statistics import interval

AUTHORS = ", authors' κ"
"""Ends the heading of a column by the released code's convention; all others are rank-aware."""
NOTHING = Query("")
"""Of columns that are made of more than one measure, or of none."""
UNDETERMINED = "undetermined"


@dataclass(frozen=True)
class Column:
    """A column of a table: `cell` turns the runs of one setting, and what is queried of them, into a cell.

    The files of a table have all of its columns; `views` names what else shows this one: `terminal`, and for the
    leaderboard `page` (in Markdown) and `browser`. `always`: also where it is empty; `best`: the best mean is bold.
    """

    of: Query
    heading: str
    cell: Callable[[Setting, Query], Cell]
    views: str = "terminal page"
    always: bool = False
    best: bool = False

    @property
    def note(self) -> str:
        """What a reader of the table has to know."""
        return NOTES.get(self.heading, "")


# --- Cells of one measure ---------------------------------------------------------------------------------------------


def middle(setting: Setting, of: Query, form: str = "") -> Cell:
    """The median over all runs, with > where it is a lower bound."""
    return _bounded(Cell.of(setting.median(of), form), setting.at_least(of))


def _bounded(cell: Cell, bound: bool) -> Cell:
    """The cell with > where it is a lower bound."""
    if bound:
        cell.text, cell.words = f"> {cell.text}", True
    return cell


def mean(setting: Setting, of: Query) -> Cell:
    """Mean and standard deviation over seeds."""
    summary = setting.summary(of)
    cell = Cell.of(summary.mean if summary.n else None)
    if not math.isnan(summary.std):
        cell.spread = summary.std
        cell.text += f" ± {number(float(f'{summary.std:.1e}'))}"
    return _bounded(cell, math.inf in setting.bounded(of).values)


def mean_alone(setting: Setting, of: Query) -> Cell:
    """The mean without its spread."""
    summary = setting.summary(of)
    return Cell.of(summary.mean if summary.n else None)


def mean_interval(setting: Setting, of: Query) -> Cell:
    """The interval of a mean of ratios, which are never below 0."""
    summary = setting.summary(of)
    low = max(summary.low, 0.0)
    return Cell(NONE) if math.isnan(summary.low) else Cell(f"{number(low)} to {number(summary.high)}", low, words=True)


def percent(setting: Setting, of: Query) -> Cell:
    """The mean over seeds of a share."""
    summary = setting.summary(of)
    return Cell.of(summary.mean, f"{100 * summary.mean:.0f} %") if summary.n else Cell(NONE)


def _changed(change: Sequence[float | None] | None, text: str = "") -> Cell:
    if change is None or None in change:
        return Cell(NONE)
    before, after = (float(value or 0) for value in change)
    return Cell(f"{text}{before:.3f} → {after:.3f}", after, words=True)


def change(setting: Setting, of: Query) -> Cell:
    """A measure before and after (`Setting.change`)."""
    return _changed(setting.change(of))


def after(setting: Setting, of: Query) -> Cell:
    """A measure before and after, or only after: single runs do not keep the net as it was."""
    cell = change(setting, of)
    return middle(setting, of, "→ {:.3f}") if cell.value is None else cell


def worst(setting: Setting, of: Query) -> Cell:
    """The smallest value over the harmful tasks."""
    several = middle(setting, of._replace(task=WORST))
    return middle(setting, of) if several.value is None else several


def pairs_above(setting: Setting, of: Query, bound: float = -math.inf) -> Cell:
    """How many pairs of classes have a median over seeds above a bound."""
    count = int((setting.pairs(of) > bound * (1 + ROUNDING)).sum())
    return Cell(str(count), count)


def passing(tests: Mapping[Query, Callable[[float], bool]]) -> Callable[[Setting, Query], Cell]:
    """In how many runs every measure passes its test, of those that have them all."""

    def cell(setting: Setting, _: Query) -> Cell:
        measured = [[result.records.value(*of) for of in tests] for result in setting.results]
        rows = [values for row in measured if len(values := [v for v in row if v is not None]) == len(tests)]
        if not rows:
            return Cell(NONE)
        good = sum(all(test(value) for test, value in zip(tests.values(), row, strict=True)) for row in rows)
        partly = len(rows) < len(setting.runs)
        return Cell(f"{good}/{len(rows)}" if partly else str(good), good, words=partly)

    return cell


def run_interval(setting: Setting, of: Query) -> Cell:
    """The interval of a single run; several have a spread."""
    record = setting.results[0].records.get(*of) if len(setting.runs) == 1 else None
    text = interval_of(setting.results[0], record) if record else ""
    return Cell(text, record.low, words=True) if record and text else Cell(NONE)


def removed(setting: Setting, of: Query) -> Cell:
    """Worth removed with its interval, where it can be determined."""
    if share := setting.removed(of):
        shown = (round(end, 2) + 0.0 for end in share)  # no -0.00
        return Cell("{:.2f} ({:.2f} to {:.2f})".format(*shown), share[0], words=True)
    before = of._replace(measure="worth/before")
    return Cell(UNDETERMINED if any(result.records.get(*before) for result in setting.results) else NONE)


def paid(setting: Setting, of: Query) -> Cell:
    """Operations until an attack learns the task, where it does in most runs."""
    costs = setting.paid(of)
    return Cell.of(None if costs == math.inf else costs)


def price(setting: Setting, of: Query) -> Cell:
    """The same relative to the baseline, or the word for a task that no attack learns."""
    return _price(setting, setting.paid(of))


def _price(setting: Setting, ratio: float | None, kind: str = "harmful") -> Cell:
    return Cell(setting.unbroken(kind), 1e300, words=True) if ratio == math.inf else Cell.of(ratio)


# --- Cells of a setting, or of what its attacks show together ---------------------------------------------------------


def label(setting: Setting, _: Query) -> Cell:
    return Cell(setting.label)


def size(setting: Setting, _: Query, runs: str = "runs") -> Cell:
    """How many `runs`, `failed` or `interrupted` there are; a dash for none."""
    count = len(getattr(setting, runs))
    return Cell(str(count) if count else NONE, count)


def unstarred(setting: Setting, objective: Query) -> Cell:
    """Why a setting cannot be marked as the best by the objective, in up to two reasons."""
    reasons = lacking(setting, objective)
    more = f" and {len(reasons) - 2} more" if len(reasons) > 2 else ""
    return Cell("; ".join(reasons[:2]) + more or NONE)


LACKS = {"(i)": "(i)", "Def. 3.1": "Def", "harmful": "harm", "primary": "prim"}
"""How `lacking` begins, and the short word for it."""


def lacks(setting: Setting, objective: Query) -> Cell:
    """The same in a word each."""
    reasons = lacking(setting, objective)
    words = [next(word for start, word in LACKS.items() if reason.startswith(start)) for reason in reasons]
    doubts = ["?" * (" unknown" in reason) for reason in reasons]
    return Cell(" ".join(dict.fromkeys(map("".join, zip(words, doubts, strict=True)))) or NONE)


def varied(setting: Setting, _: Query, key: str) -> Cell:
    """The value of a key in which settings differ."""
    return Cell(setting.varied.get(key, NONE))


def first_change(setting: Setting, _: Query) -> Cell:
    """The first measure of a retrained primary head that there is, with its name."""
    cells = (_changed(setting.change(Query(name, "primary")), f"{PRIMARY[name]} ") for name in ("accuracy", "r2"))
    return next((cell for cell in cells if cell.value is not None), Cell(NONE))


def paper(setting: Setting, _: Query, measure: str) -> Cell:
    """Mean and standard deviation that the paper reports."""
    own = published(setting.first).get(setting.method, {}).get(measure)
    return Cell(f"{number(own[0])} ± {number(own[1])}", own[0], spread=own[1]) if own else Cell(NONE)


def figure2(setting: Setting, _: Query) -> Cell:
    """The paper's count of pairs, and of how many."""
    counts = published(setting.first).get(setting.method, {}).get("figure2")
    return Cell("{:.0f} of {:.0f}".format(*counts), counts[0], words=True) if counts else Cell(NONE)


def seconds(setting: Setting, _: Query) -> Cell:
    totals = [sum(result.seconds.values()) for result in setting.results]
    return Cell.of(sum(totals) / len(totals) if totals else None)


def flags(setting: Setting, _: Query) -> Cell:
    """Flags of the runs, and in how many of several."""
    counted = Counter(flag for result in setting.results for flag in result.flags).items()
    return Cell(", ".join(flag if n == len(setting.runs) else f"{flag} ({n})" for flag, n in counted) or NONE)


def cost(setting: Setting, _: Query, kind: str = "harmful", searched: bool = False) -> Cell:
    """Cost of the cheapest attack on tasks of a kind; `searched`: among attacks that search for their settings."""
    ratio = None if searched and not setting.searched else setting.cost(kind, setting.searched if searched else None)
    return _price(setting, ratio, kind)


def searched(setting: Setting, _: Query) -> Cell:
    """The best measure of attacks that search, before and after; medians over runs."""
    best: list[float | None] = []
    for stage in reversed(STAGES):
        finals = [
            [r.records.value("final", task="harmful", stage=stage, attack=name) for name in setting.searched]
            for r in setting.results
        ]
        best.append(median(max((value for value in own if value is not None), default=None) for own in finals))
    return _changed(best)


def sgrc(setting: Setting, _: Query) -> Cell:
    """SGRC at the fewest and at the most epochs, medians over runs."""
    records: dict[str, Record] = {}
    for result in setting.results:
        records |= result.records.family("sgrc_", attack="sgrc", task="harmful")
    values = [setting.median(records[epochs].of) for epochs in sorted(records, key=int)]
    known = [value for value in values if value is not None]
    return Cell(f"{known[0]:.3f} / {known[-1]:.3f}", known[-1], words=True) if known else Cell(NONE)


def learned_in(setting: Setting, _: Query) -> Cell:
    """In how many attacked runs at least one attack learns the task."""
    known = (result for result in setting.results if result.records.get("bar", weakest(result), attack=WORST))
    broken = [bool(breaks(result)[0]) for result in known]
    return Cell(f"{sum(broken)} of {len(broken)}", sum(broken), words=True) if broken else Cell(NONE)


def breaker(result: Result) -> str | None:
    """The cheapest attack that learns a harmful task; where none does, the one that comes closest."""
    if learned := breaks(result)[0]:
        return next(iter(learned))
    finals = {name: result.records.value("final", task="harmful", attack=name) for name in attack_names(result)}
    known = {name: final for name, final in finals.items() if final is not None}
    return max(known, key=known.__getitem__, default=None)


def broken_by(setting: Setting, _: Query) -> Cell:
    """The attack that most often is the cheapest success; where there is none, that comes closest."""
    if not setting.runs:
        return Cell("failed")
    if broken := [next(iter(learned)) for learned, _ in map(breaks, setting.results) if learned]:
        return Cell(statistics.mode(broken))
    closest = [name for result in setting.results if (name := breaker(result))]
    return Cell(f"nobody; closest: {statistics.mode(closest)}" if closest else NONE)


def learned(setting: Setting, of: Query) -> Cell:
    """Whether the attack learns the harmful task; of several runs, in how many."""
    known = [result for result in setting.results if result.records.value(*of) is not None]
    if not known:
        return Cell(NONE)
    count = sum(of.attack in successes(result) for result in known)
    if len(setting.runs) > 1:
        return Cell(f"{count} of {len(known)}", count / len(known), count > 0, words=True)
    text = ("● yes" if count else "○ no") + " ?" * (of.attack in undecided(known[0]))
    return Cell(text, count, count > 0, words=True)


def rows_interval(setting: Setting, of: Query) -> Cell:
    """The interval that the test rows of a single run leave."""
    final, rows = setting.median(of), rows_tested(setting.results[0]) if len(setting.runs) == 1 else None
    if final is None or not rows:
        return Cell(NONE)
    low, high = interval(final, rows)
    return Cell(f"{low:.2f} to {high:.2f}", low, words=True)


# --- Cells of the leaderboard -----------------------------------------------------------------------------------------


def board_runs(setting: Setting, _: Query) -> Cell:
    others = {"failed": setting.failed, "interrupted": setting.interrupted}
    texts = [f"{len(setting.runs)}", *(f"{len(some)} {kind}" for kind, some in others.items() if some)]
    return Cell(", ".join(texts), len(setting.runs), words=len(texts) > 1)


def rank(setting: Setting, _: Query) -> Cell:
    return Cell(setting.rank or NONE, float(setting.rank) if setting.rank.isdecimal() else None)


def board_primary(setting: Setting, _: Query) -> Cell:
    if setting.primary is None:
        return Cell(NONE)
    of, *values = setting.primary
    cell, std = _changed(values), setting.summary(of).std if of.measure in ("accuracy", "head_accuracy") else math.nan
    cell.text += "" if math.isnan(std) else f" ± {std:.3f}"
    return cell


def retrained(setting: Setting, of: Query) -> Cell:
    """A measure of a retrained head, where it is not the one that `board_primary` shows."""
    return Cell(NONE) if setting.primary is None or setting.primary[0] == of else change(setting, of)


def board_flags(setting: Setting, _: Query) -> Cell:
    """The errors of failed runs, or the flags of the others."""
    failures = dict.fromkeys(f"failed: {run.result.error}" for run in setting.failed)
    return Cell("; ".join(failures) or ", ".join(dict.fromkeys(f for r in setting.results for f in r.flags)) or NONE)


# --- The tables -------------------------------------------------------------------------------------------------------

ACCURACY, R2 = (Query(measure, "primary") for measure in ("accuracy", "r2"))
REMOVED, CEILING = Query("worth/removed", "harmful"), Query("ceiling/worth", "harmful")
MEASURES = [
    Column(REMOVED, "worth removed", middle),
    Column(Query("leak/worth", "harmful", images=1), "told by the weights, 1 label", middle),
]
"""Measures that are in every table and list, on the screen and in the model card."""

OVERVIEW = [
    Column(NOTHING, "method", label),
    Column(RIR, "RIR", middle, always=True),
    Column(IMMUNIZED, "Def. 3.1 holds", percent, always=True),
    Column(HARMFUL_STEPS, "harmful steps", middle, always=True),
    Column(PRIMARY_STEPS, "primary steps", middle, always=True),
    Column(NOTHING, "primary, before → after", first_change, always=True),
]
"""Of RESULTS.md."""

COUNTS = [
    Column(NOTHING, "method", label),
    Column(NOTHING, "runs", size, always=True),
    Column(NOTHING, "RIR > 1", passing({RIR: above_1})),
    *(Column(NOTHING, f"({part})", passing({Query(f"definition/{part}"): bool})) for part in "abc"),
    Column(NOTHING, "Def. 3.1", passing({IMMUNIZED: bool})),
    Column(NOTHING, "harmful > 1", passing({HARMFUL_STEPS: above_1})),
    Column(NOTHING, "primary ≤ 1", passing({PRIMARY_STEPS: at_most_1})),
    Column(NOTHING, "benign ≤ 1", passing({BENIGN_STEPS: at_most_1})),
    Column(NOTHING, "both", passing({HARMFUL_STEPS: above_1, PRIMARY_STEPS: at_most_1})),
]
"""In how many runs a setting succeeds."""


def pair_columns(rir: Query) -> list[Column]:
    """Fig. 2 in numbers."""
    bounds = (1, 2, 10, 100)
    return [
        Column(NOTHING, "method", label),
        Column(rir, "pairs", pairs_above),
        *(Column(rir, f"RIR > {bound}", partial(pairs_above, bound=bound)) for bound in bounds),
        Column(NOTHING, "paper, Fig. 2", figure2, always=True),
    ]


FINAL, COST, ATTACK_STEPS, AREA = (Query(measure, "harmful") for measure in ("final", "cost", "steps", "area"))
SEARCHED = Query("cost_searched", "harmful")


def before(of: Query) -> Query:
    return of._replace(stage="baseline")


ATTACKS = [
    Column(NOTHING, "attack", lambda _, of: Cell(of.attack or NONE)),
    Column(FINAL, "learned", learned),
    Column(FINAL, "immunized", middle),
    Column(FINAL, "95 % interval", rows_interval, ""),
    Column(before(FINAL), "baseline", middle),
    Column(Query("steps_ratio", "harmful"), "steps ratio", middle),
    Column(COST, "operations, immunized", paid),
    Column(before(COST), "operations, baseline", paid, ""),
    Column(SEARCHED, "with search, immunized", paid, ""),
    Column(before(SEARCHED), "with search, baseline", paid, ""),
    Column(ATTACK_STEPS, "steps, immunized", partial(middle, form="{:,.0f}"), ""),
    Column(before(ATTACK_STEPS), "steps, baseline", partial(middle, form="{:,.0f}"), ""),
    Column(Query("steps_ratio_predicted", "harmful"), "ratio by Eq. 2", middle, ""),
    Column(AREA, "area, immunized", middle, ""),
    Column(before(AREA), "area, baseline", middle, ""),
]
"""The attacks on one setting, of which each is put into the queries; the deciding columns come first."""


def listed() -> dict[Query, str]:
    """The headings of `MEASURES`."""
    return {column.of: column.heading for column in MEASURES}


def own_measures(results: Iterable[Result]) -> list[Query]:
    """Measures of evaluations from outside this package that have no column and are shown by their own names."""
    names = dict.fromkeys(name for result in results for name in result.own_measures)
    known = {column.of.name for column in MEASURES}
    return [query_of(name) for name in names if name not in known]


def ratios(group: Sequence[Setting], objective: Query) -> list[Query]:
    """(i), (ii) and RIR in the group's convention of kappa, against theta_0 where the objective is."""
    own = [of._replace(stage="start") if objective.stage == "start" else of for of in RATIOS]
    return [*map(authors, own)] if by_authors(group) else own


def setting_columns(group: Sequence[Setting], objective: Query, further: Sequence[Query]) -> list[Column]:
    """Settings side by side, with `further` measures under their own names."""
    by, other, by_other = "", authors(RIR), AUTHORS
    if by_authors(group):
        by, other, by_other = AUTHORS, RIR, ", rank-aware κ"
    i, ii, rir = ratios(group, objective)
    several = len({run.pair for setting in group for run in setting.runs}) > 1
    roles = in_order(role for setting in group for r in setting.results for role in r.records.tasks("steps_ratio"))
    others = [(role, STEPS._replace(task=role)) for role in roles if role != "harmful"]
    return [
        Column(NOTHING, "method", label, always=True),
        Column(NOTHING, "runs", size, always=True),
        *(Column(NOTHING, kind, partial(size, runs=kind)) for kind in ("failed", "interrupted")),
        Column(i, f"(i){by}", mean, always=True, best=True),
        Column(ii, f"(ii){by}", mean, always=True, best=True),
        Column(rir, f"RIR{by}", mean, always=True, best=True),
        *(Column(of, of.name, mean, always=True, best=of == objective) for of in further),
        Column(rir, f"RIR{by}, 95 % interval", mean_interval, ""),
        *[Column(rir, f"RIR{by}, median", middle, "")] * several,
        Column(NOTHING, "paper (i)", partial(paper, measure="ratio_harmful"), ""),
        Column(NOTHING, "paper (ii)", partial(paper, measure="ratio_primary"), ""),
        Column(NOTHING, "paper RIR", partial(paper, measure="rir"), ""),
        Column(other, f"RIR{by_other}", middle, "", always=True),
        Column(Query("ceiling/attained"), "ceiling, log share", percent, ""),
        Column(IMMUNIZED, "Def. 3.1 holds", percent, ""),
        Column(ACCURACY, "primary accuracy, before → after", change, ""),
        Column(R2, "primary R², before → after", change, ""),
        Column(NOTHING, "paper accuracy, %", partial(paper, measure="primary_accuracy"), ""),
        Column(HARMFUL_STEPS, "harmful steps ratio", middle),
        Column(HARMFUL_STEPS, "harmful steps ratio, 95 % interval", run_interval, ""),
        *(Column(of, f"{role} steps ratio", middle, "") for role, of in others),
        *(Column(of, f"{role} steps ratio, 95 % interval", run_interval, "") for role, of in others),
        Column(NOTHING, "seconds", seconds, ""),
        *[Column(objective, "no ★ for", unstarred)] * (len(group) > 1),
        Column(NOTHING, "flags", flags, "", always=True),
        MEASURES[0],
        Column(CEILING, "ceiling of worth removed", middle, ""),
        *MEASURES[1:],
    ]


WORTH = (
    "Worth removed: the worth is how much more accuracy the best attacker reaches with theta_0 than the best attacker "
    "without the model. The column shows the share of it that immunization takes away, for attackers with so many "
    "images of each class. 0 is no defense. In brackets: the 95 % interval, for several seeds that of their mean. "
    "Undetermined: the worth of theta_0 may be 0, or validation rows chose badly."
)

NOTES = {
    "rank": "Rank: by worth removed. A row has a rank if it has three seeds or more, removes something (its interval "
    "is above 0), and loses at most two points on the primary task and on other classes at either size.",
    "worth removed": WORTH,
    "worth removed, all images": WORTH,
    "primary, before → after": "Primary: test accuracy, R² or loss of the model's own head. A model without one has a "
    "retrained head. Accuracy: mean ± standard deviation over seeds; the value of a seed is its mean over pairs. R², "
    "loss and ratios are medians over runs, because one run can dominate a mean.",
    "primary probe": "Probe: steps ratio of a probe by gradient descent. > means that it never reached its target "
    "accuracy. A large ratio is good for harmful and unseen tasks, a ratio of at most 1 for primary and benign tasks.",
    "price": "Price: operations of the cheapest attack that learns the harmful task, divided by those of the cheapest "
    "on the baseline; for several harmful tasks, the smallest price. Held: in most runs, no attack learns the task "
    "within its budget. This is no proof. Not attacked by training: no attack learned the task, but none fine-tuned "
    "everything that was immunized. Not attacked by standard: no attack learned the task, but attack=standard did not "
    "run.",
    "price with search": "Price with search: the price, with the operations of all settings that an attacker tried.",
    "searched, before → after": "Searched: the best test accuracy or R² of attackers who search for their settings.",
    "ceiling of worth removed": "Ceiling of worth removed: the share of the worth that is lost to attackers who only "
    "read the layers before the immunized ones, train these layers from random weights, or do without the model.",
    "SGRC": "SGRC: the share of an attacker's test accuracy that immunization takes away. The attacker fine-tunes the "
    "whole net; shown after the fewest and after the most epochs.",
    "unseen price": "Unseen: harmful data that no method was shown.",
    "fine-tuning": "Harmful probe, ridge on features, fine-tuning: the attackers of the methods' own papers. "
    "Fine-tuning trains what was immunized, which is not the same in every row. A method that does not stop these "
    "attackers does not work here.",
}
"""What readers have to know of a column, by its heading."""


def board_columns(benign: Collection[Role]) -> list[Column]:
    """The leaderboard, with the tasks to which a `benign` user transfers the net."""
    everywhere, pages = "terminal page browser", "page browser"
    moved = [(f"{task}, {n} images", Query("transfer/after", task, images=n)) for n in (5, 20) for task in benign]
    columns = [
        Column(NOTHING, "method", label, everywhere, always=True),
        Column(NOTHING, "runs", board_runs, always=True),
        Column(NOTHING, "rank", rank, pages),
        Column(NOTHING, "seeds", lambda row, _: Cell.of(len({result.seed for result in row.results})), "browser"),
        Column(REMOVED._replace(images=5), "worth removed, 5 images", removed, everywhere),
        Column(REMOVED._replace(images=20), "worth removed, 20 images", removed, everywhere),
        Column(REMOVED, "worth removed, all images", removed, everywhere),
        Column(NOTHING, "primary, before → after", board_primary, everywhere, always=True),
        Column(ACCURACY, "primary, retrained head", retrained, pages),
        Column(OTHER[0], "other classes, own head", after, pages),
        Column(OTHER[1], "other classes, twice the size", after, pages),
        *(Column(of, heading, change, pages) for heading, of in moved),
        Column(PRIMARY_STEPS, "primary probe", middle, "page"),
        Column(BENIGN_STEPS, "benign probe", middle, "page"),
        Column(NOTHING, "learned in", learned_in, ""),
        Column(NOTHING, "price", cost, everywhere, always=True),
        Column(NOTHING, "broken by", broken_by, everywhere, always=True),
        Column(Query("flops_ratio_searched", "harmful", attack=WORST), "price with search", price, "page"),
        Column(NOTHING, "searched, before → after", searched, "page"),
        Column(CEILING, "ceiling of worth removed", middle, "page"),
        Column(NOTHING, "price by search", partial(cost, searched=True), ""),
        Column(NOTHING, "SGRC", sgrc, "page"),
        Column(NOTHING, "unseen price", partial(cost, kind="unseen"), "page"),
        Column(STEPS._replace(task="unseen"), "unseen probe", middle, "page"),
        Column(HARMFUL_STEPS, "harmful probe", worst, "page"),
        Column(FINAL._replace(attack="closed_form_probe"), "ridge on features", change, "page"),
        Column(FINAL._replace(attack="finetune_trained"), "fine-tuning", change, "page"),
        Column(RIR, "RIR", worst, always=True),
        Column(IMMUNIZED, "Def. 3.1", percent, "terminal", always=True),
        Column(NOTHING, "flags", board_flags, ""),
    ]
    known = {column.of for column in columns}
    return columns + [column for column in MEASURES if column.of not in known]


def published(run: Run) -> dict[str, Any]:
    """The paper's numbers for a run's data and model, by method and measure; empty without such a table."""
    name = str(run.settings.get("model.name", "")).rpartition("/")[2].partition(".")[0]  # without hub and training
    model = next((key for key, names in _paper()["models"].items() if name in names), None)
    return _paper().get(f"{run.result.dataset}/{model}" if model else run.result.dataset, {})


@cache
def _paper() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
