"""metrics.jsonl, and W&B as it is: offline runs are read back from the file that `wandb sync` uploads."""

import json
import logging
import math
import re
import socket
import time
from pathlib import Path

import pytest
import wandb
from helpers.made_runs import made_result
from helpers.repository import ROOT
from helpers.versions import asks_once
from helpers.wandb_offline import WITHOUT_ACCOUNT, kept, summary, values
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from immunization.errors import ConfigError, DataError, UserError
from immunization.runner import run
from immunization.runs.result import Result
from immunization.runs.tracker import Guarded, Recorder, Tracker, history
from immunization.runs.wandb_tracker import Wandb

CONFIG = {
    "seed": 3,
    "dataset": {"name": "digits"},
    "method": {"_target_": "immunization.methods.Identity", "lambda_P": 0.5},
}


class Broken(Tracker):
    """Somebody's own, which raises in `where`."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise (DataError if name == "finish" else RuntimeError)("no network")

    def start(self, *_, **__) -> None:
        self._called("start")

    def finish(self, result, figures) -> None:
        self._called("finish")

    def log(self, step, metrics) -> None:
        self._called("log")

    def close(self, failed) -> None:
        self._called("close")


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("start", ["start", "close"]),
        ("log", ["start", "log", "close"]),
        ("finish", ["start", "log", "log", "finish", "close"]),
        ("close", ["start", "log", "log", "finish", "close"]),
    ],
)
def test_a_tracker_that_fails_is_left_out_and_ends_no_run(where, calls, tmp_path, caplog):
    broken = Broken(where)
    guarded = Guarded(broken)
    start(guarded, tmp_path)
    for step in range(2):
        guarded.log(step, {"loss": 1.0})
    guarded.finish(Result(0, "d", "m", "identity"), [])
    guarded.close(failed=False)
    assert broken.calls == calls
    assert len(re.findall(rf"the tracker Broken failed in {where} \(\w+Error: no network\)", caplog.text)) == 1


@pytest.mark.parametrize("end", ["finish", "failed", "long"])
def test_a_tracker_that_waits_starts_after_a_short_run_and_gets_every_line(end, tmp_path, monkeypatch):
    waiting = Broken("nowhere")
    waiting.waits = True
    guarded = Guarded(waiting)
    start(guarded, tmp_path)
    for step in range(3):
        guarded.log(step, {"loss": 1.0})
    assert waiting.calls == []
    if end == "finish":
        guarded.finish(Result(0, "d", "m", "identity"), [])
    if end == "long":
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        guarded.log(3, {"loss": 1.0})
        assert waiting.calls == ["start", "log", "log", "log", "log"]
    guarded.close(failed=end == "failed")
    calls = {"finish": ["finish"], "failed": [], "long": ["log"]}[end]
    assert waiting.calls == ["start", "log", "log", "log", *calls, "close"]


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ({}, True),
        ({"WANDB_MODE": "offline"}, True),
        ({"WANDB_MODE": "online"}, False),
        ({"WANDB_API_KEY": "0" * 40}, False),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, True),
    ],
)
def test_only_an_offline_run_waits(given, waits, environ, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Wandb().waits is waits
    assert Wandb(mode="online").waits is False
    assert Wandb(mode="offline").waits is True


def test_a_mistake_that_a_user_can_mend_ends_the_run(tmp_path):
    class Unset(Tracker):
        def start(self, *_, **__) -> None:
            raise ConfigError("give tracker.project")

    with pytest.raises(ConfigError, match="project"):
        start(Guarded(Unset()), tmp_path)


def test_a_run_whose_data_are_missing_has_nothing_to_track(tmp_path, environ):
    """No empty offline run is left for `wandb sync`, also where a folder of images has no classes."""
    (tmp_path / "empty").mkdir()
    for i, root in enumerate((tmp_path / "absent", tmp_path / "empty")):
        data = ["dataset=image_folders", f"dataset.primary_root={root}", f"dataset.harmful_root={root}"]
        options = ["tracker=wandb", "tracker.mode=offline", "model=timm", "model.name=test_resnet"]
        with pytest.raises(UserError):
            run([*data, *options, "model.pretrained=false"], folder=tmp_path / str(i))
        assert (tmp_path / str(i) / "result.json").is_file()
        assert not (tmp_path / str(i) / "wandb").exists()
    with pytest.raises(ConfigError, match="timeout"):  # a mistake in its options is still said before the data are read
        run([*data, *options, "tracker.timeout=-1"], folder=tmp_path / "wrong")


def start(tracker: Tracker, folder: Path) -> None:
    tracker.start(folder, CONFIG, name="run-name", group="table_1", tags=["paper", "linear"])


@pytest.fixture
def environ(monkeypatch, tmp_path):
    """No account and no mode, whatever the machine has; W&B's settings are read again."""
    for name in WITHOUT_ACCOUNT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def test_recorder_writes_one_strict_line_a_step_at_once(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.log(0, {"rir": 1.0})
    recorder.log(5, {"rir": math.inf, "loss": math.nan})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before it is closed
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 0, "rir": 1.0},
        {"step": 5, "rir": None, "loss": None},
    ]
    recorder.close(failed=True)
    recorder.close(failed=True)


