"""The leaderboard: a row a method by giving its folder, weaker attacks apart, failures shown, the place in a page."""

import math
import re
from itertools import pairwise

import pytest
import yaml
from helpers.made_rows import ATTACKS, worth_run
from helpers.made_runs import make_run, measure
from matplotlib.text import Text

from immunization.errors import DataError
from immunization.results.__main__ import main
from immunization.results.collect import collect
from immunization.results.columns import ATTACKS as OF_ATTACKS
from immunization.results.columns import REMOVED, board_columns
from immunization.results.formatting import NONE
from immunization.results.leaderboard import BELOW, MARKS, REPORT, rows_below, sections, tracks
from immunization.results.rows import write
from immunization.results.settings import median
from immunization.runs.result import Result


def board_run(folder, method, costs, seed=0, attacks=ATTACKS, more=(), **changes):
    """A run in which `costs` (attack -> operations or None) are what attacks pay; the baseline's are 100 and 200."""
    measures = {"attack/worst/bar": 0.8, "steps_ratio/benign": 1.5, "attack/worst/fine_tuned": 1.0}
    for (name, cost), before in zip(costs.items(), (100.0, 200.0), strict=False):
        measures |= {f"attack/{name}/final": 0.9 if cost else 0.6, f"attack/{name}/cost": cost}
        measures |= {f"attack/{name}/final_baseline": 0.95, f"attack/{name}/cost_baseline": before}
    measures |= {"steps_ratio/unseen": 0.5} | one_attack("unseen", "probe", 120.0)
    changes = {"about": {"suite": {"version": "standard-1", "theta_0": "secret"}}} | changes
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
    return {column.heading: column.cell(row, column.of).text for column in board_columns(["benign"])}


def test_a_row_says_what_is_paid(folder):
    broken, held = (texts(rows_of(folder)[method]) for method in ("identity", "closed_form"))
    assert (broken["price"], held["price"]) == ("1", "held")
    assert (broken["learned in"], held["learned in"]) == ("3 of 3", "1 of 3")
    assert (broken["broken by"], held["broken by"]) == ("probe", "tuned")
    assert broken["price by search"] == "1"  # (200, 201, 202) / 200, in three digits
    assert broken["searched, before → after"] == "0.950 → 0.900"
    assert (broken["unseen price"], broken["unseen probe"]) == ("1.2", "0.5")
    assert (broken["benign probe"], broken["RIR"]) == ("1.5", "10")
    assert broken["primary, before → after"] == "0.950 → 0.951 ± 0.001"
    assert rows_of(folder)["closed_form"].cost() == math.inf


@pytest.mark.parametrize(
    ("costs", "price", "operations"),
    [([None, None, 150.0], "held", NONE), ([None, 300.0, 150.0], "3", "300"), ([200.0, 300.0, 150.0], "2", "200")],
)
def test_runs_that_hold_count_in_every_price(costs, price, operations, tmp_path):
    for seed, cost in enumerate(costs):
        ratio = {"attack/worst/flops_ratio_searched": cost and cost / 100}
        board_run(tmp_path / str(seed), "closed_form", {"probe": cost}, seed, more=ratio)
    (row,) = rows_of(tmp_path).values()
    shown = texts(row)
    assert (shown["price"], shown["price with search"]) == (price, price)
    (own,) = (column for column in OF_ATTACKS if column.heading == "operations, immunized")
    assert own.cell(row, own.of._replace(attack="probe")).text == operations


def test_nothing_is_held_that_nobody_fine_tuned(tmp_path):
    """One run of three without an attack that trains the whole net is enough."""
    for seed in range(3):
        more = {} if seed else {"attack/worst/fine_tuned": 0.0}
        board_run(tmp_path / str(seed), "closed_form", {"probe": None, "tuned": None}, seed, more=more)
    row = rows_of(tmp_path)["closed_form"]
    assert row.cost() == math.inf
    assert texts(row)["price"] == "not attacked by training"
    assert texts(row)["price by search"] == "not attacked by training"


def test_nothing_is_held_by_a_list_of_ones_own(tmp_path):
    board_run(tmp_path / "run", "closed_form", {"probe": None}, about={})
    assert texts(rows_of(tmp_path)["closed_form"])["price"] == "not attacked by standard"


