"""The same answer on every machine? `python benchmarks/portability.py [--small] [--json FILE]`; exit code 1 if not.

Runs every default as processors of other kinds would round it: the libraries are told to use other instruction sets,
with one thread and with two, and theta_0 is perturbed by 1e-14. Of every measure it prints the largest spread
|log(value / value as it is)| over these, the share of cases in which a steps ratio lies on another step of its grid,
and whether `python launch.py` prints the same table. `BOUNDS` says how much is too much.

What a run itself withholds as undetermined is compared with nothing. MNIST and House Prices need `--data`, a folder
with both (default: $IMMUNIZATION_DATA); without it they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]

# MKL heeds the first on Intel's processors and MKL_CBWR on those of other makers.
OLDEST = {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "COMPATIBLE"}
OLDEST |= {"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Nehalem"}
AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
ENVIRONMENTS = {
    "as it is": {},
    "AVX2": AVX2,
    "oldest": OLDEST,
    "Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "AVX2 everywhere": {**AVX2, "OPENBLAS_CORETYPE": "Haswell"},
}
PERTURBATION = 1e-14

TRAINED = ("condition_number", "r_ill_only", "imma", "opt_kappa", "learning_curve")
PAIRS = ((0, 1), (1, 7), (2, 5), (3, 8), (4, 9), (5, 6), (6, 0), (7, 2), (8, 3), (9, 4))

CONDITIONING = ("rir", "ratio_harmful", "ratio_primary", "kappa_harmful", "kappa_primary")
HELD_OUT = tuple(f"test/{name}" for name in CONDITIONING[:3])
STEPS = ("steps_ratio/harmful", "steps_ratio/primary", "steps_ratio/benign")
GRID_STEP = math.log(2) / 4
"""The probe's grid is round(2^(j/4)): more than 1.5 of its steps, rounded numbers included, are two steps."""

BOUNDS = {"conditioning": (1e-3, 1e-6), "held out": (1e-2, 1e-6)}
"""Largest and median spread of the measures of a kind."""
SAME_STEP = 0.95
"""Least share of steps ratios that stay on their step of the grid; the others may be one step beside it."""


def cases(small: bool, seeds: int, data: Path | None) -> dict[str, list[str]]:
    """Overrides of every run, by name; `small`: the first pair of digits alone."""
    found: dict[str, list[str]] = {}
    for primary, harmful in PAIRS[:1] if small else PAIRS:
        for seed in range(seeds):
            for method in (*TRAINED, "closed_form"):
                where = [f"dataset.primary={primary}", f"dataset.harmful={harmful}", f"seed={seed}"]
                found[f"digits/{method}/{primary}-{harmful}/{seed}"] = [f"method={method}", *where]
    common = "dataset.common_range=true"
    found["digits/opt_kappa log/0-1/0"] = ["method=opt_kappa", "method.form=log", common]
    if small:
        return found
    nets = ("learning_curve", "condition_number")
    found |= {f"digits_deep/{method}/0": ["experiment=digits_deep", f"method={method}"] for method in nets}
    if data and (file := data / "house_prices").is_dir():
        for method in TRAINED:
            for seed in range(seeds):
                where = ["experiment=house_prices", f"dataset.root={file}", common, f"seed={seed}"]
                found[f"house_prices/{method}/{seed}"] = [*where, f"method={method}"]
        found["house_prices/opt_kappa log/0"] = [*where, "method=opt_kappa", "method.form=log"]
    if data and (file := data / "mnist").is_dir():
        for method in TRAINED:
            found[f"mnist/{method}/0"] = ["experiment=mnist", f"dataset.root={file}", f"method={method}"]
    return found


def work(jobs: dict[str, list[str]], threads: int, perturbation: float) -> dict[str, dict]:
    """Run the jobs in this process; their measures and flags."""
    import torch

    import immunization
    from immunization import runner

    assemble = runner.assemble

    def perturbed(config):
        parts = assemble(config)
        generator = torch.Generator().manual_seed(0)
        for parameter in parts.model.extractor.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += (perturbation * noise).to(parameter)
        return parts

    if perturbation:
        runner.assemble = perturbed
    measured = {}
    for name, overrides in jobs.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            options = ["tracker=none", "figures=false", f"threads={threads}", *overrides]
            result = immunization.run(options, folder=folder, quiet=True)
        measured[name] = {"metrics": result.metrics, "flags": result.flags}
    return measured


def environment(changes: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **changes, "PYTHONPATH": str(ROOT)}


