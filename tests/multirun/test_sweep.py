"""Multiruns, what they leave in the sweep folder, and that every sweep file composes and runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.commands import Ended, launched
from helpers.repository import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from immunization import run
from immunization.checks import CONF
from immunization.config import class_of, compose
from immunization.errors import ConfigError
from immunization.experiment import resolve
from immunization.multirun.callback import SweepSummary
from immunization.runs.result import Result
from immunization.runs.resume import completed, read_config, result_settings

pytestmark = pytest.mark.trains

JOBS = ("seed=0,1", "dataset.harmful=0,1", "+note=../../x")
QUICK = ("tracker=none", "method=identity", "evaluation=[rir]", "dataset.max_samples=20", "figures=false")
SWEEPS = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))
AGENTS = sorted(path.stem for path in (ROOT / "sweeps" / "wandb").glob("*.yaml"))
MULTIRUNS = ["table1", "table2", *(f"paper/{kind}{i}" for kind in ("table", "figure") for i in (1, 2, 3))]


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def first_job(name: str, group: str = "sweeps") -> list[str]:
    """The first of every value that a sweep file gives, with the file itself."""
    cfg = compose_with_hydra([f"{group}={name}"])
    assert cfg.hydra.mode.name == "MULTIRUN"
    parser = OverridesParser.create()
    overrides = parser.parse_overrides([f"{key}={value}" for key, value in cfg.hydra.sweeper.params.items()])
    assert all(override.is_sweep_override() or override.value() is not None for override in overrides)
    values = (
        next(override.sweep_string_iterator()) if override.is_sweep_override() else override.get_value_element_as_str()
        for override in overrides
    )
    return [f"{group}={name}", *(f"{o.get_key_element()}={v}" for o, v in zip(overrides, values, strict=True))]


def compose_with_hydra(overrides: list[str]):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", overrides=overrides, return_hydra_config=True)


# --- A sweep as a user starts it --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> tuple[Path, Ended]:
    """Four jobs, of which two must fail because both tasks are the same digit; a value that would leave the folder."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, launched("-m", *QUICK, *JOBS, f"hydra.sweep.dir={folder}", cwd=folder)


def test_a_failed_job_is_recorded_and_the_others_go_on(sweep):
    folder, done = sweep
    assert done.returncode == 1
    assert "error: dataset.primary=0, dataset.harmful=0" in done.stderr
    assert "Traceback" not in done.stderr
    jobs = sorted(path.parent for path in folder.glob("*/result.json"))
    assert len(jobs) == 4
    statuses = {path.name: Result.read(path).status for path in jobs}
    assert [status for name, status in statuses.items() if "harmful=0" in name] == ["failed", "failed"]
    assert [status for name, status in statuses.items() if "harmful=1" in name] == ["completed", "completed"]


def test_the_sweep_ends_with_a_table_and_a_report(sweep):
    folder, done = sweep
    assert "2 completed, 2 failed" in done.stdout
    assert "every task needs its own classes" in done.stdout
    assert len((folder / "results.csv").read_text().splitlines()) == 3
    assert "Left out of every average: 2 runs" in (folder / "report.html").read_text()


def test_a_job_prints_one_line_and_draws_no_figure(sweep):
    folder, done = sweep
    assert sum(line.startswith(("0_", "1_", "2_", "3_")) for line in done.stdout.splitlines()) == 2
    assert not list(folder.glob("*/*.png"))


def test_run_folders_stay_inside_of_the_sweep_folder(sweep):
    folder, _ = sweep
    outside = {path.name for path in folder.iterdir() if not path.name[0].isdigit()}
    assert outside == {"multirun.yaml", "report.html", "results.csv"}
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 4


def test_a_used_sweep_folder_is_refused(sweep):
    config = OmegaConf.create({"resume": False, "hydra": {"sweep": {"dir": str(sweep[0])}}})
    with pytest.raises(SystemExit, match="already holds runs; resume=true goes on"):
        SweepSummary().on_multirun_start(config)
    config.resume = True
    SweepSummary().on_multirun_start(config)


