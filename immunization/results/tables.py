"""Tables over many runs, in the shape of the paper's Tables 1 to 3, as HTML, Markdown, LaTeX and CSV by pandas."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import rich.table
from markupsafe import escape
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from immunization.results.columns import (
    AUTHORS,
    COUNTS,
    MEASURES,
    NOTHING,
    Column,
    label,
    lacks,
    mean,
    mean_alone,
    middle,
    own_measures,
    pair_columns,
    published,
    ratios,
    setting_columns,
    size,
    varied,
)
from immunization.results.formatting import NONE, Cell, markdown, spreadsheet
from immunization.results.seed_statistics import ENOUGH, paired_ratio, rank_correlation, ties
from immunization.results.settings import (
    BY_AUTHORS,
    HARMFUL_STEPS,
    IMMUNIZED,
    KEEPS,
    PRIMARY_STEPS,
    RATIOS,
    SCORE,
    Setting,
    best,
    by_authors,
    comparable,
    correlations,
    first_pairs,
    in_convention,
)
from immunization.runs.numbers import number
from immunization.runs.records import Query

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

ALIGNMENT = {SCORE: "score", Query("alignment/kernel"): "kernel", Query("alignment/kappa_M"): "κ(M)"}
"""Measures of alignment, which may predict RIR."""

GAP = 2
"""Blanks between columns on a terminal."""

LINES = 25
"""Most settings on a terminal."""

ROOM = 36
"""Letters that keys and values of settings may take of a line on a terminal."""

LONG = 60
"""Cells of more letters are broken into lines on a page."""

STAR = " ★"
"""Follows the label of the best setting."""


@dataclass
class Table:
    """Rows of cells under a header; `name` is a file name. Columns without numbers are left-aligned.

    `columns` are those that the header comes from, if it does. `brief`: what is too wide for a terminal is only named.
    """

    name: str
    title: str
    header: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    columns: Sequence[Column] = ()
    brief: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        columns: Iterable[Column],
        rows: Iterable[Any],
        cell: Callable[[Column, Any], Cell] = lambda column, setting: column.cell(setting, column.of),
    ) -> Self:
        """One row per setting; a column of dashes is left out, unless it is always shown."""
        cells = {column: [cell(column, row) for row in rows] for column in columns}
        cells = {column: own for column, own in cells.items() if column.always or {cell.text for cell in own} != {NONE}}
        notes = [column.note for column in cells if column.note]
        lines = [list(line) for line in zip(*cells.values(), strict=True)]
        return cls(name, title, [column.heading for column in cells], lines, notes, list(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """On a terminal: numbers are never broken; columns beyond the width follow in further tables."""
        columns = []
        for name, *cells in zip(self.header, *([cell.text for cell in row] for row in self.rows), strict=True):
            wide = max(
                1, *map(len, [*name.split(), *cells])
            )  # a header is no wider than its words or the cells below it
            columns.append([textwrap.fill(name, wide, break_on_hyphens=False), *cells])
        widths = [max(cell_len(line) for text in column for line in text.split("\n")) + GAP for column in columns]
        yield Text(self.title, "italic")
        parts: list[list[int]] = [[0]]
        for i in range(1, len(columns)):
            if len(parts[-1]) > 1 and sum(widths[k] for k in (*parts[-1], i)) - GAP > options.max_width:
                parts.append([0])
            parts[-1].append(i)
        for part in parts[:1] if self.brief else parts:
            table = rich.table.Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
            for i in part:
                side: Literal["left", "right"] = "right" if i else "left"
                table.add_column(Text(columns[i][0]), justify=side, vertical="bottom", overflow="fold", no_wrap=i > 0)
            for k, row in enumerate(self.rows, 1):
                table.add_row(*(Text(columns[i][k], "bold" if row[i].strong else "") for i in part))
            yield from (table,) if part is parts[0] else (Text(), table)
        if self.brief and (left := [self.header[i] for part in parts[1:] for i in part[1:]]):
            yield Text(f"Too wide for here, and in the report: {', '.join(left)}.")

    def only(self, view: str) -> Self:
        """The columns of one view, without notes; a table without `columns` is returned unchanged."""
        if not self.columns:
            return self
        chosen = [i for i, column in enumerate(self.columns) if view in column.views.split()]
        rows = [[row[i] for i in chosen] for row in self.rows]
        columns = [self.columns[i] for i in chosen]
        return type(self)(self.name, self.title, [self.header[i] for i in chosen], rows, columns=columns)

    def frame(self, form: Callable[[Cell], str], heading: Callable[[str], str]) -> "pd.DataFrame":
        """The cells and the header as text."""
        import pandas as pd  # slow to load, and a run that only prints its table does without it

        return pd.DataFrame([[form(cell) for cell in row] for row in self.rows], columns=[*map(heading, self.header)])

    def markdown(self) -> str:
        """A pipe table under a heading, and its notes."""
        lines = [f"## {_escape_markdown(self.title)}", "", self.pipes(), ""]
        return "\n".join([*lines, *(f"- {_escape_markdown(note)}" for note in self.notes), ""])

    def pipes(self) -> str:
        """The pipe table alone."""
        frame = self.frame(lambda cell: f"**{_piped(cell.text)}**" if cell.strong else _piped(cell.text), _piped)
        numeric = [any(row[i].value is not None for row in self.rows) for i in range(len(self.header))]
        sides = ["right" if right else "left" for right in numeric]
        return frame.to_markdown(index=False, disable_numparse=True, colalign=sides)

    def html(self) -> str:
        """A <table> with a button in each heading; <data> holds the numbers by which a page sorts."""
        with self._styled(_html, lambda name: f"<button>{escape(name)}</button>") as style:
            return style.to_html(exclude_styles=True).strip()

    def latex(self) -> str:
        """A table environment, which needs the package booktabs, with the notes as comments above it."""
        bold = [["textbf:--rwrap" if cell.strong else "" for cell in row] for row in self.rows]
        caption = re.sub(r"([&%$#_{}])|[\\~^]", lambda sign: f"\\{sign[1]}" if sign[1] else " ", self.title)
        with self._styled(lambda cell: " ".join(cell.text.splitlines()), str) as style:
            style.format(_signs, escape="latex").format_index(_signs, axis=1, escape="latex")
            style.apply(lambda frame: type(frame)(bold, columns=frame.columns), axis=None)
            sides = "l" + "r" * (len(self.header) - 1)
            text = style.to_latex(hrules=True, column_format=sides, caption=f"{_signs(caption)}.")
        return "".join(f"% {' '.join(note.splitlines())}\n" for note in self.notes) + text

    def csv(self) -> str:
        """Comma-separated, with the cells as they are shown."""
        frame = self.frame(lambda cell: spreadsheet(cell.text) if cell.value is None else cell.text, spreadsheet)
        return frame.to_csv(index=False, lineterminator="\n")

    @contextmanager
    def _styled(self, form: Callable[[Cell], str], heading: Callable[[str], str]) -> Iterator["Styler"]:
        """A Styler of the table, which here leaves out nothing of a long one."""
        import pandas as pd

        frame = self.frame(form, heading)
        with pd.option_context("styler.render.max_elements", max(1, frame.size)):
            yield frame.style.hide(axis="index")


def numbers(table: Table) -> tuple[list[str], list[list[str | float | None]]]:
    """Header and rows as data: numbers as floats, `a ± b` as two columns, None for none, and what is text as text."""
    columns: dict[str, list[str | float | None]] = {}
    for name, *cells in zip(table.header, *table.rows, strict=True):
        if any(cell.words or (cell.value is None and cell.text != NONE) for cell in cells):
            columns[name] = [None if cell.text == NONE else cell.text for cell in cells]
            continue
        columns[name] = [cell.value for cell in cells]
        if any(cell.spread is not None for cell in cells):
            columns[f"{name} ±"] = [cell.spread for cell in cells]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def comparison(group: Sequence[Setting], name: str, heading: str, objective: str = "rir") -> Table:
    """One row a setting: (i), (ii) and RIR beside the paper's, share of the ceiling, and what it means in practice."""
    authors = by_authors(group)
    of = in_convention(group, objective)
    results = [result for setting in group for result in setting.results]
    pairs = {run.pair for setting in group for run in setting.runs}
    named = ratios(group, of)
    further = [query for query in dict.fromkeys([of, *own_measures(results)]) if query not in named]
    winner = best(group, objective) if len(group) > 1 else None
    table = Table.of(name, heading, setting_columns(group, of, further), group)
    _embolden(table, group, group)
    if winner:
        table.rows[group.index(winner)][0].text += STAR
    about = group[0].first.result.about.items()
    facts = {name: text for name, text in about if isinstance(text, str)} or {"data": "not described"}
    seeds = len({result.seed for result in results})
    sample = f"{seeds} seed{'s' * (seeds != 1)}" + (f", {len(pairs)} pairs of classes" if len(pairs) > 1 else "")
    sample += "; fewer than 3, so nothing is known of the spread over seeds" if seeds < 3 else ""
    sample += "; the settings have different numbers of runs" if len({len(s.runs) for s in group}) > 1 else ""
    table.notes = [f"{sample}.", *_other_pairs(group)]
    table.notes += [f"Data{f', {name}' * (name != 'data')}: {text}." for name, text in facts.items()]
    table.notes += [
        *meanings(authors),
        "A cell shows the mean ± the standard deviation over seeds. "
        + "The value of a seed is its mean over pairs of classes. " * (len(pairs) > 1)
        + "The 95 % interval of the mean is Student's. Steps ratios, R² and the RIR of the other κ are medians over "
        "all runs.",
        f"Bold: the best mean of a column. With {ENOUGH} seeds or more, the next best means are bold, too, down to the "
        "first one that a paired t-test tells apart (logarithms of the same seeds and pairs, Holm's correction, 5 %). "
        "The baseline identity is left out.",
    ]
    if "no ★ for" in table.header:
        table.notes.append(
            f"no ★ for: why a setting has no ★; a/b means in a of its b runs. ★ is chosen among {KEEPS}."
        )
    if winner:
        table.notes.append(f"★: the largest mean of the objective, {of.name}, among {KEEPS}.")
    if of.stage == "start":
        table.notes.append("The baseline of (i) and (ii) is theta_0 (Eq. 17), not the inputs (Eq. 15).")
    if published(group[0].first) and not authors:
        table.notes.append("The paper's numbers come from its own preparation of the data (dataset.protocol=authors).")
    table.notes += _gaps(group, further)
    return table


