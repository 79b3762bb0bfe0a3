"""What the documents say is what the project does: examples run, tables are current, links resolve."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from helpers.repository import ROOT

from immunization.config import compose
from immunization.runner import run

pytestmark = pytest.mark.trains

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_tests_that_pages_name_exist() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", pages)) - {"test_resnet"}  # a net
    assert len(named) > 40
    assert named <= set(re.findall(r"def (test_\w+)", tests))


def test_hyperparameters_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("hyperparameters", ROOT / "docs" / "hyperparameters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "hyperparameters.md").read_text() == module.page()


def commands(page: Path) -> list[list[str]]:
    """Every `python launch.py` of a page, its first job where it is a multirun; loops are left out."""
    found = re.findall(r"python launch\.py ([^`\n]+)", page.read_text().replace("\\\n", " "))
    known = {"<method>": "closed_form", "<file>": "seeds"}
    split = []
    for line in found:
        line = re.sub("<[^>]*>", lambda place: known.get(place[0], "placeholder"), line.partition("  #")[0])
        words = shlex.split(re.sub(r"range\((\d+),\d+\)", r"\1", line.partition(";")[0]))
        multirun = "-m" in words or any(word.startswith("sweeps=") for word in words)
        if not any("..." in word or "$" in word or word.startswith("--") for word in words):
            jobs = (word.partition(",")[0] if multirun and "[" not in word else word for word in words)
            split.append([word for word in jobs if word != "-m"])
    return split


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_compose(page: Path) -> None:
    for command in commands(page):
        compose(command)


def test_the_readme_has_commands() -> None:
    assert len(commands(ROOT / "README.md")) >= 10


def test_the_table_of_the_readme_is_what_the_default_run_prints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """To the digit, on every processor; seconds, folder and footnotes follow."""
    run(["tracker=none", "figures=false"], folder=tmp_path)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (shown,) = (block.splitlines() for block in blocks("text"))
    assert printed[: len(shown)] == shown


def test_python_example_of_the_readme(tmp_path: Path) -> None:
    result = run(["method=closed_form", "dataset.common_range=true", "tracker=none", "figures=false"], folder=tmp_path)
    assert result.metrics["rir"] == pytest.approx(result.metrics["ceiling/rir"], rel=1e-6)
