"""report.html: tables, pictures, attacks and every problem, in one file that needs no network."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

from markupsafe import Markup, escape
from rich.console import Console

from immunization.results.attack_figures import attack_costs
from immunization.results.collect import Collection, Run, collect
from immunization.results.columns import ATTACKS, Column, listed
from immunization.results.formatting import Cell, code, template
from immunization.results.formatting import markdown as markdown_of
from immunization.results.plot import Plot
from immunization.results.searched import Searched
from immunization.results.settings import (
    HARMFUL_STEPS,
    RATIO_HARMFUL,
    RATIO_PRIMARY,
    RIR,
    Setting,
    authors,
    best,
    by_authors,
    in_convention,
    settings,
    title,
)
from immunization.results.sweep_figures import draw
from immunization.results.tables import Table, alignment, brief, comparison, counts, meanings, relative
from immunization.runs import files
from immunization.runs.filenames import WEIGHTS, weights_of
from immunization.runs.interpretation import attack_names, successes
from immunization.runs.numbers import number
from immunization.runs.verdict import verdict

REPORT = "report.html"
LISTED = (RATIO_HARMFUL, RATIO_PRIMARY, RIR, RIR._replace(split="test"), authors(RIR), HARMFUL_STEPS)
"""Measures in the report's list of runs, before MEASURES."""
FIRST = ("_lambdas", "_pareto")
"""Ends of the names of pictures that stand before the tables of a page."""
LACKING = (
    "no ★ for: the conditions that some run does not satisfy: (i) > 1, Definition 3.1, harmful steps > 1 and beyond "
    "doubt, primary steps ≤ 1; ?: unknown."
)
MOST = 500
"""Most rows of the report's lists of runs and problems; the CSV has all."""


ATTACK_NOTES = (
    "immunized, baseline: test accuracy or R² at the step that validation rows choose. learned: the attacker reaches "
    "the bar; ?: the 95 % interval from the number of test rows contains the bar.",
    "Operations: until the attacker reaches the bar, which is the same for all attackers. Steps: until the attacker is "
    "90 % of the way from guessing to its own best on the baseline; >: the budget was too small. Eq. 2: the ratio that "
    "the condition numbers predict.",
)


@dataclass
class Audit:
    """The attacks on one setting: the verdict, the table and the picture of them, the audited model and the flags."""

    setting: Setting
    table: Table
    plot: Plot | None
    notes: Sequence[str] = ATTACK_NOTES

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
        results, reasons = self.setting.results, {}
        for flag, count in Counter(flag for result in results for flag in result.flags).items():
            first = next(result for result in results if flag in result.flags)
            where = f"in {count} of {len(results)} runs: " if len(results) > 1 else ""
            reasons[flag] = where + first.reasons.get(flag, "no reason given")
        if len({result.seed for result in results}) < 3:
            reasons["few_seeds"] = "fewer than 3 seeds: the spread of these numbers is unknown"
        return reasons


@dataclass
class Section:
    """The runs of one group, with tables (the comparison first), pictures and audits.

    A terminal shows `brief` instead of the tables, where there is one, and `conclusion` below it. Each line of `legend`
    is there once, below all sections.
    """

    group: list[Setting]
    tables: list[Table]
    plots: list[Plot]
    legend: list[str]
    audits: Sequence[Audit] = ()
    conclusion: str = ""
    brief: Table | None = None

    @property
    def first(self) -> list[Plot]:
        """Pictures that a page shows before its tables."""
        return [plot for plot in self.plots if plot.name.endswith(FIRST)]

    @property
    def others(self) -> list[Plot]:
        return [plot for plot in self.plots if plot not in self.first]

    @property
    def every_table(self) -> list[Table]:
        return self.tables + [audit.table for audit in self.audits]

    @property
    def every_plot(self) -> list[Plot]:
        return [audit.plot for audit in self.audits if audit.plot] + self.plots

    @property
    def runs(self) -> list[Run]:
        return [run for setting in self.group for run in setting.runs]