def table(changes: dict[str, str]) -> str:
    """What the default run prints, less its seconds and its folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch.py"), "tracker=none", f"hydra.run.dir={folder}/run"]
        printed = subprocess.run(
            command, env=environment(changes), cwd=folder, capture_output=True, text=True, check=True
        ).stdout
    return re.sub(r"^ *(seconds|run folder) .*\n( {8,}\S.*\n)*", "", printed, flags=re.MULTILINE)


def variants(small: bool) -> dict[str, tuple[dict[str, str], int, float]]:
    """Environment, threads and perturbation of every variant; the first is what the others are compared with."""
    chosen = {name: ENVIRONMENTS[name] for name in ("as it is", "oldest")} if small else ENVIRONMENTS
    found = {name: (changes, 1, 0.0) for name, changes in chosen.items()}
    if not small:
        found |= {f"{name}, 2 threads": (changes, 2, 0.0) for name, changes in chosen.items()}
    return found | {"theta_0 perturbed": ({}, 1, PERTURBATION)}


def spread(first: dict, second: dict, name: str) -> float | None:
    """|log| of the quotient of one measure in two runs; None where neither has it, infinite where one has."""
    a, b = (run["metrics"].get(name) for run in (first, second))
    if a is None or b is None:
        return None if a is b else math.inf
    return 0.0 if a == b else abs(math.log(a / b)) if a > 0 < b else math.inf


def report(measured: dict[str, dict[str, dict]]) -> bool:
    """Print the spreads; True where all are within their bounds."""
    first, *others = measured
    kinds = {"conditioning": CONDITIONING, "held out": HELD_OUT}
    spreads: dict[tuple[str, str], list[float]] = defaultdict(list)
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for case, reference in measured[first].items():
        group = " ".join(case.split("/")[:2])
        for other in others:
            for kind, names in {**kinds, "steps": STEPS}.items():
                for name in names:
                    found = spread(reference, measured[other][case], name)
                    if found is None:
                        continue
                    key = group, kind
                    spreads[key].append(found)
                    worst[key] = max(worst.get(key, (-1.0, "")), (found, f"{name} of {case}, {other}"))
    fine = True
    print(f"\n{'spread against ' + first:36}{'':12}{'cases':>7}{'median':>10}{'largest':>10}")
    for (group, kind), values in spreads.items():
        if kind == "steps":
            same = sum(value < 0.5 * GRID_STEP for value in values) / len(values)
            good = same >= SAME_STEP and max(values) < 1.6 * GRID_STEP
            figures = f"{same:9.1%} same {max(values) / GRID_STEP:5.1f} steps"
        else:
            largest, middle = BOUNDS[kind]
            good = max(values) <= largest and median(values) <= middle
            figures = f"{median(values):10.1e}{max(values):10.1e}"
        note = "" if good else f"  TOO MUCH: {worst[group, kind][1]}"
        print(f"{group:36}{kind:12}{len(values):7}{figures}{note}")
        fine &= good
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one pair of digits, three variants: about a minute")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every case on digits and House Prices")
    parser.add_argument("--jobs", type=int, default=1, help="variants at once, a process each")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("IMMUNIZATION_DATA"), help="folder of the data sets"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measures there")
    parser.add_argument("--worker", nargs=2, metavar=("THREADS", "PERTURBATION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        threads, perturbation = options.worker
        measured = work(json.load(sys.stdin), int(threads), float(perturbation))
        json.dump(measured, sys.stdout)
        return
    seeds = 1 if options.small else options.seeds
    jobs = {name: job for name, job in cases(options.small, seeds, options.data).items() if options.only in name}
    tables: dict[str, str] = {}

    def measure(name: str, changes: dict[str, str], threads: int, perturbation: float) -> dict[str, dict]:
        start = time.perf_counter()
        command = [sys.executable, __file__, "--worker", str(threads), str(perturbation)]
        done = subprocess.run(
            command, env=environment(changes), input=json.dumps(jobs), stdout=subprocess.PIPE, text=True, check=True
        )
        if threads == 1 and not perturbation and not options.only:
            tables[name] = table(changes)
        print(f"{name}: {len(jobs)} runs, {time.perf_counter() - start:.0f} s", flush=True)
        return json.loads(done.stdout)

    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {name: pool.submit(measure, name, *how) for name, how in variants(options.small).items()}
    measured = {name: one.result() for name, one in waiting.items()}
    fine = report(measured)
    if tables:
        same = len(set(tables.values())) == 1
        verdict = "the same table" if same else "DIFFERENT TABLES"
        print(f"\n`python launch.py` prints {verdict} in {len(tables)} environments")
        if not same:
            print(*(f"\n--- {name}\n{text}" for name, text in tables.items()))
        fine &= same
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    sys.exit(not fine)


if __name__ == "__main__":
    main()
