"""Harm resisted against price, a point a method, with labels beside the axes that cannot overlap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from immunization.results.plot import INK, LETTER, LINE, Look, Plot, fit_log, inked, panel_axes

NARROW = 0.01
"""Of the primary measure, to both sides of none lost, the figure shows at least so much: less is rounding."""


@dataclass(frozen=True)
class Point:
    """A method: `price` is what the primary task loses, `cost` the attacker's over the baseline's.

    The cost is infinite where no attack succeeds; `unbroken` says so in words.
    """

    label: str
    price: float
    cost: float
    look: Look
    unbroken: str = "held"


def resistance(points: Sequence[Point], name: str, title: str) -> Plot:
    """The figure; methods that no attack breaks stand on a line of their own above all others."""
    held = any(math.isinf(point.cost) for point in points)
    finite = [point.cost for point in points if math.isfinite(point.cost)] or [1.0]
    top = max(finite) * 3
    height = max(2.6, LINE * len(points))
    room = 0.6 + LETTER * max(len(_label(point)) for point in points)
    with inked():
        figure, (ax,) = panel_axes(1, width=4.2, height=height, left=0.9, right=room)
        ranked = sorted(points, key=lambda point: (min(point.cost, top), -point.price))
        for rank, point in enumerate(ranked):
            y, color = min(point.cost, top), point.look.color
            edge = {"markeredgecolor": INK, "markeredgewidth": 0.6}
            ax.plot([point.price], [y], point.look.marker, color=color, markersize=8, **edge)
            share = (rank + 0.5) / len(ranked)
            arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkB": 4, "relpos": (0, 0.5)}
            ax.annotate(
                _label(point),
                (point.price, y),
                (1.06, share),
                textcoords="axes fraction",
                va="center",
                fontsize=9,
                arrowprops=arrow,
                annotation_clip=False,
            )
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
        "Harm resisted against price: operations of the cheapest attack that learns the harmful task over the "
        "baseline's, median over runs, against what the primary task loses, held out. Up and left is better. "
        "A gain counts as no loss. On the dotted line, if there is one, no attack learns the task in most runs."
    )
    return Plot(f"{name}_resistance", caption, figure)


def _label(point: Point) -> str:
    return point.label if math.isfinite(point.cost) else f"{point.label} ({point.unbroken})"
