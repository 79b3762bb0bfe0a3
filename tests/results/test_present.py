"""What follows a completed run: whatever fails there leaves the run completed, and the rest is done."""

import pytest
from helpers.made_runs import make_run, measure

from immunization.results import run_figures
from immunization.results.screen import present
from immunization.runs.result import Result
from immunization.runs.tracker import Guarded, Tracker


class Noting(Tracker):
    """Keeps what it was told; fails where it is asked to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.figures, self.closed = fails, None, []

    def finish(self, result, figures):
        self.figures = [path.name for path in figures]
        if self.fails:
            raise RuntimeError("no network")

    def close(self, failed):
        self.closed.append(failed)


@pytest.fixture
def result(tmp_path) -> Result:
    return Result.read(make_run(tmp_path / "run"))


@pytest.mark.parametrize(("figures", "quiet", "drawn"), [(None, False, True), (None, True, False), (True, True, True)])
def test_figures_are_drawn_and_handed_to_the_trackers(figures, quiet, drawn, result, capsys):
    tracker = Noting()
    present(result, [tracker], quiet, figures=figures)
    assert ("learning_curves.png" in tracker.figures) == drawn
    assert tracker.closed == [False]
    assert (len(capsys.readouterr().out.splitlines()) == 1) == quiet


def test_the_table_comes_before_the_figures(result, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(run_figures, "draw", lambda *_: shown.append(capsys.readouterr().out) or [])
    present(result, [], quiet=False, figures=True)
    assert "RIR" in shown[0]


def test_a_run_that_measured_nothing_says_so(result, capsys):
    result.records.clear()
    present(result, [], quiet=False, figures=False)
    assert "nothing was measured: choose evaluation=[rir,...] or attack=[...]" in capsys.readouterr().out


def test_failures_are_warnings_and_stop_nothing(result, monkeypatch, capsys, caplog):
    monkeypatch.setattr(run_figures, "draw", lambda *_: 1 / 0)
    broken, whole = Noting(fails=True), Noting()
    present(result, [Guarded(broken), whole], quiet=True, figures=True)
    assert "the pictures cannot be drawn (ZeroDivisionError" in caplog.text
    assert "the tracker Noting failed in finish (RuntimeError: no network) and is left out" in caplog.text
    assert broken.closed == whole.closed == [False]
    assert whole.figures == []
    assert "RIR 10" in capsys.readouterr().out


def test_only_an_audit_gets_a_page(result):
    present(result, [], quiet=True, figures=False)
    assert not (result.folder / "report.html").exists()
    measure(result, {"attack/sgd/final": 0.5}).write(result.folder)
    present(result, [], quiet=True, figures=False)
    assert "attacks on condition_number" in (result.folder / "report.html").read_text()
