"""The figures of a run, made from result.json and metrics.jsonl alone, so that they can be drawn again at any time.

One color a task in every figure (Okabe and Ito's palette, safe for color-blind readers); the immunized extractor is
a solid line, the baseline a dashed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from immunization.data.task import kind_of
from immunization.results.formatting import number, roles_in
from immunization.results.plot import INK, LINE, fit_log, panel_axes
from immunization.runs import tracker
from immunization.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from immunization.runs.result import Curve

COLORS = {"primary": "#0072B2", "harmful": "#D55E00", "benign": "#009E73"}
"""Of the usual tasks; a further one has the color of its kind, an unseen one that of UNSEEN."""
UNSEEN = "#CC79A7"
ROLE_LINES = {"primary": "-", "harmful": "--", "benign": ":"}
"""Where several tasks share a panel, so that they can be told apart without color."""
TERMS = {
    "loss": (INK, "-"),
    "task_loss": (COLORS["primary"], "-"),
    "r_well": (COLORS["primary"], "-."),
    "harmful_loss": (COLORS["harmful"], "--"),
    "r_ill": (COLORS["harmful"], ":"),
    "rir": (INK, (0, (6, 1, 1, 1))),
}
"""Color and line of the terms that the methods of the paper log; the terms of other methods take OTHERS in turn."""
LABELS = {
    "kappa_primary": "primary",
    "kappa_harmful": "harmful",
    "ratio_primary": "(ii) primary κ ratio",
    "ratio_harmful": "(i) harmful κ ratio",
    "rir": "RIR",
}
OTHERS = (("#CC79A7", "-"), ("#E69F00", "--"), ("#56B4E9", "-."), ("#999999", ":"))
STYLES = {
    "immunized": {"linestyle": "-", "linewidth": 2.0},
    "baseline": {"linestyle": (0, (5, 3)), "linewidth": 1.4},
}
DPI = 100


def draw(result: Result, folder: str | Path) -> list[Path]:
    """Draw every figure that the run has curves for into `folder`, as PNG and SVG; return the PNG paths."""
    folder = Path(folder)
    figures = {
        "norm_ratio": norm_ratio(result.curves),
        "spectra": spectra(result.curves),
        "learning_curves": learning_curves(result),
        "history": history(tracker.history(folder)),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            figure.suptitle(_headline(result), fontsize=11)
            for ax in figure.axes:
                ax.title.set_fontsize(10)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=DPI, facecolor="white")
            figure.savefig(paths[-1].with_suffix(".svg"), facecolor="white", metadata={"Date": None})
    return paths


def _headline(result: Result) -> str:
    """Method, data, model, seed, and the rows of each task where the data say how many."""
    title = f"{result.method} on {result.dataset} ({result.model}, seed {result.seed})"
    rows = result.about.get("rows")
    counts = {role: sum(task.values()) for role, task in rows.items()} if isinstance(rows, dict) else {}
    return title + (f"\nrows: {', '.join(f'{count:,} {role}' for role, count in counts.items())}" if counts else "")


def norm_ratio(curves: Mapping[str, Curve]) -> Figure | None:
    """Distance to the optimum of the probe against steps of steepest descent (Eq. 16), both tasks."""
    panels = _roles(curves, "norm_ratio")
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for ax, role in zip(axes, panels, strict=True):
        _before_and_after(ax, curves, "norm_ratio", role)
        ax.set(title=f"{role} task", xlabel="steps, exact line search")
    fit_log(axes[0].yaxis, np.concatenate([line.get_ydata() for ax in axes for line in ax.lines]))
    axes[0].set_ylabel("‖wₜ − w*‖ / ‖w₀ − w*‖")  # noqa: RUF001
    return _with_legend(figure)


def spectra(curves: Mapping[str, Curve]) -> Figure | None:
    """Eigenvalues of both Hessians relative to the largest one: the last of them is 1/kappa."""
    panels = _roles(curves, "spectrum")
    if not panels:
        return None
    relative: dict[str, Curve] = {}
    for name, curve in curves.items():
        if name.startswith("spectrum/"):
            x, y = _points(curve)
            relative[name] = {"x": x, "y": y / y[0]}
    figure, axes = _panels(len(panels))
    for ax, role in zip(axes, panels, strict=True):
        _before_and_after(ax, relative, "spectrum", role)
        ends = (relative.get(f"spectrum/{role}{suffix}") for suffix in ("/baseline", ""))
        kappa = " → ".join(number(1 / curve["y"][-1]) for curve in ends if curve)
        ax.set(title=f"{role} task: κ {kappa}", xlabel="index i")
    fit_log(axes[0].yaxis, np.concatenate([line.get_ydata() for ax in axes for line in ax.lines]))
    axes[0].set_ylabel("eigenvalue λᵢ / λ₁ of the Hessian")
    return _with_legend(figure)


def learning_curves(result: Result) -> Figure | None:
    """Held-out measure of a gradient descent probe against its steps, on every task of the run."""
    panels = _roles(result.curves, "probe")
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for ax, role in zip(axes, panels, strict=True):
        _before_and_after(ax, result.curves, "probe", role)
        ratio, bar = (result.metrics.get(f"{name}/{role}") for name in ("steps_ratio", "steps_bar"))
        if bar is not None:
            ax.axhline(bar, color=INK, linewidth=1.0, linestyle=":")
            ax.text(1, bar, "90 %", fontsize=8, va="top", transform=ax.get_yaxis_transform(), ha="right")
        bound = "> " if f"capped_{role}" in result.flags else ""
        ax.set(title=f"{role} task" + ("" if ratio is None else f": steps ratio {bound}{number(ratio)}"), xscale="log")
        ax.set_xlabel("steps of gradient descent")
        ax.minorticks_off()
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(max(low, -0.25), min(high, 1.03))  # R^2 can start far below 0
    axes[0].set_ylabel("held-out " + ("accuracy" if "primary/accuracy" in result.metrics else "R²"))
    return _with_legend(figure)


def history(curves: Mapping[str, Curve]) -> Figure | None:
    """Loss terms, condition numbers, RIR with its parts, and a scheduled learning rate, against training steps."""
    groups: dict[str, list[str]] = {"loss and its terms": [], "condition numbers κ": [], "RIR = (i) / (ii)": []}
    terms, kappas, ratios = groups.values()
    groups["learning rate"] = [name for name in curves if name == "lr"]
    for name in [name for name in curves if name != "lr"]:
        (kappas if name.startswith("kappa_") else ratios if name.startswith(("ratio_", "rir")) else terms).append(name)
    groups = {title: names for title, names in groups.items() if names}
    if not groups:
        return None
    rows = max(math.ceil(len(names) / 2) for names in groups.values())
    figure, axes = _panels(len(groups), share=False, legend_rows=rows)
    for ax, (title, names) in zip(axes, groups.items(), strict=True):
        others = iter(OTHERS * len(names))
        values = []
        for name in names:
            role = next((role for role in COLORS if name.endswith(role)), None)
            color, line = TERMS.get(name) or ((COLORS[role], ROLE_LINES[role]) if role else next(others))
            x, y = _points(curves[name])
            ax.plot(x, y, linestyle=line, color=color, label=LABELS.get(name, name))
            values.append(y)
        ax.set(title=title, xlabel="training steps")
        fit_log(ax.yaxis, np.concatenate(values))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)
    return figure


def _roles(curves: Mapping[str, Curve], family: str) -> list[str]:
    return roles_in(curves, family, COLORS)


def _panels(count: int, share: bool = True, legend_rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Axes two side by side, so narrow that their text can be read on a phone.

    `share`: one y axis for all panels and one legend below them; otherwise each panel has a legend of its own.
    """
    gaps = (0.25, 0.95) if share else (0.7, 1.1 + LINE * legend_rows)
    return panel_axes(count, 2.75, 2.2, legend_rows, 1.05, 0.15, 0.9, *gaps, columns=2, share=share)


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """x and y as float64 arrays; None, which JSON has for NaN, leaves a gap."""
    return np.array(curve["x"], dtype=float), np.array(curve["y"], dtype=float)


def _before_and_after(ax: Axes, curves: Mapping[str, Curve], family: str, role: str) -> None:
    for state, style in STYLES.items():
        suffix = "/baseline" if state == "baseline" else ""
        if curve := curves.get(f"{family}/{role}{suffix}"):
            ax.plot(*_points(curve), color=COLORS.get(kind_of(role), UNSEEN), **style)


def _with_legend(figure: Figure) -> Figure:
    """One legend under the panels: what is solid and what is dashed holds for every color."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=INK, label=name, **style) for name, style in STYLES.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, handlelength=3.5)
    return figure
