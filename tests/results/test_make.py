"""`make results`: it says what it will do, can be killed and started again, and writes its pages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.repository import ROOT

from immunization.config import compose
from immunization.errors import ConfigError
from immunization.results import make
from immunization.runs.result import Result

COMMAND = [sys.executable, "-m", "immunization.results.make", "--quick", "digits"]


def start(cwd: Path, *more: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *more], cwd=cwd, env=environment, text=True, **pipes)


def test_an_unknown_section_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no section mnits; there are digits, house_prices"):
        make.main(["mnits", "--output", str(tmp_path)])


def test_it_says_what_it_would_run_and_what_is_left_out(tmp_path, monkeypatch, capsys):
    places = [f"data_root={tmp_path}", f"cache={tmp_path}"]  # whatever the user's conf/local.yaml says
    monkeypatch.setattr("immunization.results.parts.compose", lambda job=(): compose([*job, *places]))
    assert make.main(["--dry-run", "--output", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "digits: 1,620 jobs, 1,620 to run\n" in said
    assert "house_prices: left out, no train.csv in" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_killed_and_started_again_it_writes_its_pages(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    runs = tmp_path / "outputs" / "results_quick" / "digits" / "table2"
    process = start(tmp_path)
    while process.poll() is None and not list(runs.glob("*/result.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, wrong = process.communicate(timeout=60)
    assert process.returncode == 143, wrong
    assert "digits: 6 jobs, 6 to run\n" in said
    kept = [path for path in runs.glob("*/result.json") if Result.read(path).status == "completed"]
    done = {path: path.stat().st_mtime_ns for path in kept}

    process = start(tmp_path)
    said, wrong = process.communicate(timeout=300)
    assert process.returncode == 0, wrong
    assert "digits/table2: 100%" in wrong
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list(runs.glob("*/result.json"))) == 6
    page = (tmp_path / "outputs" / "results_quick" / "RESULTS.md").read_text()
    assert page.startswith("# Results\n\nWritten by `make results QUICK=1`")
    assert "| condition_number | " in page
    assert not (tmp_path / "RESULTS.md").exists()

    said, _ = start(tmp_path, "--dry-run").communicate(timeout=60)
    assert "digits: 6 jobs, all completed" in said
