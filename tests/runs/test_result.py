"""result.json, environment.json and the table."""

import html
import io
import json
import math
import os
import stat
import time

import pytest
import torch
from helpers.made_runs import made_result
from rich.console import Console

from immunization.errors import DataError, Requeued
from immunization.results.formatting import NONE, number
from immunization.results.screen import line, show
from immunization.runs import environment, files
from immunization.runs.result import Result

UNBOUNDED = "range(K_H) is not inside range(K_P): unbounded"
METRICS = {
    "ratio_harmful": 63.1,
    "ratio_primary": 0.0158,
    "rir": 3993.67,
    "test/rir": 812.0,
    "authors/rir": 3.108e12,
    "ceiling/rir": None,
    "ceiling/attained": None,
    "kappa_harmful": 4.2e5,
    "kappa_harmful_baseline": 6655.0,
    "primary/accuracy": 0.9731,
    "primary/accuracy_baseline": 0.9846,
    "definition/a": 1.0,
    "definition/b": 1.0,
    "definition/c": 0.0,
    "definition/immunized": 0.0,
    "steps_ratio/harmful": 152.2,
    "steps_ratio/primary": 0.84,
}
REASONS = {"ceiling/rir": UNBOUNDED, "ceiling/attained": UNBOUNDED, "capped_harmful": "never came to [0.87]"}


def result(**changes) -> Result:
    values = {
        "seed": 1,
        "dataset": "digits",
        "model": "linear",
        "method": "condition_number",
        "status": "completed",
        "metrics": dict(METRICS),
        "reasons": dict(REASONS),
        "curves": {"probe/harmful": {"x": [1, 2], "y": [0.5, 0.75]}},
        "flags": ["capped_harmful"],
        "seconds": {"immunize": 1.25, "evaluate": 0.5},
        "about": {"protocol": "one_vs_rest", "rows": 300},
    }
    return made_result(**values | changes)


def printed(shown, width=80, objective="rir") -> str:
    console = Console(file=io.StringIO(), width=width)
    show(shown, objective, console)
    return console.file.getvalue()


def test_a_result_comes_back_as_it_was_written(tmp_path):
    original = result()
    path = original.write(tmp_path)
    assert Result.read(tmp_path) == Result.read(path) == original
    assert Result.read(path).folder == tmp_path
    assert original.write(tmp_path / "new") == tmp_path / "new" / "result.json"
    assert original.write(str(tmp_path / "more" / "seed-0.json")) == tmp_path / "more" / "seed-0.json"


def test_the_file_has_the_documented_keys_and_no_folder(tmp_path):
    content = json.loads(result(folder=tmp_path).write(tmp_path).read_text())
    documented = (
        "schema status seed dataset model method metrics reasons records verdict curves flags seconds error about"
    )
    documented += " sha256"
    assert set(content) == set(documented.split())
    assert content["schema"] == 2


def test_non_finite_numbers_become_null_with_a_reason(tmp_path):
    metrics = {"rir": math.inf, "rfd/harmful": math.nan, "ratio_primary": None, "ratio_harmful": torch.tensor(2.0)}
    curves = {"spectrum/primary": {"x": [1, 2], "y": [1.0, math.nan]}}
    text = result(metrics=metrics, curves=curves).write(tmp_path).read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["metrics"] == {"rir": None, "rfd/harmful": None, "ratio_primary": None, "ratio_harmful": 2.0}
    assert content["reasons"]["rir"] == "not a finite number (inf)"
    assert content["reasons"]["ratio_primary"] == "not computed"
    assert content["curves"]["spectrum/primary"]["y"] == [1.0, None]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    result().write(tmp_path)

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device.*/result\.json"):
        result(seed=2).write(tmp_path)
    assert Result.read(tmp_path).seed == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_file_is_readable_by_others_as_the_umask_says(tmp_path):
    mask = os.umask(0o022)
    try:
        path = result().write(tmp_path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ('{"schema": 1, "status": "comp', "is not JSON"),
        ('{"schema": 3}', "schema 1 or 2"),
        ("[]", "schema 1 or 2"),
        ('{"schema": 1, "seed": 1}', "missing"),
        ('{"schema": 1, "seed": 1, "dataset": "", "model": "", "method": "", "colour": 1}', "colour"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, message):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        Result.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DataError("column 'LotArea' is missing"), "failed", "column 'LotArea' is missing"),
        (ValueError("bad"), "failed", "ValueError: bad"),
        (KeyboardInterrupt(), "interrupted", "interrupted"),
        (Requeued(-1), "requeued", "requeued"),
    ],
)
def test_a_failed_run_keeps_its_measures(error, status, message):
    failed = result()
    failed.fail(error)
    assert (failed.status, failed.error) == (status, message)
    assert failed.metrics == METRICS


def test_plain_takes_tensors_arrays_and_paths_apart(tmp_path):
    value = {"t": torch.tensor([[1.0, math.inf]]), "n": torch.arange(2).numpy(), "p": tmp_path, 3: (True, None)}
    assert files.plain(value) == {"t": [[1.0, None]], "n": [0, 1], "p": str(tmp_path), "3": [True, None]}


