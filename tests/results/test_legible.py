"""Pages at the width of a phone, a tablet and a screen: nothing sticks out, no text is tiny."""

import re

import pytest
from helpers.browser import look
from helpers.made_rows import worth_run
from helpers.made_runs import METHODS, make_run

from immunization.results import leaderboard, page, rows
from immunization.results.collect import collect
from immunization.results.page import sections, write
from immunization.results.run_figures import DPI, draw
from immunization.runs.result import Result

SMALLEST = 7
"""Pixels of the smallest text, exponents at axes; other text has 8 or more."""
PHONE = 390
"""Pixels that a phone is wide."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The page of a sweep, that of an audit, and that of the leaderboard."""
    folder = tmp_path_factory.mktemp("runs")
    for i, method in enumerate(METHODS):
        for a in range(3):
            for b in set(range(3)) - {a}:
                make_run(folder / "sweep" / f"{i}_{a}{b}", method, pair=(a, b), rir=10.0 ** (a - b))
    collection = collect([folder / "sweep"])
    write(folder / "sweep" / "report.html", collection, sections(collection, "rir"), "Sweep")
    measures, curves = {"attack/worst/bar": 0.89, "attack/worst/test_rows": 72}, {}
    for i in range(18):
        name = f"attack/last_block_finetune_adamw_{i}"
        measures |= {f"{name}/final": 0.8 + i / 100, f"{name}/final_baseline": 0.95, f"{name}/steps_ratio": 1e3}
        measures |= {f"{name}/cost": 1e6 * (i + 1), f"{name}/cost_baseline": 1e6}
        curves |= {f"{name}/{kind}": {"x": [1.0, 1e9], "y": [0.5, 0.9]} for kind in ("accuracy", "compute")}
    page.audit(make_run(folder / "audit", measures=measures, curves=curves))
    for i in range(8):
        worth_run(folder / "tracks" / str(i), f"method_{i}", {"5": i / 8, "20": None}, 0.01 * i, cost=None)
    rows.write([folder / "tracks"], folder / "rows")
    board = collect(leaderboard.rows_below([folder / "rows"]))
    leaderboard.write(folder / "board.html", board, leaderboard.sections(board), "Leaderboard")
    return [*(folder / name / "report.html" for name in ("sweep", "audit")), folder / "board.html"]


def test_figures_keep_their_letters(reports):
    """A figure is never drawn smaller than a pixel for each unit of its own, and scrolls within its frame instead."""
    for report in reports:
        text = report.read_text()
        frames = re.findall(
            r'<figure><div><div style="min-width: min\((\d+)px, 100rem\)"><svg [^>]*viewBox="([^"]+)', text
        )
        assert len(frames) == text.count("<svg") > 0
        for pixels, box in frames:
            assert float(pixels) >= float(box.split()[2])
        for svg in re.findall(r"<svg.*?</svg>", text, re.S):
            sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?([\d.]+)px", svg)]
            assert sizes
            assert min(sizes) >= SMALLEST
    assert re.search(r"figure > div \{ overflow-x: auto; \}", text)


def test_every_table_scrolls_within_its_frame(reports):
    for report in reports:
        text = report.read_text()
        assert text.count("<table") == text.count('<div class="wide"><table')
        assert re.search(r"\.wide \{ overflow-x: auto;", text)
        assert 'content="width=device-width, initial-scale=1"' in text
        assert all(float(size) >= 0.8 for size in re.findall(r"font(?:-size)?: ([\d.]+)rem", text))


def test_pictures_of_a_run_are_as_narrow_as_a_phone_needs(tmp_path):
    """Text of 10 points, drawn on a picture that fills a phone, has 7 pixels or more."""
    result = Result.read(make_run(tmp_path / "run"))
    paths = draw(result, result.folder)
    assert paths
    for path in paths:
        assert path.with_suffix(".svg").is_file()
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', path.with_suffix(".svg").read_text())[1]) / 72 * DPI
        assert 10 / 72 * DPI * PHONE / width >= SMALLEST


@pytest.mark.slow
@pytest.mark.parametrize("width", [PHONE, 768, 1440])
def test_pages_in_a_browser(reports, width, tmp_path):
    pytest.importorskip("PySide6.QtWebEngineCore", reason="pip install '.[browser]'", exc_type=ImportError)
    for report in reports:
        found = look(report, tmp_path / f"{report.parent.name}.png", width)
        assert found["width"] > width - 20  # less a scroll bar
        assert found["overflow"] <= 0
        assert found["smallest"] >= SMALLEST


SORT = """(() => {
  const shown = "section:not([hidden]) tbody tr:not([hidden])";
  const texts = () => [...document.querySelectorAll(shown)].map(row => row.cells[0].textContent);
  const click = name => [...document.querySelectorAll("th button")].find(b => b.textContent === name).click();
  const type = (id, text) => {
    const field = document.getElementById(id);
    field.value = text;
    field.dispatchEvent(new Event(id === "track" ? "change" : "input"));
  };
  const said = {before: texts()};
  click("method");
  click("method");
  said.sorted = texts();
  type("words", "METHOD_1");
  said.found = texts();
  type("words", "");
  type("track", document.querySelector("section").dataset.track);
  said.chosen = texts();
  const link = document.querySelector("td a");
  link.click();
  said.opened = document.getElementById(link.getAttribute("href").slice(1)).open;
  return said;
})()"""


@pytest.mark.slow
def test_the_leaderboard_in_a_browser(reports, tmp_path):
    """A heading sorts each part of the table, words and a track leave their rows, a link opens what is behind one."""
    pytest.importorskip("PySide6.QtWebEngineCore", reason="pip install '.[browser]'", exc_type=ImportError)
    said = look(reports[-1], tmp_path / "page.png", 1440, SORT)["said"]
    kept, lost = [[f"method_{i}" for i in some] for some in ((2, 1, 0), (7, 6, 5, 4, 3))]
    assert said["before"] == [*kept, leaderboard.BELOW, *lost]
    assert said["sorted"] == said["chosen"] == [*kept[::-1], leaderboard.BELOW, *lost[::-1]]
    assert said["found"] == ["method_1", leaderboard.BELOW]
    assert said["opened"]
