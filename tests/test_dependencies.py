"""Every library that the package imports is declared, so that no installation works by chance."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("launchers", "lora", "parquet", "search", "text")
"""Extras that the package imports where they are there."""

LOWEST = ROOT / ".ci" / "lowest.txt"

FILES = [ROOT / "launch.py", *(ROOT / "immunization").rglob("*.py")]


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def canonical(requirement: str) -> str:
    """The name of a distribution, without its versions, in the one spelling that pip compares."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=\[ ]", requirement)[0]).lower()


def test_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {
        canonical(text) for text in [*project["dependencies"], *(text for name in OPTIONAL for text in extras[name])]
    }
    modules = set().union(*map(imported, FILES)) - set(sys.stdlib_module_names) - {"immunization"}
    distributions = packages_distributions()
    missing = {name for name in modules if not declared & {canonical(text) for text in distributions.get(name, [name])}}
    assert not missing
    assert {"torch", "yaml", "PIL"} <= modules


def test_the_lowest_versions_are_those_that_are_tried():
    """Every library has one, and `make test-lowest` installs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(text for name in ("test", "lora", "notebook", "onnx", "search") for text in extras[name]),
    ]
    wanted = [text for text in wanted if not text.startswith("immunization[")]
    floors = {canonical(text): re.search(r">=([\w.]+)", text)[1] for text in wanted}
    lines = (line.partition("#")[0].strip() for line in LOWEST.read_text().splitlines())
    assert dict(line.split("==") for line in lines if line) == floors
    assert {"torch": "2.10", "pillow": "10.3"}.items() <= floors.items()
