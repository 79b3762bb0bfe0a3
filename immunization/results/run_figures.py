"""The pictures of a run, made from result.json and metrics.jsonl alone, so that they can be drawn again at any time.

One color a task in every picture (Okabe and Ito's palette, safe for color-blind readers); the immunized extractor is
a solid line, the baseline a dashed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from immunization.results.plot import INK, LINE, fit_log, panel_axes, plain_text
from immunization.roles import kind_of
from immunization.runs import tracker
from immunization.runs.interpretation import shown
from immunization.runs.numbers import number
from immunization.runs.records import Role, Stage, in_order
from immunization.runs.result import Curve, Result, by_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"primary": "#0072B2", "harmful": "#D55E00", "benign": "#009E73"}
"""Of the usual tasks; a further one has the color of its kind, an unseen one that of UNSEEN."""
UNSEEN = "#CC79A7"
ROLE_LINES = {"primary": "-", "harmful": "--", "benign": ":"}
"""Lines of tasks that share a panel, distinguishable without color."""
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
STYLES: dict[Stage, dict[str, Any]] = {
    "immunized": {"linestyle": "-", "linewidth": 2.0},
    "baseline": {"linestyle": (0, (5, 3)), "linewidth": 1.4},
}
DPI = 100


def draw(result: Result, folder: str | Path) -> list[Path]:
    """Draw every picture that the run has curves for into `folder`, as PNG and SVG; return the PNG paths."""
    folder = Path(folder)
    figures = {"norm_ratio": norm_ratio(result.curves), "spectra": spectra(result.curves)}
    figures |= {"learning_curves": learning_curves(result), "history": history(tracker.history(folder))}
    rows = result.about.get("rows")
    counts = {role: sum(task.values()) for role, task in rows.items()} if isinstance(rows, dict) else {}
    headline = f"{result.method} on {result.dataset} ({result.model}, seed {result.seed})"
    headline += f"\nrows: {', '.join(f'{count:,} {role}' for role, count in counts.items())}" if counts else ""
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            figure.suptitle(headline, fontsize=11)
            for ax in figure.axes:
                ax.title.set_fontsize(10)
            plain_text(figure)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=DPI, facecolor="white")
            figure.savefig(paths[-1].with_suffix(".svg"), facecolor="white", metadata={"Date": None})
    return paths


def norm_ratio(curves: Mapping[str, Curve]) -> Figure | None:
    """Distance to the optimum of the probe against steps of steepest descent (Eq. 16), both tasks."""
    tasks = by_task(curves, "norm_ratio")
    return _panels_of(tasks, "steps, exact line search", "‖wₜ − w*‖ / ‖w₀ − w*‖", log=True)[0]  # noqa: RUF001


def spectra(curves: Mapping[str, Curve]) -> Figure | None:
    """Eigenvalues of both Hessians relative to the largest one: the last of them is 1/kappa."""
    tasks = by_task(curves, "spectrum")
    relative = {role: {stage: _relative(curve) for stage, curve in stages.items()} for role, stages in tasks.items()}
    figure, panels = _panels_of(relative, "index i", "eigenvalue λᵢ / λ₁ of the Hessian", log=True)
    for role, ax in panels.items():
        ends = (curve for stage in ("baseline", "immunized") if (curve := relative[role].get(stage)))
        kappa = " → ".join(number(1 / (curve["y"][-1] or math.nan)) for curve in ends)
        ax.set(title=f"{role} task: κ {kappa}")
    return figure


def learning_curves(result: Result) -> Figure | None:
    """Held-out measure of a gradient descent probe against its steps, on every task of the run."""
    measure = "accuracy" if result.records.get("accuracy", "primary") else "R²"
    figure, panels = _panels_of(by_task(result.curves, "probe"), "steps of gradient descent", f"held-out {measure}")
    for role, ax in panels.items():
        ratio, bar = result.records.get("steps_ratio", role), result.records.value("steps_bar", task=role)
        if bar is not None:
            ax.axhline(bar, color=INK, linewidth=1.0, linestyle=":")
            place: dict[str, Any] = {
                "xycoords": ax.get_yaxis_transform(),
                "textcoords": "offset points",
                "va": "top",
                "ha": "right",
            }
            ax.annotate("90 %", (1, bar), (-3, -3), fontsize=8, **place)
        steps = "" if ratio is None or ratio.value is None else f": steps ratio {shown(result, ratio)}"
        ax.set(title=f"{role} task{steps}", xscale="log")
        ax.minorticks_off()
    if figure:
        low, high = ax.get_ylim()  # of all panels
        ax.set_ylim(max(low, -0.25), min(high, 1.03))  # R^2 can start far below 0
    return figure


def history(curves: Mapping[str, Curve]) -> Figure | None:
    """Loss terms, condition numbers, RIR with its parts, and a scheduled learning rate, against training steps."""
    kappas = [name for name in curves if name.startswith("kappa_")]
    ratios = [name for name in curves if name.startswith(("ratio_", "rir"))]
    terms = [name for name in curves if name not in (*kappas, *ratios, "lr")]
    groups = {"loss and its terms": terms, "condition numbers κ": kappas, "RIR = (i) / (ii)": ratios}
    groups["learning rate"] = [name for name in curves if name == "lr"]
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


def _panels(count: int, share: bool = True, legend_rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Axes two side by side, so narrow that their text can be read on a phone.

    `share`: one y axis for all panels and one legend below them; otherwise each panel has a legend of its own.
    """
    gaps = (0.25, 0.95) if share else (0.7, 1.1 + LINE * legend_rows)
    return panel_axes(count, 2.75, 2.2, legend_rows, 1.05, 0.15, 0.9, *gaps, columns=2, share=share)


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """x and y as float64 arrays; None, which JSON has for NaN, leaves a gap."""
    return np.array(curve["x"], dtype=float), np.array(curve["y"], dtype=float)


def _relative(curve: Curve) -> Curve:
    x, y = _points(curve)
    return {"x": x.tolist(), "y": (y / y[0]).tolist()}


def _panels_of(
    tasks: Mapping[Role, Mapping[Stage, Curve]], xlabel: str, ylabel: str, log: bool = False
) -> tuple[Figure | None, dict[str, Axes]]:
    """A panel for every task that has a curve, with the baseline's; one legend, as one y axis, for all."""
    from matplotlib.lines import Line2D

    roles = in_order(tasks, COLORS)
    if not roles:
        return None, {}
    figure, axes = _panels(len(roles))
    for ax, role in zip(axes, roles, strict=True):
        for state, style in STYLES.items():
            if curve := tasks[role].get(state):
                ax.plot(*_points(curve), color=COLORS.get(kind_of(role), UNSEEN), **style)
        ax.set(title=f"{role} task", xlabel=xlabel)
    axes[0].set_ylabel(ylabel)
    if log:  # all panels share the axis
        fit_log(axes[0].yaxis, np.concatenate([line.get_ydata() for ax in axes for line in ax.lines]))
    handles = [Line2D([], [], color=INK, label=name, **style) for name, style in STYLES.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, handlelength=3.5)
    return figure, dict(zip(roles, axes, strict=True))
