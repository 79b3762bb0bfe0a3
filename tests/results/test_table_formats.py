"""One table in the formats in which it is written, and on a terminal."""

import csv
import io
from collections import Counter
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from immunization.results.tables import Cell, Table

HEADER = ["method", "RIR ± κ", "primary ≤ 1", "before → after"]
ROWS = [
    [Cell("a_b & 50 % ★"), Cell("1.5 ± 0.1", 1.5, strong=True), Cell("3/4", 0.75), Cell("0.9 → 0.8", 0.8)],
    [Cell('c, "d" | {e}\\'), Cell.of(29_700.0), Cell.of(None), Cell("R² < 1 > 0")],
]


@pytest.fixture
def table() -> Table:
    return Table("name", "Title_1", [*HEADER], [row.copy() for row in ROWS], ["50 % of *all*.", "κ ~ 1^2 #$"])


def test_csv_holds_the_cells_as_they_are_shown(table):
    assert list(csv.reader(io.StringIO(table.csv()))) == [HEADER, *([cell.text for cell in row] for row in ROWS)]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1-1", "@name", "\t=1", "\r=1"])
def test_names_are_no_formulas_in_a_csv(table, name):
    """Numbers below 0 stay numbers."""
    table.rows[0][0], table.header[1], table.rows[1][1] = Cell(name), name, Cell.of(-29_700.0)
    header, first, second = csv.reader(io.StringIO(table.csv()))
    shown = f"'{name}".replace("\r", " ")
    assert (first[0], header[1], second[1]) == (shown, shown, "-29,700")


HTML = "<img src=x>"
LINK = "[a](https://example.org)"
ATTRIBUTES = "{: title=x }"
LINES = "a\n\n# b"


class Tags(HTMLParser):
    """The tags of a page, its attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = Counter(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def as_the_site(text: str) -> str:
    return pytest.importorskip("markdown").markdown(text, extensions=["attr_list", "md_in_html", "tables"])


def as_github(text: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(text)


@pytest.mark.parametrize("render", [as_github, as_the_site])
@pytest.mark.parametrize("name", [HTML, LINK, ATTRIBUTES, LINES])
def test_names_are_no_markup_in_markdown(table, name, render):
    """In the title, a heading, a cell and a note: the page has the tags that it has with plain names."""
    plain = Tags(render(table.markdown())).tags
    table.title, table.notes[0] = name, name
    table.header[1], table.rows[0][0] = name, Cell(name)
    page = Tags(render(table.markdown()))
    assert page.tags == plain
    assert page.attributes <= {"style"}
    assert page.text.count(" ".join(name.splitlines())) == 4


def test_latex_escapes_everything_and_needs_no_more_than_booktabs(table):
    text = table.latex()
    assert text.splitlines() == [
        "% 50 % of *all*.",
        "% κ ~ 1^2 #$",
        r"\begin{table}",
        r"\caption{Title\_1.}",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"method & RIR $\pm$ $\kappa$ & primary $\leq$ 1 & before $\to$ after \\",
        r"\midrule",
        r"a\_b \& 50 \% $\star$ & \textbf{1.5 $\pm$ 0.1} & 3/4 & 0.9 $\to$ 0.8 \\",
        r'c, "d" | \{e\}\textbackslash  & 29,700 & -- & R$^2$ $<$ 1 $>$ 0 \\',
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_markdown_keeps_its_columns_and_every_digit(table):
    lines = table.markdown().splitlines()
    assert lines[0] == r"## Title\_1"
    assert "**1.5 ± 0.1**" in lines[4]
    assert all(line.replace(r"\|", "").count("|") == len(HEADER) + 1 for line in lines[2:6])
    assert [line.endswith(":") for line in lines[3].strip("|").split("|")] == [False, True, True, True]
    assert "29,700" in lines[5]
    table.rows[0][1], table.rows[1][1] = Cell("1.50", 1.5), Cell("1e6", 1e6)
    assert all(text in table.pipes() for text in (" 1.50 |", " 1e6 |"))


def test_pages_sort_by_numbers_and_hold_nothing_of_a_name_but_its_text(table):
    table.rows[0][0], table.header[1], table.rows[0][3].link = Cell(HTML + "x" * 60), HTML, '"><i>'
    page = Tags(table.html())
    assert page.tags == {"table": 1, "thead": 1, "tbody": 1, "tr": 3, "th": 4, "td": 8} | {
        **{"button": 4, "data": 4, "b": 1, "span": 1, "a": 1}
    }
    assert page.attributes <= {"value", "class", "href"}
    assert '<data value="29700.0">29,700</data>' in table.html()
    assert page.text.count(HTML) == 2


def test_long_tables_are_whole(table):
    """A Styler leaves out cells beyond 2^18."""
    table.rows = [[Cell("a")] * 4] * 65_537
    assert table.html().count("<td") == 4 * len(table.rows)
    table.rows = [[Cell("x" * 500)] * 4]
    assert all("x" * 500 in text for text in (table.latex(), table.csv(), table.html(), table.pipes()))


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
