"""Columns of every table: a query, a heading, how runs become a cell, and the views that show it.

To show a measure of your own in all tables, add one entry to MEASURES.
"""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml

from immunization.results.collect import Run
from immunization.results.formatting import MEASURES as PRIMARY
from immunization.results.formatting import NONE, Cell, number, roles_in
from immunization.results.seed_statistics import ROUNDING
from immunization.results.settings import RATIOS, Setting, by_authors, lacking, median
from immunization.runs.interpretation import (
    attack_names,
    breaks,
    interval_of,
    rows_tested,
    successes,
    undecided,
    weakest,
)
from immunization.runs.records import WORST
from immunization.runs.result import Result
from immunization.theory.statistics import interval

AUTHORS = ", authors' κ"
"""Ends the heading of a column by the released code's convention; all others are rank-aware."""


@dataclass(frozen=True)
class Column:
    """A column of a table: `cell` turns the runs of one setting, and the name of a measure, into a cell.

    The files of a table have all of its columns; `views` names what else shows this one: `terminal`, and for the
    leaderboard `page` (in Markdown) and `browser`. `always`: also where it is empty; `best`: the best mean is bold.
    """

    measure: str
    heading: str
    cell: Callable[[Setting, str], Cell]
    views: str = "terminal page"
    always: bool = False
    best: bool = False

    @property
    def note(self) -> str:
        """What a reader of the table has to know."""
        return NOTES.get(self.heading, "")


def label(setting: Setting, measure: str) -> Cell:
    return Cell(setting.label)


def unstarred(setting: Setting, objective: str) -> Cell:
    """Why a setting cannot be marked as the best by the objective, in up to two reasons."""
    found = lacking(setting, objective)
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return Cell("; ".join(found[:2]) + more or NONE)


def size(setting: Setting, runs: str) -> Cell:
    """How many `runs`, `failed` or `interrupted` there are; a dash for none."""
    count = len(getattr(setting, runs))
    return Cell(str(count) if count else NONE, count)


def middle(setting: Setting, measure: str, form: str = "") -> Cell:
    """The median over all runs, with > where it is a lower bound."""
    return _bounded(Cell.of(setting.median(measure), form), setting.at_least(measure))


def _bounded(cell: Cell, bound: bool) -> Cell:
    """The cell with > where it is a lower bound."""
    if bound:
        cell.text, cell.words = f"> {cell.text}", True
    return cell


def mean(setting: Setting, measure: str) -> Cell:
    """Mean and standard deviation over seeds."""
    summary = setting.summary(measure)
    cell = Cell.of(summary.mean if summary.n else None)
    if not math.isnan(summary.std):
        cell.spread = summary.std
        cell.text += f" ± {number(float(f'{summary.std:.1e}'))}"
    return _bounded(cell, math.inf in setting.values(measure, bound=math.inf).values())


def mean_interval(setting: Setting, measure: str) -> Cell:
    """The interval of a mean of ratios, which are never below 0."""
    summary = setting.summary(measure)
    if math.isnan(summary.low):
        return Cell(NONE)
    low = max(summary.low, 0.0)
    return Cell(f"{number(low)} to {number(summary.high)}", low, words=True)


def percent(setting: Setting, measure: str) -> Cell:
    """The mean over seeds of a share."""
    summary = setting.summary(measure)
    return Cell.of(summary.mean, f"{100 * summary.mean:.0f} %") if summary.n else Cell(NONE)


def change(setting: Setting, measure: str, text: str = "") -> Cell:
    """A measure before and after (`Setting.change`)."""
    found = setting.change(measure)
    return Cell(text + "{:.3f} → {:.3f}".format(*found), found[1], words=True) if found else Cell(NONE)


def after(setting: Setting, measure: str) -> Cell:
    """A measure before and after, or only after: single runs do not keep the net as it was."""
    found = change(setting, measure)
    return middle(setting, measure, "→ {:.3f}") if found.value is None else found


