"""Blocks of RESULTS.md and docs/results, from made-up runs, and the multiruns of sweeps/results.sh."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.made_runs import make_run
from helpers.repository import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from immunization.config import build, compose
from immunization.errors import DataError
from immunization.results import blocks
from immunization.results.__main__ import main
from immunization.results.tables import pair_counts
from immunization.runs.result import Result

AUTHORS = {"authors/rir": 20.0, "authors/ratio_harmful": 10.0, "authors/ratio_primary": 0.5}
THETA0 = {"authors/rir_theta0": 30.0, "authors/ratio_harmful_theta0": 15.0, "authors/ratio_primary_theta0": 0.5}
PAGE = """# Title

By hand.

<!-- results pairs: {} -->
stale
<!-- /results -->

<!-- results nothing: tables -->
kept
<!-- /results -->
"""


@pytest.fixture
def runs(tmp_path) -> Path:
    """Pairs of MNIST in the authors' protocol, a failed run among them, and digits of two protocols."""
    pairs = {"protocol": "authors", "dataset": "mnist"}
    for method, rir in {"condition_number": 20.0, "opt_kappa": 5.0}.items():
        for a, b in ((0, 1), (0, 2), (1, 2)):
            measures = AUTHORS | THETA0 | {"authors/rir": rir / (1 + a), "steps_ratio/harmful": None}
            make_run(tmp_path / "runs/pairs" / f"{method}{a}{b}", method, pair=(a, b), measures=measures, **pairs)
    make_run(tmp_path / "runs/pairs/9_x", "opt_kappa", seed=3, status="failed", error="no", **pairs)
    environment = {"git": {"commit": "0123456789abcdef", "dirty": True}}
    (tmp_path / "runs/pairs/opt_kappa01/environment.json").write_text(json.dumps(environment))
    for i, protocol in enumerate(("one_vs_rest", "authors")):
        make_run(tmp_path / "runs/mixed" / f"{i}_x", ("condition_number", "r_ill_only")[i], protocol=protocol)
    return tmp_path / "runs"


def filled(runs: Path, words: str, name: str = "pairs") -> str:
    """What the block of a page becomes; `nothing` below it stays."""
    page = runs.parent / "docs" / "page.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(PAGE.format(words).replace("results pairs", f"results {name}"))
    main(["pages", str(page), "--runs", str(runs), "--figures", str(runs.parent / "images")])
    text = page.read_text()
    assert text.startswith(f"# Title\n\nBy hand.\n\n<!-- results {name}: {words} -->\n\n")
    assert text.endswith("\n\n<!-- /results -->\n\n<!-- results nothing: tables -->\nkept\n<!-- /results -->\n")
    assert "stale" not in text
    return text


def cells(text: str) -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines]


def test_a_block_says_how_many_runs_it_is_from_and_which_code_made_them(runs, capsys):
    assert "\n6 runs, 1 failed; code 012345678 with changes, unknown.\n" in filled(runs, "runs")
    assert "pairs is written" in (said := capsys.readouterr().out)
    assert "nothing stays as it is, for want of completed runs" in said


def test_the_summary_has_a_row_for_each_setting(runs):
    header, *rows = cells(filled(runs, "summary"))
    assert header == ["method", "RIR", "Def. 3.1 holds", "harmful steps", "primary steps", "primary, before → after"]
    assert rows == [
        ["opt_kappa", "10", "100 %", "–", "1", "accuracy 0.950 → 0.950"],  # noqa: RUF001
        ["condition_number", "10", "100 %", "–", "1", "accuracy 0.950 → 0.950"],  # noqa: RUF001
    ]


def test_pairs_are_counted_beside_the_papers(runs):
    (group,) = blocks._groups(runs / "pairs")
    table = pair_counts(group, "name", "Title")
    assert table.header == ["method", "pairs", "RIR > 1", "RIR > 2", "RIR > 10", "RIR > 100", "paper, Fig. 2"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["opt_kappa", "3", "3", "3", "0", "0", "58 of 90"],
        ["condition_number", "3", "3", "3", "2", "0", "90 of 90"],
    ]
    (group,), *_ = blocks._groups(runs / "mixed")
    assert pair_counts([group], "name", "Title") is None


