"""Draw docs/images/attackers.png, the picture of the README, from attackers.json: `python docs/attackers.py`."""

import json
from pathlib import Path

from matplotlib.figure import Figure

IMAGES = Path(__file__).with_name("images")
BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
BEFORE, AFTER, LINE = "#888888", "#D55E00", "#222222"


def figure() -> Figure:
    """One row per attacker, the strongest at the bottom: accuracy on the harmful task before and after."""
    measured = json.loads((IMAGES / "attackers.json").read_text())
    attackers = measured["attackers"]
    made = Figure(figsize=(7.8, 3.0), layout="constrained")
    ax = made.subplots()
    for row, attacker in enumerate(attackers):
        ax.plot([attacker["after"], attacker["before"]], [row, row], color="#CCCCCC", linewidth=3, zorder=1)
        for key, color, side, gap in (("before", BEFORE, "left", 9), ("after", AFTER, "right", -9)):
            x, inside = attacker[key], key == "after" and attacker[key] < 0.1
            ax.plot(x, row, "o", color=color, markersize=9, label=f"{key} immunization" if row == 0 else None)
            at = {"xytext": (9 if inside else gap, 0), "ha": "left" if inside else side, "va": "center"}
            ax.annotate(f"{x:.3f}"[1:], (x, row), textcoords="offset points", bbox=BOX, **at)
    for x, text in ((measured["guessing"], "guessing"), (measured["without_model"], "without the released net")):
        ax.axvline(x, color=LINE, linestyle=":", linewidth=1, zorder=0)
        ax.annotate(text, (x, -0.6), (3, 0), textcoords="offset points", fontsize=9)
    ax.set_yticks(range(len(attackers)), [attacker["name"] for attacker in attackers])
    ax.set(
        xlim=(-0.03, 1),
        ylim=(len(attackers) - 0.5, -0.9),
        xlabel="accuracy that the attacker reaches on held-out images",
    )
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    made.suptitle("ResNet18 immunized by forget, 60 kinds of cars", x=0.01, ha="left", fontsize=11)
    made.legend(loc="outside upper right", ncols=2, frameon=False)
    return made


if __name__ == "__main__":
    figure().savefig(IMAGES / "attackers.png", dpi=110, facecolor="white")
