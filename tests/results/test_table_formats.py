"""One table in the four formats in which it is written."""

import csv
import io

import pytest

from immunization.results.formatting import NONE, number
from immunization.results.tables import Cell, Table

HEADER = ["method", "RIR ± κ", "primary ≤ 1", "before → after"]
ROWS = [
    [Cell("a_b & 50 % ★"), Cell("1.5 ± 0.1", 1.5, strong=True), Cell("3/4", 0.75), Cell("0.9 → 0.8", 0.8)],
    [Cell('c, "d" | {e}\\'), Cell.of(29_700.0), Cell.of(None), Cell("R² < 1 > 0")],
]


@pytest.fixture
def table() -> Table:
    return Table("name", "Title_1", HEADER, ROWS, ["50 % of *all*.", "κ ~ 1^2 #$"])


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