def test_what_is_removed_has_a_column_for_each_number_of_images(tmp_path):
    worth_run(tmp_path / "run", "closed_form", {"5": 0.25, "20": -0.001, "all": None})
    row = texts(rows_of(tmp_path)["closed_form"])
    shares = [row[f"worth removed, {images} images"] for images in ("5", "20", "all")]
    assert shares == ["0.25 (0.15 to 0.35)", "0.00 (-0.10 to 0.10)", "undetermined"]
    assert row["other classes, own head"] == "0.600 → 0.600"


def test_a_table_says_what_the_model_is_worth(tmp_path):
    stake = {"_5": (0.3, 0.2, 0.4), "": (0.5, 0.4, 0.6)}
    more = {
        f"worth/theta_0{e}{n}": x for n, own in stake.items() for e, x in zip(("", "_low", "_high"), own, strict=True)
    }
    board_run(tmp_path / "none", "identity", {"probe": 1.0})
    board_run(tmp_path / "run", "closed_form", {"probe": 1.0}, more=more)
    (section,) = sections(collect([tmp_path]))
    assert section.tables[0].notes[0] == (
        "The worth of theta_0 (95 % interval) is 0.30 (0.20 to 0.40) with 5, 0.50 (0.40 to 0.60) with all images of "
        "each class."
    )


def test_several_seeds_are_a_mean_with_an_interval_that_is_no_narrower(tmp_path):
    for seed, share in enumerate((0.3, 0.4, 0.5)):
        worth_run(tmp_path / str(seed), "closed_form", {"5": share, "20": 0.5 if seed else None}, seed=seed)
    row = rows_of(tmp_path)["closed_form"]
    mean, low, high = row.removed(REMOVED._replace(images=5))
    half = math.hypot(0.1, 4.302653 * 0.1 / math.sqrt(3))  # own ends, and Student's t of 2 degrees of freedom
    assert (mean, mean - low, high - mean) == pytest.approx((0.4, half, half))
    assert row.removed(REMOVED._replace(images=20)) is None  # of one seed nothing is known


def test_rows_are_sorted_by_what_they_remove_and_those_that_lose_more_follow(tmp_path):
    """By the most images at which worth is known; a loss of two points is none too many, whatever rounding says."""
    shares = {"identity": 0.0, "opt_kappa": 0.2, "imma": 0.4, "encoderlock": 0.4, "forget": 0.9, "sophon": 0.5}
    shares["r_ill_only"] = 0.1  # the interval ends at 0
    lost = {"imma": 0.02, "forget": 0.021}
    for method, share in shares.items():
        for seed in range(1 if method == "opt_kappa" else 3):
            worth = {"5": 1 - share, "20": share, "all": None}
            worth_run(tmp_path / f"{method}_{seed}", method, worth, lost.get(method, 0.0), seed)
    for seed in range(3):
        worth_run(tmp_path / f"other_{seed}", "tar", {"5": 0.8, "20": 0.8, "all": None}, seed=seed, other=0.03)
    worth_run(tmp_path / "unknown", "ntl", {"5": None, "20": None, "all": None})
    worth_run(tmp_path / "failed", "clamp", {}, status="failed", error="clamp diverged")
    (rows,) = tracks(collect([tmp_path]))
    found = [(row.method, row.rank) for row in rows]
    assert found == [
        *(("sophon", "1"), ("imma", "2"), ("encoderlock", "2"), ("opt_kappa", "1 seed")),
        *(("r_ill_only", ""), ("identity", ""), ("ntl", "")),
        *(("forget", ""), ("tar", ""), ("clamp", "")),
    ]
    (board,) = sections(collect([tmp_path]))
    assert "Sorted by worth removed with 20 images of each class." in board.tables[0].notes


def test_what_a_row_loses_on_other_classes_counts(tmp_path):
    """At either size, even where the primary task gains. A row whose net nobody measured before has no known loss."""
    worth_run(tmp_path / "gains", "imma", {"all": 0.5}, lost=-0.3, other=0.2)
    enlarged = {"other_classes/accuracy_enlarged": 0.4, "other_classes/accuracy_enlarged_baseline": 0.7}
    for method, measures in {"tar": {"other_classes/accuracy_baseline": None}, "clamp": enlarged}.items():
        made = worth_run(tmp_path / method, method, {"all": 0.5})
        result = Result.read(made)
        measure(result, measures).write(made)
    rows = rows_of(tmp_path)
    assert rows["imma"].lost == pytest.approx(0.2)
    assert rows["clamp"].lost == pytest.approx(0.3)
    assert rows["tar"].price == 0
    assert rows["tar"].lost is None


