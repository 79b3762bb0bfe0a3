"""Tables over many runs, in the shape of the paper's Tables 1 to 3, as text for a terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import rich.table
import yaml
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from immunization.results.collect import Run
from immunization.results.formatting import MEASURES, NONE, number, roles_in
from immunization.results.seed_statistics import ENOUGH, rank_correlation, ties
from immunization.results.settings import KEEPS, RATIOS, Setting, best, by_authors, correlations, in_convention

if TYPE_CHECKING:
    import pandas as pd

COUNTS: dict[str, dict[str, Callable[[float], bool]]] = {
    "RIR > 1": {"rir": lambda value: value > 1},
    "(a)": {"definition/a": bool},
    "(b)": {"definition/b": bool},
    "(c)": {"definition/c": bool},
    "Def. 3.1": {"definition/immunized": bool},
    "harmful > 1": {"steps_ratio/harmful": lambda value: value > 1},
    "primary ≤ 1": {"steps_ratio/primary": lambda value: value <= 1},
    "benign ≤ 1": {"steps_ratio/benign": lambda value: value <= 1},
}
"""When a run counts as a success: it has every measure named, and each passes its test."""
COUNTS["both"] = COUNTS["harmful > 1"] | COUNTS["primary ≤ 1"]

ALIGNMENT = {"alignment/score": "score", "alignment/kernel": "kernel", "alignment/kappa_M": "κ(M)"}
"""What might predict the RIR that a pair of tasks allows."""

GAP = 2
"""Blanks between columns on a terminal."""

AUTHORS = ", authors' κ"
"""What the name of a column ends in whose figures are by the released code's convention; all others are rank-aware."""


@dataclass
class Cell:
    """A value as text, and as a number to sort by where it is one; `strong` marks the best of a column."""

    text: str
    value: float | None = None
    strong: bool = False

    @classmethod
    def of(cls, value: float | None) -> Cell:
        """A number in three digits; a dash for none."""
        return cls(NONE) if value is None else cls(number(value), value)


@dataclass
class Table:
    """Rows of cells under a header; `name` is a file name. Columns without a number are set to the left."""

    name: str
    title: str
    header: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """On a terminal: no number is broken; columns that do not fit the width stand in further tables below."""
        texts = ([cell.text for cell in row] for row in self.rows)
        columns = [[_narrow(name, cells), *cells] for name, *cells in zip(self.header, *texts, strict=True)]
        widths = [max(cell_len(line) for text in column for line in text.split("\n")) + GAP for column in columns]
        yield Text(self.title, "italic")
        start = 1
        while start < len(columns):
            stop = start + 1
            while stop < len(columns) and widths[0] + sum(widths[start : stop + 1]) <= options.max_width:
                stop += 1
            table = rich.table.Table(box=None, padding=(0, GAP, 0, 0))
            for i in (places := [0, *range(start, stop)]):
                side = "right" if i else "left"
                table.add_column(Text(columns[i][0]), justify=side, vertical="bottom", overflow="fold", no_wrap=i > 0)
            for k, row in enumerate(self.rows, 1):
                table.add_row(*(Text(columns[i][k], "bold" if row[i].strong else "") for i in places))
            yield from (Text(), table) if start > 1 else (table,)
            start = stop

    def markdown(self) -> str:
        """A pipe table under a heading, and its notes."""
        lines = [f"## {_escape_markdown(self.title)}", "", self.pipes(), ""]
        return "\n".join([*lines, *(f"- {_escape_markdown(note)}" for note in self.notes), ""])

    def pipes(self) -> str:
        """The pipe table alone."""
        numeric = [any(row[i].value is not None for row in self.rows) for i in range(len(self.header))]
        lines = [_pipes(self.header), _pipes("---:" if right else "---" for right in numeric)]
        lines += [_pipes(f"**{cell.text}**" if cell.strong else cell.text for cell in row) for row in self.rows]
        return "\n".join(lines)

    def only(self, columns: Sequence[str]) -> Table:
        """Those of `columns` that the table has, in its own order; without the notes."""
        chosen = [i for i, name in enumerate(self.header) if name in columns]
        rows = [[row[i] for i in chosen] for row in self.rows]
        return Table(self.name, self.title, [self.header[i] for i in chosen], rows)

    def renamed(self, names: Mapping[str, str]) -> Table:
        """With other names of some rows."""
        rows = []
        for first, *others in self.rows:
            name, star, _ = first.text.partition(" ★")
            rows.append([Cell(names.get(name, name) + star), *others])
        return replace(self, rows=rows)

    def latex(self) -> str:
        """A table environment, which needs the package booktabs, with the notes as comments above it."""
        notes = "".join(f"% {_tex(note)}\n" for note in self.notes)
        return notes + self._frame(
            lambda cell: f"\\textbf{{{_tex(cell.text)}}}" if cell.strong else _tex(cell.text)
        ).to_latex(
            index=False,
            escape=False,  # done by _tex, which knows the signs of these tables
            header=[_tex(name) for name in self.header],
            column_format="l" + "r" * (len(self.header) - 1),
            caption=f"{_tex(self.title)}.",
        )

    def csv(self) -> str:
        """Comma-separated, with the cells as they are shown."""
        return self._frame(lambda cell: cell.text).to_csv(index=False, lineterminator="\n")

    def _frame(self, text: Callable[[Cell], str]) -> pd.DataFrame:
        import pandas as pd  # slow to load, and a run that only prints its table does without it

        return pd.DataFrame([[text(cell) for cell in row] for row in self.rows], columns=self.header)


