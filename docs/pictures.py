"""Draw the pictures of README, tutorial and concepts: `python docs/pictures.py [name ...]`, all of them without a name.

Each picture first makes the runs that it shows, by the command in its docstring, in a temporary folder.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from subprocess import run as call
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure

from immunization.results.settings import METHODS
from immunization.runner import run

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
BEFORE = "#555555"
ATTACKS = {"linear_probe": "gradient descent", "adam": "Adam", "whitened_probe": "whitening"}


def learning_curves(folder: Path, picture: Path) -> None:
    """What the default run draws: `python launch.py`."""
    run(["tracker=none", "figures=true"], folder=folder)
    copy(folder / "learning_curves.png", picture)


def attack_curves(folder: Path, picture: Path) -> None:
    """Three attackers: `python launch.py method=learning_curve 'attack=[linear_probe,adam,whitened_probe]'`."""
    options = ["method=learning_curve", f"attack=[{','.join(ATTACKS)}]", "tracker=none", "figures=false"]
    curves = run(options, folder=folder).curves
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
    figure.savefig(picture, dpi=125, facecolor="white")


def lambda_grid(folder: Path, picture: Path) -> None:
    """RIR and steps over both weights: `python launch.py sweeps=lambda_grid`, then `python -m immunization.results`."""
    sweep, out = folder / "sweep", folder / "out"
    call([sys.executable, "launch.py", "sweeps=lambda_grid", "tracker=none", f"hydra.sweep.dir={sweep}"], check=True)
    call([sys.executable, "-m", "immunization.results", sweep, "--output", out], check=True)
    copy(next(out.rglob("*_lambdas.png")), picture)


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    drawn.__name__: drawn for drawn in (learning_curves, attack_curves, lambda_grid)
}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        with TemporaryDirectory() as folder:
            PICTURES[name](Path(folder), IMAGES / f"{name}.png")
