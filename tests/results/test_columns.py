"""One entry of MEASURES puts a measure on the screen, into tables, reports, the leaderboard and the model card."""

import io
import re

import pytest
from helpers.made_runs import make_run
from rich.console import Console

from immunization.results import blocks, columns, leaderboard, model_card, page
from immunization.results.collect import collect
from immunization.results.columns import Column, mean
from immunization.results.screen import line, show
from immunization.runs.records import Query

FACTS = {"architecture": "resnet18", "weights": "random", "dtype": "float32", "data_config": {}}


@pytest.fixture
def collection(tmp_path):
    """Two seeds with a measure of one's own, which has a column."""
    columns.MEASURES.append(Column(Query("mine/score"), "my score", mean))
    for seed in range(2):
        measures, about = {"mine/score": 0.25 + seed / 2}, {"own_measures": ["mine/score"]}
        make_run(tmp_path / "runs" / str(seed), seed=seed, measures=measures, about=about)
    yield collect([tmp_path / "runs"])
    columns.MEASURES.pop()


def printed(thing, *arguments) -> str:
    console = Console(file=io.StringIO(), width=200)
    thing(*arguments, console)
    return console.file.getvalue()


def test_of_one_run(collection, tmp_path):
    result = collection.runs[0].result
    assert "my score 0.25" in line(result)
    text = printed(show, result, "rir")
    assert "my score" in text
    assert "mine/score" not in text
    assert "| my score | 0.25 |" in model_card.write(tmp_path, FACTS, None, result).read_text()


def test_of_several_runs(collection, tmp_path):
    sections = page.sections(collection, "rir", figures=False)
    board = leaderboard.sections(collection)
    for (part,) in (sections, board):
        table = part.tables[0]
        assert table.rows[0][table.header.index("my score")].text == "0.5 ± 0.35"
        assert "mine/score" not in table.header
    text = printed(page.show, collection, sections) + printed(page.show, collection, board)
    assert text.count("my score") == 2
    page.write(tmp_path / "report.html", collection, sections, "Title")
    assert "<button>mine/score</button>" in (tmp_path / "report.html").read_text()  # in the list of runs


def test_in_the_results(collection, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- results runs: summary tables -->\n<!-- /results -->\n")
    blocks.fill(page, tmp_path, tmp_path / "images")
    assert len(re.findall(r"\| +my score \|", page.read_text())) == 2


def test_ends_of_intervals_that_are_lower_bounds_are_marked(tmp_path):
    """On the screen and in tables; runs of before have no list of them."""
    ends = {f"interval/steps_ratio/harmful_{end}": value for end, value in (("low", 81.9), ("high", 262.0))}
    for about, expected in ({"intervals_capped": list(ends)[1:]}, "81.9 to > 262"), ({}, "81.9 to 262"):
        made = make_run(tmp_path / str(len(about)), measures=ends, about=about)
        collection = collect([made])
        assert expected in printed(show, collection.runs[0].result, "rir")
        table = page.sections(collection, "rir", figures=False)[0].tables[0]
        assert table.rows[0][table.header.index("harmful steps ratio, 95 % interval")].text == expected
