"""The leaderboard: a row a method by giving its folder, weaker attacks apart, failures shown, the place in a page."""

import json
import math
from itertools import pairwise

import pytest
import yaml
from helpers.made_runs import make_run
from matplotlib.text import Text

from immunization.errors import DataError
from immunization.results.__main__ import main
from immunization.results.attack_figures import Point, resistance
from immunization.results.collect import collect
from immunization.results.columns import Place, placed
from immunization.results.formatting import NONE
from immunization.results.leaderboard import MARKS, sections, tracks
from immunization.results.plot import INK, Look
from immunization.results.settings import median

ATTACKS = {"probe": {"steps": 100}, "tuned": {"steps": 64, "search": 20}}


def board_run(folder, method, costs, seed=0, attacks=ATTACKS, more=(), **changes):
    """A run in which `costs` (attack -> operations or None) are what attacks pay; the baseline's are 100 and 200."""
    measures = {"attack/worst/bar": 0.8, "steps_ratio/benign": 1.5, "attack/worst/fine_tuned": 1.0}
    for (name, cost), before in zip(costs.items(), (100.0, 200.0), strict=False):
        measures |= {f"attack/{name}/final": 0.9 if cost else 0.6, f"attack/{name}/cost": cost}
        measures |= {f"attack/{name}/final_baseline": 0.95, f"attack/{name}/cost_baseline": before}
    measures |= {"steps_ratio/unseen": 0.5} | one_attack("unseen", "probe", 120.0)
    changes = {"about": {"suite": {"version": "standard-2", "theta_0": "secret"}}} | changes
    made = make_run(folder, method, seed, measures=measures | dict(more), **changes)
    config = yaml.safe_load((made / "config.yaml").read_text())
    (made / "config.yaml").write_text(yaml.safe_dump(config | {"attack": attacks}))
    return made


def one_attack(role, name, cost):
    """What an attack on a further task measures that succeeds, with the baseline at 100 operations."""
    values = {"final": 0.9, "cost": cost, "final_baseline": 0.9, "cost_baseline": 100.0}
    return {f"attack_{role}/worst/bar": 0.8} | {f"attack_{role}/{name}/{key}": value for key, value in values.items()}


@pytest.fixture
def folder(tmp_path):
    """Three seeds of a method that slows attackers down, and of one that is broken at once."""
    for seed in range(3):
        board_run(tmp_path / f"held_{seed}", "closed_form", {"probe": None, "tuned": None if seed else 400.0}, seed)
        board_run(tmp_path / f"broken_{seed}", "identity", {"probe": 100.0, "tuned": 200.0 + seed}, seed)
    return tmp_path


def rows_of(folder):
    return {row.method: row for rows in tracks(collect([folder])) for row in rows}


def texts(row):
    return {column.heading: column.cell(row, column.measure).text for column in placed(Place.BOARD)}


def test_a_row_says_what_is_paid(folder):
    broken, held = (texts(rows_of(folder)[method]) for method in ("identity", "closed_form"))
    assert (broken["cost / baseline's"], held["cost / baseline's"]) == ("1", "held")
    assert (broken["learned in"], held["learned in"]) == ("3 of 3", "1 of 3")
    assert (broken["cheapest attack"], held["cheapest attack"]) == ("probe", "tuned")
    assert broken["searched cost / baseline's"] == "1"  # (200, 201, 202) / 200, in three digits
    assert broken["searched, before → after"] == "0.950 → 0.900"
    assert (broken["unseen cost / baseline's"], broken["unseen probe"]) == ("1.2", "0.5")
    assert (broken["benign probe"], broken["RIR"]) == ("1.5", "10")
    assert broken["primary, before → after"] == "0.950 → 0.951 ± 0.001"
    assert rows_of(folder)["closed_form"].cost() == math.inf


def test_nothing_is_held_that_nobody_fine_tuned(tmp_path):
    """One run of three without an attack that trains the whole net is enough."""
    for seed in range(3):
        more = {} if seed else {"attack/worst/fine_tuned": 0.0}
        board_run(tmp_path / str(seed), "closed_form", {"probe": None, "tuned": None}, seed, more=more)
    row = rows_of(tmp_path)["closed_form"]
    assert row.cost() == math.inf
    assert texts(row)["cost / baseline's"] == "not attacked by training"
    assert texts(row)["searched cost / baseline's"] == "not attacked by training"
    (figure,) = (plot.figure for section in sections([[row]]) for plot in section.plots)
    labels = [text.get_text() for text in figure.findobj(Text)]
    assert any("(not attacked by training)" in label for label in labels)
    assert not any("held)" in label for label in labels)


def test_nothing_is_held_by_a_list_of_ones_own(tmp_path):
    board_run(tmp_path / "run", "closed_form", {"probe": None}, about={})
    assert texts(rows_of(tmp_path)["closed_form"])["cost / baseline's"] == "not attacked by standard"


