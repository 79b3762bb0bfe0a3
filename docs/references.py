"""Reference tables of the pages, from the code: `PYTHONPATH=. python docs/references.py` writes them anew.

They are between the lines `<!-- generated: attackers -->` and `<!-- /generated -->` of a page. The site makes them anew
when it is built.
"""

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import yaml

import immunization
from immunization import attacks as of_attacks
from immunization import methods as of_methods
from immunization.attacks import Attack, FineTune, FreshPart, ProbeAttack
from immunization.checks import CONF

GROUPS = (
    *("dataset", "model", "method", "optimizer", "scheduler", "evaluation"),
    *("attack", "tracker", "launcher", "sweeper", "debug"),
)
SUITES = ("quick", "standard", "nightly", "probes", "depth", "depth_vit")
SOURCES = {
    "condition_number": "Zheng et al., ICML 2025, Algorithm 1",
    "released_condition_number": "the released code of Zheng et al. (2025)",
    "r_ill_only": "Zheng et al. (2025), an ablation",
    "opt_kappa": "Zheng et al. (2025), a baseline",
    "imma": "Zheng and Yeh, ECCV 2024",
    "clamp": "Sarker et al., CVPR 2026, from notes by others",
    "sophon": "Deng et al., IEEE S&P 2024, arXiv 2404.12699",
    "encoderlock": "EncoderLock, NDSS 2025, arXiv 2411.12508",
    "tar": "TAR, ICLR 2025, arXiv 2408.00761",
    "ntl": "non-transferable learning, ICLR 2022",
}
"""Of published methods; the others are this project's."""
IDEAS = {
    "condition_number": "make the harmful task ill-conditioned and keep the primary task well-conditioned, so that "
    "gradient descent on a probe is slow on the harmful task and fast on the primary task.",
    "released_condition_number": "`condition_number` exactly as the authors released it, for reproduction.",
    "r_ill_only": "only make the harmful task ill-conditioned. Nothing protects the primary task.",
    "opt_kappa": "minimize the difference of the two condition numbers directly, without regularizers.",
    "closed_form": "compute the linear map with the largest possible RIR. No training.",
    "learning_curve": "train a linear map so that a harmful probe learns slowly and a primary probe quickly.",
    "learning_curve_net": "the same objective as `learning_curve`, for layers of a net instead of a linear map.",
    "decoys": "[squeeze](glossary.md#squeeze) the directions in which the harmful probe learns, and hide them among "
    "random ones.",
    "forget": "train the last block so that it maps all harmful inputs to almost the same features.",
    "forget_blocks": "`forget` in every trained block, against attackers who read earlier blocks.",
    "identity": "change nothing.",
    "imma": "simulate an attacker who fine-tunes, and make the result bad at the harmful task.",
    "clamp": "simulate an attacker who trains a head, and make this training start badly and converge slowly.",
    "sophon": "simulate an attacker who fine-tunes, and make the harmful classes improbable after each of the steps.",
    "encoderlock": "change few weights: those that matter for the harmful task and not for the primary task.",
    "tar": "simulate an attacker who fine-tunes, and make the predictions uncertain after each of the steps.",
    "ntl": "make the harmful task's loss large and move its features away from those of the primary task.",
}
"""What each method does, in one sentence."""


def options(path: Path) -> Iterator[tuple[str, str, str]]:
    """Key, default and comment of every option in a YAML file; keys of nested options have dots."""
    text = path.read_text()
    lines = text.splitlines()

    def walk(node: yaml.Node, above: str) -> Iterator[tuple[str, str, str]]:
        for key, value in node.value:
            name, place = f"{above}{key.value}", value.end_mark
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from walk(value, f"{name}.")
            elif name != "defaults" and key.value not in ("_target_", "_partial_"):
                shown = " ".join(text[value.start_mark.index : place.index].split())
                if isinstance(value, yaml.CollectionNode) and not value.flow_style:
                    shown = "(several lines)"
                rest = lines[place.line][place.column :] if place.line < len(lines) else ""
                comment = re.match(r"\s*#\s*(.*)", rest)
                yield name, shown, comment[1] if comment else ""

    node = yaml.compose(text)
    if isinstance(node, yaml.MappingNode):
        yield from walk(node, "")


def defaults(path: Path) -> list[str]:
    """The files that a YAML file of a group takes its other keys from, relative to the group."""
    entries = (yaml.safe_load(path.read_text()) or {}).get("defaults", [])
    return [entry.partition("@")[0] for entry in entries if isinstance(entry, str) and entry != "_self_"]


