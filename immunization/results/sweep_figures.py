"""Figures over many runs: the paper's Figs. 1 to 3, the map of both lambdas, and what is traded against what.

A method has the same color in every figure. What is drawn in INK takes the color of the page's text in the report, so
that figures can be read on dark pages too.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from immunization.results.seed_statistics import rank_correlation
from immunization.results.settings import METHODS, Setting, best, correlations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

INK = "#222222"
PALETTE = ("#888888", "#E69F00", "#CC79A7", "#009E73", "#0072B2", "#D55E00", "#56B4E9", "#F0E442")
"""Okabe and Ito's colors, safe for color-blind readers, in the order of METHODS."""
SATURATED = 2.0
"""Heat maps of log10 RIR have their full colors from here on: RIR 100, more than the paper reports on average."""
LINES = 8
"""A figure of curves shows at most this many settings, those with the largest objective."""


@dataclass
class Plot:
    """A figure with a file name and what to read from it."""

    name: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """An <svg> element for a page: INK is the color of the text around it, and text stays text."""
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": self.name}):
            out = io.StringIO()
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        content = out.getvalue()
        return content[content.index("<svg") :].replace(INK, "currentColor")

    def png(self, folder: Path) -> Path:
        """A picture on white in `folder`; returns its path."""
        path = folder / f"{self.name}.png"
        self.figure.savefig(path, dpi=110, facecolor="white")
        return path


def draw(group: Sequence[Setting], name: str, objective: str = "rir") -> list[Plot]:
    """Every figure that the runs of one group have the data for; `name` starts the file names."""
    group = [setting for setting in group if setting.runs]
    makers: dict[str, Callable[[Sequence[Setting], str], tuple[Figure, str] | None]] = {
        "figure1": norm_ratio,
        "figure2": pairs,
        "figure3": probes,
        "lambdas": lambdas,
        "pareto": pareto,
        "collateral": collateral,
        "alignment": alignment,
    }
    import matplotlib

    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    plots = []
    with matplotlib.rc_context(colors):
        for key, make in makers.items():
            if made := make(group, objective):
                figure, caption = made
                plots.append(Plot(f"{name}_{key}", caption, figure))
    return plots


