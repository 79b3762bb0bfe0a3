"""The lock of a run folder: one process at a time, whatever becomes of it."""

import os
import signal
import time

import pytest

from immunization.errors import ConfigError
from immunization.runs import files


def test_a_lock_keeps_others_out_and_the_content_as_it_is(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("said before\n")
    with files.locked(path), pytest.raises(ConfigError, match="another process is at work"), files.locked(path):
        pass
    with files.locked(path):
        assert path.read_text() == "said before\n"
    assert [file.name for file in tmp_path.iterdir()] == ["run.log"]


def test_a_lock_dies_with_its_process_though_a_worker_of_it_lives_on(tmp_path):
    """As a worker of a data loader does, a copy of the process, until it finds itself alone."""
    path = tmp_path / "run.log"
    path.touch()
    owner = os.fork()
    if not owner:
        with files.locked(path):
            if not os.fork():
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(owner, 0)
    with files.locked(path):
        pass


def test_without_locks_nothing_is_held_and_that_is_said(tmp_path, monkeypatch, caplog):
    import fcntl

    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with files.locked(tmp_path / "run.log"):
        pass
    assert "nothing keeps a second process out" in caplog.text
