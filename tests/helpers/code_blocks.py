"""The code blocks of the pages."""

import re
from pathlib import Path
from typing import NamedTuple

from helpers.repository import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("sweeps", "examples")),
]
BLOCK = re.compile(r"(?:^\*(Needs: [^\n]+\.)\*\n\n)?^```(\w*)\n(.*?)^```$(?=(\n\n```text$)?)", re.S | re.M)


class Block(NamedTuple):
    """`needs`: the line before it that says what it needs; `output`: whether the next block is what it prints."""

    page: str
    language: str
    code: str
    needs: str | None
    output: bool

    @property
    def lines(self) -> list[str]:
        """Commands without comments."""
        joined = self.code.replace("\\\n", " ").splitlines()
        return [command for line in joined if (command := re.sub(r"\s+# .*", "", line).strip())]


def blocks(page: Path) -> list[Block]:
    """Every block of a page but formulas, listings and outputs."""
    name = page.relative_to(ROOT).as_posix()
    found = [
        Block(name, language, code, needs or None, bool(output))
        for needs, language, code, output in BLOCK.findall(page.read_text())
    ]
    return [block for block in found if block.language not in ("math", "text")]