def first_change(setting: Setting, measures: str) -> Cell:
    """The first of several measures that there is, with its name."""
    cells = (change(setting, f"primary/{name}", f"{PRIMARY[name]} ") for name in measures.split())
    return next((cell for cell in cells if cell.value is not None), Cell(NONE))


def paper(setting: Setting, measure: str) -> Cell:
    """Mean and standard deviation that the paper reports."""
    found = published(setting.first).get(setting.method, {}).get(measure)
    return Cell(f"{number(found[0])} ± {number(found[1])}", found[0], spread=found[1]) if found else Cell(NONE)


def pairs_above(setting: Setting, measure: str, bound: float = -math.inf) -> Cell:
    """How many pairs of classes have a median over seeds above a bound."""
    values = setting.pairs(measure).values()
    count = sum(value > bound * (1 + ROUNDING) for value in values)
    return Cell(str(count), count)


def figure2(setting: Setting, measure: str) -> Cell:
    """The paper's count of pairs, and of how many."""
    found = published(setting.first).get(setting.method, {}).get("figure2")
    return Cell("{:.0f} of {:.0f}".format(*found), found[0], words=True) if found else Cell(NONE)


def seconds(setting: Setting, measure: str) -> Cell:
    totals = [sum(result.seconds.values()) for result in setting.results]
    return Cell.of(sum(totals) / len(totals) if totals else None)


def flags(setting: Setting, measure: str) -> Cell:
    """Flags of the runs, and in how many of several."""
    counted = Counter(flag for result in setting.results for flag in result.flags).items()
    return Cell(", ".join(flag if n == len(setting.runs) else f"{flag} ({n})" for flag, n in counted) or NONE)


def passing(tests: Mapping[str, Callable[[float], bool]]) -> Callable[[Setting, str], Cell]:
    """In how many runs every measure passes its test, of those that have them all."""

    def cell(setting: Setting, measure: str) -> Cell:
        rows = [[result.metrics.get(metric) for metric in tests] for result in setting.results]
        rows = [row for row in rows if None not in row]
        if not rows:
            return Cell(NONE)
        good = sum(all(test(value) for test, value in zip(tests.values(), row, strict=True)) for row in rows)
        partly = len(rows) < len(setting.runs)
        return Cell(f"{good}/{len(rows)}" if partly else str(good), good, words=partly)

    return cell


def board_runs(setting: Setting, measure: str) -> Cell:
    others = {"failed": setting.failed, "interrupted": setting.interrupted}
    texts = [f"{len(setting.runs)}", *(f"{len(some)} {kind}" for kind, some in others.items() if some)]
    return Cell(", ".join(texts), len(setting.runs), words=len(texts) > 1)


def board_primary(setting: Setting, measure: str) -> Cell:
    if setting.primary is None:
        return Cell(NONE)
    name, *_ = setting.primary
    cell, std = change(setting, name), setting.summary(name).std if name.endswith("accuracy") else math.nan
    cell.text += "" if math.isnan(std) else f" ± {std:.3f}"
    return cell


def retrained(setting: Setting, measure: str) -> Cell:
    """A measure of a retrained head, where it is not the one that `board_primary` shows."""
    shown = setting.primary
    return Cell(NONE) if shown is None or shown[0] == measure else change(setting, measure)


def learned_in(setting: Setting, measure: str) -> Cell:
    """In how many attacked runs at least one attack learns the task."""
    known = (r for r in setting.results if r.records.get("bar", weakest(r), attack=WORST))
    found = [bool(breaks(result)[0]) for result in known]
    return Cell(f"{sum(found)} of {len(found)}", sum(found), words=True) if found else Cell(NONE)


def paid(setting: Setting, measure: str) -> Cell:
    """Operations until an attack learns the task, where it does in most runs."""
    found = setting.paid(measure)
    return Cell.of(None if found == math.inf else found)


def price(setting: Setting, measure: str) -> Cell:
    return _price(setting, setting.paid(measure))


def _price(setting: Setting, ratio: float | None, kind: str = "harmful") -> Cell:
    return Cell(setting.unbroken(kind), 1e300, words=True) if ratio == math.inf else Cell.of(ratio)