def test_methods_that_choose_their_layers_share_a_table_whatever_format_suits_the_machine(tmp_path):
    for method, layers in {"forget": "layer3", "sophon": ["layer3", "layer4"]}.items():
        made = worth_run(tmp_path / method, method, {"all": 0.5})
        config = yaml.safe_load((made / "config.yaml").read_text())
        config["model"] |= {"trainable": layers, "amp": {"forget": "auto", "sophon": "bfloat16"}[method]}
        (made / "config.yaml").write_text(yaml.safe_dump(config))
    (board,) = sections(collect([tmp_path]))
    assert [row[0].text for row in board.tables[0].rows] == ["forget", "sophon"]


def test_rows_of_two_suites_or_tracks_or_other_data_share_no_table(tmp_path):
    kinds = {"forget": {}, "imma": {"suite": "standard-2"}, "ntl": {"protocol": "other"}, "sophon": {"track": "vit"}}
    for seed, (method, changes) in enumerate(kinds.items()):
        worth_run(tmp_path / "runs" / method, method, {"all": 0.5}, seed=seed, **changes)
    write([tmp_path / "runs"], tmp_path / "rows")
    found = sections(collect(rows_below([tmp_path / "rows"])))
    assert {tuple(row[0].text for row in board.tables[0].rows) for board in found} == {(method,) for method in kinds}
    titles = [board.tables[0].title for board in found]
    data = "digits, linear, protocol"
    assert sorted(titles) == [
        f"cifar: {data}=one_vs_rest, suite.version=standard-1",
        f"cifar: {data}=one_vs_rest, suite.version=standard-2",
        f"cifar: {data}=other, suite.version=standard-1",
        f"vit: {data}=one_vs_rest",
    ]
    assert all("Attackers: standard-" in board.tables[0].notes[0] for board in found)


def test_a_gain_of_the_primary_task_is_drawn_as_no_loss(tmp_path):
    worth_run(tmp_path / "run", "closed_form", {"all": 0.5}, lost=-0.31)
    worth_run(tmp_path / "other", "identity", {"all": 0.0})
    assert rows_of(tmp_path)["closed_form"].price == pytest.approx(-0.31)
    (plot,) = (plot for section in sections(collect([tmp_path])) for plot in section.plots)
    assert [bar.get_width() for bar in plot.figure.axes[1].patches] == [0, 0]


def test_one_row_is_not_drawn(tmp_path):
    worth_run(tmp_path / "run", "identity", {"all": 0.0})
    assert not any(section.plots for section in sections(collect([tmp_path])))


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
    assert (row["learned in"], row["price"]) == ("1 of 2", "4")
    assert [median(ratios) for ratios in ([], [None], [1, 3], [1, math.inf, math.inf])] == [None, None, 2, math.inf]


def test_of_several_harmful_tasks_the_cheapest_counts(tmp_path):
    more = {"worst/rir": 3.0, "worst/steps_ratio": 2.0} | one_attack("harmful_5", "tuned", 150.0)
    board_run(tmp_path / "run", "closed_form", {"probe": 400.0, "tuned": 500.0}, more=more)
    row = texts(rows_of(tmp_path)["closed_form"])
    assert (row["price"], row["RIR"], row["harmful probe"]) == ("1.5", "3", "2")
    assert row["price by search"] == "1.5"


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
    together, apart = (section.tables[0] for section in sections(collect([folder])))
    assert [row[0].text for row in together.rows] == ["identity", "closed_form"]
    assert "Attackers: standard-1." in together.notes
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
    assert row["price"] == NONE


