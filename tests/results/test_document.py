"""RESULTS.md and its pages from made-up runs: the table that comes first, the paper's figures beside ours, links."""

import re
from pathlib import Path

import pytest
from helpers.made_runs import make_run

from immunization.results.document import Places, overview, write
from immunization.results.formatting import NONE
from immunization.results.parts import Chapter, Multirun

AUTHORS = {"authors/rir": 20.0, "authors/ratio_harmful": 10.0, "authors/ratio_primary": 0.5}
TITLES = ["Title of pairs", "Title of starts"]
THETA0 = {"authors/rir_theta0": 30.0, "authors/ratio_harmful_theta0": 15.0, "authors/ratio_primary_theta0": 0.5}


def section(name: str, folder: Path, objectives: tuple[str, ...] = (), figures: tuple[str, ...] = ()) -> Chapter:
    run = Multirun(("method=condition_number,opt_kappa", "seed=0,1"), (), folder)
    return Chapter(name, f"Title of {name}", "About it.", True, objectives, figures, (run,), None)


@pytest.fixture
def found(tmp_path) -> list[Chapter]:
    """Pairs of MNIST in the authors' protocol, a failed run among them, and digits of another start each."""
    for i, (method, pair) in enumerate(
        (m, p) for m in ("condition_number", "opt_kappa") for p in ((0, 1), (0, 2), (1, 2))
    ):
        rir = {"condition_number": 20.0, "opt_kappa": 5.0}[method] / (1 + pair[0])
        measures = AUTHORS | THETA0 | {"authors/rir": rir, "steps_ratio/harmful": None}
        make_run(
            tmp_path / "pairs" / f"{i}_x", method, pair=pair, protocol="authors", measures=measures, dataset="mnist"
        )
    make_run(
        tmp_path / "pairs" / "9_x",
        "opt_kappa",
        protocol="authors",
        seed=3,
        dataset="mnist",
        status="failed",
        error="no",
    )
    make_run(tmp_path / "starts" / "0_x", "condition_number", measures={"definition/immunized": 0})
    sections = [
        section("pairs", tmp_path / "pairs", ("authors/rir_theta0",), ("figure2",)),
        section("starts", tmp_path / "starts"),
    ]
    return [part for part in [*sections, section("nothing", tmp_path / "nothing")] if part.groups]


def test_the_first_table_has_a_row_for_each_method_by_data_set(found):
    rows = [[cell.text for cell in row] for row in overview(found).rows]
    assert rows == [
        ["Title of pairs", "opt_kappa", "10", "100 %", NONE, "1", "accuracy 0.950 → 0.950"],
        ["", "condition_number", "10", "100 %", NONE, "1", "accuracy 0.950 → 0.950"],
        ["Title of starts", "condition_number", "10", "0 %", "100", "1", "accuracy 0.950 → 0.950"],
    ]


def test_pairs_are_counted_beside_the_papers(found):
    table = found[0].pairs
    assert table.header == ["method", "pairs", "RIR > 1", "RIR > 2", "RIR > 10", "RIR > 100", "paper, Fig. 2"]
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows == [
        ["opt_kappa", "3", "3", "3", "0", "0", "58 of 90"],
        ["condition_number", "3", "3", "3", "2", "0", "90 of 90"],
    ]
    assert found[1].pairs is None


def test_the_map_of_pairs_names_the_papers_count_and_is_by_the_authors_kappa(found):
    figure = next(plot.figure for plot in found[0].plots if plot.name.endswith("figure2"))
    assert [ax.get_title() for ax in figure.axes[:2]] == [
        "opt_kappa\nRIR > 10 in 0 of 3 (paper: 58 of 90)",
        "condition_number\nRIR > 10 in 2 of 3 (paper: 90 of 90)",
    ]
    assert figure.axes[2].get_ylabel() == "log₁₀ RIR, authors' κ, mean over seeds"


def test_the_pages(found, tmp_path):
    places = Places(tmp_path / "RESULTS.md", tmp_path / "docs" / "results", tmp_path / "docs" / "images")
    write(found, places, "make results", TITLES)
    page = places.page.read_text()
    assert page.startswith("# Results\n\nWritten by `make results`")
    assert page.index("| data | method | RIR |") < page.index("## Title of pairs")
    assert page.count("| method |") == 1  # the first table
    assert page.count("![") == 1
    assert "7 of 4 runs" in page  # the made-up multirun has fewer
    for path in (places.page, *places.details.glob("*.md")):
        links = re.findall(r"\]\(([^)]+)\)", path.read_text())
        assert links
        assert [link for link in links if not (path.parent / link).is_file()] == []
    details = (places.details / "pairs.md").read_text()
    assert "python launch.py -m method=condition_number,opt_kappa seed=0,1 launcher=joblib tracker=none" in details
    assert ": successes" in details
    assert "| paper RIR |" in details
    assert r"theta\_0 (Eq. 17)" in details
    assert {path.suffix for path in places.figures.iterdir()} == {".png"}


def test_sections_whose_runs_are_not_there_stay_as_they_are(found, tmp_path):
    places = Places(tmp_path / "RESULTS.md", tmp_path / "docs" / "results", tmp_path / "docs" / "images")
    pairs, starts = found
    write([pairs], places, "make results", TITLES)
    write([starts], places, "make results", TITLES)
    in_turn = places.page.read_text()
    write(found, places, "make results", TITLES)
    assert places.page.read_text() == in_turn
    write([pairs], places, "make results", ["Title of pairs"])  # a section that is no longer one
    assert "Title of starts" not in places.page.read_text()


def test_settings_of_several_groups_stand_in_one_table_without_figures(tmp_path):
    for i, protocol in enumerate(("one_vs_rest", "authors")):
        make_run(tmp_path / "s" / f"{i}_x", ("condition_number", "r_ill_only")[i], protocol=protocol)
    part = section("s", tmp_path / "s")
    assert len(part.groups) == 2
    assert [setting.method for setting in part.group] == ["r_ill_only", "condition_number"]
    assert part.plots == []
    assert sum(len(group) for group in part.groups) == len(part.tables[0].rows)
