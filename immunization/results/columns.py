"""Every column of every table: its measure, its heading, how runs become a cell, and where it is shown.

To show a measure, add one entry to COLUMNS. All tables, the screen, the leaderboard and the model card follow.
"""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import cache, partial
from pathlib import Path

import yaml

from immunization.results.collect import Run
from immunization.results.formatting import MEASURES, NONE, Cell, number
from immunization.results.seed_statistics import ROUNDING
from immunization.results.settings import Setting, lacking, median
from immunization.runs.interpretation import (
    attack_names,
    breaks,
    interval,
    interval_of,
    rows_tested,
    successes,
    undecided,
    weakest,
)
from immunization.runs.records import WORST
from immunization.runs.result import Result

AUTHORS = ", authors' κ"
"""Ends the heading of a column by the released code's convention; all others are rank-aware."""


class Place(Flag):
    """Where a column stands."""

    LINE = auto()  # one line for a job of a multirun
    SPLITS = auto()  # one run on the screen: on training and on held-out inputs, and by the authors' kappa
    CHANGE = auto()  # one run on the screen: with the baseline, immunized
    TASKS = auto()  # one run on the screen: on every task
    SHEET = auto()  # one run on the screen, a line of its own
    CARD = auto()  # the model card
    RUNS = auto()  # the list of runs in a report, under the name of the measure
    COMPARISON = auto()  # settings of one group: reports, and the pages behind RESULTS.md
    PAIRS = auto()  # the same, where there are several pairs of classes
    TERMINAL = auto()  # those of a table that are printed
    OVERVIEW = auto()  # the first table of RESULTS.md
    COUNTS = auto()  # the table of successes
    BOARD = auto()  # the leaderboard's files
    BOARD_PAGE = auto()  # those of BOARD in a Markdown page
    BOARD_HTML = auto()  # those of BOARD in the page for a browser
    ATTACKS = auto()  # an audit: one row per attack


_SETTINGS = Place.COMPARISON | Place.TERMINAL
_PAGE = Place.BOARD | Place.BOARD_PAGE
_BOARD = _PAGE | Place.TERMINAL
_SITE = _BOARD | Place.BOARD_HTML
_AUDIT = Place.ATTACKS | Place.TERMINAL
_COUNTS = Place.COUNTS | Place.TERMINAL
EVERYWHERE = Place.LINE | Place.SHEET | Place.CARD | Place.RUNS | _SETTINGS | Place.OVERVIEW | _BOARD
"""For a measure of its own."""


@dataclass(frozen=True)
class Column:
    """A measure by its name in result.json, its heading, where it stands, and how runs of one setting become a cell.

    The screen and the card of a single run show the value as it is. `always`: also where it is empty; `best`: the best
    mean is bold; `note`: what a reader of the table has to know.
    """

    measure: str
    heading: str
    where: Place
    cell: Callable[[Setting, str], Cell]
    always: bool = False
    best: bool = False
    note: str = ""


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
    cells = (change(setting, f"primary/{name}", f"{MEASURES[name]} ") for name in measures.split())
    return next((cell for cell in cells if cell.value is not None), Cell(NONE))


def paper(setting: Setting, measure: str) -> Cell:
    """Mean and standard deviation that the paper reports."""
    found = published(setting.first).get(setting.method, {}).get(measure)
    return Cell(f"{number(found[0])} ± {number(found[1])}", found[0], spread=found[1]) if found else Cell(NONE)


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
WORTH = (
    "Worth removed: the share of what theta_0 is worth to the best attacker, compared with one without the model, that "
    "immunization takes away, by the images of each class that they have; 0 is no defense. In brackets the 95 % "
    "interval, of several seeds that of their mean. Undetermined: theta_0's own worth cannot be told from 0."
)
_FASTER, _KEPT = {"steps_ratio/harmful": _ABOVE_1}, {"steps_ratio/primary": _AT_MOST_1}

