"""The picture of docs/wandb.md, for docs/pictures.py: what runs log to W&B, read from the files of offline runs."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from immunization.results.settings import METHODS
from immunization.runner import run

RUNS = ("condition_number", "opt_kappa", "learning_curve")
CHARTS = ("rir", "ratio_harmful", "ratio_primary", "curves/probe/harmful")
BLOCK = 2**15
"""Bytes between which no record goes on without a header of its own."""


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log of protocol buffers, behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def logged(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The name that W&B shows for a run, and the rows of its history."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    name, rows = "", []
    for record in records(path):
        if record.WhichOneof("record_type") == "run":
            name = record.run.display_name
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return name, rows


def dashboard(folder: Path) -> Figure:
    """One panel a chart and one line a run, as W&B's workspace shows them; makes the runs in `folder`."""
    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    panels = figure.subplots(2, 2)
    for method in RUNS:
        options = [f"method={method}", "tracker=wandb", "tracker.mode=offline", "figures=false"]
        run(options, folder=folder / method)
        name, rows = logged(folder / method)
        for ax, chart in zip(panels.flat, CHARTS, strict=True):
            step = "curves/step" if chart.startswith("curves/") else "_step"
            points = [(row[step], row[chart]) for row in rows if chart in row]
            ax.plot(*zip(*points, strict=True), color=METHODS[method], linewidth=2.5, label=name)
    for ax, chart in zip(panels.flat, CHARTS, strict=True):
        ax.set_title(chart, fontsize=11, loc="left")
        ax.set_xlabel("curves/step" if chart.startswith("curves/") else "Step")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        if chart.startswith("curves/"):
            ax.set_xscale("log")
        elif chart != "ratio_primary":
            ax.set_yscale("log")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper left", frameon=False, fontsize=11)
    return figure
