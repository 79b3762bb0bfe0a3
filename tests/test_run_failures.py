"""What trackers are told, and what is left of a run that fails."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from immunization import Result, run
from immunization.config import compose
from immunization.errors import ConfigError, DataError, DegenerateSpectrum, Diverged
from immunization.evaluation import Measures
from immunization.results import run_figures
from immunization.runs.tracker import Tracker, history

pytestmark = pytest.mark.trains

QUICK = ("tracker=none", "dataset.max_samples=40", "method.epochs=4", "evaluation=[rir]")


def trusting(*overrides: str) -> DictConfig:
    """A configuration that may name the classes of this file."""
    cfg = compose([*QUICK, *overrides])
    cfg.trusted = [__name__]
    return cfg


class Spy(Tracker):
    """Remembers what it was told."""

    calls: list[tuple] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.calls.clear()

    def start(self, folder, config, name, group, tags):
        self.calls.append(("start", config["seed"], name, group, tags))

    def log(self, step, metrics):
        self.calls.append(("log", step, metrics["rir"]))

    def finish(self, result, figures):
        self.calls.append(("finish", result.status, figures))

    def close(self, failed):
        self.calls.append(("close", failed))


def test_a_tracker_gets_configuration_numbers_result_and_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(run_figures, "draw", lambda result, folder: [folder / "one.png"])
    cfg = trusting("seed=5", "name=mine", "tags=[a,b]")
    cfg.tracker = {"_target_": f"{__name__}.Spy"}
    run(cfg, folder=tmp_path / "here")
    start, *logs, finish, close = Spy.calls
    assert start == ("start", 5, "here", "mine", ["a", "b"])
    assert [step for _, step, _ in logs] == [0, 1, 2, 3, 4]
    assert finish == ("finish", "completed", [tmp_path / "here" / "one.png"])
    assert close == ("close", False)


class Broken:
    """An evaluation with a fault."""

    def __call__(self, comparison) -> Measures:
        raise ZeroDivisionError("a fault of the program")


def failed(folder: Path) -> Result:
    result = Result.read(folder)
    assert result.status == "failed"
    assert result.error
    assert (folder / "config.yaml").is_file()
    return result


def test_theta_that_overflows_in_the_last_step_is_divergence(tmp_path):
    with pytest.raises(Diverged, match="theta overflows at step 1"):
        run([*QUICK, "optimizer=sgd", "optimizer.lr=1e300", "method.epochs=1"], folder=tmp_path)
    assert failed(tmp_path).metrics["rir"] == pytest.approx(1)


def test_features_whose_squares_overflow_before_any_step_are_named(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(2, 40, 3)) * 1e160, np.arange(40) % 2
    np.savez(tmp_path / "p.npz", primary_x=x[0], harmful_x=x[1], primary_y=y, harmful_y=y)
    options = ["dataset=arrays", f"dataset.path={tmp_path}/p.npz", "dataset.normalize=none", "method=closed_form"]
    with pytest.raises(
        Diverged, match=r"features of the primary task are so large .* before any step; rescale the data"
    ):
        run([*options, "tracker=none", "figures=false", "evaluation=[rir]"], folder=tmp_path / "run")


def test_a_fault_of_the_program_is_raised_and_logged_with_its_traceback(tmp_path):
    cfg = trusting()
    cfg.tracker = {"_target_": f"{__name__}.Spy"}
    OmegaConf.update(cfg, "evaluation.broken", {"_target_": f"{__name__}.Broken"}, force_add=True)
    with pytest.raises(ZeroDivisionError):
        run(cfg, folder=tmp_path)
    result = failed(tmp_path)
    assert result.error == "ZeroDivisionError: a fault of the program"
    assert result.metrics["rir"] > 0  # of the last step
    assert Spy.calls[-1] == ("close", True)
    assert all(call[0] != "finish" for call in Spy.calls)
    assert "Traceback" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["device=tpu"], ConfigError, "device must be one of auto, cpu, cuda, not 'tpu'"),
        (["dataset.harmful=0"], ConfigError, "dataset.primary=0, dataset.harmful=0"),
        (["method.batch_size=1000"], ConfigError, "method.batch_size=1000 is above the 80 training rows"),
        (["optimizer.betas=[2,2]"], ConfigError, "optimizer: Invalid beta"),
        (["optimizer.betas=[0.9]"], ConfigError, "optimizer.betas=[0.9] must have two numbers, such as [0.9,0.999]"),
        (["optimizer.betas=3"], ConfigError, "optimizer: "),
        (["method.precondition=ridge", "method.ridge=0", "method.batch_size=70"], DegenerateSpectrum, "ridge=0"),
        (
            ["evaluation=[definition]", "evaluation.definition.tolerance=-1"],
            ConfigError,
            "evaluation.definition.tolerance",
        ),
        (["dataset=house_prices", "dataset.download=false", "dataset.root=/nowhere"], DataError, "/nowhere/train.csv"),
    ],
)
def test_mistakes_leave_a_failed_result(overrides, error, message, tmp_path):
    base = [item for item in QUICK if "max_samples" not in item or "dataset=house_prices" not in overrides]
    with pytest.raises(error, match=re.escape(message)):
        run([*base, *overrides], folder=tmp_path)
    assert message in failed(tmp_path).error


@pytest.mark.parametrize(
    "wrong",
    [
        ["evaluation=[norm_ratio]", "evaluation.norm_ratio.steps=0"],
        ["attack=[linear_probe]", "attack.linear_probe.steps=0"],
    ],
)
def test_options_of_what_comes_after_the_training_are_checked_before_it(wrong, tmp_path):
    with pytest.raises(ConfigError, match=r"\.steps must be an integer of at least 1, not 0"):
        run([*QUICK, *wrong], folder=tmp_path)
    assert failed(tmp_path).metrics == {}


def test_a_run_after_a_failed_one_in_the_same_folder_starts_afresh(tmp_path, no_figures):
    with pytest.raises(Diverged):
        run([*QUICK, "optimizer=sgd", "optimizer.lr=1e300"], folder=tmp_path)
    result = run(QUICK, folder=tmp_path)
    assert result.status == Result.read(tmp_path).status == "completed"
    assert history(tmp_path)["rir"]["x"] == [0, 1, 2, 3, 4]


def test_runs_leave_no_handler_or_thread_behind(tmp_path, no_figures):
    import logging

    before = list(logging.getLogger("immunization").handlers), threading.active_count()
    run(QUICK, folder=tmp_path)
    assert (list(logging.getLogger("immunization").handlers), threading.active_count()) == before


def test_a_run_that_fails_before_it_has_its_parts_stands_under_the_name_of_its_method(tmp_path):
    with pytest.raises(ConfigError, match=r"method\.epochs"):
        run(["method=r_ill_only", "method.epochs=-1", "tracker=none"], folder=tmp_path)
    assert (failed(tmp_path).method, failed(tmp_path).model) == ("r_ill_only", "linear")
