"""The cost of each attack on one setting, before and after, and what is left of worth on every setting."""

from collections.abc import Sequence
from typing import Any

from immunization.results.plot import INK, LINE, Plot, fit_log, headline, inked, panel_axes
from immunization.results.settings import Setting
from immunization.runs.interpretation import attack_names, successes
from immunization.runs.records import Query

LEARNED, HELD, LOST = "#D55E00", "#0072B2", "#BBBBBB"
IMAGES = ((INK, "o"), ("#E69F00", "s"), ("#56B4E9", "^"))
"""Color and marker of attackers with all images, with fewer, and with fewest."""

INCHES_A_LETTER = 0.08  # of names in letters of 9 points
NARROW = 0.01
"""Of the primary measure, to both sides of none lost, pictures show at least so much: less is rounding."""


def attack_costs(setting: Setting, name: str) -> Plot | None:
    """One line per attack: operations until the task is learned, baseline to immunized; None where no attack has any.

    Medians over the runs. An attack that does not learn the task is drawn at its whole budget, with another color and
    mark than one that does.
    """
    results, rows = setting.results, []
    for attack in dict.fromkeys(name for result in results for name in attack_names(result)):
        cost = Query("cost", "harmful", attack=attack)
        after = setting.paid(cost)
        if held := 2 * sum(attack in successes(result) for result in results) < len(results):
            spent = (result.curves.get(f"attack/{attack}/compute") for result in results)
            after = max((curve["x"][-1] for curve in spent if curve), default=None)
        if after is not None and after > 0:
            rows.append((held, after, attack, setting.paid(cost._replace(stage="baseline"))))
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


def worth_removed(rows: Sequence[Setting], worths: Sequence[Query], name: str, title: str, bound: float) -> Plot | None:
    """Worth removed by number of images, with intervals, and beside it the points lost (`Setting.lost`); a line a row.

    `worths` are the measures of worth, `bound` the points that a row with a rank may lose. None for fewer than two
    rows with any of `worths`.
    """
    rows = [row for row in rows if any(map(row.removed, worths))]
    if len(rows) < 2:
        return None
    with inked():
        left = 0.4 + INCHES_A_LETTER * max(len(row.label) + 2 for row in rows)
        options: dict[str, Any] = {
            "width": 2.0,
            "height": 0.28 * (len(rows) + 1),
            "left": left,
            "right": 0.6,
            "gap": 0.4,
            "top": 0.5,
        }
        figure, (worth, loss) = panel_axes(2, share=True, legend_rows=1, **options)
        lowest = -0.2
        for i, (of, (color, marker)) in enumerate(zip(worths, IMAGES, strict=True)):
            bars = [(y + 0.22 * (i - 1), *own) for y, row in enumerate(rows) if (own := row.removed(of))]
            for y, _, *ends in bars:
                worth.plot(ends, [y, y], color=color, linewidth=1.2)
            if not bars:
                continue
            places, shares, lows, _ = zip(*bars, strict=True)
            label = f"{of.images or 'all'} images per class"
            worth.plot(shares, places, marker, color=color, markersize=5, label=label)
            lowest = min(lowest, *lows)
        worth.set(xlabel="worth removed", xlim=(max(lowest, -1) - 0.05, 1.1), ylim=(len(rows) - 0.4, -0.6))
        names = {0.0: "0\n(identity)", 1.0: "1\n(no model)"}
        worth.set_xticks([0, 0.25, 0.5, 0.75, 1], [names.get(x, f"{x:g}") for x in (0, 0.25, 0.5, 0.75, 1)])
        for x, ax in ((0, worth), (1, worth), (bound, loss)):
            ax.axvline(x, color=INK, linewidth=0.8, linestyle=":")
        losses = {y: 100 * max(row.lost, 0.0) for y, row in enumerate(rows) if row.lost is not None}
        loss.barh(list(losses), list(losses.values()), height=0.5, color=LOST)
        for y, points in losses.items():
            loss.text(1.02, y, f"{points:.1f}", transform=loss.get_yaxis_transform(), va="center", fontsize=9)
        loss.set(xlabel="points lost", xlim=(0, 1.05 * max([2 * bound, *losses.values()])))
        labels = [f"{row.label} †" if row.apart else row.label for row in rows]
        worth.set_yticks(range(len(rows)), labels, fontsize=9)
        figure.legend(*worth.get_legend_handles_labels(), loc="lower left", ncols=3, frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=10, x=0.02, ha="left", y=0.98)
    caption = (
        "Left: the share of the worth of theta_0 that a method removes (95 % interval), by the number of images of "
        "each class that attackers have. At 0 nothing is removed, at 1 the model is of no use. Right: points lost on "
        "the primary task or on the own head's other classes; a gain counts as no loss. A method that loses more than "
        f"{bound:g} points has no rank." + " †: this method met other attackers." * any(row.apart for row in rows)
    )
    return Plot(f"{name}_worth", caption, figure)
