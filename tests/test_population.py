"""Runs trained in stacks: the numbers, files and errors of each are those it has alone."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from immunization import population, run
from immunization.config import compose
from immunization.errors import Diverged, UserError
from immunization.methods import ConditionNumber
from immunization.result import Result
from tests.test_sweep import ROOT, launch

QUICK = ("tracker=none", "evaluation=[rir,primary]", "method.epochs=25")


def together(jobs: list[list[str]], folder: Path) -> list[Result | UserError]:
    """All jobs as one population, each in a folder of its number."""
    configs = [compose(job) for job in jobs]
    members = [
        population.member(config, folder / str(i), job)
        for i, (config, job) in enumerate(zip(configs, jobs, strict=True))
    ]
    population.train([member for member in members if member])
    return [
        finish(config, folder / str(i), member and member.trained)
        for i, (config, member) in enumerate(zip(configs, members, strict=True))
    ]


def finish(config, folder, trained=None) -> Result | UserError:
    try:
        return run(config, folder, quiet=True, trained=trained)
    except UserError as error:
        return error


def lines(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_equal(mine: dict, its: dict) -> None:
    assert [name for name, value in mine.items() if value is None] == [n for n, value in its.items() if value is None]
    known = [{name: value for name, value in one.items() if value is not None} for one in (mine, its)]
    assert known[0] == pytest.approx(known[1], rel=1e-8, abs=0)


def assert_as_alone(jobs: list[list[str]], folder: Path) -> list[Result | UserError]:
    """Every job of the population ends as the same job does alone; to 1e-8 in all measures and log lines."""
    results = together(jobs, folder / "together")
    for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
        alone = finish(compose(job), folder / "alone" / str(i))
        assert str(result) == str(alone) if isinstance(alone, UserError) else result.flags == alone.flags
        paths = folder / "together" / str(i), folder / "alone" / str(i)
        mine, its = (Result.read(path) for path in paths)
        assert (mine.status, mine.error, mine.about) == (its.status, its.error, its.about)
        assert_equal(mine.metrics, its.metrics)
        for mine_line, its_line in zip(*map(lines, paths), strict=True):
            assert_equal(mine_line, its_line)
    return results


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_members_have_the_numbers_of_single_runs(tmp_path):
    """The shipped defaults, 300 steps across the kinks of R_well, where any other rounding ends somewhere else."""
    pairs = [("0", "1", "0"), ("3", "5", "1"), ("8", "2", "2")]
    weights = [(), ("method.lambda_P=3",), ("method.lambda_H=100",)]
    jobs = [
        [f"dataset.primary={a}", f"dataset.harmful={b}", f"seed={seed}", "tracker=none", *more]
        for (a, b, seed), more in zip(pairs, weights, strict=True)
    ]
    results = assert_as_alone(jobs, tmp_path)
    assert len({result.metrics["rir"] for result in results}) == 3
    assert all(result.seconds["immunize"] > 0 for result in results)


@pytest.mark.parametrize(
    "options",
    [
        ("optimizer=sgd", "optimizer.lr=1e-6"),
        ("optimizer=nesterov", "method.balance=false", "method.lambda_P=1e-9"),
        ("dataset.max_samples=60",),
        ("model.init=orthogonal", "optimizer=sgd", "optimizer.lr=1e-6"),
        ("method.max_accuracy_drop=0.01", "method.epochs=60", "optimizer.lr=0.05"),
        ("method.patience=5", "method.epochs=60"),
    ],
    ids=lambda options: options[0],
)
def test_options_of_a_member_hold(options, tmp_path):
    jobs = [[*QUICK, f"seed={seed}", f"dataset.harmful={seed + 3}", *options] for seed in range(3)]
    assert all(population.member(compose(job), tmp_path) for job in jobs)
    assert_as_alone(jobs, tmp_path)


def test_in_float32_only_the_logged_loss_is_rounded_otherwise(tmp_path):
    jobs = [[*QUICK, f"seed={seed}", "dtype=float32"] for seed in range(3)]
    together(jobs, tmp_path / "together")
    for i, job in enumerate(jobs):
        alone = run(compose(job), tmp_path / "alone" / str(i), quiet=True)
        measures = {name for name in alone.metrics if "loss" not in name}
        result = Result.read(tmp_path / "together" / str(i))
        assert_equal(
            {name: result.metrics[name] for name in measures}, {name: alone.metrics[name] for name in measures}
        )
        logged = [[line.get("loss", 0) for line in lines(tmp_path / where / str(i))] for where in ("together", "alone")]
        assert logged[0] == pytest.approx(logged[1], rel=1e-6)


def test_members_stop_early_each_for_itself(tmp_path):
    jobs = [[*QUICK, f"seed={seed}", "method.epochs=200", "method.patience=5", "log_every=1"] for seed in range(4)]
    assert_as_alone(jobs, tmp_path)
    ends = [lines(tmp_path / "together" / str(i))[-1]["step"] for i in range(4)]
    assert len(set(ends)) > 1
    assert min(ends) < 200


# --- Jobs of many kinds -----------------------------------------------------------------------------------------------


def test_a_member_that_diverges_disturbs_no_other(tmp_path):
    sgd = ["optimizer=sgd", "optimizer.lr=1e-4", "method.balance=false", "method.lambda_H=0"]
    jobs = [[*QUICK, *sgd, f"method.lambda_P={weight}", "log_every=5"] for weight in (1e-9, 1e3, 2e-9, 1e2)]
    results = assert_as_alone(jobs, tmp_path)
    assert [isinstance(result, Diverged) for result in results] == [False, True, False, True]


def test_what_cannot_be_stacked_runs_alone(tmp_path):
    odd = [["method=closed_form"], ["method.batch_size=32"], ["model.bias=true", "method.precondition=ridge"]]
    odd += [["dataset.harmful=0"], ["optimizer.lr=-1"], ["immunize=false"], ["method.precondition=none"]]
    jobs = [["tracker=none", "evaluation=[rir]", "method.epochs=3", *more] for more in ([], *odd, ["seed=1"])]
    jobs[1].remove("method.epochs=3")
    members = [population.member(compose(job), tmp_path / "none", job) for job in jobs]
    assert [member is not None for member in members] == [True, *[False] * len(odd), True]
    results = assert_as_alone(jobs, tmp_path)
    assert [isinstance(result, UserError) for result in results] == [*[False] * 4, True, True, *[False] * 3]


@pytest.mark.parametrize(
    ("harmful", "dtype", "size", "stacked"), [(2, "float64", 56, 1), (2, "float32", 56, 0), (6, "float64", 54, 0)]
)
def test_only_rows_that_fill_cache_lines_are_stacked(harmful, dtype, size, stacked, tmp_path):
    """Every second matrix of others begins elsewhere in memory than alone, and its products round otherwise."""
    common = [*QUICK, f"dataset.harmful={harmful}", "dataset.common_range=true", f"dtype={dtype}"]
    jobs = [[*common, f"method.lambda_P={weight}"] for weight in (1, 3)]
    members = [population.member(compose(job), tmp_path) for job in jobs]
    assert [member is not None for member in members] == [stacked, stacked]
    for result in assert_as_alone(jobs, tmp_path):
        assert f"the {size} dimensions" in result.about["common_range"]


class Otherwise(ConditionNumber):
    """A class of a user's own, whose steps are not those of the closed form it inherits."""

    def step(self, model, primary, harmful):
        terms = super().step(model, primary, harmful)
        return terms | {"loss": terms["loss"] + model.extractor.theta.square().sum()}