COLUMNS = [
    Column("", "method", _SETTINGS | Place.OVERVIEW | Place.COUNTS | _SITE, label, always=True),
    # One run.
    Column("ratio_harmful", "(i)  harmful κ / baseline", Place.SPLITS | Place.RUNS, mean),
    Column("ratio_primary", "(ii) primary κ / baseline", Place.SPLITS | Place.RUNS, mean),
    Column("rir", "RIR = (i) / (ii)", Place.SPLITS | Place.RUNS, mean),
    Column("kappa_harmful", "κ, harmful task", Place.CHANGE, change),
    Column("kappa_primary", "κ, primary task", Place.CHANGE, change),
    *(Column(f"primary/{name}", f"primary {text}, held out", Place.CHANGE, change) for name, text in MEASURES.items()),
    Column("primary/head_accuracy", "primary accuracy, own head", Place.CHANGE | Place.CARD, change),
    Column("steps_ratio", "steps of a probe / baseline", Place.TASKS, middle),
    Column("rfd", "mean deviation (RFD)", Place.TASKS, middle),
    Column("primary/head_accuracy_baseline", "the same before", Place.CARD, mean),
    Column("primary/changed_predictions", "test images whose prediction changed", Place.CARD, mean),
    *(
        Column(f"steps_ratio/{role}", f"steps {task} needs, relative to before (should be {bound})", Place.CARD, middle)
        for role, task, bound in (
            ("harmful", "a harmful probe", "large"),
            ("primary", "a fresh primary probe", "at most 1"),
            ("benign", "a benign third task", "at most 1"),
        )
    ),
    Column("rir", "RIR, training images", Place.CARD, mean),
    Column("test/rir", "RIR, held-out images", Place.CARD | Place.RUNS, mean),
    Column("authors/rir", "RIR by authors' κ", Place.CARD | Place.RUNS, mean),
    Column("rir", "RIR", Place.LINE | Place.OVERVIEW, middle),
    Column("authors/rir", "RIR by authors' κ", Place.LINE, mean),
    Column("ratio_harmful", "(i)", Place.LINE, mean),
    Column("ratio_primary", "(ii)", Place.LINE, mean),
    Column("steps_ratio/harmful", "harmful steps", Place.LINE | Place.RUNS, middle),
    # Settings side by side. `comparison` fills in the braces for their group.
    Column("runs", "runs", _SETTINGS | Place.COUNTS, size, always=True),
    Column("failed", "failed", _SETTINGS, size),
    Column("interrupted", "interrupted", Place.COMPARISON | Place.TERMINAL, size),
    Column("{kappa}ratio_harmful{start}", "(i){by}", _SETTINGS, mean, True, True),
    Column("{kappa}ratio_primary{start}", "(ii){by}", _SETTINGS, mean, True, True),
    Column("{kappa}rir{start}", "RIR{by}", _SETTINGS, mean, True, True),
    Column("{objective}", "{objective}", Place.COMPARISON | Place.TERMINAL, mean, True, True),
    Column("{own}", "{own}", Place.COMPARISON | Place.TERMINAL, mean, True),
    Column("{kappa}rir{start}", "RIR{by}, 95 % interval", Place.COMPARISON, mean_interval),
    Column("{kappa}rir{start}", "RIR{by}, median", Place.PAIRS, middle),
    Column("ratio_harmful", "paper (i)", Place.COMPARISON, paper),
    Column("ratio_primary", "paper (ii)", Place.COMPARISON, paper),
    Column("rir", "paper RIR", Place.COMPARISON, paper),
    Column("{other}rir", "RIR{by_other}", Place.COMPARISON, middle, always=True),
    Column("ceiling/attained", "ceiling, log share", Place.COMPARISON, percent),
    Column("definition/immunized", "Def. 3.1 holds", Place.COMPARISON | Place.OVERVIEW, percent),
    Column("primary/accuracy", "primary accuracy, before → after", Place.COMPARISON, change),
    Column("primary/r2", "primary R², before → after", Place.COMPARISON, change),
    Column("primary_accuracy", "paper accuracy, %", Place.COMPARISON, paper),
    Column("steps_ratio/harmful", "harmful steps ratio", Place.COMPARISON | Place.TERMINAL, middle),
    Column("steps_ratio/harmful", "harmful steps ratio, 95 % interval", Place.COMPARISON, run_interval),
    Column("steps_ratio/{role}", "{role} steps ratio", Place.COMPARISON, middle),
    Column("steps_ratio/{role}", "{role} steps ratio, 95 % interval", Place.COMPARISON, run_interval),
    Column("", "seconds", Place.COMPARISON, seconds),
    Column("{starred}", "no ★ for", _SETTINGS, unstarred),
    Column("", "flags", Place.COMPARISON, flags, always=True),
    Column("steps_ratio/harmful", "harmful steps", Place.OVERVIEW, middle),
    Column("steps_ratio/primary", "primary steps", Place.OVERVIEW, middle),
    Column("accuracy r2", "primary, before → after", Place.OVERVIEW, first_change),
    # In how many runs a setting succeeds.
    Column("", "RIR > 1", _COUNTS, passing({"rir": _ABOVE_1})),
    *(Column("", f"({part})", _COUNTS, passing({f"definition/{part}": bool})) for part in "abc"),
    Column("", "Def. 3.1", _COUNTS, passing({"definition/immunized": bool})),
    Column("", "harmful > 1", _COUNTS, passing(_FASTER)),
    Column("", "primary ≤ 1", _COUNTS, passing(_KEPT)),
    Column("", "benign ≤ 1", _COUNTS, passing({"steps_ratio/benign": _AT_MOST_1})),
    Column("", "both", _COUNTS, passing(_FASTER | _KEPT)),
    # The leaderboard.
    Column("", "runs", _BOARD, board_runs, always=True),
    Column(
        *("", "rank", _PAGE | Place.BOARD_HTML, rank),
        note="Rank: by worth removed, of rows of three or more seeds that remove something (the interval lies above 0) "
        "and lose at most two points, of the primary task and of other classes at either size.",
    ),
    Column(
        *("", "seeds", Place.BOARD | Place.BOARD_HTML),
        lambda setting, _: Cell.of(len({result.seed for result in setting.results})),
    ),
    *(
        Column(f"worth/removed{suffix}", f"worth removed, {images} images", _SITE, removed, note=note)
        for images, suffix, note in (("5", "_5", ""), ("20", "_20", ""), ("all", "", WORTH))
    ),
    Column(
        *("", "primary, before → after", _SITE, board_primary),
        always=True,
        note="Primary: held out, by the own head or, without one, a retrained head. Accuracy: mean ± standard "
        "deviation over seeds, of the mean over pairs. R², loss and ratios: medians over runs, since one run can "
        "dominate a mean.",
    ),
    Column("primary/accuracy", "primary, retrained head", _PAGE | Place.BOARD_HTML, retrained),
    Column("other_classes/accuracy", "other classes, own head", _PAGE | Place.BOARD_HTML, after),
    Column("other_classes/accuracy_enlarged", "other classes, twice the size", _PAGE | Place.BOARD_HTML, after),
    *(
        Column(f"transfer_{{benign}}/after{suffix}", f"{{benign}}, {images} images", _PAGE | Place.BOARD_HTML, change)
        for images, suffix in (("5", "_5"), ("20", "_20"))
    ),
    Column(
        *("steps_ratio/primary", "primary probe", _PAGE, middle),
        note="Probe: steps ratio of a probe by gradient descent, > where it never came to the end; large is good for "
        "harmful and unseen tasks, at most 1 for primary and benign ones.",
    ),
    Column("steps_ratio/benign", "benign probe", _PAGE, middle),
    Column("", "learned in", Place.BOARD, learned_in),
    Column(
        *("harmful", "price", _SITE, cost),
        always=True,
        note="Price: operations of the cheapest attack that learns the harmful task, relative to the cheapest on the "
        "baseline; the smallest over several harmful tasks. Held: no attack learns it in most runs within its budget, "
        "which is no proof. Not attacked by training: the same, but no attack fine-tuned everything that was "
        "immunized. Not attacked by standard: the same, but attack=standard did not run.",
    ),
    Column("", "broken by", _SITE, broken_by, always=True),
    Column(
        *("attack/worst/flops_ratio_searched", "price with search", _PAGE, price),
        note="Price with search: what an attacker spends on settings that are worse is counted, too.",
    ),
    Column(
        *("", "searched, before → after", _PAGE, searched),
        note="Searched: the best held-out measure among attackers who search for their settings.",
    ),
    Column("worth/removed", "worth removed", EVERYWHERE & ~(Place.OVERVIEW | _PAGE), middle, note=WORTH),
    Column(
        *("ceiling/worth", "ceiling of worth removed", _PAGE | Place.COMPARISON, middle),
        note="Ceiling of worth removed: what is lost to an attacker who only reads what stands before the immunized "
        "layers, trains these layers anew, or does without the model.",
    ),
    Column("searched", "price by search", Place.BOARD, cost),
    Column(
        *("", "SGRC", _PAGE, sgrc),
        note="SGRC: the share of an attacker's held-out accuracy that immunization takes away when they fine-tune the "
        "whole net, after the fewest and the most epochs.",
    ),
    Column("unseen", "unseen price", _PAGE, cost, note="Unseen: harmful data that no method was shown."),
    Column("steps_ratio/unseen", "unseen probe", _PAGE, middle),
    Column("steps_ratio/harmful", "harmful probe", _PAGE, worst),
    Column("attack/closed_form_probe/final", "ridge on features", _PAGE, change),
    Column(
        *("attack/finetune_trained/final", "fine-tuning", _PAGE, change),
        note="Harmful probe, ridge on features, and fine-tuning of what was immunized, which is not the same in every "
        "row: attackers of the methods' own papers. A method that does not stop its own does not work here.",
    ),
    Column("rir", "RIR", _BOARD, worst, always=True),
    Column("definition/immunized", "Def. 3.1", Place.BOARD | Place.TERMINAL, percent, always=True),
    Column("", "flags", Place.BOARD, board_flags),
    # The attacks on one setting; the deciding ones come first.
    Column("{attack}", "attack", _AUDIT, lambda _, attack: Cell(attack)),
    Column("{attack}", "learned", _AUDIT, learned),
    Column("attack/{attack}/final", "immunized", _AUDIT, middle),
    Column("attack/{attack}/final", "95 % interval", Place.ATTACKS, rows_interval),
    Column("attack/{attack}/final_baseline", "baseline", _AUDIT, middle),
    Column("attack/{attack}/steps_ratio", "steps ratio", _AUDIT, middle),
    Column("attack/{attack}/cost", "operations, immunized", _AUDIT, paid),
    Column("attack/{attack}/cost_baseline", "operations, baseline", Place.ATTACKS, paid),
    Column("attack/{attack}/cost_searched", "with search, immunized", Place.ATTACKS, paid),
    Column("attack/{attack}/cost_searched_baseline", "with search, baseline", Place.ATTACKS, paid),
    Column("attack/{attack}/steps", "steps, immunized", Place.ATTACKS, partial(middle, form="{:,.0f}")),
    Column("attack/{attack}/steps_baseline", "steps, baseline", Place.ATTACKS, partial(middle, form="{:,.0f}")),
    Column("attack/{attack}/steps_ratio_predicted", "ratio by Eq. 2", Place.ATTACKS, middle),
    Column("attack/{attack}/area", "area, immunized", Place.ATTACKS, middle),
    Column("attack/{attack}/area_baseline", "area, baseline", Place.ATTACKS, middle),
]


