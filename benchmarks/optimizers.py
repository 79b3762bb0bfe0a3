"""The table of docs/results/optimizers.md: `python benchmarks/optimizers.py --runs FILE --page PAGE --steps 2000`.

Every optimizer of torch and timm that runs on a CPU trains a linear probe on raw and on immunized features. FILE has a
line of JSON for each, and a run goes on where it stopped: what did not arrive is done again with more steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from limits import QUIET, measured, victim_of
from sklearn.datasets import load_digits
from timm.optim import list_optimizers
from torch import Tensor, nn

from immunization.attacks import LBFGS, LeastSquares, LinearProbe, Victim
from immunization.attacks.base import step_grid
from immunization.attacks.least_squares import DIVERGENCE, ProbeAttack, ProbeCurves
from immunization.attacks.optimizers import optimizer_named
from immunization.attacks.suite import run_attacks
from immunization.config import build, compose
from immunization.data import Origin, Split, Task, TaskPair, finish, split_rows, standardize
from immunization.errors import ConfigError
from immunization.models.weights import read_checkpoint

METHODS = ("learning_curve", "closed_form", "condition_number")
FEATURES = ("raw", *(f"{method}{how}" for method in METHODS for how in ("", ", rotated", ", standardized")))
RATES = torch.logspace(-3, 3, 12, dtype=torch.float64).tolist()
UNCAPPED = {"Rprop, uncapped": ("Rprop", {"step_sizes": (1e-12, 1e12)})}
TASKS = {
    "0/1": ["dataset.primary=0", "dataset.harmful=1"],
    "ten": ["trusted=[optimizers]", "dataset._target_=optimizers.ten_digits", "dataset.harmful=1"],
}
PAIRS = ((0, 1), (4, 9), (3, 8))


class Known(NamedTuple):
    """An optimizer, and the names that take the same steps with these rates and without weight decay."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    alike: list[str]


def ten_digits(seed: int, **_: object) -> TaskPair:
    """Half of scikit-learn's digits, turned on their side, 3 or not, and all ten classes of the other half."""
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    order, tasks = torch.randperm(len(digits), generator=generator).tensor_split(2), {}
    turned = pixels.view(-1, 8, 8).transpose(1, 2).flip(2).reshape(-1, 64)
    for role, own, x, y, classes in (
        ("primary", order[0], turned, (digits == 3).long(), 2),
        ("harmful", order[1], pixels, digits, 10),
    ):
        parts = split_rows(y[own], 0.2, 0.2, generator)
        splits = {
            split: Split(x[own[part]], y[own[part]], Origin("load_digits()", own[part]))
            for split, part in parts.items()
        }
        tasks[role] = Task(f"digits, {role}", **splits, classes=classes)
    about = {"data": "scikit-learn digits", "normalize": "each pixel by its mean and std over both training splits"}
    return finish(standardize(TaskPair.of("ten_digits", tasks, about), "shared"), False)


def distinct() -> tuple[list[Known], dict[str, str]]:
    """Every optimizer that runs here, once for all names that do the same, and why others do not."""
    torchs = [name for name, it in vars(torch.optim).items() if isinstance(it, type) and name != "Optimizer"]
    seen: dict[str, Known] = {}
    refused = {}
    options = {name: (name, {}) for name in (*sorted(torchs), *list_optimizers())} | UNCAPPED
    for name, (own, arguments) in options.items():
        try:
            make = optimizer_named(own, "optimizer", weight_decay=0.0, **arguments)
        except ConfigError as error:
            refused[name] = " ".join(str(error).split(": ", 2)[2].split())[:120]
            continue
        trace = name if name in UNCAPPED else " ".join(f"{x:.6g}" for x in traced(make))  # too short for the cap
        if trace in seen:
            seen[trace].alike.append(name)
        else:
            seen[trace] = Known(name, make, [])
    return list(seen.values()), refused