def pair_counts(group: Sequence[Setting], name: str, heading: str) -> Table | None:
    """Fig. 2 in numbers: how many pairs of classes have an RIR above a bound, beside the paper's count."""
    rir = in_convention(group, "rir")
    if max(len(setting.pairs(rir)) for setting in group) < 3:
        return None
    table = Table.of(name, f"{heading}: pairs, as Fig. 2 counts them", pair_columns(rir), group)
    by = AUTHORS if by_authors(group) else ", rank-aware κ"
    table.notes = [
        f"A pair counts by its median RIR over seeds{by}. The paper counts pairs with RIR much greater than 1 and "
        "names no bound."
    ]
    return table


def counts(group: Sequence[Setting], name: str, heading: str) -> Table | None:
    """How many runs of each setting succeed; None if no setting has several runs."""
    if max(len(setting.runs) for setting in group) < 2:
        return None
    table = Table.of(name, f"{heading}: successes", COUNTS, group)
    table.notes = [
        "A cell counts the runs, of all seeds and pairs, that satisfy its heading. a/b means a of b runs, if only b "
        "runs have the measure. RIR and the conditions (a) to (c) of Definition 3.1 are rank-aware. The columns "
        "harmful, primary and benign are about the steps ratio of that task; both means harmful > 1 and primary ≤ 1."
    ]
    return table


