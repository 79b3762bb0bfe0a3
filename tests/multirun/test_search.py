"""`sweeper=optuna`: what it proposes, what it takes for the best, and that it goes on where it stopped."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.commands import launched
from helpers.made_runs import make_run
from omegaconf import OmegaConf

from immunization.checks import CONF
from immunization.errors import ConfigError
from immunization.results.collect import collect
from immunization.results.searched import Searched
from immunization.results.settings import best, settings

pytestmark = pytest.mark.trains

search = pytest.importorskip("immunization.multirun.search")

OPTIONS = yaml.safe_load((CONF / "sweeper" / "optuna.yaml").read_text())["hydra"]["sweeper"]
OPTIONS = {key: value for key, value in OPTIONS.items() if key != "_target_"}
SPACE = ("method.lambda_P=tag(log,interval(1,1000))", "method.lambda_H=tag(log,interval(1,1000))")


def hill(lambda_p: float, lambda_h: float, seed: int) -> dict[str, float]:
    """RIR 1000 at (100, 10), where Definition 3.1 holds; larger ones from lambda_H = 100 on, where it does not."""
    away = math.log10(lambda_p / 100) ** 2 + math.log10(lambda_h / 10) ** 2
    immunized = float(lambda_h < 100)
    return {"rir": (1000 if immunized else 1e5) * math.exp(-away) + seed, "definition/immunized": immunized}


class Killed(BaseException):
    """As a signal ends a process: nothing catches it."""


class Launcher:
    """Writes a run folder for every job; is killed before job `dies`, and writes nothing for job `loses`."""

    def __init__(self, folder: Path, measure=hill, dies=None, loses=None, fails=lambda p, h: False):
        self.folder, self.measure, self.dies, self.loses, self.fails = folder, measure, dies, loses, fails
        self.jobs = []

    def launch(self, batch, initial_job_idx):
        for number, job in enumerate(batch, initial_job_idx):
            if number == self.dies:
                raise Killed
            self.jobs.append(job)
            if number != self.loses:
                self.write(number, job)
        return [SimpleNamespace(return_value=1.0) for _ in batch]

    def write(self, number, job):
        values = {key.rpartition(".")[2]: value for key, value in (word.split("=") for word in job)}
        lambdas, seed = (float(values["lambda_P"]), float(values["lambda_H"])), int(values.get("seed", 0))
        failed = {"status": "failed", "error": "the loss is nan"} if self.fails(*lambdas) else {}
        measures = {} if failed else self.measure(*lambdas, seed)
        rir = measures.pop("rir", None)
        place = self.folder / "_".join([str(number), *(word for word in job if word != "resume=True")])
        folder = make_run(place, seed=seed, lambdas=lambdas, rir=rir, measures=measures, **failed)
        (folder / "overrides.yaml").write_text(yaml.safe_dump(job))


def searched(folder: Path, *arguments: str, launcher: Launcher | None = None, objective="rir", **options):
    """The search, which has run, and its launcher; its proposals are random unless `random` says otherwise."""
    options = {"random": 40} | options
    job = {"config": {"override_dirname": {"exclude_keys": ["resume"]}}}
    config = OmegaConf.create({"objective": objective, "hydra": {"sweep": {"dir": str(folder)}, "job": job}})
    launcher = launcher or Launcher(folder)
    context = SimpleNamespace(config_loader=None)
    sweeper = SimpleNamespace(
        config=config, hydra_context=context, launcher=launcher, validate_batch_is_legal=lambda batch: None
    )
    if not any("lambda" in word for word in arguments):
        arguments = (*SPACE, *arguments)
    made = search.Search(sweeper, arguments, OPTIONS | options)
    made.run()
    return made, launcher


def said(folder: Path) -> Searched:
    return Searched(**json.loads((folder / "search.json").read_text()))


def test_the_best_is_near_the_largest_within_the_constraints_and_is_the_star(tmp_path):
    searched(tmp_path, trials=20, random=8)
    [group] = settings(collect([tmp_path]))
    star = best(group, "rir")
    assert star.summary(search.in_convention(group, "rir")).mean > 800
    assert said(tmp_path).found(group) == [star]
    assert said(tmp_path).beside(group, "rir") == "Search of 20 trials: ★ is its best trial."
    assert 0 < said(tmp_path).outside < 10


@pytest.mark.parametrize("dies", [4, 7])
def test_a_search_that_was_killed_ends_as_if_it_had_not_been(dies, tmp_path):
    """In any place of a batch: before its first job, between two."""
    _, whole = searched(tmp_path / "whole", trials=8, random=2)
    dying = Launcher(tmp_path / "killed", dies=dies)
    with pytest.raises(Killed):
        searched(tmp_path / "killed", launcher=dying, trials=8, random=2)
    _, rest = searched(tmp_path / "killed", "resume=true", trials=8, random=2)
    jobs = [[word for word in job if word != "resume=True"] for job in rest.jobs]
    assert dying.jobs + jobs == whole.jobs
    assert said(tmp_path / "killed") == said(tmp_path / "whole")


def test_a_search_that_was_killed_while_it_proposed_goes_on_the_same(tmp_path, monkeypatch):
    """A trial is in the study before its values are."""
    _, whole = searched(tmp_path / "whole", trials=8, random=2)
    dying, draws = Launcher(tmp_path / "killed"), search.Search.jobs

    def jobs(self, trial):
        if trial.number == 5:
            raise Killed
        return draws(self, trial)

    monkeypatch.setattr(search.Search, "jobs", jobs)
    with pytest.raises(Killed):
        searched(tmp_path / "killed", launcher=dying, trials=8, random=2)
    monkeypatch.undo()
    _, rest = searched(tmp_path / "killed", trials=8, random=2)
    assert dying.jobs + rest.jobs == whole.jobs


def test_more_trials_go_on_from_those_that_there_are(tmp_path):
    _, whole = searched(tmp_path / "whole", trials=6, random=1, batch=2)
    _, first = searched(tmp_path / "parts", trials=2, random=1, batch=2)
    _, rest = searched(tmp_path / "parts", trials=6, random=1, batch=2)
    assert first.jobs + rest.jobs == whole.jobs


def test_every_seed_runs_in_every_trial_and_their_mean_counts(tmp_path):
    made, launcher = searched(tmp_path, "seed=0,2", trials=4)
    assert len(launcher.jobs) == 8
    assert {job[-1] for job in launcher.jobs} == {"seed=0", "seed=2"}
    trial = made.study.trials[0]
    values = [float(word.partition("=")[2]) for word in launcher.jobs[0][:2]]
    assert trial.value == pytest.approx(math.asinh(hill(*values, 1)["rir"]))


def test_a_failed_run_is_no_best_and_the_search_keeps_away(tmp_path):
    searched(tmp_path, launcher=Launcher(tmp_path, fails=lambda p, h: p > 100), trials=12, random=8)
    told = said(tmp_path)
    assert 0 < told.failed < 8
    [name] = told.best
    assert float(yaml.safe_load((tmp_path / name / "overrides.yaml").read_text())[0].partition("=")[2]) <= 100


def test_a_lost_job_is_the_first_of_the_next_command(tmp_path):
    _, first = searched(tmp_path, launcher=Launcher(tmp_path, loses=1), trials=8)
    assert said(tmp_path).lost == 1
    assert said(tmp_path).trials == 7
    _, rest = searched(tmp_path, trials=8)
    assert rest.jobs == [first.jobs[1]]
    assert (said(tmp_path).lost, said(tmp_path).trials) == (0, 8)


def test_the_front_of_two_objectives(tmp_path):
    """Both steps grow with lambda_H; lambda_P costs primary steps alone."""

    def both(lambda_p, lambda_h, seed):
        return {"rir": 10.0, "steps_ratio/harmful": lambda_h, "steps_ratio/primary": lambda_h / 1000 + lambda_p}

    goals = ["steps_ratio/harmful", "-steps_ratio/primary"]
    searched(tmp_path, launcher=Launcher(tmp_path, both), objectives=goals, trials=12)
    [group] = settings(collect([tmp_path]))
    told = said(tmp_path)
    points = {setting: tuple(setting.results[0].metrics[name.removeprefix("-")] for name in goals) for setting in group}
    beaten = {
        setting
        for setting, (harmful, primary) in points.items()
        if any(h >= harmful and p <= primary and (h, p) != (harmful, primary) for h, p in points.values())
    }
    assert set(told.found(group)) == {*group} - beaten
    assert "◆ is the front of steps_ratio/harmful and -steps_ratio/primary" in told.beside(group, "rir")


def test_the_table_says_why_the_best_trial_is_not_the_star(tmp_path):
    def slow(lambda_p, lambda_h, seed):
        return hill(lambda_p, lambda_h, seed) | {"steps_ratio/primary": 2.0 if lambda_p > 50 else 1.0}

    searched(tmp_path, launcher=Launcher(tmp_path, slow), trials=12)
    [group] = settings(collect([tmp_path]))
    assert said(tmp_path).beside(group, "rir").endswith("◆ is its best trial, and not ★: primary steps > 1: 1/1.")
    narrow = tmp_path / "narrow"
    searched(narrow, constraints=["ratio_harmful > 1", "ratio_primary <= 0.1"], trials=4)
    [group] = settings(collect([narrow]))
    assert "none meets its constraints (ratio_harmful > 1, ratio_primary <= 0.1)" in said(narrow).beside(group, "rir")


def test_choices_and_ranges_take_their_values(tmp_path):
    space = ("method.lambda_P=range(1,10,3)", "method.lambda_H=choice(1,10)", "method.epochs=interval(0.5,2)")
    _, launcher = searched(tmp_path, *space, trials=8)
    columns = [{word.partition("=")[2] for word in column} for column in zip(*launcher.jobs, strict=True)]
    assert columns[0] <= {"1", "4", "7"}
    assert columns[1] <= {"1", "10"}
    assert all(0.5 <= float(value) <= 2 for value in columns[2])


def test_a_setting_that_is_proposed_twice_runs_once(tmp_path):
    _, launcher = searched(tmp_path, "method.lambda_P=1,10", "method.lambda_H=1", trials=6, batch=1)
    assert len(launcher.jobs) == 2
    assert said(tmp_path).trials == 6


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["method.lambda_P=1"], {}, "nothing is searched"),
        (["seed=0,1", "method.lambda_P=1"], {}, "nothing is searched"),
        (["seed=interval(0,9)", *SPACE], {}, "seed is not searched, every trial runs all its values"),
        (SPACE, {"constraints": ["ratio_harmful"]}, "'ratio_harmful' is not a condition; write a measure"),
        (SPACE, {"constraints": ["ratio_harm > 1"]}, "do not measure ratio_harm;"),
        (SPACE, {"objectives": ["-rirr"]}, "do not measure rirr;"),
        (SPACE, {"trials": 0}, "hydra.sweeper.trials must be"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        searched(tmp_path, *arguments, **options)


def test_a_folder_of_another_search_is_refused(tmp_path):
    searched(tmp_path, trials=4)
    with pytest.raises(ConfigError, match=r"holds a search of .*lambda_H=tag\(log,interval\(1,1000\)\)"):
        searched(tmp_path, SPACE[0], "method.lambda_H=tag(log,interval(1,10))", trials=4)


def test_a_search_as_a_user_starts_it(tmp_path):
    quick = ("tracker=none", "evaluation=[rir,definition,primary]", "dataset.max_samples=40", "method.epochs=2")
    command = ("sweeper=optuna", *quick, *SPACE, "hydra.sweeper.trials=3", "hydra.sweeper.batch=2")
    done = launched(*command, "hydra.sweep.dir=runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "search: trial 3 of 3; " in done.stdout
    assert "Search of 3 trials: " in done.stdout
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 3
    again = launched(*command, "hydra.sweep.dir=runs", "resume=true", "hydra.sweeper.trials=4", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 4
