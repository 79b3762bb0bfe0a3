"""report.html and the figures: complete, self-contained, escaped, and no larger than it may be."""

import csv
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.made_runs import METHODS, make_run
from markdown_it import MarkdownIt

from immunization.results.collect import collect
from immunization.results.page import markdown, provenance, sections, show, summarize, write
from immunization.results.plot import INK
from immunization.results.settings import settings
from immunization.results.sweep_figures import draw

VOID = {"meta", "br", "img", "input", "hr", "link"}


class Page(HTMLParser):
    """Fails on tags that do not close, and keeps every attribute and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.attributes, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


def report_of(folder) -> str:
    collection = collect([folder])
    write(folder / "report.html", collection, sections(collection, "rir"), "Title")
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two methods on six pairs, one run failed."""
    folder = tmp_path_factory.mktemp("runs")
    for i, method in enumerate(METHODS):
        for a in range(3):
            for b in range(3):
                if a != b:
                    make_run(folder / f"{i}_{a}{b}", method, pair=(a, b), rir=10.0 ** (a - b), seed=0)
    make_run(folder / "9", seed=5, status="failed", error="diverged <b>&")
    return folder


def test_a_page_that_needs_nothing_else(folder):
    text = report_of(folder)
    page = Page(text)
    assert page.open == []
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)  # heat maps are pictures
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 1_000_000


def test_the_page_holds_tables_figures_and_what_was_left_out(folder):
    words = "".join(Page(report_of(folder)).words)
    for expected in (*METHODS, "12 completed, 1 failed", "Fig. 1", "Fig. 2", "Fig. 3", "diverged <b>&", "12 runs in"):
        assert expected in words


def test_names_of_all_kinds_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    for seed in range(2):
        make_run(tmp_path / f"{seed}_&lt", evil, seed, dataset=evil, flags=[evil], pair=(evil, '"><i>'))
    make_run(tmp_path / "2", seed=3, status="failed", error=evil)
    text = report_of(tmp_path)
    assert text.count("<script>") == 1  # ours
    assert Page(text).open == []


@pytest.mark.parametrize("name", ["a$_$b", "$x$", "\\\\$"])
def test_dollar_signs_in_names_are_no_formulas(name, tmp_path, capsys):
    """Of methods, data, models and pairs; a sweep in a folder that rich would take for markup ends with its report."""
    folder = tmp_path / "[/b]"
    for i, method in enumerate((name, f"other {name}")):
        for pair in ((name, "1"), ("1", name), ("2", name), (name, "2")):
            changes = {"dataset": name, "model": name, "lambdas": (1.0, 10.0**i)}
            make_run(folder / f"{i}{'-'.join(pair)}", method, pair=pair, rir=10.0 ** (2 * i), **changes)
    summarize(collect([folder]), folder, "rir")
    assert "[/b]/report.html" in (printed := capsys.readouterr().out.replace("\n", ""))
    assert "8 completed" in printed
    assert (folder / "results.csv").exists()
    page = (folder / "report.html").read_text()
    drawn = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.S) if "<text" in svg]
    assert drawn
    assert all(name in svg for svg in drawn)
    assert "mathdefault" not in re.sub(r"<!--.*?-->", "", page)  # powers of ten still are
    assert r"<!-- $\mathdefault{10^" in page


def test_whole_documents_of_names_of_all_kinds(tmp_path):
    """Markdown has no tags of theirs, also not from commands and folders between backticks, and CSV no formulas."""
    folder = tmp_path / "`<b>"
    for seed in range(2):
        make_run(folder / f"{seed}=<i>", "=1+1", seed, dataset="<u>`", model="`<s>``", pair=("@x", "<a>"))
    collection = collect([folder])
    for run in collection.runs:
        run.command = "python launch.py `<b>`` x"
    rendered = MarkdownIt("commonmark").enable("table").render(markdown(sections(collection, "rir"), {}, "command"))
    assert not {"b", "i", "u", "s", "a"} & set(re.findall(r"<(\w+)", rendered))
    assert "&lt;u&gt;" in rendered
    rows = list(csv.reader(io.StringIO(collection.csv())))
    assert {"'=1+1"} == {row[rows[0].index("method")] for row in rows[1:]}
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "@", "+"))]