def test_what_is_removed_has_a_column(tmp_path):
    board_run(tmp_path / "run", "closed_form", {"probe": None}, more={"worth/removed": 0.25})
    assert texts(rows_of(tmp_path)["closed_form"])["worth removed"] == "0.25"


def test_a_gain_of_the_primary_task_is_not_plotted(tmp_path):
    more = {"primary/head_accuracy": 0.95, "primary/head_accuracy_baseline": 0.64}
    board_run(tmp_path / "run", "closed_form", {"probe": 400.0}, more=more)
    row = rows_of(tmp_path)["closed_form"]
    assert row.price == pytest.approx(-0.31)
    (plot,) = (plot for section in sections([[row]]) for plot in section.plots)
    assert plot.figure.axes[0].lines[0].get_xdata() == [0.0]


def test_sgrc_after_the_fewest_and_the_most_epochs(tmp_path):
    for seed, last in enumerate((0.1, 0.3)):
        more = {"attack/sgrc/sgrc_1": 0.5, "attack/sgrc/sgrc_3": 0.4, "attack/sgrc/sgrc_10": last}
        board_run(tmp_path / str(seed), "closed_form", {"probe": 300.0}, seed, more=more)
    assert texts(rows_of(tmp_path)["closed_form"])["SGRC"] == "0.500 / 0.200"


def test_held_is_said_of_more_than_half_of_the_runs(tmp_path):
    """Of two runs, one in which an attack succeeds, nobody can say that most hold."""
    for seed, cost in enumerate((400.0, None)):
        board_run(tmp_path / str(seed), "closed_form", {"probe": cost, "tuned": None}, seed)
    row = texts(rows_of(tmp_path)["closed_form"])
    assert (row["learned in"], row["cost / baseline's"]) == ("1 of 2", "4")
    assert [median(ratios) for ratios in ([], [None], [1, 3], [1, math.inf, math.inf])] == [None, None, 2, math.inf]


def test_of_several_harmful_tasks_the_cheapest_counts(tmp_path):
    more = {"worst/rir": 3.0, "worst/steps_ratio": 2.0} | one_attack("harmful_5", "tuned", 150.0)
    board_run(tmp_path / "run", "closed_form", {"probe": 400.0, "tuned": 500.0}, more=more)
    row = texts(rows_of(tmp_path)["closed_form"])
    assert (row["cost / baseline's"], row["RIR"], row["harmful probe"]) == ("1.5", "3", "2")
    assert row["searched cost / baseline's"] == "1.5"


def test_one_seed_cannot_carry_off_the_primary_measure_of_a_regression(tmp_path):
    for seed, r2 in enumerate((0.5, 0.6, -3.0)):
        more = {
            "primary/accuracy": None,
            "primary/accuracy_baseline": None,
            "primary/r2": r2,
            "primary/r2_baseline": 0.7,
        }
        board_run(tmp_path / str(seed), "closed_form", {"probe": 300.0}, seed, more=more)
    row = rows_of(tmp_path)["closed_form"]
    assert texts(row)["primary, before → after"] == "0.700 → 0.500"
    assert row.price == pytest.approx(0.2)


def test_runs_that_differ_in_the_unseen_class_alone_are_all_counted(tmp_path):
    for unseen, rir in {8: 10.0, 9: 30.0}.items():
        made = board_run(tmp_path / str(unseen), "closed_form", {"probe": 400.0}, rir=rir)
        config = yaml.safe_load((made / "config.yaml").read_text())
        config["dataset"]["unseen"] = unseen
        (made / "config.yaml").write_text(yaml.safe_dump(config))
    assert texts(rows_of(tmp_path)["closed_form"])["RIR"] == "20"


def test_rows_of_one_method_say_in_what_they_differ(tmp_path):
    for lambdas in ((1.0, 1.0), (1.0, 2.0)):
        board_run(tmp_path / str(lambdas), "condition_number", {"probe": 300.0}, lambdas=lambdas)
    ((one, other),) = tracks(collect([tmp_path]))
    assert [row.label for row in (one, other)] == ["condition_number lambda_H=1", "condition_number lambda_H=2"]


def test_weaker_attacks_stand_apart_with_the_reason(folder):
    few = {"probe": {"steps": 10}}
    board_run(folder / "weak", "imma", {"probe": None}, attacks=few)
    short = ATTACKS | {"tuned": {"steps": 64, "search": 2}}
    board_run(folder / "short", "opt_kappa", {"probe": None, "tuned": None}, attacks=short)
    (section,) = sections(tracks(collect([folder])))
    together, apart = section.tables
    assert [row[0].text for row in together.rows] == ["identity", "closed_form"]
    assert "Attackers: standard-2." in together.notes
    assert [row[0].text for row in apart.rows] == ["imma", "opt_kappa"]
    assert "not comparable" in apart.title
    assert apart.notes[:2] == [
        "imma: without tuned; attack.probe.steps=10 where others have 100.",
        "opt_kappa: attack.tuned.search=2 where others have 20.",
    ]