def numbers(table: Table) -> tuple[list[str], list[list[str | float | None]]]:
    """Header and rows as data: numbers as floats, `a ± b` as two columns, None for none, and what is text as text."""
    shape = re.compile(r"(-?[\d.,]+(?:e-?\d+)?)(?: %)?(?: ± ([\d.,]+(?:e-?\d+)?))?")
    columns: dict[str, list[str | float | None]] = {}
    for i, name in enumerate(table.header):
        cells = [row[i] for row in table.rows]
        found = [shape.fullmatch(cell.text) if cell.value is not None else None for cell in cells]
        if any(cell.text != NONE and not match for cell, match in zip(cells, found, strict=True)):
            columns[name] = [None if cell.text == NONE else cell.text for cell in cells]
            continue
        columns[name] = [cell.value for cell in cells]
        if any(match and match[2] for match in found):
            columns[f"{name} ±"] = [float(match[2].replace(",", "")) if match and match[2] else None for match in found]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def comparison(group: Sequence[Setting], name: str, heading: str, objective: str = "rir") -> Table:
    """One row a setting: (i), (ii) and RIR beside the paper's, share of the ceiling, and what it means in practice."""
    authors = by_authors(group)
    main, other = ("authors/", "") if authors else ("", "authors/")
    objective = in_convention(group, objective)
    own = (name for setting in group for run in setting.runs for name in run.result.own_measures)
    start = "_theta0" if objective.endswith("_theta0") else ""  # against theta_0 in the place of the inputs
    pairs = {run.pair for setting in group for run in setting.runs}
    seeds = {run.result.seed for setting in group for run in setting.runs}
    winner = best(group, objective) if len(group) > 1 else None
    paper = published(group[0].first)
    rivals = [setting for setting in group if setting.method != "identity"]
    columns: dict[str, list[Cell]] = {
        "method": [Cell(setting.label + (" ★" if setting is winner else "")) for setting in group],
        "runs": [Cell(str(len(setting.runs)), len(setting.runs)) for setting in group],
        "failed": [Cell(str(len(setting.failed)), len(setting.failed)) for setting in group],
        "interrupted": [Cell(str(len(setting.interrupted)), len(setting.interrupted)) for setting in group],
    }
    by = AUTHORS if authors else ""
    for metric, text in RATIOS.items():
        strong = _strong(rivals, main + metric + start)
        columns[text + by] = [_spread(setting, main + metric + start, setting in strong) for setting in group]
    further = [name for name in dict.fromkeys([objective, *own]) if name not in {main + m + start for m in RATIOS}]
    for metric in further:
        strong = _strong(rivals, metric) if metric == objective else ()
        columns[metric] = [_spread(setting, metric, setting in strong) for setting in group]
    columns[f"RIR{by}, 95 % interval"] = [_interval(setting, f"{main}rir{start}") for setting in group]
    if len(pairs) > 1:
        columns[f"RIR{by}, median"] = [_median(setting, f"{main}rir{start}") for setting in group]
    for metric, text in RATIOS.items():
        columns[f"paper {text}"] = [_published(paper.get(setting.method, {}).get(metric)) for setting in group]
    columns[f"RIR{', rank-aware κ' if authors else AUTHORS}"] = [_median(setting, other + "rir") for setting in group]
    columns["ceiling, log share"] = [_percent(setting, "ceiling/attained") for setting in group]
    columns["Def. 3.1 holds"] = [_percent(setting, "definition/immunized") for setting in group]
    for measure, text in MEASURES.items():
        if measure != "loss":
            columns[f"primary {text}, before → after"] = [_change(setting, f"primary/{measure}") for setting in group]
    accuracies = (paper.get(setting.method, {}).get("primary_accuracy") for setting in group)
    columns["paper accuracy, %"] = [_published(value) for value in accuracies]
    names = (name for setting in group for run in setting.runs for name in run.result.metrics)
    for role in roles_in(names, "steps_ratio"):
        columns[f"{role} steps ratio"] = [_median(setting, f"steps_ratio/{role}") for setting in group]
    columns["seconds"] = [_seconds(setting) for setting in group]
    columns["flags"] = [Cell(", ".join(_flags(setting)) or NONE) for setting in group]

    shown = {
        key: cells
        for key, cells in columns.items()
        if key in ("method", "runs", "flags", *further)
        or any(cell.value for cell in cells)
        or key.removesuffix(AUTHORS) in RATIOS.values()
    }
    rows = [list(row) for row in zip(*shown.values(), strict=True)]
    notes = [_sample(len(seeds), len(pairs), group), _data(group[0].first)]
    notes += _conventions(winner, objective, len(pairs) > 1, authors)
    if start:
        notes.append("The baseline of (i) and (ii) is theta_0 (Eq. 17), not the inputs (Eq. 15).")
    if paper and not authors:
        notes.append("The paper's figures are of its own preparation of the data, dataset.protocol=authors.")
    return Table(name, heading, list(shown), rows, notes + _gaps(group, further))


