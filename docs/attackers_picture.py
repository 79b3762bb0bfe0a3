"""Draw docs/images/attackers.png, the picture of forget.md, from attackers.json: `python docs/attackers_picture.py`."""

import json
from pathlib import Path

from matplotlib.figure import Figure

IMAGES = Path(__file__).with_name("images")
BEFORE, AFTER, LINE = "#888888", "#D55E00", "#222222"


def figure() -> Figure:
    """One row per attacker, the strongest at the bottom: accuracy on the harmful task before and after."""
    measured = json.loads((IMAGES / "attackers.json").read_text())
    attackers = measured["attackers"]
    made = Figure(figsize=(7.8, 3.0), layout="constrained")
    ax = made.subplots()
    for row, attacker in enumerate(attackers):
        ax.plot([attacker["after"], attacker["before"]], [row, row], color="#CCCCCC", linewidth=3, zorder=1)
        for key, color, size, place in (("before", BEFORE, 13, (0, 9)), ("after", AFTER, 8, (18, 8))):
            x = attacker[key]
            ax.plot(x, row, "o", color=color, markersize=size, label=key if row == 0 else None)
            if key == "before" or x != attacker["before"]:
                ax.annotate(f"{x:.3f}"[1:], (x, row), place, textcoords="offset points", ha="center")
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
    made.suptitle("ResNet18, 224 pixels, 60 classes of cars, method=forget", x=0.01, ha="left", fontsize=11)
    made.legend(loc="outside upper right", ncols=2, frameon=False)
    return made


if __name__ == "__main__":
    figure().savefig(IMAGES / "attackers.png", dpi=110, facecolor="white")
