"""Every library that the package imports is declared, so that no installation works by chance."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("launchers", "lora", "parquet", "search")
"""Extras that the package imports where they are there."""

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
