"""One table in the four formats in which it is written, and on a terminal."""

import csv
import io

import pytest
from rich.console import Console

from immunization.results.formatting import NONE, number
from immunization.results.tables import Cell, Table

HEADER = ["method", "RIR ± κ", "primary ≤ 1", "before → after"]
ROWS = [
    [Cell("a_b & 50 % ★"), Cell("1.5 ± 0.1", 1.5, strong=True), Cell("3/4", 0.75), Cell("0.9 → 0.8", 0.8)],
    [Cell('c, "d" | {e}\\'), Cell.of(29_700.0), Cell.of(None), Cell("R² < 1 > 0")],
]


@pytest.fixture
def table() -> Table:
    return Table("name", "Title_1", HEADER, [row.copy() for row in ROWS], ["50 % of *all*.", "κ ~ 1^2 #$"])


def test_csv_holds_the_cells_as_they_are_shown(table):
    assert list(csv.reader(io.StringIO(table.csv()))) == [HEADER, *([cell.text for cell in row] for row in ROWS)]


def test_latex_escapes_everything_and_needs_no_more_than_booktabs(table):
    text = table.latex()
    assert text.isascii()
    assert text.splitlines() == [
        r"% 50 \% of *all*.",
        r"% $\kappa$ \textasciitilde{} 1\textasciicircum{}2 \#\$",
        r"\begin{table}",
        r"\caption{Title\_1.}",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"method & RIR $\pm$ $\kappa$ & primary $\leq$ 1 & before $\to$ after \\",
        r"\midrule",
        r"a\_b \& 50 \% $\star$ & \textbf{1.5 $\pm$ 0.1} & 3/4 & 0.9 $\to$ 0.8 \\",
        r'c, "d" | \{e\}\textbackslash{} & 29,700 & -- & R$^2$ $<$ 1 $>$ 0 \\',
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_long_cells_are_not_cut(table):
    table.rows[0][0] = Cell("x" * 500)
    assert "x" * 500 in table.latex()
    assert "x" * 500 in table.csv()


def test_markdown_keeps_its_columns(table):
    lines = table.markdown().splitlines()
    assert lines[0] == r"## Title\_1"
    assert "**1.5 ± 0.1**" in lines[4]
    assert all(line.replace(r"\|", "").count("|") == len(HEADER) + 1 for line in lines[2:6])


def test_cells_of_numbers():
    assert Cell.of(0.01234) == Cell("0.0123", 0.01234)
    assert Cell.of(None) == Cell(NONE)
    assert number(3.108e12) == "3.11e12"


@pytest.mark.parametrize("width", [40, 60, 200])
def test_no_number_and_no_word_is_broken_on_a_terminal(table, width):
    table.header = [*HEADER, "harmful steps ratio"]
    table.rows = [[*row, Cell("1,680,000 ± 29,700")] for row in table.rows]
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = set(text.split())
    for cell in (cell for row in table.rows for cell in row[1:]):
        assert cell.text in text
    assert {word for name in table.header for word in name.split()} <= words
    assert text.count("a_b & 50 % ★") == {40: 3, 60: 2, 200: 1}[width]  # in every part
