"""What every attack costs before and after immunization, in one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from immunization.results.plot import INK, LINE, Plot, headline, inked, panel_axes
from immunization.results.settings import Setting
from immunization.runs.verdict import attack_names, successes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNED, HELD = "#D55E00", "#0072B2"
INCHES_A_LETTER = 0.08
"""Of names in letters of 9 points."""


def attack_costs(setting: Setting, name: str) -> Plot | None:
    """A line an attack: operations until the task is learned, baseline to immunized; None where no attack has any.

    Medians over the runs. An attack that does not learn the task is drawn at its whole budget, with another color and
    mark than one that does.
    """
    results = [run.result for run in setting.runs]
    rows = []
    for attack in dict.fromkeys(name for result in results for name in attack_names(result)):
        learns = 2 * sum(attack in successes(result) for result in results) >= len(results)
        before = setting.median(f"attack/{attack}/cost_baseline")
        after = setting.median(f"attack/{attack}/cost") if learns else _budget(setting, attack)
        if after is not None and after > 0:
            rows.append((not learns, after, attack, before))
    if not rows:
        return None
    rows.sort(reverse=True)  # the cheapest success stands at the top
    with inked():
        figure = _drawn(setting, rows)
    caption = (
        "Operations until each attack learns the harmful task, with the baseline (circle) and with the immunized "
        "extractor (filled, orange). Blue squares: attacks that do not learn it; their whole budget is drawn, so the "
        "cost is larger, if there is one. No circle: the attack does not learn the task of the baseline."
    )
    return Plot(name, caption, figure)


def _budget(setting: Setting, attack: str) -> float | None:
    """Operations that the attack had."""
    name = f"attack/{attack}/compute"
    spent = [run.result.curves[name]["x"][-1] for run in setting.runs if name in run.result.curves]
    return max(spent, default=None)


def _drawn(setting: Setting, rows: list[tuple[bool, float, str, float | None]]) -> Figure:
    """One line for each of `rows`: whether it is held, operations after, name, operations before."""
    left = 0.4 + INCHES_A_LETTER * max(len(attack) for _, _, attack, _ in rows)
    figure, (ax,) = panel_axes(1, width=3.4, height=0.6 + LINE * len(rows), legend_rows=3, left=left)
    for y, (held, after, _, before) in enumerate(rows):
        color = HELD if held else LEARNED
        if before is not None:
            ax.plot([before, after], [y, y], color=color, linestyle=":" if held else "-", linewidth=1.2)
            ax.plot([before], [y], "o", markerfacecolor="none", color=INK)
        ax.plot([after], [y], "s" if held else ">", color=color, markerfacecolor="none" if held else color)
    ax.set_yticks(range(len(rows)), [attack for _, _, attack, _ in rows], fontsize=9)
    ax.set(xscale="log", xlabel="operations of the attacker", ylim=(-0.7, len(rows) - 0.3))
    ax.minorticks_off()
    marks = {
        "learns the task (immunized)": (">", LEARNED, LEARNED),
        "does not, with all of its budget": ("s", "none", HELD),
        "baseline, the same attack": ("o", "none", INK),
    }
    for label, (marker, face, edge) in marks.items():
        ax.plot([], [], marker, color=edge, markerfacecolor=face, label=label)
    figure.legend(*ax.get_legend_handles_labels(), loc="lower left", frameon=False, fontsize=9)
    headline(figure, [setting])
    return figure