def cost(setting: Setting, kind: str) -> Cell:
    """Cost of the cheapest attack on tasks of a kind; `searched`: on harmful tasks, among attacks that search."""
    only, kind = (setting.searched, "harmful") if kind == "searched" else (None, kind)
    return _price(setting, None if only == [] else setting.cost(kind, only), kind)


def breaker(result: Result) -> str | None:
    """The cheapest attack that learns a harmful task; where none does, the one that comes closest."""
    if found := breaks(result)[0]:
        return next(iter(found))
    finals = {name: result.metrics.get(f"attack/{name}/final") for name in attack_names(result)}
    known = {name: final for name, final in finals.items() if final is not None}
    return max(known, key=known.__getitem__, default=None)


def broken_by(setting: Setting, measure: str) -> Cell:
    """The attack that most often is the cheapest success; where there is none, that comes closest."""
    if not setting.runs:
        return Cell("failed")
    if broken := [next(iter(found)) for found, _ in map(breaks, setting.results) if found]:
        return Cell(statistics.mode(broken))
    closest = [name for result in setting.results if (name := breaker(result))]
    return Cell(f"nobody; closest: {statistics.mode(closest)}" if closest else NONE)


def removed(setting: Setting, measure: str) -> Cell:
    """Worth removed with its interval, where it can be determined."""
    if found := setting.removed(measure):
        shown = (round(share, 2) + 0.0 for share in found)  # no -0.00
        return Cell("{:.2f} ({:.2f} to {:.2f})".format(*shown), found[0], words=True)
    measured = measure.replace("removed", "before")
    return Cell(UNDETERMINED if any(measured in result.metrics for result in setting.results) else NONE)


def rank(setting: Setting, measure: str) -> Cell:
    return Cell(setting.rank or NONE, float(setting.rank) if setting.rank.isdecimal() else None)


def searched(setting: Setting, measure: str) -> Cell:
    """The best measure of attacks that search, before and after; medians over runs."""
    reached = []
    for suffix in ("_baseline", ""):
        names = [f"attack/{name}/final{suffix}" for name in setting.searched]
        finals = ([result.metrics.get(name) for name in names] for result in setting.results)
        reached.append(median(max((value for value in some if value is not None), default=None) for some in finals))
    return Cell(NONE) if None in reached else Cell("{:.3f} → {:.3f}".format(*reached), reached[1], words=True)


def sgrc(setting: Setting, measure: str) -> Cell:
    """SGRC at the fewest and at the most epochs, medians over runs."""
    names = {name for result in setting.results for name in result.metrics if name.startswith("attack/sgrc/sgrc_")}
    values = [setting.median(name) for name in sorted(names, key=lambda name: int(name.rpartition("_")[2]))]
    known = [value for value in values if value is not None]
    return Cell(f"{known[0]:.3f} / {known[-1]:.3f}", known[-1], words=True) if known else Cell(NONE)


def worst(setting: Setting, measure: str) -> Cell:
    """The smallest value over the harmful tasks."""
    several = middle(setting, f"worst/{measure.removesuffix('/harmful')}")
    return middle(setting, measure) if several.value is None else several


def board_flags(setting: Setting, measure: str) -> Cell:
    """The errors of failed runs, or the flags of the others."""
    failures = dict.fromkeys(f"failed: {run.result.error}" for run in setting.failed)
    return Cell("; ".join(failures) or ", ".join(dict.fromkeys(f for r in setting.results for f in r.flags)) or NONE)


def learned(setting: Setting, attack: str) -> Cell:
    """Whether the attack learns the harmful task; of several runs, in how many."""
    known = [result for result in setting.results if result.metrics.get(f"attack/{attack}/final") is not None]
    if not known:
        return Cell(NONE)
    count = sum(attack in successes(result) for result in known)
    if len(setting.runs) > 1:
        return Cell(f"{count} of {len(known)}", count / len(known), count > 0, words=True)
    text = ("● yes" if count else "○ no") + " ?" * (attack in undecided(known[0]))
    return Cell(text, count, count > 0, words=True)