def test_figures_of_pairs_show_every_cell_and_count(folder):
    (group,) = settings(collect([folder]))
    plots = {plot.name.rpartition("_")[2]: plot for plot in draw(group, "x")}
    assert {"figure1", "figure2", "figure3"} <= set(plots)
    panels = [ax for ax in plots["figure2"].figure.axes if ax.get_title()]
    assert [ax.get_title().splitlines()[1] for ax in panels] == ["RIR > 1 in 3 of 6"] * 2
    values = panels[0].images[0].get_array().filled(float("nan"))
    assert values[2, 0] == pytest.approx(2.0)
    assert values[0, 0] != values[0, 0]  # the diagonal is blank


def test_a_caption_counts_the_settings_that_a_figure_of_curves_leaves_out(tmp_path):
    for i in range(9):
        make_run(tmp_path / str(i), lambdas=(1.0, 10.0**i), rir=10.0 + i)
    (group,) = settings(collect([tmp_path]))
    (plot,) = draw(group, "x", kinds=("figure3",))
    assert plot.caption.endswith("Of 9 settings, the 8 with the largest rir.")
    assert "Of 9" not in draw(group[:8], "x", kinds=("figure3",))[0].caption


def test_figures_of_settings_that_have_no_rir(tmp_path):
    for i in range(9):
        make_run(tmp_path / "many" / str(i), lambdas=(1.0, 10.0**i), rir=None)
    (group,) = settings(collect([tmp_path / "many"]))
    assert "Of 9 settings, the first 8." in draw(group, "x", kinds=("figure3",))[0].caption
    for i, pair in enumerate([(0, 1), (0, 2), (0, 3)]):
        make_run(tmp_path / "pairs" / str(i), rir=None, measures={"alignment/score": 0.5}, pair=pair)
    (group,) = settings(collect([tmp_path / "pairs"]))
    assert not any("alignment" in plot.name for plot in draw(group, "x"))


@pytest.mark.parametrize(("pairs", "count"), [([(0, 1), (0, 1)], 1), ([(0, 1), (1, 2)], 2)])
def test_settings_on_other_pairs_have_a_baseline_of_their_own(pairs, count, tmp_path):
    for method, pair in zip(METHODS, pairs, strict=True):
        make_run(tmp_path / method, method, pair=pair, measures={"steps_bar/harmful": 0.9})
    (group,) = settings(collect([tmp_path]))
    for plot in draw(group, "x", kinds=("figure1", "figure3")):
        ax = plot.figure.axes[1]  # of the harmful task
        dashed = [line for line in ax.lines if line.get_linewidth() == 1.0]
        assert len(dashed) == len({line.get_color() for line in dashed}) == count
        assert len([line for line in ax.lines if line.get_linestyle() == ":" and len(line.get_ydata()) == 2]) == (
            count if plot.name.endswith("3") else 0
        )
        assert ("of each setting in its color" in plot.caption) == (count == 2)


def test_the_map_of_both_weights(tmp_path):
    for i, lambda_p in enumerate((1.0, 10.0)):
        for j, lambda_h in enumerate((1.0, 10.0, 100.0)):
            make_run(tmp_path / f"{i}{j}", lambdas=(lambda_p, lambda_h), rir=10.0 ** (i + 2 * j))
        config = make_run(tmp_path / f"{i}_longer", lambdas=(lambda_p, 10.0), rir=1e9) / "config.yaml"
        config.write_text(config.read_text().replace("epochs: 3", "epochs: 9"))  # no part of the same map
    (group,) = settings(collect([tmp_path]))
    plot = next(plot for plot in draw(group, "x") if plot.name == "x_lambdas")
    rir, steps, *_ = plot.figure.axes
    assert rir.images[0].get_array().tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    texts = [text.get_text() for text in rir.texts]
    assert texts == ["1", "100", "10,000", "10", "1,000", "1e5"]  # ★ is of the others
    assert {text.get_text() for text in steps.texts} == {"100"}


