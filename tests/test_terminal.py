"""What a terminal shows while a run gets ready."""

import gc
import io
import sys

import pytest

from immunization.terminal import importing, waiting


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_waited_for_and_then_clears_the_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with waiting("importing torch"):
        assert sys.stderr.getvalue() == "importing torch ...\r"
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


def test_a_file_gets_none_of_it(capsys):
    with waiting("importing torch"):
        pass
    assert capsys.readouterr() == ("", "")


def test_garbage_is_collected_again_after_imports_that_fail():
    with importing("torch"):
        assert not gc.isenabled()
    with pytest.raises(ImportError), importing("nothing"):
        raise ImportError
    assert gc.isenabled()
