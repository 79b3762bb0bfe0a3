"""The reference pages are complete: every attacker, method, configuration key and measure that exists is on one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.repository import ROOT

from immunization.attacks import ProbeAttack
from immunization.runs.records import query_of

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "docs")
    import references

MEASURES = (ROOT / "docs" / "measures.md").read_text()
CONF = ROOT / "conf"


def leaves(content: dict, above: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{key}.")
        elif key not in ("_target_", "_partial_", "defaults"):
            yield f"{above}{key}"


def test_every_group_is_on_the_page() -> None:
    """But named set-ups, grids, and what stands behind `--help`; defaults by data set have a page of their own."""
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert groups - {"experiment", "hparams", "hydra", "sweeps"} == set(references.GROUPS)


@pytest.mark.parametrize("group", references.GROUPS)
def test_every_key_of_the_configuration_is_on_its_page(group: str) -> None:
    page = references.configuration()
    for path in (CONF / group).rglob("*.yaml"):
        name = path.relative_to(CONF / group).with_suffix("").as_posix()
        if "/" in name and not name.startswith("common/"):
            continue  # variants of an option, such as optimizer=table1_closest/...
        title = f"### Shared: `{name}`" if "/" in name else f"### `{group}={name}`"
        section = page[page.index(f"## {group}\n") :].partition(f"{title}\n")[2].partition("\n### ")[0]
        for key in leaves(yaml.safe_load(path.read_text()) or {}):
            first = key.partition(".")[0]
            assert re.search(rf"`[\w.<>]*{first}(\.[\w.]+)?`", section), (title, key)


def test_values_of_every_run_are_on_the_page() -> None:
    page = references.configuration()
    own = {key for key in leaves(yaml.safe_load((CONF / "config.yaml").read_text())) if not key.startswith("hydra.")}
    assert {key for key in own if f"| `{key}` |" not in page} == set()


def test_every_attacker_has_a_row_that_says_what_it_reads() -> None:
    table = references.attackers()
    attackers = {path.stem for path in (CONF / "attack").glob("*.yaml")} - {*references.SUITES}
    assert len(attackers) > 40
    for name in attackers:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", table, re.M)
        assert all(cell.strip() for cell in row.strip("|").split("|"))
    assert "`standard`" in re.search(r"^\| `read_weights` .*$", table, re.M)[0]
    assert "nothing" in re.search(r"^\| `raw_inputs` .*$", table, re.M)[0]


def test_the_page_names_every_attacker_without_an_intercept() -> None:
    said = re.search(r"\*\*Intercepts\.\*\*.*? have none either", (ROOT / "docs" / "attackers.md").read_text(), re.S)[0]
    attackers = {path.stem: path for path in (CONF / "attack").glob("*.yaml") if path.stem not in references.SUITES}
    without = {name for name, path in attackers.items() if issubclass(references.target(path), ProbeAttack)}
    assert set(re.findall(r"`(\w+)`", said)) == without


def test_every_method_has_a_section_with_its_idea_and_options() -> None:
    page = references.methods()
    for path in (CONF / "method").glob("*.yaml"):
        section = page.partition(f"## `{path.stem}`\n")[2].partition("\n## ")[0]
        assert len(section) > 100
        own = (key for key in yaml.safe_load(path.read_text()) if key not in ("defaults", "_target_"))
        assert all(f"| `method.{key}` |" in section for key in own)


def template(node: ast.expr) -> str | None:
    """A measure's name as a pattern; None where the code passes one on."""
    if isinstance(node, ast.JoinedStr):
        return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in node.values)
    return re.escape(node.value) if isinstance(node, ast.Constant) else None


def put_in(path: Path) -> Iterator[str]:
    """Measures by `measures.put("name", ...)` and `Record("name", ...)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("put", "Record") and (name := template(node.args[0])):
                yield name


def explained() -> list[str]:
    """Patterns of the names in the first column of the page's tables."""
    names = (name for row in re.findall(r"^\| (`.*?) \|", MEASURES, re.M) for name in re.findall("`([^`]+)`", row))
    return [re.sub("<.*?>", ".+", name) for name in names]


def test_every_measure_is_explained() -> None:
    files = (path for room in ("attacks", "evaluation") for path in (ROOT / "immunization" / room).rglob("*.py"))
    put = {name for path in files for name in put_in(path)}
    assert len(put) > 40
    known = explained()
    assert {name for name in put if not any(re.fullmatch(name, k) or re.fullmatch(k, name) for k in known)} == set()


def test_measures_of_the_leaderboard_are_explained() -> None:
    rows = [min(folder.glob("*.json")) for folder in (ROOT / "leaderboard" / "rows").iterdir() if folder.is_dir()]
    names = {name for row in rows for name in yaml.safe_load(row.read_text())["metrics"]}
    assert len(names) > 30
    known = explained()
    measures = {query_of(name).measure for name in names}
    assert {measure for measure in measures if not any(re.fullmatch(k, measure) for k in known)} == set()
