"""The attacks in a report: the verdict, the audited model, what each attack reached, and the flags."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from immunization.results.attack_figures import attack_costs
from immunization.results.collect import Run
from immunization.results.columns import ATTACKS, Column
from immunization.results.formatting import Cell
from immunization.results.plot import Plot
from immunization.results.settings import Setting
from immunization.results.tables import Table
from immunization.runs import files
from immunization.runs.filenames import WEIGHTS, weights_of
from immunization.runs.interpretation import attack_names, successes
from immunization.runs.verdict import verdict

NOTES = (
    "immunized, baseline: the held-out measure at the step that the attacker's validation rows choose. learned: it "
    "reaches the bar; ?: the 95 % interval from the number of test rows contains the bar.",
    "Operations: until the bar, which is the same for all attacks. Steps: until 90 % of the way from guessing to the "
    "same attack's best on the baseline; >: the budget was too small. Eq. 2: the ratio that condition numbers predict.",
)


@dataclass
class Audit:
    """The attacks on one setting, with the table and the figure of them."""

    setting: Setting
    table: Table
    plot: Plot | None
    NOTES: ClassVar[tuple[str, ...]] = NOTES

    @cached_property
    def sentences(self) -> list[str]:
        """The verdict in words; the first sentence is a summary."""
        return verdict(self.setting.results)

    @property
    def subject(self) -> str:
        """The audited model: method, weights, data, pair and rows."""
        run, more = self.setting.runs[0], len(self.setting.runs) - 1
        result, words = run.result, [f"{self.setting.label} on {run.result.dataset}, {run.result.model}"]
        words += [weights(run)] if not more else [f"{more + 1} runs"]
        classes = result.about.get("classes")
        if run.pair and isinstance(classes, dict):
            words += [f"primary class {classes.get('primary')}, harmful class {classes.get('harmful')}"]
        rows = result.about.get("rows")
        if isinstance(rows, dict) and isinstance(harmful := rows.get("harmful"), dict):
            words += ["harmful rows: " + ", ".join(f"{count:,} {split}" for split, count in harmful.items())]
        return "; ".join([*words, *([] if more else [f"seed {result.seed}"])])

    @cached_property
    def flags(self) -> dict[str, str]:
        """Every flag of the runs with the reason of the first, and how many runs have it."""
        results, found = self.setting.results, {}
        for flag, count in Counter(flag for result in results for flag in result.flags).items():
            first = next(result for result in results if flag in result.flags)
            where = f"in {count} of {len(results)} runs: " if len(results) > 1 else ""
            found[flag] = where + first.reasons.get(flag, "no reason given")
        if len({result.seed for result in results}) < 3:
            found["few_seeds"] = "fewer than 3 seeds: nothing is known of the spread of these figures"
        return found


def audit(setting: Setting, name: str, heading: str) -> Audit | None:
    """One row an attack, medians over the runs of the setting; None where nothing was attacked."""
    costs = [successes(result) for result in setting.results]
    cheapest = {
        attack: min((found[attack] for found in costs if attack in found), default=math.inf)
        for result in setting.results
        for attack in attack_names(result)
    }
    if not (names := sorted(cheapest, key=cheapest.__getitem__)):  # the cheapest success first, what is held last
        return None

    def cell(column: Column, attack: str) -> Cell:
        return column.cell(setting, f"attack/{attack}/{column.measure}" if column.measure else attack)

    places, subject = set(map(_checkpoint, setting.runs)), setting.label
    if setting.method == "unmodified" and len(places) == 1 and (place := places.pop()):
        subject = f"checkpoint {Path(place).name}"  # audited as it stands
    title = f"{heading}: attacks on {subject}"
    table = Table.of(name, title, ATTACKS, names, cell)
    made = Audit(setting, table, attack_costs(setting, f"{name}_costs"))
    flags = [f"Flag {flag}: {text}." for flag, text in made.flags.items()]
    made.table.notes += [*made.sentences, *NOTES, *flags]
    return made


def _checkpoint(run: Run) -> str | None:
    return (run.config.get("model") or {}).get("checkpoint")


def weights(run: Run) -> str:
    """The checkpoint that was audited, else the weights that the run left, by their name and SHA-256."""
    place = _checkpoint(run)
    path = weights_of(Path(place).expanduser()) if place else run.result.folder / WEIGHTS
    name = f"checkpoint {path.parent.name}/{path.name}" if place else "its own weights"
    digest = files.sha256(path)
    return f"{name}, SHA-256 {digest[:12]}" if digest else name
