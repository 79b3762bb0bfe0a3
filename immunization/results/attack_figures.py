"""The cost of each attack on one setting, before and after, and what is left of worth on every setting."""

from collections.abc import Sequence

import numpy as np

from immunization.results.plot import INK, LETTER, LINE, Plot, fit_log, headline, inked, looks, panel_axes
from immunization.results.settings import Setting
from immunization.runs.verdict import attack_names, successes

LEARNED, HELD, LEADER = "#D55E00", "#0072B2", "#BBBBBB"
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
        after = setting.paid(f"attack/{attack}/cost")
        if held := 2 * sum(attack in successes(result) for result in results) < len(results):
            spent = (result.curves.get(f"attack/{attack}/compute") for result in results)
            after = max((curve["x"][-1] for curve in spent if curve), default=None)
        if after is not None and after > 0:
            rows.append((held, after, attack, setting.paid(f"attack/{attack}/cost_baseline")))
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


def worth_removed(rows: Sequence[Setting], metric: str, name: str, title: str, bound: float) -> Plot | None:
    """Worth removed with its interval, against points lost (`Setting.lost`), with lines at 0, 1 and `bound`.

    None where no row has both. Names stand one below the other beside the axes, those of points that hide one another
    together, in the order of the shortest lines to them.
    """
    from scipy.optimize import linear_sum_assignment

    look, rows = looks(rows), [row for row in rows if row.lost is not None and row.removed(metric)]
    if not rows:
        return None
    points = [(row, 100 * max(row.lost, 0.0), *row.removed(metric)) for row in rows]
    images = metric.partition("_")[2] or "all"
    low, high = min(0.0, *(point[3] for point in points)), max(1.0, *(point[4] for point in points))
    with inked():
        right = 0.6 + LETTER * max(len(row.label) for row, *_ in points)
        figure, (ax,) = panel_axes(1, width=4.2, height=max(2.6, LINE * len(points)), left=1.5, right=right)
        for y in (0, 1):
            ax.axhline(y, color=INK, linewidth=0.8, linestyle=":")
        ax.axvline(bound, color=INK, linewidth=0.8, linestyle=":")
        for row, loss, share, *ends in points:
            color, _, marker = look[row]
            ax.plot([loss, loss], ends, color=color, linewidth=1.4)
            ax.plot(loss, share, marker, color=color, markersize=8, markeredgecolor=INK, markeredgewidth=0.6)
        ax.set(xlabel="points lost, of the primary task or other classes", ylabel=f"worth removed, {images} images")
        most = max(loss for _, loss, *_ in points)
        ax.set(xlim=(-bound, max(2 * bound, 1.1 * most)), ylim=(max(low, -1) - 0.1, min(high, 2) + 0.1))
        ax.locator_params(axis="x", nbins=5)
        ax.locator_params(axis="y", steps=[5, 10])
        names = {0: "identity: 0", 1: "no model: 1"}
        ax.yaxis.set_major_formatter(lambda value, position: names.get(round(value, 6), f"{value:g}"))
        figure.suptitle(title, fontsize=10, x=0.02, ha="left", y=0.98)
        together: dict[tuple[float, float], list[str]] = {}  # labels by the first of points that hide one another
        near_x = 0.04 * np.ptp(ax.get_xlim())
        for row, loss, share, *_ in points:
            beside = (at for at in together if (at[0] <= bound) == (loss <= bound) and abs(at[0] - loss) < near_x)
            near = (at for at in beside if abs(at[1] - share) < 0.03)
            together.setdefault(next(near, (loss, share)), []).append(row.label)
        starts = ax.transData.transform(list(together))
        ends = ax.transAxes.transform([(1.06, (i + 0.5) / len(together)) for i in range(len(together))])
        order = np.argsort(linear_sum_assignment(np.linalg.norm(starts[:, None] - ends, axis=2))[1])
        filled = 0
        for at, labels in (list(together.items())[i] for i in order):
            place = (1.06, (filled + len(labels) / 2) / len(points))
            filled += len(labels)
            arrow = {"arrowstyle": "-", "color": LEADER, "linewidth": 0.5, "shrinkB": 4, "relpos": (0, 0.5)}
            beside = {"xytext": place, "textcoords": "axes fraction", "va": "center", "fontsize": 9}
            ax.annotate("\n".join(labels), at, arrowprops=arrow, annotation_clip=False, linespacing=1.5, **beside)
    caption = (
        f"Share of theta_0's worth that is removed from attackers with {images} images of each class (95 % interval), "
        "against the points lost, on the primary task or on the own head's other classes; a gain counts as no loss. "
        "Up and left is better: at 0 nothing is removed, at 1 the model is of no use; a row that loses more than "
        f"{bound:g} points has no rank."
    )
    return Plot(f"{name}_worth", caption, figure)
