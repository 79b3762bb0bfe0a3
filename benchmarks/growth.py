"""How cost grows, each beside its floor: `python benchmarks/growth.py [--sizes 64 256 784 2048] [--rows 3 4 5 6 7]`.

1. A step of condition_number for D features: against its own matrix products at the speed that BLAS has at that size.
2. kappa of 10^n rows of 64 features, streamed in batches of 10^5: against a QR decomposition's operations at the speed
   of BLAS (two products X^T X), and against reading as many bytes once.
3. A step of one of J jobs that are trained side by side, digits, D = 64: against one that is trained alone.

One thread, float64, processor seconds (`clock.py`): read the ratios.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import process_time

import torch
from clock import seconds
from linear import products, random_pair, stepper
from torch import Tensor

from immunization import condition_number
from immunization.compute.machine import set_threads
from immunization.config import compose
from immunization.experiment import assemble, resolve
from immunization.methods import ConditionNumber
from immunization.multirun.ahead import Prepared
from immunization.training import side_by_side

BATCH = 10**5


def steps(sizes: list[int]) -> None:
    print("| D | step | its products alone | ratio | step, in D x D products |\n|---:|---:|---:|---:|---:|", flush=True)
    for dim in sizes:
        pair = random_pair(dim, 2 * dim)
        a = torch.randn(dim, dim, dtype=torch.float64)
        options = {"lambda_P": 1.0, "lambda_H": 1.0, "precondition": "cancelled", "hold_primary": None}
        step = stepper(ConditionNumber(**options), pair)
        calls, unit = max(1, 256 // dim), torch.empty_like(a)
        times = seconds(step, products(pair, None), lambda a=a, o=unit: torch.mm(a, a, out=o), repeats=5, calls=calls)
        whole, own, one = times
        print(
            f"| {dim:,} | {whole * 1e3:.2f} ms | {own * 1e3:.2f} ms | {whole / own:.2f} | {whole / one:.1f} |",
            flush=True,
        )


def measures(powers: list[int]) -> None:
    heads = "| rows of 64 features | kappa | two products X^T X | ratio | reading them | ratio |"
    print(f"\n{heads}\n{'|---:' * 6}|", flush=True)
    block = torch.randn(BATCH, 64, dtype=torch.float64)

    def batches(rows: int) -> Iterator[Tensor]:
        for start in range(0, rows, BATCH):
            yield block[: rows - start]

    for power in powers:
        rows = 10**power
        kappa, gram, reading = seconds(
            lambda rows=rows: condition_number(batches(rows)),
            lambda rows=rows: [batch.mT @ batch for batch in batches(rows)],
            lambda rows=rows: [batch.sum() for batch in batches(rows)],
            repeats=3,
        )
        floors = (f"{own * 1e3:.2f} ms | {kappa / own:.1f}" for own in (2 * gram, reading))
        print(f"| 10^{power} | {kappa * 1e3:.2f} ms | {' | '.join(floors)} |", flush=True)


def jobs(counts: list[int]) -> None:
    print("\n| jobs side by side | step of one | alone | ratio |\n|---:|---:|---:|---:|", flush=True)

    def prepared(count: int) -> list[Prepared]:
        words = (["tracker=none", f"method.lambda_H={1 + place / 7}"] for place in range(count))
        experiments = [resolve(compose(own)) for own in words]
        return [Prepared(experiment, assemble(experiment)) for experiment in experiments]

    def alone() -> float:
        sessions = [own.begin() for own in prepared(2)]
        began = process_time()
        for session in sessions:
            session.fit()
        return (process_time() - began) / sum(session.progress.step for session in sessions)

    for count in counts:
        before, sessions = alone(), [own.begin() for own in prepared(count)]
        began = process_time()
        side_by_side.fit(sessions)
        one = (process_time() - began) / sum(session.progress.step for session in sessions)
        before = (before + alone()) / 2
        print(f"| {count} | {one * 1e3:.2f} ms | {before * 1e3:.2f} ms | {one / before:.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 784, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[3, 4, 5, 6, 7], help="powers of ten")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 4, 8, 16])
    asked = parser.parse_args()
    set_threads(1)
    steps(asked.sizes)
    measures(asked.rows)
    jobs(asked.jobs)