def counts(group: Sequence[Setting], name: str, heading: str) -> Table | None:
    """In how many runs each setting does what immunization is for; None where no setting has several runs."""
    if max(len(setting.runs) for setting in group) < 2:
        return None
    columns = {text: [_successes(setting, tests) for setting in group] for text, tests in COUNTS.items()}
    columns = {text: cells for text, cells in columns.items() if any(cell.value is not None for cell in cells)}
    rows = [
        [Cell(setting.label), Cell(str(len(setting.runs)), len(setting.runs)), *cells]
        for setting, *cells in zip(group, *columns.values(), strict=True)
    ]
    notes = [
        "Runs (all seeds and pairs) of which the heading holds; a/b: of the b runs that have the measure. RIR and "
        "Definition 3.1 (a) to (c) are rank-aware. harmful, primary, benign: the steps ratio of that task; both: of "
        "the first two."
    ]
    return Table(name, f"{heading}: successes", ["method", "runs", *columns], rows, notes)


def alignment(group: Sequence[Setting], name: str, heading: str) -> Table | None:
    """Rank correlation of the alignment of K_P and K_H with the attainable and the reached RIR, over pairs."""
    outcomes = correlations(group)
    if not outcomes:
        return None
    rows = []
    for label, outcome in outcomes.items():
        row = [Cell(label), Cell(str(len(outcome)), len(outcome))]
        for metric in ALIGNMENT:
            predictor = next((found for setting in group if (found := setting.pairs(metric))), {})
            r, p = rank_correlation(predictor, outcome)
            row.append(Cell(NONE) if math.isnan(r) else Cell(f"{number(r)} (p {number(p)})", r))
        rows.append(row)
    notes = [
        "Spearman's rank correlation over ordered pairs of classes (medians over seeds); p from permutations of the "
        "classes where all of their pairs are there, since pairs that share a class are not independent."
    ]
    return Table(name, f"{heading}: what alignment predicts", ["RIR of", "pairs", *ALIGNMENT.values()], rows, notes)


def published(run: Run) -> dict[str, dict[str, list[float]]]:
    """What the paper reports of a run's data and model, by method and measure; nothing where it has no such table."""
    model = str(run.settings.get("model.name", ""))
    family = next((name for name in ("resnet18", "vit") if name in model), None)
    return _paper().get(f"{run.result.dataset}/{family}" if family else run.result.dataset, {})


@cache
def _paper() -> dict[str, dict[str, dict[str, list[float]]]]:
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())


def _successes(setting: Setting, tests: Mapping[str, Callable[[float], bool]]) -> Cell:
    rows = [[run.result.metrics.get(metric) for metric in tests] for run in setting.runs]
    rows = [row for row in rows if None not in row]
    good = sum(all(test(value) for test, value in zip(tests.values(), row, strict=True)) for row in rows)
    text = str(good) if len(rows) == len(setting.runs) else f"{good}/{len(rows)}"
    return Cell(text, good / len(rows)) if rows else Cell(NONE)


def _strong(group: Sequence[Setting], metric: str) -> set[Setting]:
    """The best of a column, and those that paired tests do not tell from it."""
    values = {setting: setting.values(metric) for setting in group if setting.values(metric)}
    if len(values) < 2:
        return set()
    largest = not metric.endswith("ratio_primary")
    return ties(values, sorted(values, key=lambda setting: setting.summary(metric).mean, reverse=largest))


def _spread(setting: Setting, metric: str, strong: bool = False) -> Cell:
    summary = setting.summary(metric)
    if not summary.n:
        return Cell(NONE)
    spread = "" if math.isnan(summary.std) else f" ± {number(float(f'{summary.std:.1e}'))}"
    return Cell(number(summary.mean) + spread, summary.mean, strong)