def alignment(group: Sequence[Setting], name: str, heading: str) -> Table | None:
    """Rank correlation of the alignment of K_P and K_H with the attainable and the reached RIR, over pairs."""
    outcomes = correlations(group)
    if not outcomes:
        return None
    rows = []
    for name_of, outcome in outcomes.items():
        row = [Cell(name_of), Cell(str(len(outcome)), len(outcome))]
        for predictor in ALIGNMENT:
            r, p = rank_correlation(first_pairs(group, predictor), outcome)
            row.append(Cell(NONE) if math.isnan(r) else Cell(f"{number(r)} (p {number(p)})", r, words=True))
        rows.append(row)
    notes = [
        "Spearman's rank correlation over ordered pairs of classes (medians over seeds). Pairs that share a class are "
        "not independent, so p is from permutations of the classes, where all pairs have runs."
    ]
    return Table(name, f"{heading}: what alignment predicts", ["RIR of", "pairs", *ALIGNMENT.values()], rows, notes)


def _strong(group: Sequence[Setting], of: Query) -> set[Setting]:
    """The best of a column, and those that paired tests do not distinguish from it; the baseline is left out.

    Empty where the best shares no seed and pair of classes with another setting.
    """
    rivals = [setting for setting in group if setting.method != "identity"]
    values = {setting: own for setting in rivals if len(own := setting.values(of))}
    if len(values) < 2:
        return set()
    largest = of.task != "primary" or of.measure not in ("ratio", BY_AUTHORS["ratio"])
    ranked = sorted(values, key=lambda setting: setting.summary(of).mean, reverse=largest)
    return ties(values, ranked) if comparable([values[setting] for setting in ranked]) else set()


