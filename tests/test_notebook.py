"""examples/tutorial.ipynb runs on a kernel without a screen and prints what it keeps."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.pages import missing
from helpers.repository import ROOT

pytestmark = pytest.mark.trains

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def said(cell) -> list[str]:
    """Lines that a cell prints; progress on standard error and pictures are left out."""
    streams = (out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
    return [line.rstrip() for line in "".join(streams).splitlines() if line.strip()]


def test_the_notebook_prints_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "needs the extra `notebook`: pip install '.[notebook]'"
    nbformat, nbclient = (pytest.importorskip(name, reason=reason) for name in ("nbformat", "nbclient"))
    if find_spec("ipykernel") is None:  # not imported: progress bars would take this process for a notebook
        pytest.skip(reason)
    kept, made = nbformat.read(NOTEBOOK, 4), nbformat.read(NOTEBOOK, 4)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(made, timeout=600, resources={"metadata": {"path": str(Path(ROOT))}}).execute()
    shown = [
        (said(before), said(after))
        for before, after in zip(kept.cells, made.cells, strict=True)
        if before.cell_type == "code"
    ]
    assert sum(len(before) for before, _ in shown) > 8
    for before, after in shown:
        assert missing(before, after) is None
    pictures = [out for cell in kept.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert pictures