def _interval(setting: Setting, metric: str) -> Cell:
    """Of a ratio, which is never below 0."""
    summary = setting.summary(metric)
    if math.isnan(summary.low):
        return Cell(NONE)
    low = max(summary.low, 0.0)
    return Cell(f"{number(low)} to {number(summary.high)}", low)


def _median(setting: Setting, metric: str) -> Cell:
    return Cell.of(setting.median(metric))


def _published(value: Sequence[float] | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{number(value[0])} ± {number(value[1])}", value[0])


def _percent(setting: Setting, metric: str) -> Cell:
    summary = setting.summary(metric)
    return Cell(f"{100 * summary.mean:.0f} %", summary.mean) if summary.n else Cell(NONE)


def _change(setting: Setting, measure: str) -> Cell:
    found = setting.change(measure)
    return Cell("{:.3f} → {:.3f}".format(*found), found[1]) if found else Cell(NONE)


def _seconds(setting: Setting) -> Cell:
    totals = [sum(run.result.seconds.values()) for run in setting.runs]
    return Cell.of(sum(totals) / len(totals) if totals else None)


def _flags(setting: Setting) -> list[str]:
    """Flags of the runs, and in how many of several."""
    counted = Counter(flag for run in setting.runs for flag in run.result.flags)
    return [flag if count == len(setting.runs) else f"{flag} ({count})" for flag, count in counted.items()]


def _sample(seeds: int, pairs: int, group: Sequence[Setting]) -> str:
    text = f"{seeds} seed{'s' * (seeds != 1)}" + (f", {pairs} pairs of classes" if pairs > 1 else "")
    sizes = {len(setting.runs) for setting in group}
    if seeds < 3:
        text += "; fewer than 3, so nothing is known of the spread over seeds"
    return text + ("; the settings have different numbers of runs" if len(sizes) > 1 else "") + "."


def _data(run: Run) -> str:
    """How the data were prepared, which decides what any method can attain."""
    facts = (f"{name}: {text}" for name, text in run.result.about.items() if isinstance(text, str))
    return f"Data: {'; '.join(facts) or 'not described'}."


def meanings(authors: bool) -> list[str]:
    """What the columns of a comparison are, with kappa by the authors' convention or rank-aware."""
    convention = "the released code's κ, smallest eigenvalue above 1e-6 of H + 1e-6 I" if authors else "rank-aware κ"
    return [
        f"(i), (ii): κ of the harmful and of the primary Hessian over the baseline's; RIR = (i) / (ii); {convention}.",
        "Steps ratio: steps of a gradient descent probe with the immunized extractor over those with the baseline. "
        "RIR sees the spectrum alone; this is what an attacker meets.",
    ]


def _conventions(winner: Setting | None, objective: str, pairs: bool, authors: bool) -> list[str]:
    notes = [
        *meanings(authors),
        "Mean ± standard deviation over seeds"
        + (" of the mean over pairs" if pairs else "")
        + ", and Student's 95 % interval of it; steps ratios, R² and the RIR of the other κ are medians over all runs.",
        f"Bold: the best mean of a column; from {ENOUGH} seeds on, also the next ones down to the first that a paired "
        "t-test (logarithms of the same seeds and pairs, Holm, 5 %) tells from it. The baseline identity is left out.",
    ]
    return notes + ([f"★: the largest mean of the objective, {objective}, among {KEEPS}."] if winner else [])


def _gaps(group: Sequence[Setting], further: Iterable[str]) -> list[str]:
    """Which averages are over fewer runs than there are, and why."""
    gaps: dict[str, list[str]] = {}
    texts = RATIOS | {"ceiling/attained": "ceiling", "definition/immunized": "Def. 3.1"}
    for metric, text in ({name: name for name in further} | texts).items():
        for setting in group:
            if reason := setting.reason(metric):
                gaps.setdefault(f"No value of {text} in {reason}", []).append(setting.label)
    return [f"{text} ({', '.join(labels)})." for text, labels in gaps.items()]


def _narrow(name: str, cells: Iterable[str]) -> str:
    """A header in lines no longer than its words or the cells below it."""
    return textwrap.fill(name, max(map(len, [*name.split(), *cells])), break_on_hyphens=False)


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _escape_markdown(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


_TEX: Mapping[int, str] = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "±": "$\\pm$",
        "→": "$\\to$",
        "κ": "$\\kappa$",
        "≤": "$\\leq$",
        **{char: f"${char}$" for char in "<>"},  # other signs in the fonts that LaTeX has by default
        "★": "$\\star$",
        "²": "$^2$",
        NONE: "--",
    }
)


def _tex(text: str) -> str:
    return text.translate(_TEX)