def test_resume_skips_what_is_completed_and_runs_the_rest(sweep, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sweep[0], folder)
    done_before = next(folder.glob("0_*harmful=0*")), next(folder.glob("1_*harmful=1*"))
    kept = (done_before[1] / "result.json").stat().st_mtime_ns
    half = next(folder.glob("3_*"))
    (half / "result.json").write_text('{"schema": 1, "sta')
    done = launched("-m", *QUICK, *JOBS, f"hydra.sweep.dir={folder}", "resume=true", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("completed before, nothing to do") == 1
    assert (done_before[1] / "result.json").stat().st_mtime_ns == kept
    assert Result.read(half).status == "completed"
    assert "2 completed, 2 failed" in done.stdout


@pytest.mark.slow
def test_joblib_runs_jobs_in_processes_of_one_thread(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    jobs = ("launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1", "hydra.sweep.dir=runs")
    done = launch("-m", *QUICK, *jobs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    environments = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/environment.json")]
    assert [environment["threads"] for environment in environments] == [1, 1]
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.slow
def test_submitit_runs_jobs_on_this_machine(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    done = launch("-m", *QUICK, "launcher=submitit_local", "seed=0,1", "hydra.sweep.dir=runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 completed" in done.stdout


def test_an_objective_that_no_job_has_is_no_success(tmp_path):
    done = launched("-m", *QUICK, "seed=0,1", "objective=test/rri", cwd=tmp_path)
    assert (done.returncode, "2 completed" in done.stdout) == (1, True)
    assert "the closest are: test/rir" in done.stderr


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_resume_takes_no_job_of_another_configuration_for_its_own(tmp_path):
    folder = tmp_path / "runs" / "0"
    run([*QUICK, "seed=0"], folder=folder)
    kept = (folder / Result.file).read_bytes()
    options = ("hydra.sweep.dir=runs", "hydra.sweep.subdir=${hydra.job.num}", "resume=true")
    done = launched("-m", *QUICK, *options, "seed=5,1", cwd=tmp_path)
    assert done.returncode == 1
    assert "runs/0 holds a completed run of another configuration (seed: 0 -> 5, dataset.seed" in done.stderr
    assert "1 completed, 1 failed" in done.stdout
    assert (folder / Result.file).read_bytes() == kept
    done = launched("-m", *QUICK, *options, "seed=0,1", cwd=tmp_path)
    assert (done.returncode, "2 completed" in done.stdout) == (0, True)


def test_the_exit_code_is_that_of_the_jobs_of_the_command(tmp_path):
    """Not of those that an earlier command left in the same folder, which the table still counts."""
    options = (*QUICK, "hydra.sweep.dir=runs", "resume=true")
    assert launched("-m", *options, "optimizer.lr=0.001,-1", cwd=tmp_path).returncode == 1
    done = launched("-m", *options, "optimizer.lr=0.001,0.003", "threads=1", cwd=tmp_path)
    assert (done.returncode, "2 completed, 1 failed" in done.stdout) == (0, True)
    assert launched("-m", *options, "optimizer.lr=-1", cwd=tmp_path).returncode == 1


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> tuple[Path, Result]:
    """The folder of a completed run, which no test changes, and its result."""
    folder = tmp_path_factory.mktemp("single") / "run"
    return folder, run([*QUICK], folder=folder)


def test_a_completed_run_of_another_configuration_is_refused(single):
    assert completed(single[0], resolve(compose(QUICK)).settings)
    for change in ("seed=1", "dataset.harmful=2", "evaluation=[rir,primary]"):
        with pytest.raises(ConfigError, match="holds a completed run of another configuration"):
            completed(single[0], resolve(compose([*QUICK, change])).settings)


@pytest.mark.parametrize("name", ["config.yaml", "result.json", "immunized.safetensors"])
def test_an_empty_or_damaged_folder_is_not_completed(name, single, tmp_path, caplog):
    config = compose([*QUICK, "resume=true"])
    settings = resolve(config).settings
    assert completed(tmp_path / "nowhere", settings) is None
    folder = Path(shutil.copytree(single[0], tmp_path / "run"))
    content = (folder / name).read_bytes()
    for damaged in (content[: len(content) // 2] + b"\0", b""):  # NUL: half a YAML file may be one
        (folder / name).write_bytes(damaged)
        caplog.clear()
        assert completed(folder, settings) is None
        assert name in caplog.text
    assert run(config, folder=folder).metrics == single[1].metrics


def test_a_written_configuration_reads_back_as_it_was(tmp_path):
    config = compose([*QUICK])
    OmegaConf.save(config, tmp_path / "config.yaml", resolve=True)
    assert result_settings(read_config(tmp_path)) == result_settings(OmegaConf.to_container(config, resolve=True))


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_composes_and_runs_one_step(name, tmp_path):
    overrides = first_job(name)
    if name == "layers":
        assert compose([*overrides, "model=resnet18"]).model.trainable == "layer4.1"
        return
    result = run([*overrides, "debug=default", "evaluation=[rir]", "dataset.max_samples=20"], tmp_path, quiet=True)
    assert result.status == "completed"


@pytest.mark.parametrize("path", ["sweeps/layers.yaml", "conf/experiment/layers.yaml"])
def test_several_layers_of_a_sweep_are_a_list(path):
    text = yaml.safe_load((ROOT / path).read_text())["hydra"]["sweeper"]["params"]["model.trainable"]
    (override,) = OverridesParser.create().parse_overrides([f"model.trainable={text}"])
    jobs = [[f"model.trainable={value}"] for value in override.sweep_string_iterator()]
    chosen = [compose(["dataset=image_folders", "model=resnet18", *job]).model.trainable for job in jobs]
    assert ["layer3", "layer4"] in chosen
    assert "layer4" in chosen
    assert len(chosen) == (5 if path.startswith("sweeps") else 4)


def test_mnist_pairs_are_the_90_ordered_pairs():
    text = yaml.safe_load((ROOT / "sweeps" / "mnist_pairs.yaml").read_text())["hydra"]["sweeper"]["params"]["pair"]
    pairs = {tuple(pair.strip().split("-")) for pair in text.split(",")}
    assert len(pairs) == 90
    assert all(a != b and {a, b} <= set("0123456789") for a, b in pairs)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_file_composes_and_runs_one_step(name, tmp_path):
    """With the arguments that W&B makes of its parameters for ${args_no_hyphens}."""
    content = yaml.safe_load((ROOT / "sweeps" / "wandb" / f"{name}.yaml").read_text())
    assert content["program"] == "immunize"  # it is installed: an agent needs no checkout
    assert content["command"][:2] == ["${env}", "immunize"]
    assert "${args_no_hyphens}" in content["command"]
    assert content["method"] in ("grid", "random", "bayes")
    arguments = [part for part in content["command"] if "=" in part]
    for key, options in content["parameters"].items():
        value = options.get("value", options.get("values", [options.get("min")])[0])
        arguments.append(f"{key}={value}")
    small = ["debug=default", "evaluation=[rir,definition]", "dataset.max_samples=20", "figures=false"]
    result = run([*arguments, *small], tmp_path, quiet=True)
    assert result.metrics.get(content["metric"]["name"]) is not None


@pytest.mark.parametrize("name", MULTIRUNS)
def test_every_table_is_a_multirun_by_itself(name):
    job = first_job(name, "experiment")
    assert any(argument.startswith("seed=") for argument in job)
    resolve(compose(job))


def test_a_pair_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="pair=12: write the primary and the harmful class"):
        class_of("12", 0)


@pytest.mark.parametrize("path", sorted((CONF / "launcher").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_launcher_composes(path):
    here = path.stem == "basic"  # in this process
    if not here:
        pytest.importorskip(f"hydra_plugins.hydra_{path.stem.partition('_')[0]}_launcher")
    cfg = compose_with_hydra([f"launcher={path.stem}"])
    assert here or cfg.hydra.job.env_set.OMP_NUM_THREADS is not None


@pytest.mark.parametrize(("model", "cores"), [("linear", 1), ("resnet18", 4)])
def test_a_job_on_slurm_asks_for_the_cores_that_its_model_is_worth(model, cores):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = compose_with_hydra(["launcher=submitit_slurm", f"model={model}"]).hydra.launcher
    assert launcher.cpus_per_task == cores


def test_jobs_that_fail_before_their_run_begins_are_counted(tmp_path):
    """An interpolation that cannot be, met as soon as resume=true compares configurations."""
    options = ("sweeps=mnist_pairs", "dataset=digits", "pair=01,3-5", "resume=true", "hydra.sweep.dir=runs")
    done = launched("-m", *QUICK, *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "1 completed, 1 failed" in done.stdout
    assert "1 failed: pair=01: write the primary and the harmful class as in 3-5" in done.stdout


@pytest.mark.slow
def test_a_range_that_is_none_is_counted_too(tmp_path):
    done = launched("-m", *QUICK, "seed=1..3", "hydra.sweep.dir=seeds", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 failed: seed must be an integer" in done.stdout