def traced(make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    """Weights after some steps on a small problem, at three rates."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(9, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    found = []
    for rate in (1e-3, 0.03, 1.0):
        torch.manual_seed(0)
        weights = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
        optimizer = make([weights], lr=rate)
        for _ in range(12):
            weights.grad = x.T @ (x @ weights.detach() - y) / 9
            optimizer.step()
        found += weights.detach().flatten().tolist()
    return found


def victims(task: str) -> Iterator[tuple[str, Victim, Tensor]]:
    """The victim of each method, and its theta; the identity is `raw`."""
    pair = build(compose(TASKS[task]), "dataset").to("cpu", torch.float64)
    theta = torch.eye(pair.dim, dtype=torch.float64)
    yield "raw", victim_of(pair, theta), theta
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            measured([*TASKS[task], f"method={method}", "evaluation=[rir]", *QUIET], folder)
            theta = read_checkpoint(folder).tensors["theta"]
        yield method, victim_of(pair, theta), theta


def problems(task: str) -> Iterator[tuple[str, LeastSquares]]:
    """What is descended on each kind of features; rotated are those in the singular axes of theta."""
    for method, victim, theta in victims(task):
        attack = LinearProbe()
        yield method, attack.problem(victim, "immunized")
        if method != "raw":
            axes, rows = torch.linalg.svd(theta).Vh.T, attack.features(victim, "immunized")
            turned = {split: getattr(rows, split) @ axes for split in ("train", "val", "test")}
            yield f"{method}, rotated", LeastSquares.of(victim.task, replace(rows, **turned))
            yield f"{method}, standardized", LinearProbe(scaling="standard").problem(victim, "immunized")


def bar_of(problem: LeastSquares) -> float:
    """90 % of the way from guessing to the best validation accuracy of gradient descent on raw features."""
    curves = ProbeCurves(problem, step_grid(8192), 1)
    LinearProbe().descend(problem, curves)
    curves.finish()
    return problem.task.chance + 0.9 * (curves.val.max().item() - problem.task.chance)


def arrival(known: Known, problem: LeastSquares, bar: float, steps: int) -> dict[str, Any]:
    """The first step of the grid at which a rate has the bar on validation rows, and the test accuracy of that rate."""
    torch.manual_seed(0)
    task, rates = problem.task, dict(enumerate(RATES))
    parameters = {i: nn.Parameter(torch.zeros(problem.shape, dtype=torch.float64)) for i in rates}
    optimizers = {i: known.make([parameters[i]], lr=rate) for i, rate in rates.items()}
    best, grid = (0.0, 0.0, RATES[0]), set(step_grid(steps))
    for step in range(1, steps + 1):
        with torch.no_grad():
            gradients = problem.gradient(torch.stack([parameters[i].data for i in optimizers]))
        for (i, optimizer), gradient in zip(optimizers.items(), gradients, strict=True):
            parameters[i].grad = gradient
            optimizer.step()
        if step not in grid:
            continue
        weights = torch.stack([parameters[i].data for i in optimizers])
        sound = problem.excess(weights) < DIVERGENCE  # False where it is NaN
        val = task.measure(problem.val @ weights, task.val.y).where(sound, -1.0)
        if val.max() > best[0]:
            at = int(val.argmax())
            test = task.measure(problem.test @ weights[at], task.test.y).item()
            best = (val.max().item(), test, RATES[list(optimizers)[at]])
        optimizers = {i: it for (i, it), fine in zip(optimizers.items(), sound.tolist(), strict=True) if fine}
        if best[0] >= bar or not optimizers:
            break
    arrived = step if best[0] >= bar else None
    return dict(zip(("val", "test", "rate"), best, strict=True)) | {
        "arrived": arrived,
        "diverged": 12 - len(optimizers),
    }


class TorchLBFGS(ProbeAttack, group="attack.lbfgs"):
    """torch's L-BFGS with a memory of D and its strong-Wolfe line search; the loss is times `factor`."""

    order = None

    steps = 2048
    factor: float = 1e4

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        weights, calls = nn.Parameter(torch.zeros(problem.shape, dtype=torch.float64)), 0
        options = {"history_size": problem.shape[0], "tolerance_grad": 0, "tolerance_change": 0}
        options |= {"max_iter": 1, "max_eval": 100}
        optimizer = torch.optim.LBFGS([weights], line_search_fn="strong_wolfe", **options)

        def loss() -> Tensor:
            nonlocal calls
            calls += 1
            weights.grad = self.factor * problem.gradient(weights.detach())
            return self.factor * (problem.factor @ weights.detach() - problem.target).square().sum() / 2

        for step in range(1, self.steps + 1):
            optimizer.step(loss)
            if curves.record(step, weights.detach()[None], calls):
                break


def quasi_newton() -> Iterator[dict[str, Any]]:
    """Steps of L-BFGS to the bar of its own curve on raw features, ours and torch's."""
    for primary, harmful in PAIRS:
        digits = [f"dataset.primary={primary}", f"dataset.harmful={harmful}"]
        pair = build(compose(digits), "dataset").to("cpu", torch.float64)
        with tempfile.TemporaryDirectory() as folder:
            measured([*digits, "method=learning_curve", "evaluation=[rir]", *QUIET], folder)
            victim = victim_of(pair, read_checkpoint(folder).tensors["theta"])
        attacks = {
            "ours, memory D": LBFGS(),
            "ours, memory 10": LBFGS(memory=10),
            "torch's, memory D": TorchLBFGS(scaling="none", samples=None, precision=None, seed=0),
        }
        attacks["ours, memory D, standardized"] = LBFGS(scaling="standard")
        found = run_attacks(attacks, victim).metrics
        for name in attacks:
            keys = ("steps_baseline", "steps", "steps_ratio", "final_baseline", "final")
            yield {"pair": f"{primary}/{harmful}", "lbfgs": name} | {k: found.get(f"attack/{name}/{k}") for k in keys}


INTRODUCTION = """# Optimizers, measured

This page measures every optimizer of torch.optim and timm.optim that runs on a CPU ({versions}) as an attacker:

*Needs: hours.*

```sh
python benchmarks/optimizers.py --runs docs/results/optimizers.jsonl --page docs/results/optimizers.md --steps {steps}
```

The attacker trains a linear probe on the harmful digits (scikit-learn's digits, seed 0, methods with their defaults).
Features are scaled so that the largest eigenvalue of the probe's Hessian is 1.

- **Rows.** {count} optimizers take different steps if they have no weight decay. Names after a comma take the same
  steps.
- **Cells.** A cell has the number of steps until the probe is, on validation rows, 90 % of the way from guessing to
  the best of gradient descent on raw features. 12 learning rates from 1e-3 to 1e3 are tried, and the first to get
  there counts. Steps are counted on the grid 2^(j/4). > means that no rate gets there within so many steps.
- **Empty cells** were not measured. The same command continues, also with more steps.
- **Columns.** *raw*: the features before immunization. *rotated*: the attacker rotates the features to the right
  singular axes of theta, which can be read from the weights. *standardized*: the attacker standardizes each feature.
- *(arrived)* counts the optimizers that get there.

For your own data, use `attack=[adam] attack.adam.optimizer=<name>`.
"""

TITLES = {
    "0/1": "Digit 1 is harmful, digit 0 primary",
    "ten": "All ten digits are harmful; primary is 3 or not 3, on other images, rotated by 90 degrees",
}

LBFGS_SAID = """A cell has the steps until the attacker is 90 % of the way from guessing to its own best on raw
features. An attacker that never gets there has 2048. *Memory D* is a memory of as many pairs as
there are features, 64. *Ours* has an exact line search. *torch's* has torch's strong-Wolfe line
search; its loss is multiplied by 1e4, because it drops small pairs.
"""


def page(lines: Iterable[dict[str, Any]], refused: dict[str, str]) -> str:
    """docs/results/optimizers.md, of the lines with the largest budget."""
    latest = {(line["task"], line["features"], line["optimizer"]): line for line in lines if "task" in line}
    count = len({name for _, _, name in latest})
    versions = ", ".join(sorted({line["versions"] for line in latest.values()}))
    text = [INTRODUCTION.format(versions=versions, count=count, steps=max(line["budget"] for line in latest.values()))]
    for task in TASKS:
        own = {key[1:]: line for key, line in latest.items() if key[0] == task}
        if not own:
            continue
        shown = [features for features in FEATURES if any(key[0] == features for key in own)]
        text += [f"## {TITLES[task]}", "", f"| optimizer | {' | '.join(shown)} |", f"|---|{'---:|' * len(shown)}"]
        names = {name: line["alike"] for (_, name), line in own.items()}
        for name in sorted(names, key=str.lower):
            cells = [steps(own.get((features, name))) for features in shown]
            text.append(f"| {', '.join([name, *names[name]])} | {' | '.join(cells)} |")
        counts = [
            f"{sum((line['arrived'] or 0) > 0 for (f, _), line in own.items() if f == features)} of "
            f"{sum(f == features for f, _ in own)}"
            for features in shown
        ]
        text += [f"| (arrived) | {' | '.join(counts)} |", ""]
    text += [
        "## L-BFGS",
        "",
        LBFGS_SAID,
        "| pair | | raw | learning_curve | ratio | held out |",
        "|---|---|---:|---:|---:|---|",
    ]
    for line in {(line["pair"], line["lbfgs"]): line for line in lines if "pair" in line}.values():
        cells = [line["pair"], line["lbfgs"], *(f"{line[k]:.3g}" for k in ("steps_baseline", "steps", "steps_ratio"))]
        text.append(f"| {' | '.join(cells)} | {line['final_baseline']:.3f} → {line['final']:.3f} |")
    text += ["", "## What does not run here", "", *(f"- {name}: {why}" for name, why in refused.items())]
    return "\n".join(text) + "\n"


def steps(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    return f"{line['arrived']}" if line["arrived"] else f"> {line['budget']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/results/optimizers.jsonl"))
    parser.add_argument("--page", type=Path, help="write the tables of all lines here")
    parser.add_argument("--steps", type=int, default=20000, help="budget of each optimizer")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--features", nargs="*", default=list(FEATURES), choices=FEATURES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # kron compiles its functions, for minutes
    lines = [json.loads(line) for line in args.runs.read_text().splitlines()] if args.runs.exists() else []
    optimizers, refused = distinct()
    print(f"{len(optimizers)} optimizers, {len(refused)} refused", flush=True)

    def add(line: dict[str, Any]) -> None:
        lines.append(line)
        with args.runs.open("a") as file:
            file.write(json.dumps(line) + "\n")

    if args.tasks and not any("pair" in line for line in lines):
        for line in quasi_newton():
            add(line)
    done = {(x["task"], x["features"], x["optimizer"]): x for x in lines if "task" in x}
    versions = f"torch {torch.__version__.partition('+')[0]}, timm {version('timm')}"
    for task in args.tasks:
        bar = None
        for features, problem in problems(task):
            bar = bar_of(problem) if bar is None else bar
            for known in optimizers if features in args.features else ():
                old = done.get((task, features, known.name))
                if old and (old["arrived"] or old["budget"] >= args.steps):
                    continue
                start = time.perf_counter()
                line = {"task": task, "features": features, "optimizer": known.name, "alike": known.alike}
                line |= {"versions": versions, "budget": args.steps, "bar": bar} | arrival(
                    known, problem, bar, args.steps
                )
                add(line | {"seconds": round(time.perf_counter() - start, 2)})
            print(task, features, "done", flush=True)
    if args.page:
        args.page.write_text(page(lines, refused))


if __name__ == "__main__":
    main()