def test_history_reads_curves_and_leaves_out_a_cut_off_line(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.log(0, {"rir": 1.0})
    recorder.log(5, {"rir": 2.0, "loss": math.nan})
    recorder.close(failed=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "ri')
    assert history(tmp_path) == {"rir": {"x": [0, 5], "y": [1.0, 2.0]}, "loss": {"x": [5], "y": [None]}}
    assert history(tmp_path / "nowhere") == {}


def test_wandb_keeps_config_history_summary_and_figures(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    metrics = {"rir": 4.5, "ceiling/rir": None, "test/rir": math.inf}
    result = made_result(3, "digits", "linear", "identity", "completed", metrics=metrics, flags=["capped_harmful"])
    result.seconds = {"immunize": 1.5}
    picture = tmp_path / "norm_ratio.png"
    Image.new("RGB", (8, 8)).save(picture)

    tracker = Wandb(project="unit-test", mode="offline")
    start(tracker, tmp_path)
    for step in (0, 25, 50):
        tracker.log(step, {"loss": 1 / (1 + step), "rir": float(step)})
    tracker.finish(result, [picture])
    tracker.close(failed=False)
    tracker.close(failed=False)

    run = kept(tmp_path, "run")[0]
    assert (run.project, run.display_name, run.run_group) == ("unit-test", "identity digits seed 3", "table_1")
    assert list(run.tags) == ["paper", "linear"]
    grouped = {**CONFIG["method"], "name": "identity"}
    assert {"seed": 3, "method": grouped}.items() <= values(run.config.update).items()
    steps = [values(entry.item) for entry in kept(tmp_path, "history")]
    assert [(line["_step"], line["rir"]) for line in steps] == [(0, 0.0), (25, 25.0), (50, 50.0)]
    assert steps[-1]["figures/norm_ratio/_type"] == "image-file"
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/files/{steps[-1]['figures/norm_ratio/path']}"))) == 1
    last = summary(tmp_path)
    assert (last["rir"], last["seconds/immunize"], last["status"]) == (4.5, 1.5, "completed")
    assert last["flags"] == ["capped_harmful"]
    assert not {"ceiling/rir", "test/rir"} & set(last)
    assert kept(tmp_path, "exit")[0].exit_code == 0
    assert "wandb sync" in caplog.text


def test_wandb_closes_a_failed_run_as_failed(tmp_path):
    tracker = Wandb(mode="offline")
    start(tracker, tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.close(failed=True)
    assert kept(tmp_path, "exit")[0].exit_code == 1


def test_wandb_leaves_a_run_of_the_caller_alone(tmp_path):
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True)) as own:
        tracker = Wandb(mode="offline")
        (tmp_path / "run").mkdir()
        start(tracker, tmp_path / "run")
        assert tracker.run.id != own.id
        tracker.close(failed=False)
        own.log({"still": 1.0})


def test_wandb_is_quiet(tmp_path, capfd):
    tracker = Wandb(mode="offline")
    start(tracker, tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.close(failed=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, "online"),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "online"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("online", {}, "offline"),
        ("online", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "online"),
        ("offline", {"WANDB_API_KEY": "k" * 40}, "offline"),
    ],
)
def test_mode_is_online_only_with_an_account(environ, mode, environment, expected):
    for name, value in environment.items():
        environ.setenv(name, value)
    found, why = Wandb(mode=mode)._mode()
    assert found == expected
    assert bool(why) == (expected == "offline" and "offline" not in (mode, environment.get("WANDB_MODE")))


def test_wandb_login_is_found_in_netrc(environ, tmp_path):
    def mode(content: str) -> str:
        (tmp_path / "netrc").write_text(content)
        return Wandb()._mode()[0]

    account = f"  login user\n  password {'k' * 40}\n"
    assert mode(f"machine api.wandb.ai\n{account}") == "online"
    assert mode(f"machine elsewhere.org\n{account}") == "offline"
    assert mode("machine\n") == "offline"
    environ.setenv("WANDB_BASE_URL", "https://wandb.elsewhere.org")
    wandb.teardown()
    assert mode(f"machine wandb.elsewhere.org\n{account}") == "online"
    assert mode(f"machine api.wandb.ai\n{account}") == "offline"


@asks_once
def test_an_unreachable_server_makes_the_run_an_offline_one(tmp_path, environ, caplog):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        environ.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        environ.setenv("WANDB_API_KEY", "k" * 40)
        wandb.teardown()
        started = time.monotonic()
        tracker = Wandb(timeout=2)
        start(tracker, tmp_path)
        tracker.log(1, {"loss": 1.0})
        tracker.finish(Result(0, "d", "m", "identity"), [])
        tracker.close(failed=False)
    assert "tracked offline" in caplog.text
    assert "wandb sync /" in caplog.text
    assert time.monotonic() - started < 60
    assert len(kept(tmp_path, "history")) == 1


def test_a_failure_of_wandb_is_one_warning_and_the_run_is_still_closed(tmp_path, caplog, monkeypatch):
    tracker = Guarded(Wandb(mode="offline"))
    start(tracker, tmp_path)

    def lost(*args, **kwargs):
        raise ConnectionResetError("connection lost")

    monkeypatch.setattr("wandb.sdk.wandb_run.Run.log", lost)
    tracker.log(0, {"loss": 1.0})
    tracker.log(1, {"loss": 1.0})
    tracker.close(failed=False)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "connection lost" in warnings[0]
    assert kept(tmp_path, "exit")[0].exit_code == 0


def test_a_slow_last_upload_is_a_warning(caplog):
    class Slow:
        def finish(self, exit_code):
            raise TimeoutError("timed out")

    tracker = Wandb()
    tracker.run = Slow()
    Guarded(tracker).close(failed=False)
    assert "timed out" in caplog.text


def test_timeout_must_be_positive():
    with pytest.raises(ConfigError, match=r"tracker\.timeout"):
        Wandb(timeout=0)


@pytest.mark.parametrize("environment", [{}, {"WANDB_PROJECT": "mine", "WANDB_ENTITY": "team"}])
def test_yaml_builds_the_tracker_and_takes_wandbs_variables(monkeypatch, environment):
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = OmegaConf.create({"entity": "${oc.env:WANDB_ENTITY,null}"})
    config.tracker = OmegaConf.load(ROOT / "conf" / "tracker" / "wandb.yaml")
    tracker = instantiate(config).tracker
    assert tracker.project == environment.get("WANDB_PROJECT", "immunization")
    assert tracker.entity == environment.get("WANDB_ENTITY")


def test_tracker_none_composes_to_null(tmp_path):
    (tmp_path / "config.yaml").write_text("defaults:\n  - _self_\n  - tracker: wandb\n")
    (tmp_path / "tracker").symlink_to(ROOT / "conf" / "tracker")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("config", overrides=["tracker=none"]).tracker is None
        assert compose("config").tracker._target_ == "immunization.runs.wandb_tracker.Wandb"


def started(folder: Path, run_id: str | None = None) -> str:
    """The id of an offline run of W&B, of a new one or of one that is to go on."""
    tracker = Wandb(project="unit-test", mode="offline")
    tracker.run_id = run_id
    start(tracker, folder)
    tracker.close(failed=False)
    return tracker.run_id


def test_an_offline_run_that_goes_on_replaces_none_and_says_so(environ, tmp_path, caplog):
    first = started(tmp_path)
    again = started(tmp_path, first)
    assert again != first
    assert f"{again} takes the place of {first}, the steps so far among its own" in caplog.text
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_a_run_that_was_offline_goes_on_under_another_id_online(tmp_path):
    tracker = Wandb(project="unit-test")
    tracker.folder, tracker.run_id = tmp_path, "before"
    assert tracker._name_of("online", sweep=False) == {"id": "before", "resume": "allow"}
    (tmp_path / "wandb" / "offline-run-20260101_000000-before").mkdir(parents=True)
    assert tracker._name_of("online", sweep=False)["id"] != "before"


def test_an_exported_id_is_that_of_one_run_and_of_no_sweep(environ, tmp_path, monkeypatch, caplog):
    environ.setenv("WANDB_RUN_ID", "exported")
    assert started(tmp_path / "single") == "exported"
    monkeypatch.setattr("immunization.runs.wandb_tracker._sweep", lambda: tmp_path)
    ids = {started(tmp_path / job) for job in "ab"}
    assert len(ids) == 2
    assert "exported" not in ids
    assert caplog.text.count("WANDB_RUN_ID=exported names one run") == 1
    environ.setenv("WANDB_SWEEP_ID", "of-an-agent")  # which gives each job an id of its own
    assert started(tmp_path / "agent") == "exported"