def test_the_map_marks_failures_and_has_the_spread_over_seeds_beside(tmp_path):
    for i, (lambda_p, lambda_h) in enumerate((p, h) for p in (1.0, 10.0) for h in (1.0, 10.0)):
        for seed in range(2):
            failed = {"status": "failed", "error": "nan"} if (i, seed) in ((0, 0), (1, 0), (1, 1)) else {}
            make_run(tmp_path / f"{i}{seed}", seed=seed, lambdas=(lambda_p, lambda_h), rir=10.0 * 3**seed, **failed)
    (group,) = settings(collect([tmp_path]))
    (plot,) = draw(group, "x", kinds=("lambdas",))
    rir, spread, *_ = plot.figure.axes
    assert [text.get_text() for text in rir.texts] == ["★ ✗ 30", "✗", "20", "20"]
    assert [text.get_text() for text in spread.texts] == ["★ ✗ 1", "✗", "3", "3"]
    assert spread.get_title() == "largest / smallest seed"
    assert "1 of 2 at (1.0, 1.0); 2 of 2 at (10.0, 1.0)" in plot.caption


def test_what_a_search_tried_are_points_and_the_legend_names_the_front(tmp_path):
    for i in range(12):
        measures = {"ratio_harmful": 2.0 + i % 5, "ratio_primary": 0.1 + i / 100}
        make_run(tmp_path / str(i), lambdas=(1.1**i, 1.3**i), rir=10.0 + i, measures=measures)
    (group,) = settings(collect([tmp_path]))
    points, traded = draw(group, "x", kinds=("lambdas", "pareto"))
    assert points.figure.axes[0].collections[0].get_offsets().shape == (12, 2)
    (legend,) = traded.figure.legends
    assert len(legend.get_texts()) == 5 + 1 + 2  # settings 0 to 4 are the front; the largest RIR; front and ★
    assert "Faint points are not in the legend" in traded.caption


CASES = {
    "best": (10.0, {}),
    "smaller": (5.0, {}),
    "primary_lost": (100.0, {"definition/c": 0, "definition/immunized": 0}),
    "primary_probe_slower": (1000.0, {"steps_ratio/primary": 1e5}),
    "harmful_better_conditioned": (1e4, {"ratio_harmful": 0.632}),
    "perhaps_as_fast": (1e5, {}),
    "unknown": (1e6, {"ratio_harmful": None}),
}
"""RIR and what else is measured, of settings of which the first is to be marked."""


@pytest.mark.parametrize(("cases", "marked"), [(list(CASES), True), (list(CASES)[2:], False)])
def test_what_is_marked_best_is_best(tmp_path, cases, marked, capsys):
    """In figure, table and the line below; nothing is, where none slows harm and keeps the primary task."""
    for i, (rir, measures) in enumerate(CASES[case] for case in cases):
        measures = {"primary/accuracy": 0.9 + i / 100} | measures
        flags = ["harmful_not_slower"] * (cases[i] == "perhaps_as_fast")
        make_run(tmp_path / str(i), lambdas=(1.0, 10.0**i), rir=rir, measures=measures, flags=flags)
    collection = collect([tmp_path])
    (part,) = made = sections(collection, "rir")
    plot = next(plot for plot in part.plots if plot.name.endswith("_pareto"))
    circles = [line for line in plot.figure.axes[-1].lines if line.get_label() == "★"]
    assert [line.get_ydata().tolist() for line in circles] == ([[10.0]] if marked else [])
    starred = [row[0].text for row in part.tables[0].rows if "★" in row[0].text]
    assert starred == (["condition_number lambda_H=1 ★"] if marked else [])
    reasons = [
        *(["–", "–"] * marked),  # noqa: RUF001
        "Def. 3.1 fails: 1/1",
        "primary steps > 1: 1/1",
        "(i) ≤ 1: 1/1",
        "harmful_not_slower: 1/1",
        "(i) unknown: 1/1",
    ]
    table = part.tables[0]
    assert [row[table.header.index("no ★ for")].text for row in table.rows] == reasons
    show(collection, made)
    shown = capsys.readouterr().out
    assert all(f" {word} " in shown for word in ["Def", "prim", "(i)", "harm", "(i)?"])  # in the rows of the terminal
    assert ("★ largest" in shown) == marked
    assert f"Flags, of {len(cases)} runs: harmful_not_slower in 1 (docs/flags.md)" in shown
    assert ("No setting has a ★" in plot.caption) != marked


