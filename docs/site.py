"""Hooks of mkdocs.yml: pages from outside docs/, links, tables generated from the code, and formulas as MathML."""

import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "results.md": "RESULTS.md",
    "grids.md": "sweeps/README.md",
    "examples.md": "examples/README.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site, and the files of the repository that they are."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")

FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.S)
"""A formula as pymdownx.arithmatex leaves it: between \\( and \\) in the text, \\[ and \\] on lines of its own."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/."""
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point every link at its page of the site; links to other files become their text and path."""
    here = posixpath.dirname(PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    site = {path: uri for uri, path in PAGES.items()}

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        uri = site.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if uri is None or not uri.endswith((".md", ".png", ".svg")):
            return text if posixpath.basename(path) in text else f"{text} (`{path}`)"
        relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{picture}[{text}]({relative}{anchor or ''})"

    sys.path += [place for place in (str(ROOT), str(ROOT / "docs")) if place not in sys.path]
    from references import filled

    return LINK.sub(moved, filled(markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers draw without a script; one that does not parse ends the build."""

    def drawn(formula: re.Match[str]) -> str:
        tag, bracket, tex = formula.groups()
        display = "inline" if bracket == "(" else "block"
        return f'<{tag} class="arithmatex">{convert(html.unescape(tex), display=display)}</{tag}>'

    return FORMULA.sub(drawn, content)
