"""Files of a run folder: a lock, which one process holds at a time, and YAML that others may have written."""

import os
import signal
import time

import pytest
from omegaconf import OmegaConf

from immunization.errors import ConfigError, DataError
from immunization.results.rows import overrides_of
from immunization.runs import files
from immunization.runs.resume import read_config


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
    assert "a second process could write into the same folder" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1, 2]\nb: [*x, *x]\n", "line 1 has an anchor, and aliases are not read"),
        ("- &x [1, *x]\n", "line 1 has an anchor"),
        ("a: " + "x" * files.LONGEST_YAML + "\n", "it is longer than 1,048,576 bytes"),
        ("a: 1", "was cut off or edited"),
        ("a: [1\n", "expected ',' or ']'"),
        ("a: \xff\n", "can't decode byte 0xff"),
    ],
)
@pytest.mark.parametrize(("name", "read"), [("config.yaml", read_config), ("overrides.yaml", overrides_of)])
def test_yaml_that_may_stand_for_any_amount_of_memory_is_refused(tmp_path, text, message, name, read):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} cannot be read: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_yaml_is_read(tmp_path):
    content = {"a": [1, {"b": None}], "c": "ä"}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(content))
    assert files.read_yaml(tmp_path / "config.yaml") == content
    (tmp_path / "overrides.yaml").write_text("[]\n")
    assert overrides_of(tmp_path) == []