def norm_ratio(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Fig. 1: distance to the optimum against steps, all methods, both tasks."""
    figure = _curves(group, objective, "norm_ratio", ("harmful", "primary"))
    if figure is None:
        return None
    figure.axes[0].set_ylabel("distance to the optimum, relative")
    for ax in figure.axes:
        ax.set_xlabel("steps, exact line search")
        if ax.dataLim.ymin < 0.1:  # below a decade, a logarithmic axis has hardly any ticks
            ax.set_yscale("log")
            ax.set_ylim(bottom=max(ax.get_ylim()[0], 1e-16))  # below is rounding
    return figure, (
        "Fig. 1 of the paper. Distance of the probe to its optimum against steps of steepest descent (Eq. 16): on the "
        "harmful task a slow curve is what is wanted, on the primary task a fast one. Median over the runs, "
        "the band holds their middle half; dashed: the raw inputs or theta_0."
    )


def probes(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Fig. 3: held-out measure of a probe by gradient descent against its steps."""
    figure = _curves(group, objective, "probe", ("harmful", "primary", "benign"), xscale="log")
    if figure is None:
        return None
    accuracy = any("primary/accuracy" in run.result.metrics for setting in group for run in setting.runs)
    figure.axes[0].set_ylabel("held-out " + ("accuracy" if accuracy else "R²"))
    low, high = figure.axes[0].get_ylim()
    figure.axes[0].set_ylim(max(low, -0.25), min(high, 1.03))  # R^2 can start far below 0
    for ax in figure.axes:
        ax.set_xlabel("steps of gradient descent")
    return figure, (
        "Fig. 3 of the paper. What a linear probe reaches on held-out data after so many steps of gradient descent. "
        "Median over the runs, the band holds their middle half; dashed: the raw inputs or theta_0."
    )


def pairs(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Fig. 2: log10 RIR of every ordered pair of classes, one map a method."""
    classes = sorted({name for setting in group for run in setting.runs for name in run.pair.split("→")}, key=_order)
    group = [setting for setting in group if len({run.pair for run in setting.runs}) > 2]
    if not group:
        return None
    maps = []
    for setting in group:
        cells: dict[str, list[float]] = {}
        for (_, pair, _), value in setting.values("rir").items():
            if value > 0:
                cells.setdefault(pair, []).append(math.log10(value))
        rows = [[cells.get(f"{a}→{b}") for b in classes] for a in classes]
        maps.append(np.array([[np.mean(cell) if cell else math.nan for cell in row] for row in rows]))
    figure, axes = _panels(len(group), width=3.1, height=3.0, right=1.0)
    for ax, setting, values in zip(axes, group, maps, strict=True):
        image = _image(ax, values, classes, classes, cmap="RdBu", vmin=-SATURATED, vmax=SATURATED)
        above, known = int((values > 0).sum()), int(np.isfinite(values).sum())
        ax.set(title=f"{setting.label}\nRIR > 1 in {above} of {known}", xlabel="harmful class")
        ax.set_ylabel("primary class")
    beside = axes[0].get_position()  # the bar is as high as a panel, in the margin right of the first row
    size = figure.get_size_inches()[0]
    bar = figure.colorbar(
        image, cax=figure.add_axes((1 - 0.85 / size, beside.y0, 0.15 / size, beside.height)), extend="both"
    )
    bar.set_label("log₁₀ RIR, mean over seeds")
    return figure, (
        "Fig. 2 of the paper. RIR of every ordered pair of classes, blue above 1 and red below, in full color from 100 "
        "and 1/100 on; blank where there is no pair or no run."
    )


def lambdas(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """The objective over lambda_P and lambda_H, for the method that was run on the largest grid of them."""
    axes_of = ("method.lambda_H", "method.lambda_P")
    grids: dict[str, list[Setting]] = {}
    for setting in group:
        if all(isinstance(setting.first.settings.get(name), int | float) for name in axes_of):
            grids.setdefault(setting.method, []).append(setting)
    if not grids:
        return None
    method, members = max(grids.items(), key=lambda item: len(item[1]))
    levels = [sorted({setting.first.settings[name] for setting in members}) for name in axes_of]
    if min(map(len, levels)) < 2:
        return None
    measures = [objective, *(name for name in ("steps_ratio/harmful",) if name != objective)]
    values = np.full((len(measures), len(levels[1]), len(levels[0])), math.nan)
    for setting in members:
        column, row = (level.index(setting.first.settings[name]) for level, name in zip(levels, axes_of, strict=True))
        for panel, measure in enumerate(measures):
            mean = setting.median(measure)
            values[panel, row, column] = math.log10(mean) if mean and mean > 0 else math.nan
    figure, axes = _panels(len(measures), width=4.4, height=3.4)
    for ax, measure, panel in zip(axes, measures, values, strict=True):
        names = [[f"{value:.3g}" for value in level] for level in levels]
        image = _image(ax, panel, *names, cmap="viridis", origin="lower", aspect="auto")
        ax.set(title=f"log₁₀ {measure}", xlabel="lambda_H")
        figure.colorbar(image, ax=ax, fraction=0.05)
    axes[0].set_ylabel("lambda_P")
    return figure, f"{method} over both weights, median over the runs; blank where there is no value."


def pareto(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """RIR against the primary task, one point a setting, with the front and the point a user would choose.

    An invertible linear map cannot change what a retrained head reaches in the end; then the steps it takes are shown.
    """
    points = [setting for setting in group if setting.seeds("rir") and setting.summary("rir").mean > 0]
    held_out = next((name for name in ("primary/accuracy", "primary/r2") if _spread(points, name) > 1e-6), None)
    measure = held_out or "steps_ratio/primary"
    points = [setting for setting in points if setting.median(measure)]
    if len(points) < 2:
        return None
    x = np.array([setting.median(measure) for setting in points])
    y = np.array([setting.summary("rir").mean for setting in points])
    good = x if held_out else -x
    front = [i for i in np.argsort(-good) if y[i] >= y[good >= good[i]].max()]
    kept = [s for s in points if s.seeds("definition/c") and s.summary("definition/c").mean > 0.5]
    chosen = best(kept or points, objective)

    figure, (ax,) = _panels(1, width=6.0, height=3.8, legend=True)
    ax.step(x[front], y[front], where="pre", color=INK, linewidth=1.0, alpha=0.5, label="front")
    for method in dict.fromkeys(setting.method for setting in points):
        mine = [i for i, setting in enumerate(points) if setting.method == method]
        ax.plot(x[mine], y[mine], "o", color=_color(method, points), label=method)
    if chosen is not None:
        i = points.index(chosen)
        ax.plot(x[i], y[i], "o", markersize=13, fillstyle="none", color=INK, label="chosen")
    ax.set(ylabel="RIR", yscale="log", xlabel=f"{measure}, held out, head retrained")
    if not held_out:
        ax.set(xscale="log", xlabel="steps of a fresh primary probe / baseline (left is worse)")
        ax.invert_xaxis()
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure, (
        "RIR (mean) against the primary task (median), one point a setting; no setting is better in both than one on "
        f"the front. Circled: the largest {objective} among settings that keep the primary task "
        "(part (c) of Definition 3.1)."
    )


def collateral(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Steps of the harmful probe against those of a benign third task's; settings of one method are one line."""
    roles = ("steps_ratio/benign", "steps_ratio/harmful")
    points = [setting for setting in group if all(setting.median(name) for name in roles)]
    if len(points) < 2:
        return None
    figure, (ax,) = _panels(1, width=6.0, height=3.8, legend=True)
    for method in dict.fromkeys(setting.method for setting in points):
        mine = [setting for setting in points if setting.method == method]
        x, y = ([setting.median(name) for setting in mine] for name in roles)
        ax.plot(x, y, "o-", color=_color(method, points), linewidth=1.0, label=method)
        if len(mine) <= LINES:
            for setting, *place in zip(mine, x, y, strict=True):
                text = setting.label.removeprefix(method).strip()
                ax.annotate(text, place, (5, 4), textcoords="offset points", fontsize=8, color=INK)
    ax.set(xscale="log", yscale="log")
    ax.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    ax.xaxis.set_minor_formatter(lambda value, position: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    ax.axvline(1, color=INK, linewidth=0.8, alpha=0.5)
    ax.set_xlabel("steps of a benign task's probe / baseline (left of the line is faster)")
    ax.set_ylabel("steps of the harmful probe / baseline")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure, (
        "What slowing the harmful task costs a benign task that no method was shown: steps of fresh probes by gradient "
        "descent over those with the baseline, median over the runs. Up and to the left is better."
    )


def alignment(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Alignment score of both tasks against the ceiling of RIR, and against the RIR reached, one point a pair."""
    outcomes = correlations(group)
    if not outcomes:
        return None
    score = next(found for setting in group if (found := setting.pairs("alignment/score")))
    methods = {setting.label: setting.method for setting in group}
    panels = {"the largest attainable": {"ceiling": outcomes.pop("ceiling")}, "reached": outcomes}
    panels = {title: series for title, series in panels.items() if any(series.values())}
    figure, axes = _panels(len(panels), width=4.4, height=3.4, legend=True)
    for ax, (heading, series) in zip(axes, panels.items(), strict=True):
        for label, values in series.items():
            r, p = rank_correlation(score, values)
            known = [pair for pair in values if pair in score]
            color = _color(methods[label], group) if label in methods else INK
            text = f"{label}\nr {r:.2f}, p {p:.2g}"
            x, y = ([measure[pair] for pair in known] for measure in (score, values))
            ax.plot(x, y, "o", markersize=4, alpha=0.7, color=color, label=text)
        ax.set(title=f"RIR, {heading}", yscale="log", xlabel="alignment score of K_P and K_H")
    handles = [line for ax in axes for line in ax.lines]
    axes[-1].legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure, (
        "Does the alignment of both tasks predict the RIR? One point a pair of classes; a score of 1/2 stands for "
        "unrelated tasks, 1 for aligned ones. r: Spearman's rank correlation, p by permutations of the classes where "
        "all of their pairs are there."
    )


def _spread(group: Sequence[Setting], metric: str) -> float:
    values = [value for setting in group if (value := setting.median(metric)) is not None]
    return max(values) - min(values) if values else 0.0


def _curves(
    group: Sequence[Setting],
    objective: str,
    family: str,
    roles: Sequence[str],
    xscale: str = "linear",
) -> Figure | None:
    """One panel a task, one line a setting with a band over its runs; the baseline dashed."""
    panels = [r for r in roles if any(f"{family}/{r}" in run.result.curves for s in group for run in s.runs)]
    if not panels:
        return None
    if len(group) > LINES:
        scored = [setting for setting in group if setting.seeds(objective)]
        group = sorted(scored, key=lambda setting: -setting.summary(objective).mean)[:LINES]
    figure, axes = _panels(len(panels), width=4.4, height=3.2, legend=True)
    for ax, role in zip(axes, panels, strict=True):
        for setting in group:
            if band := _band(setting, f"{family}/{role}"):
                x, middle, low, high = band
                color = _color(setting.method, group, setting)
                ax.plot(x, middle, color=color, label=setting.label)
                if len(setting.runs) > 1:
                    ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        before = next((b for s in group if (b := _band(s, f"{family}/{role}/baseline"))), None)
        if before:
            ax.plot(*before[:2], color=INK, linestyle=(0, (5, 3)), linewidth=1.2, label="baseline")
        ax.set(title=f"{role} task", xscale=xscale)
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def _band(setting: Setting, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """x, median and quartiles of a curve over the runs that share the commonest length."""
    curves = [run.result.curves[name] for run in setting.runs if name in run.result.curves]
    if not curves:
        return None
    length, _ = Counter(len(curve["x"]) for curve in curves).most_common(1)[0]
    curves = [curve for curve in curves if len(curve["x"]) == length]
    low, middle, high = np.nanquantile(
        np.array([curve["y"] for curve in curves], dtype=float), (0.25, 0.5, 0.75), axis=0
    )
    return np.array(curves[0]["x"], dtype=float), middle, low, high


def _color(method: str, group: Sequence[Setting], setting: Setting | None = None) -> str:
    """The color of a method; where several settings of it are lines of one figure, colors in turn."""
    if setting is not None and sum(other.method == method for other in group) > 1:
        return PALETTE[1 + list(group).index(setting) % (len(PALETTE) - 1)]
    return PALETTE[METHODS.index(method) % len(PALETTE)] if method in METHODS else INK


def _order(name: str) -> tuple[bool, float, str]:
    return (not name.isdecimal(), float(name) if name.isdecimal() else 0.0, name)


def _panels(
    count: int, width: float, height: float, legend: bool = False, right: float = 0.2, columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """Axes of `width` x `height` inches each, at most `columns` side by side, on no background."""
    from matplotlib.figure import Figure

    left, bottom, top, gap, row_gap = 0.95, 0.75, 0.6, 0.9, 1.15
    right = 2.6 if legend else right
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    total = left + columns * width + (columns - 1) * gap + right
    tall = bottom + rows * height + (rows - 1) * row_gap + top
    figure = Figure(figsize=(total, tall), facecolor="none")
    axes = []
    for i in range(count):
        row, column = divmod(i, columns)
        x, y = left + column * (width + gap), bottom + (rows - 1 - row) * (height + row_gap)
        ax = figure.add_axes((x / total, y / tall, width / total, height / tall), facecolor="none")
        ax.grid(alpha=0.2, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        axes.append(ax)
    return figure, axes


def _image(ax: Axes, values: np.ndarray, x: Sequence[str], y: Sequence[str], **options: str | float) -> AxesImage:
    """A heat map with a name at every row and column."""
    ax.grid(False)
    ax.spines[:].set_visible(False)
    image = ax.imshow(values, **options)
    ax.set_xticks(range(len(x)), x)
    ax.set_yticks(range(len(y)), y)
    ax.tick_params(length=0)
    return image
