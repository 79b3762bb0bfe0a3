"""How values are shown, on the screen, in tables and in pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from immunization.runs.numbers import number

if TYPE_CHECKING:
    from jinja2 import Template

NONE = "–"  # noqa: RUF001
"""Shown for a missing value."""
PRIMARY = {"accuracy": "accuracy", "r2": "R²", "loss": "loss"}
"""What may be measured on the primary task, and how it is called."""


@dataclass
class Cell:
    """A value as text, and as a number to sort by where there is one, with its standard deviation over seeds.

    `words`: the text says more than that number. `strong` marks the best of a column. `link`: where a page leads to.
    """

    text: str
    value: float | None = None
    strong: bool = False
    spread: float | None = None
    words: bool = False
    link: str = ""

    @classmethod
    def of(cls, value: float | None, form: str = "") -> Self:
        """A number in three digits, or in `form`, a template; a dash for none."""
        return cls(NONE) if value is None else cls(form.format(value) if form else number(value), value)


def markdown(text: str) -> str:
    """`text` in a line of Markdown, where it makes no HTML, link, attributes or further line."""
    return " ".join(text.splitlines()).replace("<", "&lt;").replace("](", "]&#40;").replace("{", "&#123;")


def code(text: str) -> str:
    """`text` as code in a line of Markdown."""
    return f"`{' '.join(text.splitlines()).replace('`', chr(39))}`"


def spreadsheet(text: str) -> str:
    """`text` in a line of a CSV file, which programs for tables do not take for a formula."""
    text = " ".join(text.splitlines())
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def template(name: str, **filters: Callable[..., object]) -> "Template":
    """The page `name` of this folder, to be filled in; values are escaped in HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # slow to load: most runs write no page

    html = name.endswith(".html")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
    environment.filters |= filters
    return environment.get_template(name)