def test_of_equally_strong_attacks_those_of_most_rows_count(folder):
    few = ATTACKS | {"probe": {"steps": 100, "samples": 5}}
    board_run(folder / "a_few", "identity", {"probe": 100.0}, attacks=few)
    rows = [row for rows in tracks(collect([folder])) for row in rows]
    apart = {row.label: row.apart for row in rows if row.apart}
    assert list(apart.values()) == ["attack.probe.samples=5 where others have None"]


def test_failed_and_diverged_runs_are_shown(folder):
    board_run(folder / "lost", "imma", {"probe": None, "tuned": None}, status="failed", error="imma diverged at step 3")
    board_run(folder / "stopped", "imma", {"probe": None}, seed=1, status="failed", error="interrupted")
    row = texts(rows_of(folder)["imma"])
    assert (row["runs"], row["flags"]) == ("0, 1 failed, 1 interrupted", "failed: imma diverged at step 3")
    assert row["cost / baseline's"] == NONE


def test_one_command_writes_everything_and_a_folder_more_is_a_row_more(folder, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"Before, between `{MARKS[0]}` and `{MARKS[1]}`.\n\n{MARKS[0]}\nold\n{MARKS[1]}\n\nAfter.\n")
    mine = board_run(tmp_path.parent / f"{tmp_path.name}_mine", "mine", {"probe": 300.0, "tuned": 250.0})
    out = tmp_path / "out"
    main(["leaderboard", str(folder), str(mine), "--output", str(out), "--markdown", str(page)])
    assert "mine" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith(f"Before, between `{MARKS[0]}` and `{MARKS[1]}`.\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "| mine | 1 |" in text
    assert "Do not edit by hand" in text
    assert "### digits, linear" in text
    assert "flags" not in text
    assert "Unseen: harmful data that no method was shown." in text
    names = {path.name for path in out.rglob("*.*")}
    assert {"report.html", "leaderboard_digits_linear.csv", "leaderboard_digits_linear.tex", "results.csv"} <= names
    assert "leaderboard_digits_linear_resistance.png" in names
    html = (out / "report.html").read_text()
    assert "<svg" in html
    assert "<h1>Leaderboard</h1>" in html
    (row,) = (json.loads(path.read_text()) for path in (out / "rows").glob("*_mine.json"))
    assert row["attacks"]["attack.tuned.search"] == 20
    assert row["cells"]["cost / baseline's"] == "2.5"
    assert row["config"]["method"]["epochs"] == 3
    assert {"code", "data", "rows_sha256", "runs", "attackers_found"} <= set(row)
    main(["leaderboard", str(folder), "--output", str(out), "--markdown", str(page)])
    assert not list((out / "rows").glob("*_mine.json"))
    assert "mine" not in page.read_text().partition(MARKS[0])[2].replace(str(mine), "").partition("|")[2]


def test_a_track_is_made_again_without_the_runs_of_the_others(folder, tmp_path):
    page = tmp_path / "page.md"
    other = "### another, net\n\n| method | SGRC |\n| --- | ---: |\n| mine | 2 |\n\nOne is alone.\n"
    apart = "### another, net: other attacks, not comparable\n\n| method |\n| --- |\n| weak |\n"
    page.write_text(f"{MARKS[0]}\nold\n\n{other}\n{apart}\n- Old note.\n{MARKS[1]}\n")
    arguments = ["leaderboard", str(folder), "--output", str(tmp_path / "out"), "--markdown", str(page)]
    main(arguments)
    first = page.read_text()
    assert other.strip() in first
    assert apart.strip() in first
    assert "SGRC: the share of an attacker's held-out accuracy" in first
    assert "Old note" not in first
    assert first.index("### another, net") < first.index("### digits, linear")
    main(arguments)
    assert page.read_text() == first


def test_a_page_without_a_place_is_refused(folder, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(DataError, match="has no place for the leaderboard: put <!-- leaderboard -->"):
        main(["leaderboard", str(folder), "--output", str(tmp_path / "out"), "--markdown", str(page)])
    assert page.read_text() == "no marks\n"


def test_labels_of_the_figure_do_not_overlap():
    places = [(0.001 * (i % 2), math.inf if i == 5 else 1.0) for i in range(13)]
    points = [Point(f"a_method_with_a_long_name_{i}", *at, Look(INK, "-", "o")) for i, at in enumerate(places)]
    figure = resistance(points, "board", "title").figure
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert len(boxes) == len(points)
    edge = figure.bbox
    assert all(edge.x0 <= box.x0 and box.x1 <= edge.x1 for box in boxes)
    boxes.sort(key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
