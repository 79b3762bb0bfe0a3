"""What a terminal shows while a run gets ready, and readers who leave early."""

import gc
import io
import subprocess
import sys
import time

import pytest
from helpers.repository import ROOT
from helpers.terminals import Terminal

from immunization import terminal
from immunization.terminal import counted, doing, importing, reporting, waiting, where


def test_a_terminal_shows_what_is_waited_for_and_then_clears_the_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with waiting("importing torch"):
        assert sys.stderr.getvalue() == "importing torch ...\r"
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


def test_a_file_gets_none_of_it(capsys):
    with waiting("importing torch"):
        pass
    assert capsys.readouterr() == ("", "")


def test_where_says_the_whole_and_then_the_part_of_it(capsys):
    said = []
    with waiting("preparing"), doing(lambda: f"after {len(said)}"):
        said.extend(where() for _ in counted([(range(3),), (range(2),)], "train: 5 images"))
    parts = ("0, train: 5 images, 0 done", "1, train: 5 images, 3 done")
    assert said == [f"preparing, after {part}" for part in parts]
    assert where() == "at work"
    assert capsys.readouterr() == ("", "")  # no terminal


def test_a_terminal_shows_a_bar_of_what_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert len(list(counted([(range(3),), (range(2),)], "train: 5 images"))) == 2
    assert "train: 5 images" in sys.stderr.getvalue()


@reporting
def slowly(verbose: bool | None = None) -> None:
    with waiting("measuring"):
        list(counted([(range(3),), (range(2),)], "train: 5 images"))
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("stream", "verbose", "bars", "lines"),
    [
        (Terminal, None, True, False),
        (Terminal, True, True, False),
        (Terminal, False, False, False),
        (io.StringIO, None, False, False),
        (io.StringIO, True, False, True),
        (io.StringIO, False, False, False),
        ("notebook", None, True, False),
        ("notebook", True, True, False),
    ],
)
def test_verbose_says_where_a_call_from_python_shows_its_progress(stream, verbose, bars, lines, monkeypatch):
    if stream == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel.ipkernel", sys)
        stream = io.StringIO
    monkeypatch.setattr(terminal, "SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stream())
    slowly(verbose=verbose)
    said = sys.stderr.getvalue()
    assert ("train: 5 images:" in said) == bars
    assert ("measuring ..." in said) == bars
    assert ("measuring, 0 min since the start" in said) == lines
    assert bool(said) == (bars or lines)


def test_garbage_is_collected_again_after_imports_that_fail():
    with importing("torch"):
        assert not gc.isenabled()
    with pytest.raises(ImportError), importing("nothing"):
        raise ImportError
    assert gc.isenabled()


@pytest.mark.trains
@pytest.mark.parametrize(
    "flags",
    [["--help"], pytest.param([], marks=pytest.mark.slow), ["-m", "seed=0,1"]],
    ids=["help", "run", "multirun"],
)
def test_a_reader_who_leaves_ends_nothing_and_hears_nothing(tmp_path, flags):
    """As `immunize ... | head -1` does, and `2>&1 | head -1`."""
    quick = ["tracker=none", "method=identity", "evaluation=[rir]", "dataset.max_samples=20", "figures=false"]
    command = [sys.executable, str(ROOT / "launch.py"), *quick, *flags, "hydra.sweep.dir=sweep", "hydra.run.dir=run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
    assert len(list(tmp_path.glob("**/immunized.safetensors"))) == {"--help": 0, "-m": 2}.get("".join(flags[:1]), 1)
    assert (tmp_path / "sweep" / "report.html").exists() == ("-m" in flags)
