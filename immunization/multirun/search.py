"""`sweeper=optuna`: what the runs of a multirun measure decides which settings are tried next.

The study is a file of the sweep folder. A trial is one setting, on all seeds and pairs of classes that are given. What
trial n proposes depends on `seed`, n and the trials before it alone: a search that was killed runs again what was
proposed and not measured, and ends as if it had not been killed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import OmegaConf

from immunization.checks import AtLeastOne, Component, Count, Seed
from immunization.errors import ConfigError
from immunization.results import rows
from immunization.results.collect import PAIR, collect
from immunization.results.searched import Searched
from immunization.results.seed_statistics import ROUNDING
from immunization.results.settings import Setting, in_convention
from immunization.runs.result import Result

try:
    import optuna
    import torch  # of Optuna's Gaussian process
    from optuna.trial import BaseTrial, FrozenTrial, Trial, TrialState
except ImportError as error:
    raise ConfigError("sweeper=optuna needs optuna; install it with pip install 'immunization[search]'") from error

STUDY = "search.db"
REPEATED = ("seed", *PAIR)
"""Keys of which a trial runs every value."""
RAN = "ran"
"""The constraint that only a trial with a failed run, or without a value of an objective, misses."""


class Constraint(NamedTuple):
    """What a measure has to be: above (`>`, `>=`) or below (`<`, `<=`) a bound."""

    measure: str
    sign: str
    bound: float

    @classmethod
    def of(cls, text: str) -> Self:
        """Read `ratio_harmful > 1`; ConfigError for anything else."""
        if match := re.fullmatch(r"\s*([^\s<>=]+)\s*([<>]=?)\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*", text):
            return cls(match[1], match[2], float(match[3]))
        hint = "write a measure, one of > >= < <=, and a number, as in 'ratio_harmful > 1'"
        raise ConfigError(f"hydra.sweeper.constraints: {text!r} is not a condition; {hint}")

    def missed(self, setting: Setting) -> float:
        """By how much the worst run of a setting misses it, at most 0 if none does; 1 where a run has no value."""
        values = setting.values(in_convention([setting], self.measure))
        if len(values) < len(setting.runs):
            return 1.0
        worst, bound = values.min() if self.sign[0] == ">" else values.max(), math.asinh(self.bound)
        short = (bound - math.asinh(worst)) * (1 if self.sign[0] == ">" else -1)
        return short + ROUNDING * max(1.0, abs(bound)) * (-1 if "=" in self.sign else 1)


class Options(Component, group="hydra.sweeper"):
    """The values of conf/sweeper/optuna.yaml."""

    trials: AtLeastOne
    batch: AtLeastOne
    random: Count
    objectives: Sequence[str] | None
    constraints: Sequence[str]
    seed: Seed
    params: Mapping[str, Any]


class Search:
    """Asks for a batch of trials, launches their jobs, and tells what they measured, until there are enough.

    `folders` holds the jobs of the run folders, and `lost` the trials of which a job did not end. The study has asinh
    of measures, which is linear near 0 and a logarithm far from it: ratios spread by factors.
    """

    def __init__(self, sweeper: Any, arguments: Sequence[str], options: Mapping[str, Any]) -> None:
        self.sweeper, config = sweeper, sweeper.config
        self.options = Options(**options)
        self.folder = Path(config.hydra.sweep.dir)
        self.ignored = config.hydra.job.config.override_dirname.exclude_keys
        self.objectives = list(self.options.objectives or [config.objective])
        self.signs = [-1 if name[0] == "-" else 1 for name in self.objectives]
        self.measures = [name.removeprefix("-") for name in self.objectives]
        self.constraints = {text: Constraint.of(text) for text in self.options.constraints}
        words = [*(f"{key}={value}" for key, value in self.options.params.items()), *arguments]
        parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
        self.overrides = {own.get_key_element(): own for own in parser.parse_overrides(words)}
        if not any(own.is_sweep_override() and key not in REPEATED for key, own in self.overrides.items()):
            raise ConfigError("sweeper=optuna: nothing is searched; give method.lambda_P='tag(log,interval(1,1000))'")
        self.study = self._study({key: own.input_line or "" for key, own in self.overrides.items()})
        self.folders: dict[Path, frozenset[str]] = {}
        self.lost: set[int] = set()

    def _study(self, words: Mapping[str, str]) -> optuna.Study:
        """That of the sweep folder, begun or gone on with; ConfigError if it is of another search."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            study_name="search",
            storage=f"sqlite:///{self.folder.resolve() / STUDY}",
            directions=["maximize" if sign > 0 else "minimize" for sign in self.signs],
            load_if_exists=True,
        )
        command = [word for key, word in words.items() if key not in self.ignored]
        asked = [*command, *self.objectives, *self.options.constraints]
        if (before := study.user_attrs.get("asked", asked)) != asked:
            raise ConfigError(
                f"{self.folder} holds a search of {' '.join(set(before) - set(asked))}, which this command has not; "
                "another hydra.sweep.dir=... starts a new one"
            )
        study.set_user_attr("asked", asked)
        return study

    def run(self) -> list[Any]:
        """All batches; returns what the launcher returned for each."""
        OmegaConf.save(self.sweeper.config, self.folder / "multirun.yaml")
        returned = []
        while batch := self.ask():
            jobs = {trial: self.jobs(trial) for trial in batch}
            every = [job for own in jobs.values() for job in own]
            if new := [job for job in every if not self.completed(job)]:
                self.sweeper.validate_batch_is_legal(new)
                first = batch[0].number * len(every) // len(batch) + every.index(new[0])
                returned.append(self.sweeper.launcher.launch(new, initial_job_idx=first))
                for job in returned[-1]:
                    _ = job.return_value  # raises the exception that ended it
            for trial, own in jobs.items():
                self.tell(trial, own)
            self.sum_up()
        return returned

    def ask(self) -> list[Trial]:
        """The next trials: first those that were proposed and never measured, then new ones."""
        left = [trial for trial in self._trials(TrialState.RUNNING) if trial.number not in self.lost]
        batch = []
        numbers = [*(trial.number for trial in left), *range(len(self._trials()), self.options.trials)]
        for number in numbers[: self.options.batch]:
            self._seed(number)
            known = next((trial for trial in left if trial.number == number), None)
            batch.append(Trial(self.study, known._trial_id) if known else self.study.ask())
            self.jobs(batch[-1])  # draws, which the next trial of the batch has to know
        return batch

    def _seed(self, number: int) -> None:
        """Let the draws of a trial depend on nothing but its number and the trials before it."""
        torch.set_num_threads(1)  # of the sampler; a run sets its own
        sampler = optuna.samplers.GPSampler(seed=self.options.seed + number, n_startup_trials=self.options.random)
        self.study.sampler = sampler

    def jobs(self, trial: BaseTrial) -> list[list[str]]:
        """The overrides of a trial's jobs, one for every seed and pair of classes."""
        values = {key: _values(trial, own) for key, own in self.overrides.items()}
        return [[f"{key}={value}" for key, value in zip(values, job, strict=True)] for job in product(*values.values())]

    def tell(self, trial: Trial, jobs: Sequence[Sequence[str]]) -> None:
        """Tell the study what a trial measured; one with a job that did not end stays open, for the next command.

        A failed one counts as the worst so far in everything.
        """
        folders = [folder for job in jobs if (folder := self.folder_of(job))]
        found = collect(folders) if folders else None
        failed = sum(problem.kind == "failed" for problem in found.problems) if found else 0
        if found is None or len(found.runs) + failed < len(jobs):
            self.lost.add(trial.number)
            return
        done = self._trials(TrialState.COMPLETE)
        values = [min((s * t.values[i] for t in done), default=0.0) * s for i, s in enumerate(self.signs)]
        missed = {name: max([1.0, *(t.constraints[name] for t in done)]) for name in self.constraints} | {RAN: 1.0}
        if not failed:
            setting = Setting(found.runs)
            for name in [*self.measures, *(constraint.measure for constraint in self.constraints.values())]:
                if not any(name in result.metrics for result in setting.results):
                    raise ConfigError(
                        f"sweeper=optuna: the runs do not measure {name}; evaluation=[...] chooses what is"
                    )
            means = [setting.summary(in_convention([setting], name)) for name in self.measures]
            missed |= {name: constraint.missed(setting) for name, constraint in self.constraints.items()}
            if all(mean.n for mean in means):
                values, missed[RAN] = [math.asinh(mean.mean) for mean in means], 0.0
        for name, amount in missed.items():
            trial.set_constraint(name, amount)
        self.study.tell(trial, values)

    def folder_of(self, job: Sequence[str]) -> Path | None:
        """The run folder of a job, by the overrides that it has."""
        for path in self.folder.iterdir():
            if path not in self.folders and (words := rows.overrides_of(path)):
                self.folders[path] = rows.job(words, self.ignored)
        wanted = rows.job(job, self.ignored)
        return next((path for path, words in self.folders.items() if words == wanted), None)

    def completed(self, job: Sequence[str]) -> bool:
        """Whether a job of this multirun has run already, for a setting can be proposed twice."""
        folder = self.folder_of(job)
        return bool(folder and (folder / Result.file).exists() and Result.read(folder).status == "completed")

    def sum_up(self) -> None:
        """Write and print how far the search is, and its best trials: one, or the front of several objectives."""
        done = self._trials(TrialState.COMPLETE)
        failed = sum(trial.constraints[RAN] > 0 for trial in done)
        within = [trial for trial in done if max(trial.constraints.values()) <= 0]
        points = [[sign * value for sign, value in zip(self.signs, trial.values, strict=True)] for trial in within]
        front = [t for t, own in zip(within, points, strict=True) if not any(_beats(other, own) for other in points)]
        best = dict.fromkeys(folder.name for t in front if (folder := self.folder_of(self.jobs(t)[0])))
        counts = len(done), failed, len(done) - len(within) - failed, len(self.lost)
        said = Searched(self.objectives, list(self.options.constraints), *counts, list(best))
        said.write(self.folder)
        print(f"search: trial {said.trials} of {self.options.trials}; {said.line}", flush=True)

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is better in something and worse in nothing."""
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def _values(trial: BaseTrial, override: Override) -> list[str]:
    """The value that a trial proposes for a key, or all of a repeated one; numbers of an interval are rounded."""
    key, sweep = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if isinstance(sweep, IntervalSweep):
        if key in REPEATED:
            raise ConfigError(
                f"sweeper=optuna: {key} is not searched, every trial runs all its values; give a list, such as "
                f"{key}=0,1,2"
            )
        low, high, log = sweep.start or 0, sweep.end or 0, "log" in sweep.tags
        if isinstance(low, int) and isinstance(high, int):
            return [str(trial.suggest_int(key, low, high, log=log))]
        drawn = trial.suggest_float(key, low, high, log=log)
        return [f"{min(max(float(f'{drawn:.{3 if log else 5}g}'), low), high):.6g}"]
    values = list(override.sweep_string_iterator())
    if key in REPEATED:
        return values
    if override.is_range_sweep():  # in order
        return [values[trial.suggest_int(key, 0, len(values) - 1)]]
    return [trial.suggest_categorical(key, values)]
