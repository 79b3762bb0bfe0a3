"""Hydra's `launcher=population`: the jobs of a multirun trained many at once, then run one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from immunization.errors import ConfigError

if TYPE_CHECKING:
    from immunization.population import Member


class Population(BasicLauncher):
    """`launcher=basic`, but the jobs go through population.py first: `members` at once, of `gigabytes` together.

    Hydra takes plugins from the package `hydra_plugins` alone, where `register` puts this class.
    """

    __module__ = "hydra_plugins.immunization"

    def __init__(self, members: int = 90, gigabytes: float = 4.0) -> None:
        super().__init__()
        self.members, self.gigabytes = members, gigabytes

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        from immunization import population  # torch, which a multirun elsewhere does not need

        self._check()
        setup_globals()
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        returns: list[JobReturn] = []
        waiting: list[tuple[DictConfig, Member | None]] = []
        count = size = 0
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            folder = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
            task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            member = population.member(task, folder, list(config.hydra.overrides.task))
            waiting.append((config, member))
            if member:
                count, size = count + 1, size + member.bytes
            full = count >= self.members or size >= self.gigabytes * 1e9
            if full or not count or number + 1 == initial_job_idx + len(job_overrides):
                del member  # held by `waiting` alone, which lets go of each when its job is done
                if count:
                    print(f"population: {count} of {len(waiting)} jobs are trained together", flush=True)
                    population.train([one for _, one in waiting if one])
                while waiting:
                    returns.append(self._run(*waiting.pop(0)))
                count = size = 0
        return returns

    def _check(self) -> None:
        if type(self.members) is not int or self.members < 1:
            raise ConfigError(f"hydra.launcher.members must be a number of jobs of at least 1, not {self.members!r}")
        if type(self.gigabytes) not in (int, float) or not self.gigabytes > 0:
            raise ConfigError(f"hydra.launcher.gigabytes must be a number above 0, not {self.gigabytes!r}")

    def _run(self, config: DictConfig, member: Member | None) -> JobReturn:
        return run_job(
            task_function=partial(self.task_function, trained=member and member.trained),
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=self.hydra_context,
        )


def register() -> None:
    """Make `Population` known to Hydra, once it has looked for plugins; the package exists where one is installed."""
    Plugins.instance().register(Population)
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins")).immunization = sys.modules[__name__]
