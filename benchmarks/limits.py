"""The tables of docs/results/limits.md: `python benchmarks/limits.py <table> [--root <folder with house_prices>]`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median

import torch
from scipy.stats import spearmanr
from torch import Tensor

from immunization import run
from immunization.attacks import (
    LBFGS,
    Adam,
    ClosedFormProbe,
    ConjugateGradients,
    LinearProbe,
    LogisticProbe,
    Victim,
    WhitenedProbe,
)
from immunization.attacks.base import step_grid
from immunization.attacks.least_squares import ProbeAttack, ProbeCurves
from immunization.config import build, compose
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison
from immunization.models import Linear
from immunization.models.weights import read_checkpoint
from immunization.runs.filenames import WEIGHTS
from immunization.runs.files import read_tensors

QUIET = ["tracker=none", "figures=false"]
ATTACKS = (
    *("linear_probe", "momentum", "adam", "adam_scaled", "scaled", "lbfgs", "lbfgs_scaled", "conjugate_gradients"),
    *("whitened_probe", "closed_form_probe", "strip", "weights_int8"),
)
OWN = {
    "(primary accuracy, the net's own head)": ("primary/head_accuracy_baseline", "primary/head_accuracy"),
    "(steps of a benign probe, relative)": ("", "steps_ratio/benign"),
}
ROLES = ("harmful", "primary")
PAIRS = ("0-1", "3-5", "2-7")
SEEDS = (0, 1, 2)


def measured(overrides: Sequence[str], folder: str | None = None) -> dict[str, float]:
    """The metrics of a run, in a folder of its own where none is given; it prints nothing."""
    with tempfile.TemporaryDirectory() as other, redirect_stdout(StringIO()):
        return run(list(overrides), folder=folder or other, quiet=True).metrics


def victim_of(pair: TaskPair, theta: Tensor) -> Victim:
    """A linear model with the given theta; the baseline is the inputs."""
    model = Linear(pair)
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    model.extractor.theta.data.copy_(theta)
    return Victim(model, Comparison(pair, model), start)


def house_prices(root: str) -> Iterator[Sequence[str]]:
    """Steps until the relative excess training loss of the harmful probe is 1e-2 / 1e-4, the best of all settings."""
    each = ["dataset=house_prices", f"dataset.root={root}/house_prices", "dataset.download=false"]
    each += ["dataset.common_range=true", "dataset.normalize=each"]
    shared = [*each[:-1], "dataset.normalize=shared"]
    maps = {
        "identity": [*each, "method=identity"],
        "closed_form": [*each, "method=closed_form", "method.rotate=false"],
        "the same, rotated": [*each, "method=closed_form"],
        "rotated, shared normalization": [*shared, "method=closed_form"],
        "learning_curve": [*each, "method=learning_curve"],
    }
    attacks: dict[str, ProbeAttack] = {
        "gradient descent, exact line search": LinearProbe(steps=20000),
        "Adam, best of 11 rates": Adam(rates=Adam().rates[:-1], steps=5000),
        "column scaling, then gradient descent": LinearProbe(steps=20000, scaling="columns"),
        "conjugate gradients": ConjugateGradients(steps=10000),
        "L-BFGS": LBFGS(steps=10000),
        "whitening, then gradient descent": WhitenedProbe(),
    }
    columns = {}
    for name, overrides in maps.items():
        pair = build(compose([*overrides, *QUIET]), "dataset").to("cpu", torch.float64)
        with tempfile.TemporaryDirectory() as folder:
            measured([*overrides, *QUIET, "evaluation=[rir]"], folder)
            theta = read_checkpoint(folder).tensors["theta"]
        victim = victim_of(pair, theta)
        kappa = victim.comparison.probe("harmful", "immunized").sigma
        title = f"{name}, kappa_H={(kappa[0] / kappa[-1]).square().item():.2g}"
        columns[title] = [steps(attack, victim) for attack in attacks.values()]
    yield ["attacker", *columns]
    yield from ([name, *cells] for name, *cells in zip(attacks, *columns.values(), strict=True))


def steps(attack: ProbeAttack, victim: Victim) -> str:
    """First step of the grid at which any setting has come to 1e-2 / 1e-4 of the excess loss of w = 0."""
    problem = attack.problem(victim, "immunized")
    curves = ProbeCurves(problem, step_grid(attack.steps), len(attack.settings))
    attack.descend(problem, curves)
    curves.finish()
    best = curves.excess.nan_to_num(torch.inf).min(0).values
    found = [(best <= level).nonzero() for level in (1e-2, 1e-4)]
    return " / ".join(f"{curves.grid[int(at[0, 0])]}" if len(at) else f"> {attack.steps}" for at in found)


def digits(root: str) -> Iterator[Sequence[str]]:
    """learning_curve without and with `centered`: medians over three pairs and three seeds, no choice made on these."""
    names = [*ATTACKS]
    columns: dict[str, list[str]] = {}
    for centered in ("false", "true"):
        options = ["dataset.benign=9", f"method.centered={centered}", f"attack=[{','.join(names)}]"]
        results = [measured([*job, *options]) for job in jobs()]
        title = f"centered={centered}"
        columns[f"steps ratio, {title}"] = [
            f"{median(m[f'attack/{name}/steps_ratio'] for m in results):.3g}" for name in names
        ]
        columns[f"held out, {title}"] = [
            " → ".join(f"{median(m[f'attack/{name}/final{end}'] for m in results):.3f}" for end in ("_baseline", ""))
            for name in names
        ]
        for role in ("primary", "benign"):
            columns[f"held out, {title}"].append("")
            columns[f"steps ratio, {title}"].append(f"{median(m[f'steps_ratio/{role}'] for m in results):.3g}")
        columns[f"held out, {title}"].append("")
        columns[f"steps ratio, {title}"].append(f"{median(m['attack/worst/flops_ratio'] for m in results):.3g}")
    rows = [*names, "(primary probe)", "(benign probe)", "(operations of the cheapest success / baseline's)"]
    yield ["attack", *columns]
    yield from ([name, *cells] for name, *cells in zip(rows, *columns.values(), strict=True))


def direct(root: str) -> Iterator[Sequence[str]]:
    """Held-out accuracy of a direct attacker with few rows, or with rounded weights: medians, centered=true."""
    yield ["closed_form_probe", "baseline", "immunized"]
    settings = [f"samples={count}" for count in (2, 5, 10, 20, 50)]
    settings += [f"precision={dtype}" for dtype in ("float32", "bfloat16", "int8")]
    found: dict[str, list[dict[str, float]]] = {setting: [] for setting in settings}
    for job in jobs():
        with tempfile.TemporaryDirectory() as folder:
            measured([*job, "method.centered=true"], folder)
            for setting in settings:
                options = ["immunize=false", f"model.checkpoint={folder}", "attack=[closed_form_probe]"]
                found[setting].append(measured([*job, *options, f"attack.closed_form_probe.{setting}"]))
    for setting, results in found.items():
        ends = ("_baseline", "")
        yield [setting, *(f"{median(m[f'attack/closed_form_probe/final{end}'] for m in results):.3f}" for end in ends)]


def erasure(root: str) -> Iterator[Sequence[str]]:
    """A map that is not invertible: what tells the harmful classes apart on half of the rows is projected out.

    The attacker has the other half. Held-out accuracy of the same attackers on the harmful and the primary task.
    """
    attacks = {
        "ridge regression": ClosedFormProbe(),
        "whitening": WhitenedProbe(),
        "gradient descent": LinearProbe(steps=1024),
        "L-BFGS, standardized features": LBFGS(steps=200, scaling="standard"),
    }
    found: dict[tuple[str, str, str], list[float]] = {}
    for job in jobs():
        pair = build(compose(job), "dataset").to("cpu", torch.float64)
        mine, theirs = halves(pair.harmful)
        theta = eraser(mine)
        for role, tasks in {"harmful": (pair.primary, theirs), "primary": (pair.harmful, pair.primary)}.items():
            victim = victim_of(TaskPair(role, *tasks), theta)
            for name, attack in attacks.items():
                for stage in ("baseline", "immunized"):
                    found.setdefault((name, role, stage), []).append(attack.run(victim, stage).final)
    yield ["probe", "harmful, before → after", "primary, before → after"]
    for name in attacks:
        cells = ([f"{median(found[name, role, stage]):.3f}" for stage in ("baseline", "immunized")] for role in ROLES)
        yield [name, *(" → ".join(cell) for cell in cells)]


def nets(root: str) -> Iterator[Sequence[str]]:
    """The last stage of a net trained by learning_curve_net; the attacker has none of the defender's harmful images.

    Held-out accuracy on the harmful task, medians over seeds 1 to 3; epochs and rate are the first tried, on seed 0.
    """
    attacks = {
        "gradient descent": LinearProbe(steps=4096),
        "L-BFGS, standardized features": LBFGS(steps=512, scaling="standard"),
        "ridge regression": ClosedFormProbe(),
        "whitening": WhitenedProbe(),
        "logistic regression, whitened": LogisticProbe(),
    }
    found: dict[str, list[float]] = {}
    for seed in (1, 2, 3):
        overrides = ["experiment=digits_deep", "method=learning_curve_net", "method.epochs=20", "optimizer.lr=1e-3"]
        overrides += [f"seed={seed}", "dataset.val_fraction=0.4", "evaluation=[own_head,learning_curves]", *QUIET]
        config = compose(overrides)
        data = build(config, "dataset").to("cpu", torch.float64)
        model, pair = build(config, "model", pair=data.to("cpu", torch.float32)).read(data, False)
        start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            metrics = measured(overrides, folder)
            weights, _ = read_tensors(Path(folder) / WEIGHTS)
        head = f"{model.parts.classifier}."
        model.net.load_state_dict({name: t for name, t in weights.items() if not name.startswith(head)})
        # the validation split, which the method is not shown, becomes the attacker's training and validation rows
        x, y, reference = pair.harmful.val.x, pair.harmful.val.y, model.reference["harmful", "val"]
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        parts = dict(zip(("val", "train"), order.split([len(y) // 4, len(y) - len(y) // 4]), strict=True))
        task = replace(pair.harmful, **{split: Split(x[rows], y[rows]) for split, rows in parts.items()})
        model.reference |= {("harmful", split): reference[rows] for split, rows in parts.items()}
        victim = Victim(model, Comparison(TaskPair("nets", pair.primary, task), model), start)
        for name, attack in attacks.items():
            for stage in ("baseline", "immunized"):
                found.setdefault(f"{name} {stage}", []).append(attack.run(victim, stage).final)
        for name, keys in OWN.items():
            for stage, key in zip(("baseline", "immunized"), keys, strict=True):
                found.setdefault(f"{name} {stage}", []).append(metrics[key] if key else 1.0)
    yield ["probe", "before → after"]
    for name in (*attacks, *OWN):
        yield [name, " → ".join(f"{median(found[f'{name} {stage}']):.3f}" for stage in ("baseline", "immunized"))]


def transfer(root: str) -> Iterator[Sequence[str]]:
    """Harmful data that were not known: steps ratio of every other digit, after immunization against one.

    The last column is Spearman's correlation of these ratios with the alignment score of both digits' inputs.
    """
    options = ["method=learning_curve", "evaluation=[learning_curves,alignment]", *QUIET]
    yield ["pair", "known digit", "other digits, median", "least", "most", "rank correlation with alignment"]
    for pair in PAIRS:
        primary, harmful = pair.split("-")
        rows = []
        for other in range(10):
            if str(other) not in (primary, harmful):
                classes = [f"dataset.primary={primary}", f"dataset.harmful={harmful}", f"dataset.benign={other}"]
                rows.append(measured([*classes, *options]))
        ratios = [m["steps_ratio/benign"] for m in rows]
        known = median(m["steps_ratio/harmful"] for m in rows)
        score = spearmanr(ratios, [m["alignment/benign_harmful"] for m in rows]).statistic
        cells = (known, median(ratios), min(ratios), max(ratios))
        yield [pair, *(f"{value:.3g}" for value in cells), f"{score:.2f}"]


def halves(task: Task) -> tuple[Task, Task]:
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))
    parts = order.tensor_split(2)
    return tuple(replace(task, train=Split(task.train.x[rows], task.train.y[rows])) for rows in parts)


def eraser(task: Task, ridge: float = 1e-6) -> Tensor:
    """K^-1/2 (I - Q Q^T) K^1/2 with Q spanning K^-1/2 X^T [Y, 1]: no least-squares probe of these rows learns anything.

    Least-squares concept erasure (Belrose et al. 2023), for features with and without their mean.
    """
    x = task.train.x
    values, vectors = torch.linalg.eigh(x.T @ x)
    values = values.clamp(min=ridge * values[-1].item())
    root, inverse = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    labels = torch.cat([task.targets(task.train.y), torch.ones(len(x), 1, dtype=x.dtype)], 1)
    q = torch.linalg.qr(inverse @ x.T @ labels).Q
    return inverse @ (root - q @ (q.T @ root))


def jobs() -> Iterator[list[str]]:
    """Overrides of a run for each pair of digits and seed."""
    for pair in PAIRS:
        primary, harmful = pair.split("-")
        for seed in SEEDS:
            classes = [f"dataset.primary={primary}", f"dataset.harmful={harmful}", f"seed={seed}"]
            yield ["method=learning_curve", "evaluation=[primary,learning_curves]", *classes, *QUIET]


def main() -> None:
    tables = {table.__name__: table for table in (house_prices, digits, direct, erasure, nets, transfer)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=tables)
    parser.add_argument("--root", default=compose().data_root, help="folder that holds house_prices/train.csv")
    options = parser.parse_args()
    for i, row in enumerate(tables[options.table](options.root)):
        print(f"| {' | '.join(row)} |", flush=True)
        if i == 0:
            print(f"|---|{'---:|' * (len(row) - 1)}", flush=True)


if __name__ == "__main__":
    main()
