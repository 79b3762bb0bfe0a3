"""What a search (`sweeper=optuna`) leaves in its sweep folder beside its runs, and how its best trial relates to ★."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

from immunization.results.settings import Setting, best, in_convention, lacking
from immunization.runs import files


@dataclass(frozen=True)
class Searched:
    """How far a search is, and the run folders of its best trials: one, or the front of several objectives.

    Objectives are names of measures, with - in front those that are minimized. `outside`: trials that miss a
    constraint. `failed`: those without a value. `lost`: jobs that never ended, to be run again.
    """

    file: ClassVar[str] = "search.json"

    objectives: list[str]
    constraints: list[str]
    trials: int
    failed: int
    outside: int
    lost: int
    best: list[str]

    @classmethod
    def of(cls, group: Sequence[Setting]) -> Self | None:
        """The search whose runs these are, if they are of one."""
        folders = {run.folder.resolve().parent for setting in group for run in setting.runs}
        path = folders.pop() / cls.file if len(folders) == 1 else Path(cls.file)
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    def write(self, folder: Path) -> None:
        files.write(folder / self.file, json.dumps(asdict(self), indent=2))

    @property
    def line(self) -> str:
        """In one line."""
        counts = {"failed": self.failed, "lost": self.lost, "outside the constraints": self.outside}
        words = [f"{count} {what}" for what, count in counts.items() if count]
        goal = " and ".join(f"smallest {n[1:]}" if n[0] == "-" else f"largest {n}" for n in self.objectives)
        found = "the front: " if len(self.objectives) > 1 else "the best: "
        return "; ".join([*words, f"{goal}, {found}" + (", ".join(self.best) or "none meets all constraints")])

    def found(self, group: Sequence[Setting]) -> list[Setting]:
        """The settings of its best trials."""
        return [setting for setting in group if any(run.folder.name in self.best for run in setting.runs)]

    def beside(self, group: Sequence[Setting], objective: str) -> str:
        """How its best trials relate to the group's ★: the same setting, or why not."""
        star, found = best(group, objective), self.found(group)
        within, said = f"its constraints ({', '.join(self.constraints)})", f"Search of {self.trials} trials: "
        if not found:
            return f"{said}none meets {within}."
        if len(self.objectives) > 1:
            on = "is on it" if star in found else "is not on it" if star else "is no setting"
            return f"{said}◆ is the front of {' and '.join(self.objectives)}; ★ {on}."
        if found[0] is star:
            return f"{said}★ is its best trial."
        why = lacking(found[0], in_convention(group, objective))
        if self.objectives != [objective]:
            why = [f"its objective is {self.objectives[0]}, that of ★ is {objective}", *why]
        elif star and not why:
            why = [f"★ is outside {within}"]
        return f"{said}◆ is its best trial, and not ★: {'; '.join(why) or 'it shares no seed with another setting'}."