def test_tables_and_figures(runs):
    text = filled(runs, "tables by=authors/rir_theta0 figure2")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Every measure",
        "## Every measure, authors/rir\\_theta0",
        "## Title: pairs, as Fig. 2 counts them",
        "## Title: successes",
    ]
    assert "paper RIR" in text
    assert r"theta\_0 (Eq. 17)" in text
    assert re.findall(r"\]\(([^)]+)\)", text) == ["../images/pairs_figure2.png"]
    assert [path.name for path in (runs.parent / "images").iterdir()] == ["pairs_figure2.png"]


def test_settings_of_several_groups_stand_in_one_table_without_figures(runs):
    text = filled(runs, "summary figures", "mixed")
    assert [row[0] for row in cells(text)] == ["method", "r_ill_only", "condition_number"]
    assert "![" not in text


def test_words_that_choose_nothing_are_refused(runs):
    with pytest.raises(DataError, match=r"the block of pairs asks for figure9; there are runs, summary, tables"):
        filled(runs, "figure9")


# --- The multiruns ----------------------------------------------------------------------------------------------------

SCRIPT = ["sh", str(ROOT / "sweeps" / "results.sh")]


def planned(**variables: str) -> dict[str, list[str]]:
    """The overrides of each multirun that the script would start, by its folder."""
    done = subprocess.run(SCRIPT, env=os.environ | {"PYTHON": "echo"} | variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    commands = [shlex.split(line)[2:] for line in done.stdout.splitlines() if line.startswith("launch.py -m")]
    return {words[-1].removeprefix("hydra.sweep.dir="): words[: words.index("launcher=joblib")] for words in commands}


def test_every_page_has_its_multiruns():
    commands: dict[str, list[str]] = {}
    for folder, words in planned().items():
        commands.setdefault(Path(folder).parent.name, []).append(" ".join(words))
    there = {}
    for page in (ROOT / "docs" / "results").glob("*.md"):
        if found := blocks.BLOCK.search(text := page.read_text()):
            assert found[2] == page.stem
            there[page.stem] = re.findall(r"^python launch.py -m (.*) launcher=joblib tracker=none$", text, re.M)
    assert there == commands
    assert set(re.findall(r"<!-- results (\w+):", (ROOT / "RESULTS.md").read_text())) == commands.keys()


@pytest.mark.parametrize("quick", ["", "1"], ids=["whole", "quick"])
def test_every_multirun_composes_and_builds_its_methods(quick):
    parser, seen = OverridesParser.create(), set()
    for words in planned(QUICK=quick, HOUSE_PRICES="/data").values():
        fixed, methods = [], [None]
        for override in parser.parse_overrides(words):
            values = [*override.sweep_string_iterator()] if override.is_sweep_override() else [override.input_line]
            if override.get_key_element() == "method":
                methods = [value.rpartition("=")[2] for value in values]
            else:
                first = f"{override.get_key_element()}={values[0]}" if override.is_sweep_override() else values[0]
                fixed.append(first)
        for method in methods:
            if method in seen and method != methods[0]:
                continue
            seen.add(method)
            config = compose([*fixed, *([f"method={method}"] if method else [])])
            assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            assert method in (None, build(config, "method").name)


def test_sections_are_chosen_by_name():
    done = subprocess.run([*SCRIPT, "mnits"], env=os.environ | {"PYTHON": "echo"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no section mnits; ")


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    variables = os.environ | {"PYTHON": sys.executable, "QUICK": "1", "RUNS": str(tmp_path / "runs")}
    results = (tmp_path / "runs" / "digits" / "table2").glob
    process = subprocess.Popen([*SCRIPT, "digits"], env=variables, start_new_session=True)
    while process.poll() is None and not list(results("*/result.json")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    assert process.wait(60) == 130
    done = {path: path.stat().st_mtime_ns for path in results("*/result.json") if Result.completed_in(path.parent)}
    said = subprocess.run([*SCRIPT, "digits"], env=variables, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list(results("*/result.json"))) == 6
    assert "condition_number" in (tmp_path / "runs" / "report" / "report.html").read_text()