def rows_interval(setting: Setting, measure: str) -> Cell:
    """The interval that the test rows of a single run leave."""
    final, rows = setting.median(measure), rows_tested(setting.results[0]) if len(setting.runs) == 1 else None
    if final is None or not rows:
        return Cell(NONE)
    low, high = interval(final, rows)
    return Cell(f"{low:.2f} to {high:.2f}", low, words=True)


def run_interval(setting: Setting, measure: str) -> Cell:
    """The interval of a single run; several have a spread."""
    text = interval_of(setting.results[0], measure) if len(setting.runs) == 1 else ""
    return Cell(text, setting.median(f"interval/{measure}_low"), words=True) if text else Cell(NONE)


_ABOVE_1, _AT_MOST_1 = partial(operator.lt, 1 + ROUNDING), partial(operator.ge, 1 + ROUNDING)
UNDETERMINED = "undetermined"
MEASURES = [Column("worth/removed", "worth removed", middle)]
"""Measures that stand in every table and list, on the screen and in the model card."""

OVERVIEW = [
    Column("", "method", label),
    Column("rir", "RIR", middle, always=True),
    Column("definition/immunized", "Def. 3.1 holds", percent, always=True),
    Column("steps_ratio/harmful", "harmful steps", middle, always=True),
    Column("steps_ratio/primary", "primary steps", middle, always=True),
    Column("accuracy r2", "primary, before → after", first_change, always=True),
]
"""Of RESULTS.md."""

_FASTER, _KEPT = {"steps_ratio/harmful": _ABOVE_1}, {"steps_ratio/primary": _AT_MOST_1}
COUNTS = [
    Column("", "method", label),
    Column("runs", "runs", size, always=True),
    Column("", "RIR > 1", passing({"rir": _ABOVE_1})),
    *(Column("", f"({part})", passing({f"definition/{part}": bool})) for part in "abc"),
    Column("", "Def. 3.1", passing({"definition/immunized": bool})),
    Column("", "harmful > 1", passing(_FASTER)),
    Column("", "primary ≤ 1", passing(_KEPT)),
    Column("", "benign ≤ 1", passing({"steps_ratio/benign": _AT_MOST_1})),
    Column("", "both", passing(_FASTER | _KEPT)),
]
"""In how many runs a setting succeeds."""

PAIRS = [
    Column("", "method", label),
    Column("rir", "pairs", pairs_above),
    *(Column("rir", f"RIR > {bound}", partial(pairs_above, bound=bound)) for bound in (1, 2, 10, 100)),
    Column("", "paper, Fig. 2", figure2, always=True),
]
"""Fig. 2 in numbers; RIR is by the group's convention of kappa."""

ATTACKS = [
    Column("", "attack", lambda _, attack: Cell(attack)),
    Column("", "learned", learned),
    Column("final", "immunized", middle),
    Column("final", "95 % interval", rows_interval, ""),
    Column("final_baseline", "baseline", middle),
    Column("steps_ratio", "steps ratio", middle),
    Column("cost", "operations, immunized", paid),
    Column("cost_baseline", "operations, baseline", paid, ""),
    Column("cost_searched", "with search, immunized", paid, ""),
    Column("cost_searched_baseline", "with search, baseline", paid, ""),
    Column("steps", "steps, immunized", partial(middle, form="{:,.0f}"), ""),
    Column("steps_baseline", "steps, baseline", partial(middle, form="{:,.0f}"), ""),
    Column("steps_ratio_predicted", "ratio by Eq. 2", middle, ""),
    Column("area", "area, immunized", middle, ""),
    Column("area_baseline", "area, baseline", middle, ""),
]
"""The attacks on one setting, by what is measured of an attack; the deciding ones come first."""


def own_measures(results: Iterable[Result]) -> list[str]:
    """Metrics of evaluations from outside this package that have no column and are shown by their own names."""
    known = {column.measure for column in MEASURES}
    return list(dict.fromkeys(name for result in results for name in result.own_measures if name not in known))


