"""The figures of a run: what is drawn, in which colour and line, and that odd curves do not stop them."""

import math

import numpy as np
import pytest
from helpers.made_runs import made_result
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from immunization.results import run_figures
from immunization.runs import tracker
from immunization.runs.records import from_flat
from immunization.runs.result import Result
from immunization.runs.tracker import Recorder


def curve(y, x=None) -> dict:
    return {"x": list(range(1, len(y) + 1)) if x is None else x, "y": list(y)}


@pytest.fixture
def result() -> Result:
    """A run on two tasks and a benign one: immunization slows the harmful probe."""
    curves, steps = {}, [1, 10, 100, 1000]
    for role, end in {"primary": -2.0, "harmful": -6.0, "benign": -4.0}.items():
        for suffix, factor in {"": 1.0, "/baseline": 0.5}.items():
            curves[f"spectrum/{role}"] = curve(40 * np.logspace(0, end, 30))
            curves[f"spectrum/{role}{suffix}"] = curve(7 * np.logspace(0, end * factor, 30))
            curves[f"norm_ratio/{role}{suffix}"] = curve(np.logspace(0, end * factor, 50), list(range(50)))
            curves[f"probe/{role}{suffix}"] = curve([0.5, 0.6, 0.7 * factor, 0.9], steps)
    metrics = {"primary/accuracy": 0.97, "steps_ratio/harmful": 152.2, "steps_ratio/primary": None}
    return made_result(1, "digits", "linear", "condition_number", status="completed", metrics=metrics, curves=curves)


def record(folder, **terms) -> None:
    recorder = Recorder(folder)
    recorder.log(0, {"kappa_primary": 10.0, "kappa_harmful": 5.0, "rir": 1.0})
    for step in (1, 2, 3):
        values = {name: value[step - 1] for name, value in terms.items()}
        recorder.log(step, values | {"kappa_primary": 9.0, "kappa_harmful": 6.0, "ratio_primary": 0.9, "rir": 1.3})
    recorder.close(failed=False)


@pytest.fixture
def drawn(monkeypatch) -> dict[str, Figure]:
    """The figures that were saved, by the name of their file."""
    figures, save = {}, Figure.savefig

    def remember(figure, path, **options):
        figures[path.stem] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures


def points(line) -> list[list[float]]:
    return [line.get_xdata().tolist(), line.get_ydata().tolist()]


def test_every_figure_holds_its_curves_under_names_that_say_what_they_are(result, tmp_path, drawn):
    record(tmp_path, loss=[3.0, 2.0, 1.0], my_term=[5.0, 6.0, 7.0])
    paths = run_figures.draw(result, tmp_path)
    assert {path.stem for path in paths} == drawn.keys() == {"norm_ratio", "spectra", "learning_curves", "history"}
    for family, name, x, y in (
        ("norm_ratio", "norm_ratio", "steps, exact line search", "‖wₜ − w*‖ / ‖w₀ − w*‖"),  # noqa: RUF001
        ("spectrum", "spectra", "index i", "eigenvalue λᵢ / λ₁ of the Hessian"),
        ("probe", "learning_curves", "steps of gradient descent", "held-out accuracy"),
    ):
        axes = drawn[name].axes
        assert axes[0].get_ylabel() == y
        for role, ax in zip(("primary", "harmful", "benign"), axes, strict=True):
            assert ax.get_xlabel() == x
            for line, suffix in zip(ax.get_lines(), ("", "/baseline"), strict=True):
                expected = result.curves[f"{family}/{role}{suffix}"]
                scale = expected["y"][0] if family == "spectrum" else 1  # relative to the largest eigenvalue
                assert points(line) == [expected["x"], pytest.approx([value / scale for value in expected["y"]])]
    shown = {line.get_label(): points(line) for ax in drawn["history"].axes for line in ax.get_lines()}
    assert shown == {
        "loss": [[1, 2, 3], [3, 2, 1]],
        "my_term": [[1, 2, 3], [5, 6, 7]],
        "primary": [[0, 1, 2, 3], [10, 9, 9, 9]],
        "harmful": [[0, 1, 2, 3], [5, 6, 6, 6]],
        "(ii) primary κ ratio": [[1, 2, 3], [0.9, 0.9, 0.9]],
        "RIR": [[0, 1, 2, 3], [1, 1.3, 1.3, 1.3]],
    }
    for ax in drawn["history"].axes:
        assert ax.get_xlabel() == "training steps"
        assert [text.get_text() for text in ax.get_legend().get_texts()] == [
            line.get_label() for line in ax.get_lines()
        ]
    for path in paths:
        assert drawn[path.stem].get_suptitle() == "condition_number on digits (linear, seed 1)"
        with Image.open(path) as image:
            assert image.size == pytest.approx(drawn[path.stem].get_size_inches() * run_figures.DPI, abs=1)


def test_a_run_without_curves_gives_the_figures_it_can(result, tmp_path):
    result.curves = {}
    assert run_figures.draw(result, tmp_path) == []
    record(tmp_path, loss=[3.0, 2.0, 1.0])
    assert [path.name for path in run_figures.draw(result, tmp_path)] == ["history.png"]