def sections(collection: Collection, objective: str, figures: bool = True) -> list[Section]:
    """One section per preparation of the data and model."""
    groups = settings(collection)
    made = []
    for i, group in enumerate(groups, 1):
        heading = title(group, groups)
        name = f"{i}_{re.sub(r'[^a-z0-9]+', '_', heading.lower()).strip('_')[:60]}"
        more = (
            relative(group, f"{name}_relative", heading, objective),
            counts(group, f"{name}_counts", heading),
            alignment(group, f"{name}_alignment", heading),
        )
        tables = [comparison(group, name, heading, objective), *filter(None, more)]
        audits = []
        for j, setting in enumerate(group, 1):
            if attacks := audit_of(setting, f"{name}_attacks_{j}", heading):
                audits.append(attacks)
        legend = [*meanings(by_authors(group)), *[LACKING] * (len(group) > 1)]
        legend += [note for made in audits for note in made.notes]
        search, of = Searched.of(group), in_convention(group, objective)
        part = Section(group, tables, draw(group, name, objective) if figures else [], legend, audits)
        part.brief = brief(group, heading, objective, search.found(group) if search else ())
        told = [search.beside(group, objective)] if search else []
        tables[0].notes[:0] = told
        if len(group) > 1 and (winner := best(group, objective)):
            among = "of settings that slow harm and keep the primary task in every run"
            mean = number(winner.summary(of).mean)
            told.append(f"★ largest mean {of.name} {among}: {winner.label} ({mean})")
        part.conclusion = "\n".join(told)
        made.append(part)
    return made


def audit_of(setting: Setting, name: str, heading: str) -> Audit | None:
    """One row an attack, medians over the runs of the setting; None where nothing was attacked."""
    costs = [successes(result) for result in setting.results]
    cheapest = {
        attack: min((own[attack] for own in costs if attack in own), default=math.inf)
        for result in setting.results
        for attack in attack_names(result)
    }
    if not (names := sorted(cheapest, key=cheapest.__getitem__)):  # the cheapest success first, what is held last
        return None

    def cell(column: Column, attack: str) -> Cell:
        return column.cell(setting, column.of._replace(attack=attack))

    places, subject = set(map(_checkpoint, setting.runs)), setting.label
    if setting.method == "unmodified" and len(places) == 1 and (place := places.pop()):
        subject = f"checkpoint {Path(place).name}"  # audited as it stands
    title = f"{heading}: attacks on {subject}"
    table = Table.of(name, title, ATTACKS, names, cell)
    made = Audit(setting, table, attack_costs(setting, f"{name}_costs"))
    flags = [f"Flag {flag}: {text}." for flag, text in made.flags.items()]
    made.table.notes += [*made.sentences, *ATTACK_NOTES, *flags]
    return made


def _checkpoint(run: Run) -> str | None:
    return (run.config.get("model") or {}).get("checkpoint")


def weights(run: Run) -> str:
    """The checkpoint that was audited, else the weights that the run left, by their name and SHA-256."""
    place = _checkpoint(run)
    path = weights_of(Path(place).expanduser()) if place else run.folder / WEIGHTS
    name = f"checkpoint {path.parent.name}/{path.name}" if place else "its own weights"
    digest = files.sha256(path)
    return f"{name}, SHA-256 {digest[:12]}" if digest else name


def summarize(collection: Collection, folder: Path, objective: str) -> None:
    """Print the table over a sweep, and write results.csv and report.html into its folder."""
    parts = sections(collection, objective)
    files.write(folder / "results.csv", collection.csv())
    write(folder / REPORT, collection, parts, f"Sweep {folder.name}")
    show(collection, parts)
    print(f"report: {folder / REPORT}")


def audit(folder: Path) -> None:
    """Write the report of a single audited run into its folder."""
    collection = collect([folder])
    write(folder / REPORT, collection, sections(collection, "rir", figures=False), f"Audit {folder.name}")