def ratios(group: Sequence[Setting], objective: str) -> list[str]:
    """The names of (i), (ii) and RIR in the group's convention of kappa, against theta_0 where the objective is."""
    kappa, start = "authors/" * by_authors(group), "_theta0" * objective.endswith("_theta0")
    return [f"{kappa}{ratio}{start}" for ratio in RATIOS]


def setting_columns(group: Sequence[Setting], objective: str, further: Sequence[str]) -> list[Column]:
    """Settings side by side, with `further` measures under their own names."""
    by, other, by_other = ("", "authors/", AUTHORS)
    if by_authors(group):
        by, other, by_other = AUTHORS, "", ", rank-aware κ"
    i, ii, rir = ratios(group, objective)
    several = len({run.pair for setting in group for run in setting.runs}) > 1
    names = (name for setting in group for result in setting.results for name in result.metrics)
    others = [role for role in roles_in(names, "steps_ratio") if role != "harmful"]
    return [
        Column("", "method", label, always=True),
        Column("runs", "runs", size, always=True),
        Column("failed", "failed", size),
        Column("interrupted", "interrupted", size),
        Column(i, f"(i){by}", mean, always=True, best=True),
        Column(ii, f"(ii){by}", mean, always=True, best=True),
        Column(rir, f"RIR{by}", mean, always=True, best=True),
        *(Column(name, name, mean, always=True, best=name == objective) for name in further),
        Column(rir, f"RIR{by}, 95 % interval", mean_interval, ""),
        *[Column(rir, f"RIR{by}, median", middle, "")] * several,
        Column("ratio_harmful", "paper (i)", paper, ""),
        Column("ratio_primary", "paper (ii)", paper, ""),
        Column("rir", "paper RIR", paper, ""),
        Column(f"{other}rir", f"RIR{by_other}", middle, "", always=True),
        Column("ceiling/attained", "ceiling, log share", percent, ""),
        Column("definition/immunized", "Def. 3.1 holds", percent, ""),
        Column("primary/accuracy", "primary accuracy, before → after", change, ""),
        Column("primary/r2", "primary R², before → after", change, ""),
        Column("primary_accuracy", "paper accuracy, %", paper, ""),
        Column("steps_ratio/harmful", "harmful steps ratio", middle),
        Column("steps_ratio/harmful", "harmful steps ratio, 95 % interval", run_interval, ""),
        *(Column(f"steps_ratio/{role}", f"{role} steps ratio", middle, "") for role in others),
        *(Column(f"steps_ratio/{role}", f"{role} steps ratio, 95 % interval", run_interval, "") for role in others),
        Column("", "seconds", seconds, ""),
        *[Column(objective, "no ★ for", unstarred)] * (len(group) > 1),
        Column("", "flags", flags, "", always=True),
        MEASURES[0],
        Column("ceiling/worth", "ceiling of worth removed", middle, ""),
        *MEASURES[1:],
    ]


WORTH = (
    "Worth removed: the share of what theta_0 is worth to the best attacker, compared with one without the model, that "
    "immunization takes away, by the images of each class that they have; 0 is no defense. In brackets the 95 % "
    "interval, of several seeds that of their mean. Undetermined: theta_0's own worth cannot be told from 0."
)

