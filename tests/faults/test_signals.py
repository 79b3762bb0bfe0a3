"""Signals in real processes: what is said, the exit code, and what stays."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from helpers.commands import launched
from helpers.processes import ended, in_a_child, wait_for
from helpers.repository import ROOT

from immunization import run, terminal
from immunization.config import compose
from immunization.errors import BusyError, ConfigError, Preempted
from immunization.evaluation import Measures
from immunization.methods.base import Method
from immunization.multirun.callback import SweepSummary
from immunization.runner import record_failure
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.result import Result

pytestmark = pytest.mark.trains

LONG = ("tracker=none", "dataset.max_samples=20", "evaluation=[rir]", "method.epochs=1000000", "log_every=50")


def test_ctrl_c_keeps_a_checkpoint_which_is_not_thrown_away(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(Method, "epoch_end", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = launched(*LONG, f"hydra.run.dir={folder}", cwd=tmp_path)
    signal.signal(signal.SIGINT, before)
    assert process.returncode == 130
    last = f"error: interrupted: the same command with hydra.run.dir={folder} resume=true goes on"
    assert process.stderr.splitlines()[-1] == last
    assert "Traceback" not in process.stderr
    assert (folder / CHECKPOINT).exists()
    with pytest.raises(ConfigError, match=r"holds an interrupted run .*; resume=true continues it; another folder"):
        run([*LONG], folder=folder)
    assert (folder / CHECKPOINT).exists()


def test_sigterm_at_any_moment_writes_a_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    soon = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(Method, "epoch_end", lambda *_: None if soon.ident else soon.start())
    process = launched(*LONG, f"hydra.run.dir={folder}", cwd=tmp_path)
    assert process.returncode == 143
    assert len(process.stderr.splitlines()) == 1
    assert "error: SIGTERM: interrupted after step" in process.stderr
    assert "resume=true goes on from there" in process.stderr
    result = Result.read(folder)
    assert (result.status, result.error) == ("interrupted", "interrupted")
    state = torch.load(folder / CHECKPOINT, weights_only=True)["state"]
    assert state["progress"]["step"] == int(process.stderr.split("after step ")[1].split(";")[0])


def test_ctrl_c_of_a_multirun_shows_what_is_done_and_a_second_process_is_refused(tmp_path):
    sweep = tmp_path / "sweep"
    jobs = (*LONG, "log_every=10", "method.epochs=1,1000000", f"hydra.sweep.dir={sweep}")
    names = "hydra.sweep.subdir=${hydra.job.num}"
    said, history = tmp_path / "said", sweep / "1" / "metrics.jsonl"

    def interrupted() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background ignores it
        done = launched("-m", *jobs, names, cwd=tmp_path)
        print(done.stdout, done.stderr, sep="", end="")
        sys.exit(done.returncode)

    child = in_a_child(interrupted, said)
    try:
        wait_for(lambda: history.exists() and history.stat().st_size > 1000)
        with pytest.raises(ConfigError, match="another process is at work in this run folder"):
            run([*LONG, "resume=true"], folder=sweep / "1")
        record_failure(compose(LONG), sweep / "1", BusyError("at work"))
        assert not (sweep / "1" / "result.json").exists()
    finally:
        os.kill(child, signal.SIGINT)
        code = ended(child)
    assert code == 130
    assert "1 completed, 1 interrupted" in said.read_text()
    assert (sweep / "report.html").exists()
    last = said.read_text().splitlines()[-1]
    assert last.endswith(f"the same command with hydra.sweep.dir={sweep} resume=true goes on")


@pytest.mark.parametrize(("module", "number"), [("hydra", signal.SIGTERM), ("torch", signal.SIGINT)])
def test_a_signal_amid_the_imports_is_one_line(tmp_path, module, number):
    """The command listens before it imports anything that takes long."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Signals:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{module}': os.kill(os.getpid(), {number:d})\n"
        "sys.meta_path.insert(0, Signals())\n"
        "from immunization.__main__ import start\n"
        "sys.argv = ['immunize', 'tracker=none']\n"
        "start()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number
    assert done.stderr == f"error: {number.name}: interrupted before the run began\n"


def test_sigterm_that_an_import_turns_into_an_error_of_its_own_ends_the_run(tmp_path, monkeypatch):
    lines = "import os, signal, time", "try:", "    os.kill(os.getpid(), signal.SIGTERM)", "    time.sleep(5)"
    (tmp_path / "slow_module.py").write_text("\n".join([*lines, "except SystemExit:", "    raise ImportError", ""]))
    monkeypatch.syspath_prepend(tmp_path)

    def imports(*_: object) -> Measures:
        import slow_module  # noqa: F401

    monkeypatch.setattr("immunization.evaluation.RelativeRatio.__call__", imports)
    with pytest.raises(SystemExit) as end:
        run(["method=identity", *LONG[:3], "figures=false"], folder=tmp_path / "run")
    assert end.value.code == 143
    assert Result.read(tmp_path / "run").error == "interrupted"


def test_sigterm_amid_the_record_of_a_failure_waits_for_it(tmp_path, monkeypatch, capsys):
    """As by torchrun, which ends the others once one process has died."""
    writes = Result.write

    def told(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        writes(*arguments)

    monkeypatch.setattr(Result, "write", told)
    options = ("optimizer.lr=1e300", "method.power=inf", "tracker=none", "figures=false")
    with pytest.raises(Preempted) as end:
        run(["method=condition_number", *options], folder=tmp_path / "run")
    assert end.value.code == 143
    result = Result.read(tmp_path / "run")
    assert result.status == "failed"
    assert "diverged at step" in result.error
    assert capsys.readouterr().err.endswith(f"SIGTERM: interrupted; the run had failed before: {result.error}\n")


def test_sigterm_amid_the_record_of_a_failed_job_ends_the_multirun(tmp_path, monkeypatch):
    writes = Result.write

    def told(*arguments: object) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        writes(*arguments)

    monkeypatch.setattr(Result, "write", told)
    jobs = "seed=0,1", "optimizer.lr=1e300", "method.power=inf", *LONG[:3], "figures=false"
    done = launched("-m", *jobs, f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 143
    assert "1 failed" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("resume=true goes on")


def test_sigterm_behind_the_last_job_of_a_multirun_shows_what_is_done(tmp_path, monkeypatch):
    def told(*_: object, **__: object) -> None:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SweepSummary, "on_multirun_end", told)
    jobs = "method=identity", "seed=0,1", *LONG[:3], "figures=false", f"hydra.sweep.dir={tmp_path / 'sweep'}"
    done = launched("-m", *jobs, cwd=tmp_path)
    assert done.returncode == 143
    assert "2 completed" in done.stdout
    assert done.stderr.splitlines() == [
        "error: SIGTERM: interrupted",
        f"error: interrupted: the same command with hydra.sweep.dir={tmp_path / 'sweep'} resume=true goes on",
    ]


def test_a_run_without_a_terminal_says_where_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SECONDS", 0.01)
    run([*LONG[:3], "method.epochs=60", "figures=false"], folder=tmp_path)
    assert "condition_number: step" in (said := capsys.readouterr().err)
    assert "of 60, 0 min since the start" in said
    assert "condition_number: step" in (tmp_path / "run.log").read_text()
