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

        setup_globals()
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        returns: list[JobReturn] = []
        waiting: list[tuple[DictConfig, Member | None]] = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            folder = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
            task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            waiting.append((config, population.member(task, folder, list(config.hydra.overrides.task))))
            members = [member for _, member in waiting if member]
            full = len(members) >= self.members or sum(one.bytes for one in members) >= self.gigabytes * 1e9
            if full or number + 1 == initial_job_idx + len(job_overrides):
                population.train(members)
                returns += [self._run(*waiting.pop(0)) for _ in range(len(waiting))]  # each let go of when it is done
        return returns

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