def test_one_command_writes_everything_and_a_file_more_is_a_row_more(tmp_path, capsys):
    page, runs, rows, out = (tmp_path / name for name in ("page.md", "runs", "rows", "out"))
    page.write_text(f"Before, between `{MARKS[0]}` and `{MARKS[1]}`.\n\n{MARKS[0]}\nold\n{MARKS[1]}\n\nAfter.\n")
    worth_run(runs / "identity", "identity", {"all": 0.0})
    worth_run(runs / "forget", "forget", {"all": 0.5}, lost=0.1)
    write([runs], rows)
    arguments = ["leaderboard", str(rows), "--output", str(out), "--markdown", str(page)]
    main(arguments)
    text = page.read_text()
    assert text.startswith(f"Before, between `{MARKS[0]}` and `{MARKS[1]}`.\n")
    assert text.endswith("After.\n")
    assert "\nold\n" not in text
    assert "Do not edit by hand" in text
    assert "### cifar: digits, linear, protocol=one_vs_rest" in text
    plain = re.sub(" +", " ", text)  # columns are as wide as their widest cell
    assert plain.index("| identity | 1 |") < plain.index(f"*{BELOW}:*") < plain.index("| forget | 1 |")
    assert "flags" not in text
    assert text.count("Price: operations of the cheapest attack") == 1
    name = "leaderboard_cifar_digits_linear_protocol_one_vs_rest"
    names = {path.name for path in out.rglob("*.*")}
    assert {REPORT, f"{name}.csv", f"{name}.tex", f"{name}_worth.png", "results.csv"} <= names
    assert "\nmine " not in capsys.readouterr().out
    write([worth_run(tmp_path / "mine", "mine", {"all": 0.7})], rows)
    main(arguments)
    assert "\nmine " in capsys.readouterr().out
    assert "| mine | 1 | 1 seed | 0.70 (0.60 to 0.80) |" in re.sub(" +", " ", page.read_text())
    (rows / "cifar" / "mine-0.json").unlink()
    main(arguments)
    assert page.read_text() == text


def test_without_rows_it_says_how_to_get_them(tmp_path):
    with pytest.raises(DataError, match=r"no row in or below .*: .* rows PATH... makes them from runs"):
        main(["leaderboard", str(tmp_path)])


@pytest.mark.parametrize("given", ["", "one", "one/result.json"])
def test_runs_are_no_rows(given, tmp_path):
    worth_run(tmp_path / "runs" / "one", "identity", {"all": 0.0})
    with pytest.raises(
        DataError, match=r"one is a run and not a row of the leaderboard: .* rows PATH... makes them from runs"
    ):
        main(["leaderboard", str(tmp_path / "runs" / given)])


def test_a_page_without_a_place_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    write([worth_run(tmp_path / "run", "identity", {"all": 0.0})], tmp_path / "rows")
    with pytest.raises(DataError, match="has no place for the leaderboard: put <!-- leaderboard -->"):
        main(["leaderboard", str(tmp_path / "rows"), "--output", str(tmp_path / "out"), "--markdown", str(page)])
    assert page.read_text() == "no marks\n"


@pytest.fixture
def picture(tmp_path):
    """Thirteen rows, some of them at one place; the last of other attackers."""
    for i in range(13):
        attacks = {"probe": {"steps": 5}} if i == 12 else ATTACKS
        removed = {"20": i * 4 % 6 / 10, "all": 0.1}
        made = worth_run(tmp_path / str(i), f"a_method_with_a_long_name_{i}", removed, 0.01 * (i * 5 % 7))
        config = yaml.safe_load((made / "config.yaml").read_text())
        (made / "config.yaml").write_text(yaml.safe_dump(config | {"attack": attacks}))
    (plot,) = (plot for section in sections(collect([tmp_path])) for plot in section.plots)
    plot.figure.draw_without_rendering()
    return plot.figure


def test_labels_of_the_figure_do_not_overlap(picture):
    boxes = [Text.get_window_extent(label) for label in picture.axes[0].get_yticklabels()]
    assert len(boxes) == 13
    edge = picture.bbox
    assert all(edge.x0 <= box.x0 and box.x1 <= edge.x1 for box in boxes)
    boxes.sort(key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))


def test_every_row_has_its_worth_by_number_of_images_and_its_loss_on_one_line(picture):
    worth, loss = picture.axes
    points = {line.get_label(): line.get_xydata() for line in worth.lines if "images" in line.get_label()}
    assert list(points) == ["all images per class", "20 images per class"]
    bars = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in loss.patches}
    for place, label in enumerate(text.get_text() for text in worth.get_yticklabels()):
        i = int(label.removesuffix(" †").rpartition("_")[2])
        assert label.endswith("†") == (i == 12)
        for name, share in (("all", 0.1), ("20", i * 4 % 6 / 10)):
            x, y = points[f"{name} images per class"][place]
            assert (x, round(y)) == (pytest.approx(share), place)
        assert bars[place] == pytest.approx(i * 5 % 7)


def test_the_picture_has_the_lines_of_no_defense_and_of_no_model(picture):
    worth, _ = picture.axes
    assert {"0\n(identity)", "1\n(no model)"} <= {label.get_text() for label in worth.get_xticklabels()}
    low, high = worth.get_xlim()
    assert low < 0 < 1 < high
    assert {(0, 0), (1, 1)} <= {tuple(line.get_xdata()) for line in worth.lines}
