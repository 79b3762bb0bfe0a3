"""The contents of RESULTS.md, from parts.yaml: sections with their multiruns, jobs, tables and figures."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from immunization.config import CONF, compose
from immunization.errors import ConfigError
from immunization.results.collect import collect
from immunization.results.plot import Plot
from immunization.results.settings import Setting, place, settings
from immunization.results.sweep_figures import draw
from immunization.results.tables import Table, alignment, comparison, counts, pair_counts
from immunization.runs.result import Result
from immunization.runs.resume import different, read_config, result_settings


@dataclass(frozen=True, eq=False)
class Multirun:
    """One `python launch.py -m`: its overrides, where the data are, and its folder."""

    overrides: tuple[str, ...]
    data: tuple[str, ...]
    folder: Path

    @property
    def command(self) -> str:
        """The command for the same runs in a new folder."""
        return f"python launch.py -m {' '.join(self.overrides)} launcher=joblib tracker=none"

    @property
    def arguments(self) -> list[str]:
        """The arguments for Hydra, with the same folder every time, so that `resume=true` finds completed jobs."""
        own = [f"hydra.sweep.dir='{self.folder}'", "resume=true", "tracker=none", "figures=false"]
        return ["-m", *self.overrides, *self.data, *own]

    @cached_property
    def jobs(self) -> list[list[str]]:
        """The overrides of every job, in Hydra's order, by which their folders are numbered."""
        from hydra import compose as hydra_compose
        from hydra import initialize_config_dir
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parser = OverridesParser.create()
        fixed = [o.input_line for o in parser.parse_overrides([*self.overrides]) if not o.is_sweep_override()]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = hydra_compose("config", overrides=fixed, return_hydra_config=True)
        swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        choices: dict[str, list[str]] = {}  # by key: one given twice stands where it was first
        for override in parser.parse_overrides([*swept, *self.overrides, *self.data]):
            key, sweep = override.get_key_element(), override.is_sweep_override()
            values = override.sweep_string_iterator() if sweep else [override.get_value_element_as_str()]
            choices[key] = [f"{key}={value}" for value in values]
        return [list(job) for job in itertools.product(*choices.values())]

    def missing(self, among: Sequence[int] | None = None) -> list[int]:
        """Numbers of the jobs that are not completed, among all or the given ones."""
        folders = {int(path.name.partition("_")[0]): path for path in self.folder.glob("[0-9]*_*")}
        numbers = range(len(self.jobs)) if among is None else among
        return [number for number in numbers if number not in folders or not Result.completed_in(folders[number])]

    def check(self) -> None:
        """Raise ConfigError if completed jobs have another configuration; checks one job per method."""
        first: dict[str, int] = {}
        for number in sorted({*range(len(self.jobs))} - {*self.missing()}):
            first.setdefault(next((word for word in self.jobs[number] if word.startswith("method=")), ""), number)
        for number in first.values():
            folder = next(self.folder.glob(f"{number}_*"))
            now = OmegaConf.to_container(compose(self.jobs[number]), resolve=True)
            if found := different(result_settings(read_config(folder)), result_settings(now)):
                raise ConfigError(
                    f"{folder} holds a run of another configuration ({', '.join(found)}): move {self.folder} away"
                )


@dataclass(frozen=True)
class Chapter:
    """A heading of RESULTS.md and a page of docs/results/; `lacking` names files that are not there."""

    name: str
    title: str
    about: str
    front: bool
    objectives: tuple[str, ...]
    figures: tuple[str, ...]
    multiruns: tuple[Multirun, ...]
    lacking: str | None

    @cached_property
    def groups(self) -> list[list[Setting]]:
        """The settings that have completed runs, in groups that can be compared."""
        folders = [run.folder for run in self.multiruns if next(run.folder.glob("*/result.json"), None)]
        found = settings(collect(folders)) if folders else []
        return [group for group in found if any(setting.runs for setting in group)]

    @cached_property
    def group(self) -> list[Setting]:
        """All settings, in the order of METHODS: they stand in one table."""
        return sorted((setting for group in self.groups for setting in group), key=place)

    @cached_property
    def pairs(self) -> Table | None:
        return pair_counts(self.group, self.name, self.title)

    @cached_property
    def tables(self) -> list[Table]:
        """The comparison, by each objective, and the tables of counts."""
        further = [comparison(self.group, self.name, f"Every measure, {by}", by) for by in self.objectives]
        more = (self.pairs, counts(self.group, self.name, self.title), alignment(self.group, self.name, self.title))
        return [comparison(self.group, self.name, "Every measure"), *further, *filter(None, more)]

    @cached_property
    def plots(self) -> list[Plot]:
        """Every figure; only Fig. 2 where settings differ in more than the method."""
        return draw(self.group, self.name, kinds=None if len(self.groups) == 1 else ("figure2",))

    def jobs(self) -> str:
        """The number of runs, and whether some are missing."""
        there = sum(len(setting.runs) + len(setting.failed) for setting in self.group)
        asked = sum(len(run.jobs) for run in self.multiruns)
        return f"{there:,} runs." if there == asked else f"{there:,} of {asked:,} runs; the others are missing."


def read(folder: Path, quick: bool = False, path: Path | None = None) -> list[Chapter]:
    """The list at `path` (the package's own), with run folders below `folder`; `quick`: its small form."""
    content = yaml.safe_load((path or Path(__file__).with_name("parts.yaml")).read_text())
    config = compose()
    sections = []
    for name, entry in content["sections"].items():
        data, lacking = _data(entry, config)
        multiruns = []
        for key, run in entry["multiruns"].items():
            if not quick or "quick" in run:
                words = [*run["overrides"], *(run["quick"] if quick else ())]
                overrides = {word.partition("=")[0]: word for word in words}  # a later one of the same key in its place
                multiruns.append(Multirun(tuple(overrides.values()), data, folder.resolve() / name / key))
        if multiruns:
            texts, front = (entry["title"].strip(), entry["about"].strip()), entry.get("front", False)
            lists = (tuple(entry.get(key, ())) for key in ("objectives", "figures"))
            sections.append(Chapter(name, *texts, front, *lists, tuple(multiruns), lacking))
    return sections


def _data(entry: dict[str, Any], config: DictConfig) -> tuple[tuple[str, ...], str | None]:
    """Overrides for the folder of a section's data, in data_root or the cache; or what is missing, with the remedy."""
    root, needs = entry.get("root"), entry.get("needs", [])
    bases = [Path(base).expanduser().resolve() for base in (config.data_root, *([config.cache] if root else []))]
    places = [base / (root or "") for base in bases]
    place = next((place for place in places if all((place / need).exists() for need in needs)), None)
    if place is None:
        absent = ", ".join(need for need in needs if not (places[0] / need).exists())
        return (), f"no {absent} in {' or '.join(map(str, places))}: {entry['remedy']}"
    if root:
        return (f"dataset.root='{place}'", "dataset.download=false"), None
    return ((f"data_root='{place}'",) if needs else ()), None