NOTES = {
    "rank": "Rank: by worth removed, of rows of three or more seeds that remove something (the interval lies above 0) "
    "and lose at most two points, of the primary task and of other classes at either size.",
    "worth removed": WORTH,
    "worth removed, all images": WORTH,
    "primary, before → after": "Primary: held out, by the own head or, without one, a retrained head. Accuracy: mean ± "
    "standard deviation over seeds, of the mean over pairs. R², loss and ratios: medians over runs, since one run can "
    "dominate a mean.",
    "primary probe": "Probe: steps ratio of a probe by gradient descent, > where it never came to the end; large is "
    "good for harmful and unseen tasks, at most 1 for primary and benign ones.",
    "price": "Price: operations of the cheapest attack that learns the harmful task, relative to the cheapest on the "
    "baseline; the smallest over several harmful tasks. Held: no attack learns it in most runs within its budget, "
    "which is no proof. Not attacked by training: the same, but no attack fine-tuned everything that was immunized. "
    "Not attacked by standard: the same, but attack=standard did not run.",
    "price with search": "Price with search: what an attacker spends on settings that are worse is counted, too.",
    "searched, before → after": "Searched: the best held-out measure among attackers who search for their settings.",
    "ceiling of worth removed": "Ceiling of worth removed: what is lost to an attacker who only reads what stands "
    "before the immunized layers, trains these layers anew, or does without the model.",
    "SGRC": "SGRC: the share of an attacker's held-out accuracy that immunization takes away when they fine-tune the "
    "whole net, after the fewest and the most epochs.",
    "unseen price": "Unseen: harmful data that no method was shown.",
    "fine-tuning": "Harmful probe, ridge on features, and fine-tuning of what was immunized, which is not the same in "
    "every row: attackers of the methods' own papers. A method that does not stop its own does not work here.",
}
"""What readers have to know of a column, by its heading."""


def board_columns(benign: Collection[str]) -> list[Column]:
    """The leaderboard, with the tasks to which a `benign` user transfers the net."""
    everywhere, pages = "terminal page browser", "page browser"
    columns = [
        Column("", "method", label, everywhere, always=True),
        Column("", "runs", board_runs, always=True),
        Column("", "rank", rank, pages),
        Column("", "seeds", lambda row, _: Cell.of(len({result.seed for result in row.results})), "browser"),
        Column("worth/removed_5", "worth removed, 5 images", removed, everywhere),
        Column("worth/removed_20", "worth removed, 20 images", removed, everywhere),
        Column("worth/removed", "worth removed, all images", removed, everywhere),
        Column("", "primary, before → after", board_primary, everywhere, always=True),
        Column("primary/accuracy", "primary, retrained head", retrained, pages),
        Column("other_classes/accuracy", "other classes, own head", after, pages),
        Column("other_classes/accuracy_enlarged", "other classes, twice the size", after, pages),
        *(Column(f"transfer_{task}/after_5", f"{task}, 5 images", change, pages) for task in benign),
        *(Column(f"transfer_{task}/after_20", f"{task}, 20 images", change, pages) for task in benign),
        Column("steps_ratio/primary", "primary probe", middle, "page"),
        Column("steps_ratio/benign", "benign probe", middle, "page"),
        Column("", "learned in", learned_in, ""),
        Column("harmful", "price", cost, everywhere, always=True),
        Column("", "broken by", broken_by, everywhere, always=True),
        Column("attack/worst/flops_ratio_searched", "price with search", price, "page"),
        Column("", "searched, before → after", searched, "page"),
        Column("ceiling/worth", "ceiling of worth removed", middle, "page"),
        Column("searched", "price by search", cost, ""),
        Column("", "SGRC", sgrc, "page"),
        Column("unseen", "unseen price", cost, "page"),
        Column("steps_ratio/unseen", "unseen probe", middle, "page"),
        Column("steps_ratio/harmful", "harmful probe", worst, "page"),
        Column("attack/closed_form_probe/final", "ridge on features", change, "page"),
        Column("attack/finetune_trained/final", "fine-tuning", change, "page"),
        Column("rir", "RIR", worst, always=True),
        Column("definition/immunized", "Def. 3.1", percent, "terminal", always=True),
        Column("", "flags", board_flags, ""),
    ]
    known = {column.measure for column in columns}
    return columns + [column for column in MEASURES if column.measure not in known]


def published(run: Run) -> dict[str, dict[str, list[float]]]:
    """Figures of the paper for a run's data and model, by method and measure; empty without such a table."""
    name = str(run.settings.get("model.name", "")).rpartition("/")[2].partition(".")[0]  # without hub and training
    model = next((key for key, names in _paper()["models"].items() if name in names), None)
    return _paper().get(f"{run.result.dataset}/{model}" if model else run.result.dataset, {})


@cache
def _paper() -> dict[str, dict[str, dict[str, list[float]]]]:
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