def _other_pairs(group: Sequence[Setting]) -> Iterator[str]:
    """That settings were run on different pairs of classes, and on which."""
    counted = Counter(tuple(sorted({run.pair for run in setting.runs})) for setting in group if setting.runs)
    if len(counted) > 1:
        named = (", ".join(pairs) if len(pairs) <= 3 else f"{len(pairs)} pairs" for pairs in counted)
        told = (f"{pairs} in {n} of {counted.total()}" for pairs, n in zip(named, counted.values(), strict=True))
        yield (
            f"Settings have different pairs of classes: {'; '.join(told)}. Their averages are of other data; one that "
            "shares no seed and pair with another is neither ★ nor bold beside it."
        )


def relative(group: Sequence[Setting], name: str, heading: str, objective: str = "rir") -> Table | None:
    """Settings relative to ★ on the same seeds and pairs; None without ★ or three seeds.

    Settings with lower bounds have no ratio.
    """
    of = in_convention(group, objective)
    if len(group) < 2 or (winner := best(group, objective)) is None:
        return None
    measures = {ratios(group, of)[-1]: "RIR", HARMFUL_STEPS: "harmful steps", PRIMARY_STEPS: "primary steps"}
    others = [setting for setting in group if setting is not winner]

    def cell(column: Column, setting: Setting) -> Cell:
        if not column.of.measure:
            return column.cell(setting, column.of)
        ratio = paired_ratio(setting.bounded(column.of), winner.bounded(column.of))
        text = f"{number(ratio.mean)} ({number(ratio.low)} to {number(ratio.high)})" if ratio else NONE
        return Cell(text, ratio.mean, words=True) if ratio else Cell(text)

    columns = [
        Column(NOTHING, "method", label, always=True),
        *(Column(m, text, middle) for m, text in measures.items()),
    ]
    table = Table.of(name, f"{heading}: relative to ★ {winner.label}", columns, others, cell)
    table.notes = ["Geometric mean of the ratio to ★ on the same seeds and pairs of classes, with its 95 % interval."]
    return table if len(table.header) > 1 else None


def brief(group: Sequence[Setting], heading: str, objective: str = "rir", marked: Collection[Setting] = ()) -> Table:
    """One line a setting for a terminal of 80 columns: what tells it apart, means over seeds, and what ★ lacks.

    `marked` settings, a search's best, have ◆. Where there are more than LINES, those with the largest objective.
    """
    of, winner = in_convention(group, objective), best(group, objective) if len(group) > 1 else None
    i, ii, rir = ratios(group, of)
    further = dict.fromkeys([of, *own_measures(result for setting in group for result in setting.results)])
    marks = {s: (STAR[1:] if s is winner else "") + ("◆" if s in marked else "") for s in group}
    keys = list(dict.fromkeys(key for setting in group for key in setting.varied))
    wide = sum(max(len(key), *(len(setting.varied.get(key, "")) for setting in group)) + GAP for key in keys)
    title, several = [heading + (AUTHORS if by_authors(group) else "")], len({setting.method for setting in group}) > 1
    if several or not keys or wide > ROOM:
        names = {s: f"{n} {s.method}" if keys else s.label for n, s in enumerate(group, 1)}
        first = [Column(NOTHING, "method", lambda s, _: Cell(f"{names[s]} {marks[s]}".strip()), always=True)]
        title = [*(f"{n} {s.label}" for n, s in enumerate(group, 1)), "", *title] if keys else title
    else:
        first = [Column(NOTHING, "", lambda s, _: Cell(marks[s]), always=True)]
        first += [Column(NOTHING, key, partial(varied, key=key)) for key in keys]
    columns = [
        *first,
        *[Column(NOTHING, "runs", size, always=True)] * (len(group) == 1 or len({len(s.runs) for s in group}) > 1),
        *(Column(NOTHING, kind, partial(size, runs=kind)) for kind in ("failed", "interrupted")),
        Column(i, "(i)", mean_alone, always=True, best=True),
        Column(ii, "(ii)", mean_alone, always=True, best=True),
        Column(rir, "RIR", mean, always=True, best=True),
        *(Column(query, query.name, mean, always=True) for query in further if query not in (i, ii, rir)),
        *[Column(of, "no ★ for", lacks)] * (len(group) > 1),
        Column(HARMFUL_STEPS, "harmful steps", middle),
        Column(PRIMARY_STEPS, "primary steps", middle),
        *MEASURES,
    ]
    rows = list(group)
    if len(rows) > LINES:
        rows.sort(key=lambda setting: (setting.summary(of).n == 0, -setting.summary(of).mean))
        title.append(f"the {LINES} with the largest {of.name} of {len(rows)}; the report has all")
        rows = rows[:LINES]
    table = Table.of("", "\n".join(title), columns, rows)
    _embolden(table, group, rows)
    return replace(table, brief=True)