def placed(where: Place) -> list[Column]:
    """The columns that stand in one of these places, in their order."""
    return [column for column in COLUMNS if column.where & where]


def filled_in(
    columns: Iterable[Column], words: Mapping[str, str], lists: Mapping[str, Sequence[str]]
) -> Iterator[Column]:
    """`columns` with what stands in braces: of `words`, and of `lists`, every element of which is a column."""
    for column in columns:
        for word in next((lists[name] for name in lists if f"{{{name}}}" in column.measure), [""]):
            known = dict.fromkeys(lists, word) | words
            yield replace(column, measure=column.measure.format(**known), heading=column.heading.format(**known))


def own_measures(results: Iterable[Result], where: Place) -> list[str]:
    """Metrics of evaluations from outside this package; they have no column and are shown by their own names."""
    known = {column.measure for column in COLUMNS if where in column.where}
    return list(dict.fromkeys(name for result in results for name in result.own_measures if name not in known))


def published(run: Run) -> dict[str, dict[str, list[float]]]:
    """Figures of the paper for a run's data and model, by method and measure; empty without such a table."""
    name = str(run.settings.get("model.name", "")).rpartition("/")[2].partition(".")[0]  # without hub and training
    model = next((key for key, names in _paper()["models"].items() if name in names), None)
    return _paper().get(f"{run.result.dataset}/{model}" if model else run.result.dataset, {})


@cache
def _paper() -> dict[str, dict[str, dict[str, list[float]]]]:
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
