"""Would warm starts pay? `python benchmarks/eigenpairs.py [dataset=house_prices ...]`, arguments as those of launch.py.

Every step of condition_number needs one eigenpair of two Hessians. Along a training this times ways to it, and counts
how often they find the pair that LAPACK's dsyevr finds anew:

- inverse iteration from outside of the spectrum, from the vector of the step before, with a Cholesky factor that also
  proves that nothing lies beyond;
- Lanczos iterations (ARPACK), from that vector or from a fixed one.

docs/performance.md reads the numbers.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dpotrs
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from immunization.compute.machine import set_threads
from immunization.config import build, compose
from immunization.theory.eigenpairs import lapack_eigenpair
from immunization.theory.spectrum import EPS
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

ROUNDS, SOLVES = 4, 3
"""Factors of inverse iteration, solves with one factor: beyond that dsyevr is cheaper."""

Found = np.ndarray | None


def inverse_iteration(gram: np.ndarray, vector: np.ndarray, sign: int) -> Found:
    """The vector of the largest (`sign` 1) or smallest (-1) eigenvalue; None if that fails.

    Some eigenvalue is within the residual r of rho = v^T H v. The shift s = rho + sign r lies beyond all of them if and
    only if sign (s I - H) is positive definite, which its factorization tells.
    """
    noise = len(gram) * EPS * np.linalg.norm(gram)
    for _ in range(ROUNDS):
        product = gram @ vector
        value = vector @ product
        residual = np.linalg.norm(product - value * vector)
        shifted = gram * -sign
        shifted.ravel()[:: len(gram) + 1] += sign * value + residual + 4 * noise
        factor, failed = dpotrf(shifted.T, lower=1, clean=0, overwrite_a=1)
        if failed:
            return None
        if residual <= noise:
            return vector
        for _ in range(SOLVES):
            vector, _ = dpotrs(factor, vector, lower=1)
            vector /= np.linalg.norm(vector)
    return None


def lanczos(gram: np.ndarray, vector: np.ndarray, sign: int) -> Found:
    """The same by ARPACK, to machine precision."""
    try:
        return eigsh(gram, 1, which="LA" if sign == 1 else "SA", v0=vector, maxiter=10)[1][:, 0]
    except ArpackNoConvergence:
        return None


def cold_lanczos(gram: np.ndarray, vector: np.ndarray, sign: int) -> Found:
    """The same from a fixed vector: what the package does for the largest pair above D = 256."""
    return lanczos(gram, np.random.default_rng(0).standard_normal(len(gram)), sign)


def main() -> None:
    config = compose(sys.argv[1:])
    set_threads(1)
    torch.manual_seed(config.seed)
    pair = build(config, "dataset").to("cpu", torch.float64)
    model, method = build(config, "model", pair=pair), build(config, "method")
    method.setup(model, pair)
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    vectors: dict[str, np.ndarray] = {}

    def timed(key: tuple[str, str], call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        spent[key].append(time.perf_counter() - start)
        return result

    def look(step: int, terms: dict[str, torch.Tensor]) -> None:
        for name, task, sign in (("largest of H_P", pair.primary, 1), ("smallest of H_H", pair.harmful, -1)):
            factor = model.factor(task)
            if sign == -1 and task.rank < pair.dim:
                continue  # the k-th eigenvalue is inside of the spectrum, next to zeros: no iteration leads there
            gram = (factor.T @ factor).numpy()
            exact = timed((name, "dsyevr"), partial(lapack_eigenpair, gram, -1 if sign == 1 else -pair.dim))[1][:, 0]
            for way in (inverse_iteration, lanczos, cold_lanczos) if name in vectors else ():
                vector = timed((name, way.__name__), partial(way, gram, vectors[name], sign))
                found[name, way.__name__].append(vector is not None and abs(vector @ exact) > 1 - 1e-8)
            vectors[name] = exact

    batches = PairedBatches(pair, method.batch_size, torch.Generator().manual_seed(config.seed))
    train(method, model, batches, build(config, "optimizer")(model.groups()), look)
    print(f"{pair.name}, D = {pair.dim}, ranks {pair.primary.rank} and {pair.harmful.rank}, {method.epochs} steps")
    print(f"{'eigenvalue':18}{'way':20}{'ms (median)':>12}{'found':>8}")
    for (name, way), seconds in spent.items():
        share = f"{np.mean(found[name, way]):.0%}" if (name, way) in found else ""
        print(f"{name:18}{way:20}{np.median(seconds) * 1e3:12.3f}{share:>8}")


if __name__ == "__main__":
    main()