def _embolden(table: Table, group: Sequence[Setting], rows: Sequence[Setting]) -> None:
    for place, column in enumerate(table.columns):
        strong = _strong(group, column.of) if column.best else ()
        for setting, row in zip(rows, table.rows, strict=True):
            row[place].strong = setting in strong


def meanings(authors: bool) -> list[str]:
    """Notes on the columns of a comparison, with kappa by the authors' convention or rank-aware."""
    aware = "rank-aware: the smallest singular value that counts is the smallest one above rounding errors"
    released = "that of the released code: the largest eigenvalue of H + 1e-6 I over its smallest one above 1e-6"
    return [
        "(i) and (ii): the condition number κ of the harmful and of the primary task after immunization, divided by "
        f"that of the baseline. RIR = (i) / (ii). κ is {released if authors else aware}.",
        "Steps ratio: the steps that a probe needs by gradient descent on the immunized features, divided by those on "
        "the baseline. Unlike RIR, it depends on the labels.",
    ]


def _gaps(group: Sequence[Setting], further: Iterable[Query]) -> list[str]:
    """Averages that leave out runs, and why."""
    gaps: dict[tuple[str, ...], list[str]] = {}
    texts = RATIOS | {Query("ceiling/attained"): "ceiling", IMMUNIZED: "Def. 3.1"}
    for of, text in ({of: of.name for of in further} | texts).items():
        for setting in group:
            if reason := setting.reason(of):
                gaps.setdefault((text, *reason.split(": ", 1)), []).append(setting.label)
    told = ((text, few, " each" * (len(who) > 1), ", ".join(who), why) for (text, few, why), who in gaps.items())
    return [f"No {text} in {few} runs{each} of {who}: {why}." for text, few, each, who, why in told]


def _piped(text: str) -> str:
    """`text` in a cell of a pipe table."""
    return markdown(text).replace("|", "\\|")


def _html(cell: Cell) -> str:
    """A cell of a page; long ones may take several lines."""
    text: str = escape(cell.text)
    text = f'<a href="{escape(cell.link)}">{text}</a>' if cell.link else f"<b>{text}</b>" if cell.strong else text
    text = text if len(cell.text) <= LONG else f'<span class="long">{text}</span>'
    return str(text) if cell.value is None else f'<data value="{cell.value}">{text}</data>'


def _escape_markdown(text: str) -> str:
    return markdown(text).replace("*", "\\*").replace("_", "\\_")


SIGNS = {
    **{"±": "$\\pm$", "→": "$\\to$", "κ": "$\\kappa$", "≤": "$\\leq$", "★": "$\\star$", "●": "$\\bullet$"},
    **{"○": "$\\circ$", "²": "$^2$", "<": "$<$", ">": "$>$", NONE: "--"},
}
"""Signs that LaTeX's default fonts lack."""


def _signs(text: str) -> str:
    return "".join(SIGNS.get(letter, letter) for letter in text)