def test_a_star_needs_every_run(tmp_path, capsys):
    """Of two runs in three that keep the primary task nobody can say that the setting does."""
    for seed in range(3):
        steps = {"steps_ratio/primary": 1.0 if seed else 3.0}
        make_run(tmp_path / f"mostly{seed}", "opt_kappa", seed, rir=11.4, measures=steps)
        make_run(tmp_path / f"always{seed}", "condition_number", seed, rir=5.34)
    collection = collect([tmp_path])
    (part,) = sections(collection, "rir", figures=False)
    table = part.tables[0]
    rows = {row[0].text: row[table.header.index("no ★ for")].text for row in table.rows}
    assert rows == {"condition_number ★": "–", "opt_kappa": "primary steps > 1: 1/3"}  # noqa: RUF001
    show(collection, [part])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("opt_kappa ") and " prim " in line for line in lines)
    assert any(note.startswith("no ★ for: why a setting has no ★") for note in table.notes)


def pareto(folder, accuracies=(0.9, 0.9, 0.9), steps=(1.0, 1.0, 1.0), rirs=(10.0, 100.0, 1000.0)):
    """Panels of three settings, held out .95 with the baseline, by their x axes; none where there is no figure."""
    for i, (accuracy, step, rir) in enumerate(zip(accuracies, steps, rirs, strict=True)):
        measures = {"primary/accuracy": accuracy, "steps_ratio/primary": step, "steps_ratio/harmful": rir}
        make_run(folder / str(i), lambdas=(1.0, 10.0**i), rir=rir, measures=measures)
    (group,) = settings(collect([folder]))
    made = draw(group, "x", kinds=("pareto",))
    assert all("Up and left is better" in plot.caption for plot in made)
    return {ax.get_xlabel(): ax for plot in made for ax in plot.figure.axes}


LOST, STEPS = "lost on the primary task, held out", "steps of a fresh primary probe / baseline"


@pytest.mark.parametrize(
    ("varied", "x"),
    [
        ({"accuracies": (0.95, 0.85, 0.75)}, {LOST: [0.0, 0.1, 0.2]}),
        ({"steps": (0.5, 2.0, 8.0)}, {STEPS: [0.5, 2.0, 8.0]}),
        ({"accuracies": (0.95, 0.949, 0.948), "steps": (0.5, 2.0, 8.0)}, {STEPS: [0.5, 2.0, 8.0]}),  # too close to tell
        ({"accuracies": (0.95, 0.85, 0.75), "steps": (0.5, 2.0, 8.0)}, {STEPS: [0.5, 2.0, 8.0], LOST: [0.0, 0.1, 0.2]}),
    ],
    ids=["loss", "steps", "near", "both"],
)
def test_up_and_left_is_better_in_the_figure_of_what_is_traded(tmp_path, varied, x):
    panels = pareto(tmp_path, **varied)
    assert list(panels) == list(x)
    for name, ax in panels.items():
        points = {line.get_label(): line.get_xydata()[0] for line in ax.lines if line.get_label().startswith("lambda")}
        assert np.array(list(points.values())) == pytest.approx(np.array([x[name], [10.0, 100.0, 1000.0]]).T)
        assert ax.get_xlim()[0] < ax.get_xlim()[1]
        assert ax.get_ylim()[0] < ax.get_ylim()[1]


@pytest.mark.parametrize("varied", [{}, {"accuracies": (0.9, 0.8, 0.7), "rirs": (10.0, 10.0, 10.0)}], ids=["x", "y"])
def test_where_one_axis_does_not_vary_there_is_no_figure(tmp_path, varied):
    assert not pareto(tmp_path, **varied)


def test_what_slowing_the_harmful_task_costs_a_benign_one(tmp_path):
    for i, (harmful, benign) in enumerate([(1e5, 100.0), (1e3, 3.0), (10.0, 1.0)]):
        measures = {"steps_ratio/harmful": harmful, "steps_ratio/benign": benign}
        make_run(tmp_path / str(i), lambdas=(1.0, 10.0**i), measures=measures)
    (group,) = settings(collect([tmp_path]))
    plot = next(plot for plot in draw(group, "x") if plot.name == "x_collateral")
    (ax,) = plot.figure.axes
    assert ax.lines[0].get_xydata().tolist() == [[100.0, 1e5], [3.0, 1e3], [1.0, 10.0]]
    (legend,) = plot.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["lambda_H=1", "lambda_H=10", "lambda_H=100"]