def show(collection: Collection, parts: Sequence[Section], console: Console | None = None) -> None:
    """Print the main columns of the tables, and the runs that averages leave out, with reasons."""
    console = console or Console()
    plain = partial(console.print, markup=False, highlight=False)
    for part in parts:
        for table in [part.brief] if part.brief else [table.only("terminal") for table in part.tables]:
            console.print("", table, sep="\n")
        for made in part.audits:
            console.print("", made.table.only("terminal"), sep="\n")
            plain(*made.sentences[:1])
        if part.conclusion:
            plain(part.conclusion)
        flags = Counter(flag for run in part.runs for flag in run.result.flags)
        if told := ", ".join(f"{flag} in {count}" for flag, count in flags.most_common()):
            plain(f"Flags, of {len(part.runs)} runs: {told} (docs/flags.md)")
    plain("", *dict.fromkeys(line for part in parts for line in part.legend), sep="\n")
    console.print("", collection.counts(), sep="\n", highlight=False)
    for (kind, message), same in Counter((p.kind, p.message) for p in collection.problems).most_common(20):
        folder = next(p.folder for p in collection.problems if (p.kind, p.message) == (kind, message))
        plain(f"{same} {kind}: {message}\n  {'first ' if same > 1 else ''}{folder}", soft_wrap=True)


def write(path: Path, collection: Collection, parts: Sequence[Section], heading: str) -> None:
    """Write the report to `path`; the report of a single audit begins with its verdict."""
    one_audit = len(parts) == 1 and len(parts[0].group) == 1 and parts[0].audits
    problems = [[Cell(p.kind), Cell(str(p.folder)), Cell(p.message)] for p in collection.problems[:MOST]]
    content = template(REPORT, code=_code).render(
        title=heading,
        lead=next(iter(parts[0].audits[0].sentences), None) if one_audit else None,
        flags_page=flags_page(path),
        counts=collection.counts(),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=[(part, provenance(part.runs)) for part in parts],
        left_out=len(collection.problems),
        problems=Table("problems", "", ["what", "folder", "why"], problems),
        completed=len(collection.runs),
        runs=_runs(collection.runs),
        most=MOST,
    )
    files.write(path, content)


def flags_page(path: Path) -> str | None:
    """The path from a report inside a checkout to docs/flags.md; otherwise None, so that no local path is published."""
    root = Path(__file__).resolve().parents[2]
    page, folder = root / "docs" / "flags.md", path.resolve().parent
    return os.path.relpath(page, folder) if page.is_file() and folder.is_relative_to(root) else None


def provenance(runs: Sequence[Run]) -> str:
    """Which runs, and the commands that made them."""
    commands = [code(command) for command in dict.fromkeys(run.command for run in runs if run.command)]
    made = f", made by {_first(commands)}" if commands else ""
    folders = _first(sorted({str(run.folder.parent).replace("`", "'") for run in runs}))
    return f"{len(runs)} run{'s' * (len(runs) != 1)} in {folders}{made}."


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _runs(runs: Sequence[Run]) -> Table:
    queries, rows = [*LISTED, *listed()], []
    for run in runs[:MOST]:
        result = run.result
        known = Cell(run.folder.name), Cell(result.method), Cell(str(result.seed), result.seed)
        measured = (Cell.of(result.records.value(*of)) for of in queries)
        rows.append([*known, *measured, Cell(", ".join(result.flags))])
    return Table("runs", "", ["run folder", "method", "seed", *(of.name for of in queries), "flags"], rows)


def _code(text: str) -> Markup:
    """Escaped, with `...` as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # Markup would escape the tags too


def markdown(parts: Iterable[Section], pictures: dict[str, str], command: str) -> str:
    """The tables as one document, each with its command; `pictures` maps each picture to its path."""
    lines = ["# Results", "", f"Written by `{command}`. Do not edit by hand.", ""]
    for part in parts:
        lines += [*(table.markdown() for table in part.every_table), f"Source: {_source(part.runs)}", ""]
        lines += [plot.markdown(pictures[plot.name]) for plot in part.every_plot if plot.name in pictures]
    return "\n".join(lines)


def _source(runs: Sequence[Run]) -> str:
    """`provenance` without local paths; outside of the code, between its backticks, as Markdown."""
    text = re.sub(r"(?<=[= ])[/~][^\s`,]*", "<folder>", provenance(runs))
    return "`".join(part if i % 2 else markdown_of(part) for i, part in enumerate(text.split("`")))