def about(path: Path) -> str:
    """What a file of conf/ is for: its first comment without the package, or the comment of its only key."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").strip())
    if path.parent.name == "evaluation":
        text = path.read_text().splitlines()[0].partition(": # ")[2]
        lines = [f"{text[0].upper()}{text[1:]}."]
    elif path.parent.name == "method":
        lines = [f"[What it does](methods.md#{path.stem}).", *lines]
    return " ".join(lines)


def prose(text: str) -> str:
    """Text whose angle brackets stay, outside of `code`, where Markdown leaves them as they are."""
    parts = text.split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def cell(text: str) -> str:
    """The same in a cell of a table."""
    return prose(text).replace("|", r"\|")


def prefix(path: Path, group: str) -> str:
    """What comes before the keys of a file on the command line."""
    if path.parent.name == "common":
        return "suite." if path.stem == "suite" else f"{group}.<name>." if group == "attack" else f"{group}."
    package = re.search(r"^# @package (\S+)", path.read_text(), re.M)
    place = package[1] if package else group
    return "" if place == "_global_" else f"{place}."


def keys(path: Path, before: str, without: str = "\0") -> list[str]:
    """The table of the options of a file; empty for none."""
    found = [(key, value, comment) for key, value, comment in options(path) if not key.startswith(without)]
    rows = [f"| `{before}{key}` | {cell(f'`{value}`')} | {cell(comment)} |" for key, value, comment in found]
    return ["", "| key | default | meaning and range |", "|---|---|---|", *rows, ""] if rows else [""]


def configuration() -> str:
    """Every key of every file in conf/, with its default and comment."""
    lines = ["## Values of every run", *keys(CONF / "config.yaml", "", "hydra.")]
    for group in GROUPS:
        lines += [f"## {group}", ""]
        files = sorted((CONF / group).glob("common/*.yaml")) + sorted((CONF / group).glob("*.yaml"))
        for path in files:
            name = path.relative_to(CONF / group).with_suffix("").as_posix()
            lines += [f"### `{group}={name}`" if "/" not in name else f"### Shared: `{name}`", "", prose(about(path))]
            if others := defaults(path):
                lines += ["", "Also the keys of " + ", ".join(f"`{other}`" for other in others) + "."]
            lines += keys(path, prefix(path, group))
    return "\n".join(lines)


def target(path: Path) -> type[Any] | None:
    """The class that a file of conf/attack or conf/method configures, its own or that of the file it builds on."""
    if named := (yaml.safe_load(path.read_text()) or {}).get("_target_"):
        module = of_methods if path.parent.name == "method" else of_attacks
        return getattr(module, named.rpartition(".")[2])
    parents = (path.parent / f"{other}.yaml" for other in defaults(path) if not other.startswith("common/"))
    return next((found for parent in parents if (found := target(parent))), None)


def reads(attack: type[Attack]) -> tuple[str, str]:
    """What an attacker reads of the released model, and what it trains."""
    if attack.reference:
        trains = "a fresh net" if issubclass(attack, FineTune) else "a regression"
        return "nothing, or only layers that the defense leaves as they are", trains
    if issubclass(attack, FreshPart):
        return "all layers but the immunized ones", "the immunized layers from random weights, and a head"
    if issubclass(attack, FineTune):
        return "all weights", "layers of the net, and a head"
    if attack.reads_blocks:
        return "outputs of the blocks", "a regression"
    if attack.__name__ in ("ReadWeights", "Spread"):
        return "features, and the weights of the map", "a regression"
    steps = issubclass(attack, ProbeAttack) and attack.__name__ != "ClosedFormProbe"
    return "features", "a linear head, in steps" if steps else "a classifier, without steps"


def attackers() -> str:
    """One row an attacker: what it does, reads and trains, and its suites."""
    suites = {suite: members(suite) for suite in SUITES}
    lines = ["| `attack=` | what it does | reads | trains | suites |", "|---|---|---|---|---|"]
    for path in sorted((CONF / "attack").glob("*.yaml")):
        if path.stem in SUITES:
            continue
        read, trained = reads(target(path))
        within = ", ".join(f"`{suite}`" for suite, names in suites.items() if path.stem in names)
        lines.append(f"| `{path.stem}` | {cell(about(path))} | {read} | {trained} | {within or 'none'} |")
    return "\n".join(lines)


def members(suite: str) -> set[str]:
    """The attackers of a suite, those of the suites it builds on included."""
    found = set()
    for entry in defaults(CONF / "attack" / f"{suite}.yaml"):
        found |= members(entry) if entry in SUITES else {entry}
    return found


def methods() -> str:
    """One section a method: its docstring and options."""
    lines = []
    for path in sorted((CONF / "method").glob("*.yaml")):
        source = SOURCES.get(path.stem, "this project")
        text = prose(cleandoc(target(path).__doc__ or ""))
        lines += [f"## `{path.stem}`", "", f"**Idea:** {IDEAS[path.stem]} *Source: {source}.*", "", text]
        if others := defaults(path):
            lines += [
                "",
                "Also the keys of " + ", ".join(f"[`{other}`](configuration.md#method)" for other in others) + ".",
            ]
        lines += keys(path, "method.")
    return "\n".join(lines)


def python() -> str:
    """One row a name of `import immunization`: its summary, and its source."""
    lines = ["| `immunization.` | what it does | source |", "|---|---|---|"]
    for name in immunization.__all__:
        found = getattr(immunization, name)
        summary = cell(cleandoc(found.__doc__).partition("\n\n")[0].replace("\n", " "))
        path = f"{found.__module__.replace('.', '/')}.py"
        lines.append(f"| `{name}` | {summary} | [{path}](../{path}) |")
    return "\n".join(lines)


TABLES = {made.__name__: made for made in (configuration, attackers, methods, python)}
MARK = re.compile(r"<!-- generated: (\w+) -->.*?<!-- /generated -->", re.S)


def filled(markdown: str) -> str:
    """A page with its generated tables."""
    return MARK.sub(lambda m: f"<!-- generated: {m[1]} -->\n\n{TABLES[m[1]]()}\n\n<!-- /generated -->", markdown)


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(filled(page.read_text()))