def test_alignment_against_the_ceiling_and_what_is_reached(tmp_path):
    for i, (a, b) in enumerate((a, b) for a in range(3) for b in range(3) if a != b):
        for method in METHODS:
            measures = {"alignment/score": i / 6, "ceiling/rir": 1e3 / (1 + i)}
            make_run(tmp_path / f"{i}_{method}", method, pair=(a, b), rir=2.0 + i, measures=measures)
    (group,) = settings(collect([tmp_path]))
    plot = next(plot for plot in draw(group, "x") if plot.name == "x_alignment")
    attainable, reached = plot.figure.axes
    assert attainable.lines[0].get_xydata().tolist() == [[i / 6, 1e3 / (1 + i)] for i in range(6)]
    assert [line.get_label().splitlines()[0] for line in reached.lines] == sorted(METHODS, reverse=True)
    assert "r 1.00" in reached.lines[0].get_label()


def test_text_of_figures_follows_the_theme(folder):
    (group,) = settings(collect([folder]))
    for plot in draw(group, "x"):
        content = plot.svg()
        assert content.startswith("<svg")
        assert INK not in content
        assert "currentColor" in content


def grid(folder, **arguments) -> None:
    """Two methods, one of them with three settings."""
    for i in range(3):
        make_run(folder / str(i), lambdas=(1e-3, 10.0**i), rir=10.0 + i, **arguments)
    make_run(folder / "3", "opt_kappa", **arguments)


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_has_whole_numbers_settings_on_lines_of_their_own_and_a_legend(
    tmp_path, capsys, monkeypatch, width
):
    monkeypatch.setenv("COLUMNS", str(width))
    for seed in range(3):
        grid(tmp_path / str(seed), seed=seed, measures={"steps_ratio/harmful": 1680.0 * 3**seed})
    collection = collect([tmp_path])
    show(collection, sections(collection, "rir", figures=False))
    lines = capsys.readouterr().out.splitlines()
    assert 60 < max(map(len, lines)) <= width
    for i in range(3):
        assert f"{i + 2} condition_number lambda_H={10**i}" in lines
    assert any(line.split()[:3] == ["1", "opt_kappa", "5"] for line in lines)
    assert any(line.startswith("4 condition_number ★ ") and " 5,040  " in line for line in lines)
    text = " ".join(line.strip() for line in lines)
    assert "divided by that of the baseline. RIR = (i) / (ii)." in text
    assert "no ★ for: the conditions that some run does not satisfy: (i) > 1, Definition 3.1" in text


def test_the_objective_and_measures_of_ones_own_are_in_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for seed in range(2):
        measures = {"mine/score": 0.25 + seed / 2, "test/rir": 123.0 + 2 * seed, "mine/other": 77.0}
        grid(tmp_path / str(seed), seed=seed, measures=measures, about={"own_measures": ["mine/score"]})
    collection = collect([tmp_path])
    made = sections(collection, "test/rir", figures=False)
    show(collection, made)
    printed = capsys.readouterr().out
    assert "124 ± 1.4" in printed
    assert "0.5 ± 0.35" in printed
    assert "77" not in printed
    assert {"test/rir", "mine/score"} <= set(made[0].tables[0].header)


def test_commands_are_code_and_documents_hold_no_places_of_this_machine(folder):
    collection = collect([folder])
    for i, run in enumerate(collection.runs):
        run.command = f"python launch.py seed={i} name=<b> dataset.root=/home/me/data 'x=~/y'"
    told = provenance(collection.runs)
    assert re.fullmatch(r"12 runs in .*, made by `python launch.py seed=0 .*`, .* and 9 more\.", told)
    parts = sections(collection, "rir", figures=False)
    text = markdown(parts, {}, "python -m immunization.results")
    assert "/home/me" not in text
    assert "dataset.root=<folder>" in text
    write(folder / "report.html", collection, parts, "Title")
    page = (folder / "report.html").read_text()
    assert len(re.findall(r"<code>python launch\.py seed=\d+ name=&lt;b&gt; [^<]*</code>", page)) >= 3