def test_a_method_with_steps_of_its_own_is_not_stacked(tmp_path):
    config = compose([*QUICK, f"trusted=[{__name__.partition('.')[0]}]"])
    config.method._target_ = f"{__name__}.Otherwise"
    assert population.member(config, tmp_path) is None
    assert run(config, tmp_path, quiet=True).status == "completed"


def test_a_stack_that_fails_is_trained_one_by_one(tmp_path, monkeypatch, caplog):
    def broken(*arguments):
        raise RuntimeError("no memory")

    job = [*QUICK, "method.epochs=2"]
    monkeypatch.setattr(population.Stack, "_gradients", broken)
    assert together([job], tmp_path)[0].status == "completed"
    assert "trained one by one (RuntimeError: no memory)" in caplog.text


def test_only_equal_settings_share_a_stack():
    def key(*more: str) -> str:
        return population.member(compose([*QUICK, *more]), Path("none")).key

    same = key()
    assert key("seed=1") == key("method.lambda_P=3") == key("dataset.primary=4") == same
    others = {key("optimizer.lr=1"), key("method.epochs=3"), key("dtype=float32"), key("optimizer=sgd")}
    assert len(others | {same}) == 5


# --- Launcher ---------------------------------------------------------------------------------------------------------


def test_the_launcher_runs_every_job_as_basic_does_and_goes_on_with_what_is_missing(tmp_path):
    """Two methods, two pairs of which one is none, two seeds."""
    folder = tmp_path / "sweep"
    jobs = ["-m", "method=condition_number,identity", "dataset.harmful=0,1", "seed=0,1", "evaluation=[rir]"]
    command = [*jobs, "method.epochs=50", "launcher=population", f"hydra.sweep.dir={folder}"]
    done = launch(*command, cwd=tmp_path)
    assert done.returncode == 1  # of the pair that is none
    assert "Traceback" not in done.stderr
    assert "4 completed, 4 failed" in done.stdout
    assert "population: 2 of 6 jobs are trained together" in done.stdout
    assert len(list(folder.glob("*/result.json"))) == 8
    assert (folder / "report.html").exists()
    stacked = sorted(folder.glob("*harmful=1,*condition_number*"))
    assert len(stacked) == 2
    for path in stacked:
        assert len(list(path.glob("wandb/offline-run-*/*.wandb"))) == 1
        job = [*path.name.split("_", 1)[1].split(","), "evaluation=[rir]", "tracker=none"]
        alone = run(job, tmp_path / "alone" / path.name)
        assert Result.read(path).metrics == pytest.approx(alone.metrics, rel=1e-8, abs=0)

    kept, lost = (path / "result.json" for path in stacked)
    before, written = Result.read(lost).metrics, kept.stat().st_mtime_ns
    lost.unlink()
    done = launch(*command, "resume=true", cwd=tmp_path)
    assert done.stdout.count("completed before, nothing to do") == 3
    assert "population: 1 of" in done.stdout
    assert kept.stat().st_mtime_ns == written
    assert Result.read(lost).metrics == pytest.approx(before, rel=1e-8, abs=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [("members=0", "members must be a number of jobs"), ("gigabytes=x", "gigabytes must be a number above 0, not 'x'")],
)
def test_bad_options_of_the_launcher(option, message, tmp_path):
    done = launch("-m", "launcher=population", f"hydra.launcher.{option}", "seed=0,1", cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: hydra.launcher.{message}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_sigterm_ends_a_population_with_a_message(tmp_path):
    command = [sys.executable, "launch.py", "-m", "launcher=population", "seed=0,1", "tracker=none"]
    endless = ["method.epochs=1000000", f"hydra.sweep.dir={tmp_path}"]
    with subprocess.Popen([*command, *endless], cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "population: 2 of 2 jobs are trained together\n"
        time.sleep(0.5)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "error: SIGTERM: interrupted; resume=true goes on" in errors