def test_environment_says_what_ran_and_is_quick(tmp_path):
    environment.describe("cpu")
    started = time.process_time()
    files.write_json(tmp_path / "environment.json", environment.describe("cpu"))
    assert time.process_time() - started < 0.1
    content = json.loads((tmp_path / "environment.json").read_text())
    assert content["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert content["threads"] == 1
    assert content["command"]
    if (environment.ROOT / ".git").exists():
        assert len(content["git"]["commit"]) == 40


def test_environment_of_an_installed_package_claims_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.describe("cpu")["git"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.0, "1"),
        (-2.5, "-2.5"),
        (356.2, "356"),
        (29712.3, "29,700"),
        (99999, "100,000"),
        (3.108e12, "3.11e12"),
        (2.4e-7, "2.4e-7"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_the_sheet_of_one_run_shows_every_measure_and_why_one_is_missing(tmp_path):
    text = printed(result(folder=tmp_path), 120)
    for shown in ("63.1", "0.0158", "3,990", "812", "3.11e12", "4.2e5", "0.985", "0.973", "152", "no (c)", "immunize"):
        assert shown in text
    assert text.count(UNBOUNDED) == 1
    assert text.count("–¹") == 2  # noqa: RUF001
    assert "capped_harmful: never came to [0.87]" in text
    assert str(tmp_path) in text


def test_harm_that_became_easier_stands_before_every_figure():
    reasons = {"harmful_faster": "a fresh probe learns the harmful task in 0.125 of the steps"}
    text = printed(result(flags=["harmful_faster"], reasons=reasons))
    assert text.index("Worse than before: a fresh probe") < text.index("RIR = (i) / (ii)")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_sheet_fits_the_width(width, tmp_path):
    own = "my/measure_of_which_the_name_is_longer_than_its_column"
    text = printed(result(folder=tmp_path, metrics=METRICS | {own: 1.0}, about={"own_measures": [own]}), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_sheet_shows_the_objective_and_measures_of_ones_own():
    measured = result(
        metrics=METRICS | {"my/score": 0.125, "theirs/score": 0.375}, about={"own_measures": ["my/score"]}
    )
    lines = [line.split() for line in printed(measured, objective="test/rir").splitlines()]
    assert ["test/rir", "812"] in lines
    assert ["my/score", "0.125"] in lines
    assert "theirs/score" not in printed(measured)
    assert "objective" not in printed(measured)  # RIR has a row
    assert line(measured, "my/score").startswith("condition_number: my/score 0.125, RIR 3,990, ")


def test_the_sheet_shows_steps_that_never_came_to_the_end_as_bounds():
    assert "> 152" in printed(result())
    assert "> 0.84" not in printed(result())
    assert "> 152" not in printed(result(flags=[]))
    assert "harmful steps > 152" in line(result())


def test_the_sheet_of_a_failed_run_says_so():
    text = printed(result(status="failed", error="lower optimizer.lr", metrics={}, flags=[], reasons={}, seconds={}))
    assert "failed: lower optimizer.lr" in text


def test_an_edited_number_is_noticed(tmp_path):
    path = result(metrics={"rir": 2.5}).write(tmp_path)
    assert Result.read(tmp_path).metrics["rir"] == 2.5
    path.write_text(path.read_text().replace("2.5", "25"))
    with pytest.raises(DataError, match=r"result\.json was edited or damaged: its checksum does not agree"):
        Result.read(tmp_path)


def test_the_screen_lists_what_layers_can_forget():
    measured = {"selectivity/layer1.0.conv1/lost": 0.25, "selectivity/layer1.0.conv1/switched": None}
    lines = printed(result(metrics=measured, reasons={"selectivity/layer1.0.conv1/switched": "dead"})).splitlines()
    (row,) = (line for line in lines if "layer1.0.conv1" in line)
    assert row.split() == ["layer1.0.conv1", "0.25", NONE + "¹"]
    assert any("others lost" in line and "switched off" in line for line in lines)


def test_a_result_is_short_in_a_prompt_and_a_table_in_a_notebook():
    given = METRICS | {"interval/steps_ratio/harmful_low": 2.4, "interval/steps_ratio/harmful_high": 724.0}
    made = result(metrics=given, method="<b>bold</b>", curves={"a": {"x": list(range(1000)), "y": [0.0] * 1000}})
    assert len(repr(made)) < 200
    assert repr(made).startswith("<Result <b>bold</b> on ")
    assert f"seed {made.seed}: completed, {len(given)} metrics, " in repr(made)
    frame = made.to_frame()
    assert list(frame.columns) == ["value", "low", "high", "reason"]
    assert frame.loc["steps_ratio/harmful"].tolist() == [152.2, 2.4, 724.0, ""]
    assert math.isnan(frame.loc["ceiling/rir", "value"])
    assert frame.loc["ceiling/rir", "reason"] == UNBOUNDED
    assert not any(name.startswith("interval/") for name in frame.index)
    shown = made._repr_html_()
    assert "&lt;b&gt;bold&lt;/b&gt;" in shown
    assert "<b>bold" not in shown
    assert "<td>152</td>" in shown
    assert made.verdict[0] in html.unescape(shown)
    assert Result(0, "d", "m", "x")._repr_html_().startswith("<p><b>Result x on d, m, seed 0: failed, 0 metrics")
