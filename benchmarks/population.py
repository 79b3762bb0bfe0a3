"""The same linear runs one after the other and as one population: the training alone, and whole jobs.

python benchmarks/population.py --pairs 10 --seeds 1 --device cpu
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from immunization import population, run
from immunization.config import compose

MEMBERS = 90
"""As in conf/launcher/population.yaml."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=90, help="ordered pairs of digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("overrides", nargs="*", help="of every run, such as dataset=mnist method.epochs=20")
    options = parser.parse_args()
    pairs = list(itertools.permutations(range(10), 2))[: options.pairs]
    common = [f"device={options.device}", "tracker=none", *options.overrides]
    jobs = [
        [f"dataset.primary={a}", f"dataset.harmful={b}", f"seed={seed}", *common]
        for (a, b), seed in itertools.product(pairs, range(options.seeds))
    ]
    with tempfile.TemporaryDirectory() as folder:
        measure(jobs, Path(folder))


def measure(jobs: list[list[str]], folder: Path) -> None:
    """Print milliseconds a job for both ways, and their ratios."""
    run(jobs[0], folder / "warm up", quiet=True)
    started = time.perf_counter()
    configs = [compose(job) for job in jobs]
    compose_seconds = time.perf_counter() - started

    started = time.perf_counter()
    alone = [run(config, folder / f"alone{i}", quiet=True) for i, config in enumerate(configs)]
    alone_seconds = time.perf_counter() - started + compose_seconds

    together, started = [], time.perf_counter()
    for at in range(0, len(jobs), MEMBERS):
        chunk = [(config, folder / f"member{at + i}") for i, config in enumerate(configs[at : at + MEMBERS])]
        members = [population.member(config, path) for config, path in chunk]
        population.train([member for member in members if member])
        together += [
            run(config, path, quiet=True, trained=member and member.trained)
            for (config, path), member in zip(chunk, members, strict=True)
        ]
    together_seconds = time.perf_counter() - started + compose_seconds

    pairs = [(one.metrics, other.metrics) for one, other in zip(alone, together, strict=True)]
    equal = sum(one == other for one, other in pairs)
    training = [sum(result.seconds["immunize"] for result in results) for results in (alone, together)]
    print(f"{len(jobs)} jobs of {alone[0].method}; measures equal to the last bit: {equal}")
    print("milliseconds a job       alone  population  ratio")
    for name, one, other in (("training", *training), ("whole job", alone_seconds, together_seconds)):
        print(f"{name:22}{1e3 * one / len(jobs):8.0f}{1e3 * other / len(jobs):12.0f}{one / other:7.2f}")
    print(f"of a whole job, composing its configuration: {1e3 * compose_seconds / len(jobs):.0f}")


if __name__ == "__main__":
    main()
