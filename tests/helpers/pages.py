"""The commands that pages show, and their outputs: a block `sh` whose next block is `text`."""

import re
import shlex
from functools import cache
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory

from helpers.commands import launched

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
GAP = "..."
"""A line that stands for others, which the page leaves out."""


def outputs(page: Path) -> list[tuple[str, list[str]]]:
    """Every command that a page shows with its output, and the lines of that."""
    pairs = re.findall(r"```sh\n([^`]*?)```\n\n```text\n(.*?)```", page.read_text(), re.S)
    return [(command.strip().splitlines()[-1], text.splitlines()) for command, text in pairs]


@cache
def printed(command: str) -> list[str]:
    """What `python launch.py ...` prints, without W&B and pictures."""
    _, script, *arguments = shlex.split(command, comments=True)
    assert script == "launch.py", command
    with TemporaryDirectory() as folder:
        ended = launched(*arguments, "tracker=none", "figures=false", cwd=Path(folder))
    assert ended.returncode == 0, ended.stderr
    return [line.rstrip() for line in ended.stdout.splitlines()]


def same(shown: str, line: str, within: float) -> bool:
    """Whether two lines have the same words, and numbers that differ by at most the share `within`."""
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (shown, line)]
    if words[0] != words[1]:
        return False
    first, second = ([float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (shown, line))
    return all(isclose(a, b, rel_tol=within, abs_tol=within / 2) for a, b in zip(first, second, strict=True))


def missing(shown: list[str], lines: list[str], within: float = 0.05) -> str | None:
    """The first line of `shown` that does not follow in `lines`; GAP allows others between, and so does the start."""
    place, gap = 0, True
    for text in shown:
        if text == GAP:
            gap = True
            continue
        fits = (i for i in range(place, len(lines) if gap else place + 1) if same(text, lines[i], within))
        if (found := next(fits, None)) is None:
            return text
        place, gap = found + 1, False
    return None
