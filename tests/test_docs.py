"""What the documents say is what the project does: examples run, tables are current, links resolve."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.pages import missing, outputs, printed
from helpers.repository import ROOT

import immunization
from immunization.config import compose
from immunization.runner import run

pytestmark = pytest.mark.trains

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


README_ROWS = re.findall(r"^\| `?(\w+)`? \| (\.\d+) \| (\.\d+) \|$", (ROOT / "README.md").read_text(), re.M)
"""Method, accuracy by gradient descent and by whitening."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_tests_that_pages_name_exist() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", pages)) - {"test_resnet", "test_rows"}  # a net, and a measure
    assert len(named) > 40
    assert named <= set(re.findall(r"def (test_\w+)", tests))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_have_a_text_and_python_parses(page: Path) -> None:
    text = page.read_text()
    assert "![](" not in text
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        ast.parse(dedent(block))


def test_make_targets_that_pages_name_exist() -> None:
    named = set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)", "".join(page.read_text() for page in PAGES), re.M))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {one or other for one, other in named} <= set(targets)
    assert len(named) >= 5


def test_the_page_of_the_python_interface_is_complete() -> None:
    shown = re.findall(r"^::: immunization\.[\w.]*?(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    assert sorted(shown) == immunization.__all__


def test_the_linter_has_the_words_of_the_style_sheet() -> None:
    """`make lint` runs codespell with docs/words.txt, a word and what to write for it in each line."""
    style = (ROOT / "docs" / "contributing.md").read_text().partition("**Words.**")[2]
    table, _, idioms = style.partition("`make lint`")[0].partition("**No idioms**")
    named = {*re.findall("`([^`]+)`", "".join(row.split("|")[3] for row in re.findall(r"^\|.*\|$", table, re.M)))}
    named |= {*re.findall("`([^`]+)`", idioms)}
    words = dict(line.split("->") for line in (ROOT / "docs" / "words.txt").read_text().splitlines())
    assert len(named) > 10
    assert named <= set(words)


def test_hyperparameters_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("hyperparameters", ROOT / "docs" / "hyperparameters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "hyperparameters.md").read_text() == module.page()


@pytest.mark.parametrize("name", ["attackers", "configuration", "methods", "reference"])
def test_generated_pages_are_current(name: str) -> None:
    """`PYTHONPATH=. python docs/references.py` writes them anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        references = importlib.import_module("references")
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert len(references.MARK.findall(text)) == 1
    assert references.filled(text) == text, "docs are not current: PYTHONPATH=. python docs/references.py"


def commands(page: Path) -> list[list[str]]:
    """Every `python launch.py` of a page, its first job where it is a multirun; loops are left out."""
    found = re.findall(r"python launch\.py ([^`\n]+)", page.read_text().replace("\\\n", " "))
    known = {"<method>": "closed_form", "<file>": "seeds"}
    split = []
    for line in found:
        line = re.sub("<[^>]*>", lambda place: known.get(place[0], "placeholder"), line.partition("  #")[0])
        line = re.sub(r"(?:tag\(log,)?interval\((\d+),\d+\)+|range\((\d+),\d+\)", r"\1\2", line.partition(";")[0])
        words = shlex.split(line)
        multirun = "-m" in words or any(word.startswith(("sweeps=", "sweeper=")) for word in words)
        if not any("..." in word or "$" in word or word.startswith("--") for word in words):
            jobs = (word.partition(",")[0] if multirun and "[" not in word else word for word in words)
            split.append([word for word in jobs if word not in ("-m", "launcher=ray")])  # which needs Ray
    return split


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_compose(page: Path) -> None:
    for command in commands(page):
        compose(command)


def test_the_readme_has_commands() -> None:
    assert len(README_ROWS) == 6
    assert len(commands(ROOT / "README.md")) >= 10


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [(page.name, command, shown) for page in PAGES for command, shown in outputs(page)],
)
def test_outputs_are_what_the_commands_print(page: str, command: str, shown: list[str]) -> None:
    """Numbers within 5 %, which is more than processors differ by."""
    assert missing(shown, printed(command)) is None


def test_lines_that_differ_are_found() -> None:
    lines = ["a run", "(i) 1.88", "seconds 3", "RIR 7.19"]
    assert missing(["(i) 1.9", "...", "RIR 7.2"], lines) is None
    assert missing(["(i) 1.88", "RIR 7.19"], lines) == "RIR 7.19"
    assert missing(["(ii) 1.88"], lines) == "(ii) 1.88"
    assert missing(["(i) 2.2"], lines) == "(i) 2.2"


@pytest.mark.slow
@pytest.mark.parametrize("row", README_ROWS, ids=lambda row: row[0])
def test_the_table_of_the_readme_is_what_its_command_gives(row: tuple[str, str, str], tmp_path: Path) -> None:
    method, descent, whitening = row
    options = [f"method={method.replace('none', 'identity')}", "attack=[linear_probe,adam,whitened_probe]"]
    metrics = run([*options, "tracker=none", "figures=false"], folder=tmp_path).metrics
    for attack, shown in (("linear_probe", descent), ("whitened_probe", whitening)):
        assert metrics[f"attack/{attack}/final"] == pytest.approx(float(shown), abs=1.5 / 72)  # one of 72 images


def test_python_example_of_the_readme(tmp_path: Path) -> None:
    result = run(["method=closed_form", "dataset.common_range=true", "tracker=none", "figures=false"], folder=tmp_path)
    assert result.metrics["rir"] == pytest.approx(result.metrics["ceiling/rir"], rel=1e-6)


def test_every_picture_of_the_pages_has_a_command() -> None:
    """docs/pictures.py, a benchmark, or the command that writes the pages of results and leaderboard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        drawn = {f"{name}.png" for name in importlib.import_module("pictures").PICTURES}
    text = "".join(page.read_text() for page in PAGES) + (ROOT / "RESULTS.md").read_text()
    named = {Path(target).name: target for target in re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", text)}
    benchmarks = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py")) + text
    others = {name for name, target in named.items() if "/results/" in target or "/leaderboard/" in target}
    others |= {name for name in named if f"=docs/images/{name}" in benchmarks or f'"{name}"' in benchmarks}
    assert {*named} - drawn - others == set()
    assert drawn <= {*named}
    kept = {path.name for path in (ROOT / "docs" / "images").rglob("*.png")}
    assert kept == {*named}
