"""Draw the pictures of README and tutorial: `python docs/pictures.py [name ...]`, all of them without a name.

Each picture first makes the runs that it shows, in a temporary folder, by the command in its docstring.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure

from immunization.results.settings import METHODS
from immunization.runner import run

IMAGES = Path(__file__).with_name("images")
QUIET = ["tracker=none", "figures=false"]
BEFORE = "#555555"
ATTACKS = {"linear_probe": "gradient descent", "adam": "Adam", "whitened_probe": "whitening"}


def attack_curves(folder: Path) -> Figure:
    """Three attackers before and after: `method=learning_curve attack=[linear_probe,adam,whitened_probe]`."""
    options = ["method=learning_curve", f"attack=[{','.join(ATTACKS)}]", *QUIET]
    curves = run(options, folder=folder / "run").curves
    figure = Figure(figsize=(6.4, 2.7), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for ax, (attack, title) in zip(panels, ATTACKS.items(), strict=True):
        for ending, label, look in (
            ("", "after learning_curve", {"color": METHODS["learning_curve"], "linewidth": 4}),
            ("/baseline", "before", {"color": BEFORE, "linewidth": 2, "linestyle": "--"}),
        ):
            curve = curves[f"attack/{attack}/accuracy{ending}"]
            ax.plot(curve["x"], curve["y"], label=label, **look)
        ax.axhline(0.5, color="#222222", linestyle=":", linewidth=1)
        ax.set(title=title, xscale="log", ylim=(0.4, 1.02))
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy on the harmful task")
    panels[0].annotate("guessing", (1, 0.51), fontsize=9)
    figure.supxlabel("steps of the attacker", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


PICTURES: dict[str, Callable[[Path], Figure]] = {"attack_curves": attack_curves}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        with TemporaryDirectory() as folder:
            PICTURES[name](Path(folder)).savefig(IMAGES / f"{name}.png", dpi=125, facecolor="white")
