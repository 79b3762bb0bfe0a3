"""Costs of immunizing linear models: `python benchmarks/linear.py [--json FILE]`, about two minutes.

1. A step of condition_number, full batch and mini-batch, against the matrix products in it, and against the paper's
   pseudo-code written down as it stands: autograd through full eigendecompositions, an inverse of K in every step.
2. A step of every method.
3. A full `eigh`, the singular values that every reported kappa comes from, and the closed form, in matrix products.
4. Start-up: imports, and a job of a multirun without its training.

Random data of the paper's sizes, float64, one thread. The unit of most rows is a product of two D x D matrices, timed
in turn with them, since its rate is what a machine can do at that size. docs/performance.md reads the numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from clock import seconds
from torch import Tensor
from torch.nn.functional import mse_loss

from immunization.compute.machine import set_threads
from immunization.data.task import Split, Task, TaskPair
from immunization.methods import IMMA, ClosedForm, ConditionNumber, LearningCurve, Method, OptKappa, RIllOnly
from immunization.models import Linear
from immunization.training.batches import batches_of

SIZES = {"house_prices": (79, 730), "mnist": (784, 6000)}
"""D and rows of a task."""

BATCH = 64


def random_pair(dim: int, rows: int) -> TaskPair:
    """Two regressions on inputs whose standard deviations fall over two decades, in two bases."""

    def task(name: str) -> Task:
        basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64)).Q
        x = torch.randn(rows, dim, dtype=torch.float64) @ (
            torch.logspace(0, -2, dim, dtype=torch.float64)[:, None] * basis
        )
        split = Split(x, x @ torch.randn(dim, dtype=torch.float64))
        return Task(name, split, split, split)

    return TaskPair("random", task("primary"), task("harmful"))


def stepper(method: Method, pair: TaskPair) -> Callable[[], None]:
    """One call is one step of `method` on the next batches, as the training loop takes it."""
    model = Linear(pair)
    method.setup(model, pair)
    optimizer = torch.optim.Adam(model.groups(), lr=1e-6, fused=True)
    batches = batches_of(model, pair, method.batch_size, torch.Generator().manual_seed(0))
    pending = iter(())

    def step() -> None:
        nonlocal pending
        if (batch := next(pending, None)) is None:
            pending = iter(batches.epoch())
            batch = next(pending)
        optimizer.zero_grad()
        method.step(model, *batch)["loss"].backward()
        optimizer.step()

    return step


def pseudo_code(pair: TaskPair, rows: int) -> Callable[[], None]:
    """Alg. 1 as the paper prints it, on the first `rows` rows of both tasks: nothing is known of the gradients."""
    (x_p, y_p), (x_h, _) = ((task.train.x[:rows], task.train.y[:rows]) for task in (pair.primary, pair.harmful))
    dim = x_p.shape[1]
    theta = torch.eye(dim, dtype=torch.float64).requires_grad_()
    head = torch.zeros(dim, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([theta, head], lr=1e-6)
    unit = torch.eye(dim, dtype=torch.float64)

    def r_well(h: Tensor) -> Tensor:
        return torch.linalg.eigh(h).eigenvalues[-1] ** 2 / 2 - h.square().sum() / (2 * dim)

    def r_ill(h: Tensor) -> Tensor:
        smallest = torch.linalg.eigh(h).eigenvalues[max(0, dim - rows)]
        return 1 / (h.square().sum() / (2 * min(dim, rows)) - smallest**2 / 2)

    def gradient(regularizer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        features = x @ theta
        (plain,) = torch.autograd.grad(regularizer(features.T @ features), theta)
        return torch.linalg.inv(x.T @ x + unit) @ plain

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(x_p @ theta @ head, y_p).backward()
        theta.grad += 1e-9 * gradient(r_well, x_p) + 1e-9 * gradient(r_ill, x_h)
        optimizer.step()

    return step


def products(pair: TaskPair, rows: int | None) -> Callable[[], None]:
    """The matrix products of a step of condition_number alone: features, Gram and gradient of both tasks."""
    theta = torch.randn(pair.dim, pair.dim, dtype=torch.float64).to(pair.primary.train.x.device)
    inputs = [task.root if rows is None else task.train.x[:rows] for task in (pair.primary, pair.harmful)]

    def full() -> None:
        for x in inputs:
            features = x @ theta
            theta @ (features.T @ features)

    def batch() -> None:
        for x in inputs:
            features = x @ theta
            x.T @ ((features @ features.T) @ features)
            x @ x.T

    return full if rows is None else batch


def measure(name: str, repeats: int) -> dict[str, float]:
    """Seconds of everything at one size."""
    dim, rows = SIZES[name]
    torch.manual_seed(0)
    pair = random_pair(dim, rows)
    options = {"lambda_P": 1e-9, "lambda_H": 1e-9, "epochs": 1, "balance": False}
    square = torch.randn(dim, dim, dtype=torch.float64)
    gram = square.T @ square

    def closed_form() -> None:
        model = Linear(pair)
        method = ClosedForm()
        method.setup(model, pair)
        method.finish(model)

    timed: dict[str, Callable[[], object]] = {
        "product": lambda: square @ square,
        "full/condition_number": stepper(ConditionNumber(**options), pair),
        "full/products": products(pair, None),
        "full/pseudo_code": pseudo_code(pair, rows),
        "batch/condition_number": stepper(ConditionNumber(**options, batch_size=BATCH, precondition="ridge"), pair),
        "batch/products": products(pair, BATCH),
        "batch/pseudo_code": pseudo_code(pair, BATCH),
        "full/r_ill_only": stepper(RIllOnly(epochs=1), pair),
        "full/opt_kappa": stepper(OptKappa(epochs=1), pair),
        "batch/imma": stepper(IMMA(epochs=1, batch_size=BATCH), pair),
        "full/learning_curve": stepper(LearningCurve(epochs=1), pair),
        "eigh": partial(torch.linalg.eigh, gram),
        "svdvals": partial(torch.linalg.svdvals, square),
        "closed_form": closed_form,
    }
    calls = 50 if dim < 256 else 1
    return dict(zip(timed, seconds(*timed.values(), repeats=repeats, calls=calls), strict=True))


def start_up() -> dict[str, float]:
    """Wall seconds of fresh processes, and of a job of a multirun without its training."""
    python, launch = sys.executable, str(Path(__file__).parents[1] / "launch.py")

    def wall(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([python, *command], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    def sweep(jobs: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return wall(
                launch, "-m", "method=identity", "tracker=none", f"seed=range({jobs})", f"hydra.sweep.dir={folder}"
            )

    sweep(1)  # reads everything from disk once
    return {
        "import hydra": wall("-c", "import hydra"),
        "launch.py --help": wall(launch, "--help"),
        "import immunization.runner": wall("-c", "import immunization.runner"),
        "a job of a multirun": (sweep(21) - sweep(1)) / 20,
    }


def show(name: str, cost: dict[str, float]) -> None:
    """The table of one size."""
    dim = SIZES[name][0]
    rate = 2 * dim**3 / cost["product"] / 1e9
    print(f"\n{name}: D = {dim}, a product of D x D matrices takes {cost['product'] * 1e6:.1f} us ({rate:.0f} GFLOP/s)")
    print(f"  {'':28}{'ms':>9}{'products':>10}")
    for row, value in cost.items():
        print(f"  {row:28}{value * 1e3:9.3f}{value / cost['product']:10.1f}")
    for kind in ("full", "batch"):
        step = cost[f"{kind}/condition_number"]
        print(
            f"  {kind}: a step is {step / cost[f'{kind}/products']:.1f} times its matrix products; "
            f"the pseudo-code takes {cost[f'{kind}/pseudo_code'] / step:.1f} times a step"
        )
    batches = SIZES[name][1] // BATCH
    epoch = batches * cost["batch/pseudo_code"] / cost["full/condition_number"]
    print(f"  an epoch of the pseudo-code, {batches} batches, takes {epoch:.0f} times ours, one full batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all seconds there")
    args = parser.parse_args()
    set_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name in args.sizes:
        found[name] = measure(name, args.repeats)
        show(name, found[name])
    found["start_up"] = start_up()
    print("\nstart-up, seconds")
    for row, value in found["start_up"].items():
        print(f"  {row:28}{value:9.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