def test_a_task_keeps_its_color_and_the_baseline_is_dashed(result):
    for figure in (
        run_figures.norm_ratio(result.curves),
        run_figures.spectra(result.curves),
        run_figures.learning_curves(result),
    ):
        for role, ax in zip(run_figures.COLORS, figure.axes, strict=True):
            immunized, baseline = ax.get_lines()
            assert {to_hex(line.get_color()).upper() for line in (immunized, baseline)} == {run_figures.COLORS[role]}
            assert immunized.get_linestyle() == "-"
            assert baseline.get_linestyle() != "-"
            assert ax.get_title().startswith(f"{role} task")
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["immunized", "baseline"]


def test_spectra_end_at_one_over_kappa(result):
    figure = run_figures.spectra(result.curves)
    assert figure.axes[0].get_lines()[0].get_ydata()[[0, -1]] == pytest.approx([1, 1e-2])
    assert figure.axes[1].get_title() == "harmful task: κ 1,000 → 1e6"


def test_learning_curves_name_the_measure_and_the_steps_ratio(result):
    figure = run_figures.learning_curves(result)
    assert figure.axes[0].get_ylabel() == "held-out accuracy"
    assert [ax.get_title() for ax in figure.axes[:2]] == ["primary task", "harmful task: steps ratio 152"]
    assert figure.axes[0].get_xscale() == "log"


def test_r2_far_below_zero_does_not_flatten_the_rest(result):
    result.records = from_flat({"primary/r2": 0.7}, {})
    result.curves["probe/primary"]["y"] = [-1e6, -3.0, 0.5, 0.7]
    figure = run_figures.learning_curves(result)
    assert figure.axes[0].get_ylabel() == "held-out R²"
    assert figure.axes[0].get_ylim()[0] == -0.25


@pytest.mark.parametrize(
    ("terms", "scale"),
    [
        ({"loss": [3.0, 2.0, 1.0], "r_ill": [1e-9, 1e-8, 1e-7]}, "log"),
        ({"loss": [-1e11, 0.0, 2.0]}, "symlog"),
        ({"loss": [0.0, 0.0, 0.0]}, "linear"),
        ({"loss": [1.0, math.nan, math.inf], "my_term": [1.0, 2.0, 9.0], "another": [1.0, 2.0, 3.0]}, "log"),
        ({"loss": [0.71, 0.72, 0.73]}, "linear"),
    ],
)
def test_history_takes_any_loss_terms(tmp_path, terms, scale):
    record(tmp_path, **terms)
    figure = run_figures.history(tracker.history(tmp_path))
    assert [ax.get_title() for ax in figure.axes] == ["loss and its terms", "condition numbers κ", "RIR = (i) / (ii)"]
    loss = figure.axes[0]
    assert loss.get_yscale() == scale
    assert {line.get_label() for line in loss.get_lines()} == set(terms)
    assert len({(line.get_color(), line.get_linestyle()) for line in loss.get_lines()}) == len(terms)
    figure.savefig(tmp_path / "history.png")


def test_flat_empty_and_null_values_are_drawn(result, tmp_path):
    result.curves |= {
        "norm_ratio/primary": curve([1.0, 0.0, 0.0]),
        "spectrum/primary": curve([2.0]),
        "spectrum/harmful": curve([2.0, None, 1.0]),
        "probe/harmful": curve([None, None, None, None]),
    }
    assert len(run_figures.draw(result, tmp_path)) == 3


@pytest.mark.parametrize("low", [0.999, 0.9, 0.3, 0.15, 0.02, 1e-9])
def test_an_axis_has_several_labels(result, tmp_path, low):
    result.curves = {"norm_ratio/primary": curve(np.geomspace(1, low, 50))}
    (path,) = run_figures.draw(result, tmp_path)
    figure = run_figures.norm_ratio(result.curves)
    figure.draw_without_rendering()
    assert figure.axes[0].yaxis.label.get_window_extent().x0 > 0
    bottom, top = figure.axes[0].get_ylim()
    assert 3 <= sum(bottom <= tick <= top for tick in figure.axes[0].get_yticks()) <= 12
    assert path.is_file()


def test_dollar_signs_in_names_are_no_formulas(result, tmp_path, drawn):
    """Powers of ten at the axes are."""
    result.method, result.dataset = "a$_$b", "$x$"
    paths = run_figures.draw(result, tmp_path)
    for path in paths:
        text = path.with_suffix(".svg").read_text()
        assert "a$_$b on $x$" in text
    figure = drawn["norm_ratio"]
    labels = [label for label in figure.axes[0].yaxis.get_ticklabels() if label.get_text()]
    assert labels
    assert all("$" in label.get_text() and label.get_parse_math() for label in labels)


def test_legends_stay_outside_of_the_data(result, tmp_path):
    record(tmp_path, loss=[3.0, 2.0, 1.0], r_well=[1.0, 1.0, 1.0], r_ill=[1.0, 1.0, 1.0], task_loss=[1.0, 1.0, 1.0])
    history = run_figures.history(tracker.history(tmp_path))
    for figure in (history, run_figures.norm_ratio(result.curves)):
        figure.draw_without_rendering()
        for ax in figure.axes:
            for legend in [*figure.legends, *filter(None, [ax.get_legend()])]:
                box = legend.get_window_extent()
                assert box.y1 < ax.xaxis.label.get_window_extent().y0
                assert box.y0 >= 0
