"""Draw the pictures of README, tutorial and concepts: `python docs/pictures.py [name ...]`, all of them without a name.

Each picture first makes the runs that it shows, by the command in its docstring, in a temporary folder.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from subprocess import run as call
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure
from wandb_picture import dashboard

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
    of_sweep("sweeps=lambda_grid", "lambdas", folder, picture)


def alignment(folder: Path, picture: Path) -> None:
    """RIR against the alignment score: `python launch.py experiment=alignment`, the same."""
    of_sweep("experiment=alignment", "alignment", folder, picture)


def of_sweep(option: str, kind: str, folder: Path, picture: Path) -> None:
    """Make the sweep `option` and keep the picture `kind` of its report."""
    sweep, out = folder / "sweep", folder / "out"
    call([sys.executable, "launch.py", option, "tracker=none", f"hydra.sweep.dir={sweep}"], check=True)
    call([sys.executable, "-m", "immunization.results", sweep, "--output", out], check=True)
    copy(next(out.rglob(f"*_{kind}.png")), picture)


def audit_worth(_: Path, picture: Path) -> None:
    """An audit by images: of the leaderboard's rows of three runs of `experiment=leaderboard/resnet18_cars`."""
    method, images = "forget_blocks", ("5", "10", "20", "all")
    rows = [json.loads(path.read_text()) for path in (ROOT / "leaderboard/rows/resnet18_cars").glob(f"{method}-*")]

    def mean(name: str, count: str) -> float:
        return sum(row["metrics"][f"worth/{name}" + f"_{count}" * (count != "all")] for row in rows) / len(rows)

    before = [mean("before", count) for count in images]
    worth = [mean("theta_0", count) for count in images]
    removed = [mean("removed", count) for count in images]
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    ax = figure.subplots()
    after = [a - share * w for a, share, w in zip(before, removed, worth, strict=True)]
    without = [a - w for a, w in zip(before, worth, strict=True)]
    ax.plot(images, before, "o--", color=BEFORE, linewidth=2, label="with the model before")
    ax.plot(images, after, "P-", color=METHODS[method], linewidth=3, markersize=9, label=f"after {method}")
    ax.plot(images, without, "x:", color="#222222", linewidth=2, label="without the model")
    for x, (w, share) in enumerate(zip(worth, removed, strict=True)):
        text = f"worth {w:.2f}\nremoved {share:.2f}".replace("0.", ".")
        ax.annotate(text, (x, without[x] - 0.03), ha="center", va="top", fontsize=10)
    ax.set(xlabel="images of each class that the attacker has", ylim=(0, 1), xlim=(-0.4, 3.4))
    ax.set_ylabel("accuracy of the best attacker")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=10)
    figure.savefig(picture, dpi=125, facecolor="white")


def attackers(_: Path, picture: Path) -> None:
    """Three attackers before and after `method=forget`, one row each: of docs/images/attackers.json."""
    measured = json.loads((IMAGES / "attackers.json").read_text())
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    ax = figure.subplots()
    for row, attacker in enumerate(measured["attackers"]):
        ax.plot([attacker["after"], attacker["before"]], [row, row], color="#CCCCCC", linewidth=3, zorder=1)
        for key, color, size, place in (("before", BEFORE, 13, (0, 9)), ("after", METHODS["forget"], 8, (18, 8))):
            x = attacker[key]
            ax.plot(x, row, "o", color=color, markersize=size, label=key if row == 0 else None)
            if key == "before" or x != attacker["before"]:
                ax.annotate(f"{x:.3f}"[1:], (x, row), place, textcoords="offset points", ha="center")
    for x, text in ((measured["guessing"], "guessing"), (measured["without_model"], "without the released net")):
        ax.axvline(x, color="#222222", linestyle=":", linewidth=1, zorder=0)
        ax.annotate(text, (x, -0.6), (3, 0), textcoords="offset points", fontsize=9)
    names = [attacker["name"] for attacker in measured["attackers"]]
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(-0.03, 1), ylim=(len(names) - 0.5, -0.9), xlabel="accuracy of the attacker on held-out images")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.suptitle("ResNet18, 224 pixels, 60 classes of cars, method=forget", x=0.01, ha="left", fontsize=11)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    figure.savefig(picture, dpi=125, facecolor="white")


def wandb(folder: Path, picture: Path) -> None:
    """What three runs log offline: `python launch.py -m method=<three methods> tracker.mode=offline`."""
    dashboard(folder).savefig(picture, dpi=125, facecolor="white")


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    drawn.__name__: drawn
    for drawn in (learning_curves, attack_curves, lambda_grid, alignment, audit_worth, attackers, wandb)
}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        with TemporaryDirectory() as folder:
            PICTURES[name](Path(folder), IMAGES / f"{name}.png")
