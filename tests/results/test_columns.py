"""One entry of COLUMNS puts a measure on the screen, into tables, reports, the leaderboard and the model card."""

import io

import pytest
from helpers.made_runs import make_run
from rich.console import Console

from immunization.results import columns, leaderboard, model_card, page
from immunization.results.collect import collect
from immunization.results.columns import EVERYWHERE, Column, mean
from immunization.results.document import Places, write
from immunization.results.parts import Chapter, Multirun
from immunization.results.screen import line, show

FACTS = {"architecture": "resnet18", "weights": "random", "dtype": "float32", "data_config": {}}


@pytest.fixture
def collection(tmp_path, monkeypatch):
    """Two seeds with a measure of one's own, which has a column."""
    column = Column("mine/score", "my score", EVERYWHERE, mean)
    monkeypatch.setattr(columns, "COLUMNS", [*columns.COLUMNS, column])
    for seed in range(2):
        measures, about = {"mine/score": 0.25 + seed / 2}, {"own_measures": ["mine/score"]}
        make_run(tmp_path / "runs" / str(seed), seed=seed, measures=measures, about=about)
    return collect([tmp_path / "runs"])


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
    run = Multirun(("seed=0,1",), (), tmp_path / "runs")
    found = [Chapter("mine", "Mine", "About it.", True, (), (), (run,), None)]
    write(found, Places(tmp_path / "RESULTS.md", tmp_path / "docs", tmp_path / "images"), "make results", ["Mine"])
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("| my score |") == 1  # in the first table; the section has none of its own
    assert "| my score |" in (tmp_path / "docs" / "mine.md").read_text()


def test_ends_of_intervals_that_are_lower_bounds_are_marked(tmp_path):
    """On the screen and in tables; runs of before have no list of them."""
    ends = {f"interval/steps_ratio/harmful_{end}": value for end, value in (("low", 81.9), ("high", 262.0))}
    for about, expected in ({"intervals_capped": list(ends)[1:]}, "81.9 to > 262"), ({}, "81.9 to 262"):
        made = make_run(tmp_path / str(len(about)), measures=ends, about=about)
        collection = collect([made])
        assert expected in printed(show, collection.runs[0].result, "rir")
        table = page.sections(collection, "rir", figures=False)[0].tables[0]
        assert table.rows[0][table.header.index("harmful steps ratio, 95 % interval")].text == expected
