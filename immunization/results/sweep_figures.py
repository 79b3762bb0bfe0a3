"""Pictures over many runs: the paper's Figs. 1 to 3, the map of both lambdas, and trade-offs.

A method has the same color in every picture, its settings shades of it. Data, seeds and runs stand above each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from immunization.results import plot
from immunization.results.attack_figures import NARROW
from immunization.results.collect import varying
from immunization.results.columns import AUTHORS, published, ratios
from immunization.results.plot import INK, Look, Plot
from immunization.results.run_figures import COLORS
from immunization.results.seed_statistics import ROUNDING, rank_correlation
from immunization.results.settings import (
    BENIGN_STEPS,
    HARMFUL_STEPS,
    KEEPS,
    PRIMARY_STEPS,
    RIR,
    SCORE,
    Setting,
    best,
    by_authors,
    correlations,
    first_pairs,
    in_convention,
    short_labels,
)
from immunization.runs.records import Query, Role, Stage, in_order, query_of
from immunization.runs.result import Curve, Result, by_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SATURATED = 2.0
"""Heat maps of log10 RIR have their full colors from here on: RIR 100, more than the paper reports on average."""
MOST = 8
"""A picture of curves shows at most this many settings, those with the largest objective; a legend names as many."""
WEIGHTS = ("method.lambda_H", "method.lambda_P")
COLUMNS = 3
"""Heat maps side by side."""
ALIKE = 1.01
"""Ratios that differ by no more than this factor are one value to a picture."""
BANDS = 3
"""More settings than this have no bands, which would merge."""
_HOW = (
    f"Lines are medians over runs; bands, with up to {BANDS} settings, are the middle half of the runs. Thin dashed "
    "lines: the baseline"
)


def draw(
    group: Sequence[Setting], name: str, objective: str = "rir", kinds: Collection[str] | None = None
) -> list[Plot]:
    """Every picture, or those of `kinds`, for which the runs of a group have the data; `name` starts the file names."""
    known = [setting for setting in group if setting.runs]
    plots = []
    with plot.inked():
        for key, make in KINDS.items() if known else ():
            if (kinds is None or key in kinds) and (made := make(group if make is lambdas else known, objective)):
                figure, caption = made
                plot.headline(figure, known)
                plots.append(Plot(f"{name}_{key}", caption, figure))
    return plots


def norm_ratio(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Fig. 1: distance to the optimum against steps, all methods, both tasks."""
    made = _curves(group, objective, "norm_ratio", ("primary", "harmful"))
    if made is None:
        return None
    figure, shown = made
    figure.axes[0].set_ylabel("distance to the optimum, relative")
    for ax in figure.axes:
        ax.set_xlabel("steps, exact line search")
    return figure, (
        "Fig. 1 of the paper: distance of the probe's weights from their optimum, against steps of steepest descent "
        "(Eq. 16). Slow is good for the harmful task, fast is good for the primary task. " + shown
    )


