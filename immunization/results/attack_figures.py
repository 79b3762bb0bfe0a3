"""The cost of each attack on one setting, before and after, and of the cheapest attack on every setting."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from immunization.results.plot import INK, LETTER, LINE, Look, Plot, fit_log, headline, inked, panel_axes
from immunization.results.settings import Setting
from immunization.runs.verdict import attack_names, successes

LEARNED, HELD = "#D55E00", "#0072B2"
INCHES_A_LETTER = 0.08  # of names in letters of 9 points
NARROW = 0.01
"""Of the primary measure, to both sides of none lost, figures show at least so much: less is rounding."""


def attack_costs(setting: Setting, name: str) -> Plot | None:
    """One line per attack: operations until the task is learned, baseline to immunized; None where no attack has any.

    Medians over the runs. An attack that does not learn the task is drawn at its whole budget, with another color and
    mark than one that does.
    """
    results, rows = setting.results, []
    for attack in dict.fromkeys(name for result in results for name in attack_names(result)):
        after = setting.median(f"attack/{attack}/cost")
        if held := 2 * sum(attack in successes(result) for result in results) < len(results):
            spent = (result.curves.get(f"attack/{attack}/compute") for result in results)
            after = max((curve["x"][-1] for curve in spent if curve), default=None)
        if after is not None and after > 0:
            rows.append((held, after, attack, setting.median(f"attack/{attack}/cost_baseline")))
    if not rows:
        return None
    rows.sort(reverse=True)  # the cheapest success stands at the top
    with inked():
        left = 0.4 + INCHES_A_LETTER * max(len(attack) for _, _, attack, _ in rows)
        figure, (ax,) = panel_axes(1, width=3.4, height=0.6 + LINE * len(rows), legend_rows=3, left=left)
        for y, (held, after, _, before) in enumerate(rows):
            color = HELD if held else LEARNED
            if before is not None:
                ax.plot([before, after], [y, y], color=color, linestyle=":" if held else "-", linewidth=1.2)
                ax.plot([before], [y], "o", markerfacecolor="none", color=INK)
            ax.plot([after], [y], "s" if held else ">", color=color, markerfacecolor="none" if held else color)
        ax.set_yticks(range(len(rows)), [attack for _, _, attack, _ in rows], fontsize=9)
        ax.set(xlabel="operations of the attacker", ylim=(-0.7, len(rows) - 0.3))
        fit_log(ax.xaxis, [cost for _, after, _, before in rows for cost in (after, before) if cost is not None])
        ax.plot([], [], ">", color=LEARNED, label="learns the task (immunized)")
        ax.plot([], [], "s", color=HELD, markerfacecolor="none", label="does not, with all of its budget")
        ax.plot([], [], "o", color=INK, markerfacecolor="none", label="baseline, the same attack")
        figure.legend(*ax.get_legend_handles_labels(), loc="lower left", frameon=False, fontsize=9)
        headline(figure, [setting])
    caption = (
        "Operations until each attack learns the harmful task: on the baseline (circle) and on the immunized extractor "
        "(filled, orange). Blue squares: the attack does not learn it within the budget drawn. No circle: it does not "
        "learn it on the baseline."
    )
    return Plot(name, caption, figure)


class Point(NamedTuple):
    """A method: `price` is the loss on the primary task, `cost` the attacker's over the baseline's, inf if held."""

    label: str
    price: float
    cost: float
    look: Look


def resistance(points: Sequence[Point], name: str, title: str) -> Plot:
    """Cost of the attacker against the price of a method, with labels beside the axes that cannot overlap.

    Methods that no attack breaks stand on a line of their own above all others.
    """
    held = any(math.isinf(point.cost) for point in points)
    finite = [point.cost for point in points if math.isfinite(point.cost)] or [1.0]
    top = max(finite) * 3
    room = 0.6 + LETTER * max(len(point.label) for point in points)
    with inked():
        figure, (ax,) = panel_axes(1, width=4.2, height=max(2.6, LINE * len(points)), left=0.9, right=room)
        ranked = sorted(points, key=lambda point: (min(point.cost, top), -point.price))
        for rank, (label, price, cost, (color, _, marker)) in enumerate(ranked):
            place = price, min(cost, top)
            ax.plot(*place, marker, color=color, markersize=8, markeredgecolor=INK, markeredgewidth=0.6)
            arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkB": 4, "relpos": (0, 0.5)}
            beside = {"xytext": (1.06, (rank + 0.5) / len(ranked)), "textcoords": "axes fraction", "va": "center"}
            ax.annotate(label, place, fontsize=9, arrowprops=arrow, annotation_clip=False, **beside)
        if held:
            ax.axhline(top, color=INK, linewidth=0.8, linestyle=":")
        fit_log(ax.yaxis, [min(finite) * 0.8, top if held else max(finite) * 1.2])
        ax.axvline(0, color=INK, linewidth=0.6, alpha=0.5)
        ax.set(xlabel="lost on the primary task", ylabel="cost of the cheapest attack / baseline's")
        ax.margins(x=0.1)
        left, right = ax.get_xlim()
        ax.set_xlim(min(left, -NARROW), max(right, NARROW))
        ax.locator_params(axis="x", nbins=5)
        figure.suptitle(title, fontsize=10, x=0.02, ha="left", y=0.98)
    caption = (
        "Cost of the cheapest attack, median over runs, against the held-out loss on the primary task; a gain counts "
        "as no loss. Up and left is better. On a dotted line no attack learns the task in most runs."
    )
    return Plot(f"{name}_resistance", caption, figure)
