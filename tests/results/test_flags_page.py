"""docs/flags.md: every flag that the code can raise, with an anchor that reports link to."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers.repository import ROOT

from immunization.attacks.flags import MEANINGS
from immunization.models.formats import FORMATS
from immunization.results.page import flags_page

PAGE = (ROOT / "docs" / "flags.md").read_text()


def flag_of(node: ast.expr) -> str | None:
    """The name of a flag as the page writes it, `few_samples_<role>`; None where the code passes one on.

    `of_role("name", role)` is `name`, which the page says of all that have a task at their end.
    """
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "of_role":
        node = node.args[0]
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else placeholder(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) else None


def placeholder(part: ast.expr) -> str:
    """What the page has where the code fills in a task, or the number format `form`."""
    return "<format>" if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "form" else "<role>"


def raised_in(path: Path) -> Iterator[str]:
    """Flags by `x.flag("name", ...)`, `x.withhold("name", ...)` and `x.flags["name"] = ...`."""
    for node in ast.walk(ast.parse(path.read_text())):
        found = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            found = flag_of(node.args[0]) if node.func.attr in ("flag", "withhold") else None
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "flags":
            found = flag_of(node.slice)
        if isinstance(found, str):
            yield found


def test_every_flag_is_explained() -> None:
    found = {flag for path in (ROOT / "immunization").rglob("*.py") for flag in raised_in(path)}
    found |= {f"attacks_{flag.__name__}" for flag in MEANINGS} | {"few_seeds", "other_data", "unknown_data"}
    assert len(found) >= 25
    assert {flag for flag in found if f"`{flag}` |" not in PAGE} == set()
    rows = [line for line in PAGE.splitlines() if line.startswith("| <a")]
    assert all(len(cell.strip()) > 15 for row in rows for cell in row.strip("| ").split(" | "))


def test_every_flag_has_its_anchor() -> None:
    for name in re.findall(r"</a>`([^`]+)` \|", PAGE):
        fillings = {"<role>": ("primary", "harmful", "benign"), "<format>": FORMATS}
        for part, filled in [*(item for item in fillings.items() if item[0] in name)] or [("", ("",))]:
            assert all(f'<a id="{name.replace(part, own)}"></a>' in PAGE for own in filled), name


def test_reports_link_to_it_where_it_lies_beside_them(tmp_path) -> None:
    assert flags_page(ROOT / "outputs" / "digits" / "run" / "report.html") == "../../../docs/flags.md"
    assert flags_page(tmp_path / "report.html") is None  # a path from elsewhere would tell where the copy is