def probes(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Fig. 3: held-out measure of a probe by gradient descent against its steps."""
    roles = (role for setting in group for result in setting.results for role in by_task(result.curves, "probe"))
    made = _curves(group, objective, "probe", in_order(roles, COLORS), xscale="log", bar="steps_bar")
    if made is None:
        return None
    figure, shown = made
    accuracy = any(result.records.get("accuracy", "primary") for setting in group for result in setting.results)
    figure.axes[0].set_ylabel("held-out " + ("accuracy" if accuracy else "R²"))
    for ax in figure.axes:
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -0.25), min(high, 1.03))  # R^2 can be far below 0
        ax.set_xlabel("steps of gradient descent")
    return figure, (
        "Fig. 3 of the paper: test accuracy or R² of a linear probe, against its steps of gradient descent. Dotted "
        "line: 90 % of the way from guessing to the baseline's best. Steps are counted until this line. " + shown
    )


def pair_maps(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Fig. 2: log10 RIR of every ordered pair of classes, one map per method."""
    names = {name for setting in group for run in setting.runs for name in run.pair.split("→")}
    classes = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    group = [setting for setting in group if len({run.pair for run in setting.runs}) > 2]
    if not group:
        return None
    rir, paper = in_convention(group, "rir"), published(group[0].first)
    columns = min(len(group), 2 if len(group) == 4 else COLUMNS)
    figure, axes = plot.panel_axes(len(group), width=3.1, height=3.0, right=1.0, columns=columns)
    for ax, setting in zip(axes, group, strict=True):
        cells: dict[str, list[float]] = {}
        for (_, pair, _), value in setting.values(rir).items():
            if value > 0:
                cells.setdefault(pair, []).append(math.log10(value))
        rows = [[cells.get(f"{a}→{b}", math.nan) for b in classes] for a in classes]
        values = np.array([[np.mean(cell) for cell in row] for row in rows])
        drawn = plot.image(ax, values, classes, classes, cmap="RdBu", vmin=-SATURATED, vmax=SATURATED)
        plot.write_values(ax, values, drawn, "z.1f")
        count = paper.get(setting.method, {}).get("figure2")
        bound, theirs = (10, " (paper: {:.0f} of {:.0f})".format(*count)) if count else (1, "")
        above, known = int((values > math.log10(bound) + ROUNDING).sum()), int(np.isfinite(values).sum())
        ax.set(title=f"{setting.label}\nRIR > {bound} in {above} of {known}{theirs}", xlabel="harmful class")
        ax.set_ylabel("primary class")
    by = AUTHORS if by_authors(group) else ""
    plot.color_bar(figure, drawn, axes[columns - 1], f"log₁₀ RIR{by}, mean over seeds", extend="both")
    return figure, (
        "Fig. 2 of the paper: RIR of every ordered pair of classes. Blue is above 1, red is below 1. Colors are full "
        "from 100 and from 1/100 on. Blank cells have no run."
        + (" In brackets: the number of pairs for which the paper has RIR much greater than 1." if paper else "")
    )


def lambdas(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """The objective over two keys, of both weights where they vary, its spread over seeds, and harmful steps.

    Of the settings that differ in nothing else, the most. A grid is a heat map; what a search tries are points.
    """
    names = varying(setting.first.settings for setting in group)
    plain = [n for n in names if all(type(s.first.settings.get(n)) in (int, float) for s in group)]
    x_key, y_key = keys = (*sorted(plain, key=lambda name: [*WEIGHTS, name].index(name)), "", "")[:2]
    alike: dict[str, list[Setting]] = {}
    for setting in group:
        others = (setting.method, *(str(setting.first.settings.get(name)) for name in names if name not in keys))
        alike.setdefault(str(others), []).append(setting)
    members = max(alike.values(), key=len)
    places = {s: (s.first.settings[x_key], s.first.settings[y_key]) for s in members} if y_key else {}
    levels = [sorted(set(level)) for level in zip(*places.values(), strict=True)]
    of, winner = in_convention(group, objective), best(group, objective)
    panels = {of.name: {setting: setting.median(of) for setting in members}}
    if any(setting.summary(of).n > 1 for setting in members):
        panels["largest / smallest seed"] = {s: v.max() / v.min() if len(v := s.seeds(of)) else None for s in members}
    panels[HARMFUL_STEPS.name] = {setting: setting.median(HARMFUL_STEPS) for setting in members}
    panels = {name: values for name, values in panels.items() if any((value or 0) > 0 for value in values.values())}
    if not panels or min(map(len, levels), default=0) < 2:
        return None
    failed = {s: f"{len(s.failed)} of {len(s.failed + s.runs)} at {places[s]}" for s in members if s.failed}
    marks = {s: "★ " * (s is winner) + "✗ " * (s in failed) for s in members}
    sizes = (min(max(3.2, 0.56 * len(levels[0])), 8.0), min(max(2.8, 0.36 * len(levels[1])), 8.0))
    grid = 2 * len(members) > len(levels[0]) * len(levels[1])
    width, height = sizes if grid else (3.2, 2.8)
    figure, axes = plot.panel_axes(len(panels), width, height, right=0.9, columns=1)
    for ax, (heading, values) in zip(axes, panels.items(), strict=True):
        plot.over_two(figure, ax, places, levels if grid else (), values, marks)
        ax.set(title=heading, xlabel=x_key.removeprefix("method."), ylabel=y_key.removeprefix("method."))
    told = f" ✗: runs failed, {'; '.join(failed.values())}." if failed else ""
    told += (
        f" Numbers are left out of more than {plot.CROWDED} columns." if grid and len(levels[0]) > plot.CROWDED else ""
    )
    return figure, (
        f"{members[0].method}: medians over runs, colored by their logarithms. ★: the largest mean {of.name} among "
        f"{KEEPS}.{told}"
    )


def pareto(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """What is traded, one point a setting: (i) for (ii), harmful for primary steps, RIR for loss on the primary task.

    With the front, which none beats in both, and the point that a user would choose. Where either is the same for all
    settings there is nothing to trade.
    """
    i, ii, _ = ratios(group, in_convention(group, objective))
    trades = {
        ("(ii): κ of the primary task / baseline", "(i): κ of the harmful task / baseline"): (ii, i),
        ("steps of a fresh primary probe / baseline", "steps of the harmful probe / baseline"): (
            PRIMARY_STEPS,
            HARMFUL_STEPS,
        ),
        ("lost on the primary task, held out", "RIR"): (None, RIR),
    }
    panels = {}
    for names, (x_of, y_of) in trades.items():
        found = {s: (s.median(x_of) if x_of else s.price, s.median(y_of)) for s in group}
        points = {s: (x, y) for s, (x, y) in found.items() if x is not None and y and y > 0 and (x > 0 or not x_of)}
        own = np.array([*points.values()], dtype=float).reshape(-1, 2)
        (x, y), (x_low, y_low) = own.max(0, initial=-math.inf), own.min(0, initial=math.inf)
        if y > ALIKE * y_low and (x > ALIKE * x_low if x_of else x - x_low >= NARROW):
            panels[names] = points
    if not panels:
        return None
    chosen, look, labels = best(group, objective), plot.looks(group), short_labels(group)
    edges = {names: plot.front(points) for names, points in panels.items()}
    named = {*group} if len(group) <= MOST else {chosen, *(setting for edge in edges.values() for setting in edge)}
    named = named if len(named) <= MOST else {chosen}
    figure, axes = plot.panel_axes(len(panels), width=3.6, height=3.2)
    for ax, (names, points) in zip(axes, panels.items(), strict=True):
        corners = [points[setting] for setting in edges[names]]
        corners.append((max(place[0] for place in points.values()), corners[-1][1]))  # to pay more is no worse
        ax.step(*zip(*corners, strict=True), where="post", color=INK, linewidth=1.0, alpha=0.5, label="front")
        for setting, place in points.items():
            style = {"label": labels[setting]} if setting in named else {"alpha": 0.3}
            ax.plot(*place, look[setting].marker, color=look[setting].color, **style)
        if chosen in points:
            ax.plot(*points[chosen], "o", markersize=14, fillstyle="none", color=INK, label="★")
        ax.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        ax.axvline(neutral := 0 if names[1] == "RIR" else 1, color=INK, linewidth=0.8, linestyle=":")
        ax.set(xlabel=names[0], ylabel=names[1])
        plot.fit_log(ax.yaxis, [*(place[1] for place in points.values()), 1.0])
        if neutral:
            plot.fit_log(ax.xaxis, [*(place[0] for place in points.values()), 1.0])
    plot.legend_below(figure, axes[0])
    return figure, (
        "A point is the median of one setting over its runs. Up and left is better. The line is the front: no setting "
        "is better in both measures than a setting on it. "
        + (
            f"Circled (★): the largest mean {objective} among {KEEPS}."
            if chosen
            else f"No setting has a ★. ★ is the largest mean {objective} among {KEEPS}."
        )
        + (" Faint points are not in the legend." if len(named) < len(group) else "")
    )


def collateral(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Steps of the harmful probe against those of a benign third task's; settings of one method are one line."""
    steps = (BENIGN_STEPS, HARMFUL_STEPS)
    points = [setting for setting in group if all(map(setting.median, steps))]
    if len(points) < 2:
        return None
    x, y = ([setting.median(of) or math.nan for setting in points] for of in steps)
    figure, (ax,) = plot.panel_axes(1, width=4.2, height=3.2)
    for method in dict.fromkeys(setting.method for setting in points):
        mine = [i for i, setting in enumerate(points) if setting.method == method]
        ax.plot([x[i] for i in mine], [y[i] for i in mine], color=INK, linewidth=0.8, alpha=0.4)
    _points(ax, group, points, x, y)
    ax.axvline(1, color=INK, linewidth=0.8, alpha=0.5)
    plot.fit_log(ax.xaxis, [*x, 1.0])
    plot.fit_log(ax.yaxis, y)
    ax.set_xlabel("steps of a benign task's probe / baseline\n(left of the line is faster)")
    ax.set_ylabel("steps of the harmful probe / baseline")
    plot.legend_below(figure, ax, columns=1)
    return figure, (
        "Steps ratio of the harmful task, against the steps ratio of a benign task that no method is shown. Points are "
        "medians over runs. Up and left is better."
    )


def alignment(group: Sequence[Setting], objective: str) -> tuple[Figure, str] | None:
    """Alignment score of both tasks against the ceiling of RIR, and against the RIR reached, one point per pair."""
    outcomes = correlations(group)
    if not outcomes:
        return None
    score = first_pairs(group, SCORE)
    drawn_as = {setting.label: look for setting, look in plot.looks(group).items()}
    panels = {"the largest attainable": {"ceiling": outcomes.pop("ceiling")}, "reached": outcomes}
    panels = {title: series for title, series in panels.items() if any(map(len, series.values()))}
    if not panels:
        return None
    figure, axes = plot.panel_axes(len(panels), 3.2, 3.0, 2 * len(outcomes) + 2, columns=1)
    for ax, (heading, series) in zip(axes, panels.items(), strict=True):
        for label, values in series.items():
            r, p = rank_correlation(score, values)
            known = [pair for pair in values.index if pair in score.index]
            look = drawn_as.get(label, Look(INK, "-", "o"))
            text = f"{label}\nr {r:.2f}, p {p:.2g}"
            x, y = ([measure[pair] for pair in known] for measure in (score, values))
            ax.plot(x, y, look.marker, markersize=4, alpha=0.7, color=look.color, label=text)
        ax.set(title=f"RIR, {heading}", yscale="log", xlabel="alignment score of K_P and K_H")
    figure.legend(
        handles=[line for ax in axes for line in ax.lines], loc="lower left", ncols=2, frameon=False, fontsize=9
    )
    return figure, (
        "RIR against the alignment score of the two tasks. A point is a pair of classes. Unrelated tasks have the "
        "score 1/2, aligned tasks 1. r is Spearman's rank correlation. If all pairs have runs, p is from permutations "
        "of the classes."
    )


KINDS = {
    "lambdas": lambdas,
    "pareto": pareto,
    "figure1": norm_ratio,
    "figure2": pair_maps,
    "figure3": probes,
    "collateral": collateral,
    "alignment": alignment,
}


def _points(
    ax: Axes, group: Sequence[Setting], points: Sequence[Setting], x: Iterable[float], y: Iterable[float]
) -> None:
    """A mark for each setting of `points`, in its look among those of the group."""
    names, look = short_labels(points), plot.looks(group)
    for setting, *place in zip(points, x, y, strict=True):
        ax.plot(*place, look[setting].marker, color=look[setting].color, label=names[setting])


def _curves(
    group: Sequence[Setting], objective: str, family: str, roles: Sequence[str], xscale: str = "linear", bar: str = ""
) -> tuple[Figure, str] | None:
    """One panel per task, one line per setting, with bands for a few settings; the baseline in thin dashes.

    The median of the measure `bar` is dotted. Settings on different pairs of classes have a baseline and a bar each.
    And how they are drawn, for the caption.
    """
    shown = [r for r in roles if any(_stages(result, family, r) for s in group for result in s.results)]
    if not shown:
        return None
    look, how, count = plot.looks(group), "", len(group)
    if count > MOST:
        of = query_of(objective)
        scored = [setting for setting in group if len(setting.values(of))]
        best = sorted(scored, key=lambda setting: -setting.summary(of).mean)[:MOST]
        which = f"{len(best)} with the largest {objective}" if best else f"first {MOST}"
        group, how = best or group[:MOST], f" Of {count} settings, the {which}."
    apart = len({frozenset(run.pair for run in setting.runs) for setting in group}) > 1
    how = _HOW + (", of each setting in its color, since their pairs of classes differ." if apart else ".") + how
    names = short_labels(group)
    figure, axes = plot.panel_axes(len(shown), width=3.2, height=2.8)
    for ax, role in zip(axes, shown, strict=True):
        for setting in group:
            if band := _band(setting, family, role):
                x, middle, low, high = band
                color, line, marker = look[setting]
                every = (2 * group.index(setting) % 10, max(1, len(x) // 6))  # where those of others are not
                ax.plot(x, middle, color=color, linestyle=line, marker=marker, markevery=every, label=names[setting])
                if len(setting.runs) > 1 and len(group) <= BANDS:
                    edge: dict[str, Any] = {"linewidth": 0.6, "linestyle": line, "edgecolor": color}
                    ax.fill_between(x, low, high, facecolor=(color, 0.1), **edge)
        for some, color in [([s], look[s].color) for s in group] if apart else [(group, INK)]:
            if before := next((b for s in some if (b := _band(s, family, role, "baseline"))), None):
                label = None if "baseline" in ax.get_legend_handles_labels()[1] else "baseline"
                ax.plot(*before[:2], color=color, linestyle=(0, (5, 3)), linewidth=1.0, label=label)
            if bars := [level for s in some if bar and (level := s.median(Query(bar, role))) is not None]:
                ax.axhline(np.median(bars), color=color, linewidth=1.2, linestyle=":")
        ax.set(title=f"{role} task", xscale=xscale)
    plot.legend_below(figure, axes[0])
    return figure, how


def _stages(result: Result, family: str, role: Role) -> Mapping[Stage, Curve]:
    return by_task(result.curves, family).get(role, {})


def _band(
    setting: Setting, family: str, role: Role, stage: Stage = "immunized"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """x, median and quartiles of a curve over the runs that share the commonest length."""
    curves = [curve for result in setting.results if (curve := _stages(result, family, role).get(stage))]
    if not curves:
        return None
    length = statistics.mode(len(curve["x"]) for curve in curves)
    curves = [curve for curve in curves if len(curve["x"]) == length]
    y = np.array([curve["y"] for curve in curves], dtype=float)
    low, middle, high = np.nanquantile(y, (0.25, 0.5, 0.75), axis=0)
    return np.array(curves[0]["x"], dtype=float), middle, low, high
