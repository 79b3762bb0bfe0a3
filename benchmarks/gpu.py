"""What a GPU gives and whether it is right: `python benchmarks/gpu.py [--quick]`, on a machine that has one.

1. Every method on the GPU against the CPU: condition numbers and ratios to 1e-6 (float64) and 1e-3 (float32).
2. Steps of every method on a linear model, D = 64 and 784: a second on the GPU and on the CPU, the GPU's share of busy
   time, how often a step waits for it, and the step in the matrix products of one of condition_number.
3. Table 2, the 90 pairs of digits and 3 seeds of condition_number and released_condition_number, one job after another.
4. Steps of condition_number on ResNet18 and ViT-B/16 against plain supervised ones, in float64, float32, bfloat16
   autocast, channels_last and compiled.

Writes gpu.json and gpu.md, whose tables are those of docs/performance.md, into `--out`. `--quick`: small nets, few
steps and runs, and nothing compiled. Exit code 1 where there is no GPU, or where a method does not agree with the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from clock import seconds
from linear import products, random_pair
from nets import NetSteps, condition_number
from torch.profiler import ProfilerActivity, profile

import immunization
from immunization.compute import machine
from immunization.config import build, compose
from immunization.data.task import TaskPair
from immunization.models import Linear
from immunization.training.batches import batches_of
from immunization.training.loop import Progress, train

Row = dict[str, Any]
"""One line of a table, by column."""

SMALL = ("dataset.max_samples=40", "tracker=none", "figures=false", "evaluation=[rir]")
ALLOWED = {"float64": 1e-6, "float32": 1e-3}
METHODS = {
    "condition_number": (),
    "released_condition_number": ("method.batch_size=16",),
    "r_ill_only": (),
    "opt_kappa": (),
    "imma": (),
    "learning_curve": ("method.patience=null",),
    "closed_form": (),
}
COMPARED = ("kappa_primary", "kappa_harmful", "ratio_primary", "ratio_harmful", "rir")
NETS = {"resnet18": ("layer4", 224, 64), "vit_base_patch16_224": ("last", 224, 64)}
QUICK_NETS = {"test_resnet": ("layer4", 32, 8), "test_vit": ("last", 160, 8)}
"""Trained part, side of the images, and a task's rows in a step."""
TITLES = {
    "agreement": "Deviation from the CPU",
    "linear": "Linear steps",
    "table2": "Table 2",
    "nets": "Steps of condition_number on nets",
}
ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"}


# --- 1. agreement -----------------------------------------------------------------------------------------------------


def agreement(quick: bool) -> list[Row]:
    """The largest relative deviation of each method's measures from those of the CPU, after a few steps."""
    return [_agreement(name, dtype, quick) for name in METHODS for dtype in ALLOWED]


def _agreement(name: str, dtype: str, quick: bool) -> Row:
    # kinks (power=inf) turn the last bits into others: two steps
    epochs = 2 if quick or name == "released_condition_number" else 10
    options = [*SMALL, f"method={name}", f"dtype={dtype}", *METHODS[name]]
    options += [] if name == "closed_form" else [f"method.epochs={epochs}"]
    with tempfile.TemporaryDirectory() as folder:
        cpu, gpu = (
            immunization.run([*options, f"device={device}"], Path(folder, device), quiet=True).metrics
            for device in ("cpu", "cuda")
        )
    deviation = max(abs(gpu[measure] - cpu[measure]) / abs(cpu[measure]) for measure in COMPARED)
    return {
        "method": name,
        "dtype": dtype,
        "deviation": deviation,
        "allowed": ALLOWED[dtype],
        "agrees": deviation <= ALLOWED[dtype],
    }


# --- 2. linear steps --------------------------------------------------------------------------------------------------


def linear_steps(quick: bool) -> list[Row]:
    """Steps of every method that takes any, at two sizes."""
    sizes = {64: 200} if quick else {64: 1500, 784: 6000}
    repeats = 2 if quick else 50
    rows = []
    for dim, count in sizes.items():
        torch.manual_seed(0)
        pair = random_pair(dim, count)
        on_gpu = pair.to("cuda", torch.float64)
        (product,) = seconds(products(on_gpu, None), repeats=repeats, cuda=True)
        for name in METHODS:
            if name != "closed_form":
                machine.choose_threads(None, dim)
                rows.append({"D": dim, "method": name, **_timed(name, pair, on_gpu, repeats, product)})
    return rows


def _timed(name: str, pair: TaskPair, on_gpu: TaskPair, repeats: int, product: float) -> Row:
    (cpu,) = seconds(trainer(name, pair), repeats=repeats)
    step = trainer(name, on_gpu)
    (gpu,) = seconds(step, repeats=repeats, cuda=True)
    return {
        "steps/s, GPU": 1 / gpu,
        "steps/s, CPU": 1 / cpu,
        "products": gpu / product,
        **watched(step, repeats, gpu),
    }


def trainer(name: str, pair: TaskPair) -> Callable[[], None]:
    """One call is one step of a method on `pair`, where that is, by the training loop."""
    config = compose([f"method={name}", *METHODS[name], "optimizer.lr=1e-6"])
    method, model, progress = build(config, "method"), Linear(pair), Progress()
    method.setup(model, pair)
    method.epochs = 10**9
    batches = batches_of(model, pair, method.batch_size, torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.groups(), lr=1e-6, fused=True)
    return lambda: train(
        method, model, batches, optimizer, progress=progress, most=progress.step + 1, logged=lambda step: False
    )


def watched(step: Callable[[], object], repeats: int, each: float) -> Row:
    """The GPU's kernels in a step over the `each` seconds that one takes unwatched, and how often a step waits."""
    with profile(activities=ACTIVITIES) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    events = found.key_averages()
    waits = sum(event.count for event in events if event.key in WAITS) - 1  # this function's own
    kernels = sum(e.self_device_time_total for e in events if e.device_type == torch.autograd.DeviceType.CUDA) / 1e6
    return {
        "GPU busy": kernels / repeats / each,
        "waits a step": max(waits, 0) / repeats,
    }


# --- 3. Table 2 -------------------------------------------------------------------------------------------------------


def table2(quick: bool, data: Sequence[str]) -> list[Row]:
    """Both methods on the GPU, and the first runs of each on the CPU for comparison."""
    jobs = [(pair, seed) for pair in permutations(range(10), 2) for seed in range(3)]
    counts = {"cuda": 2 if quick else len(jobs), "cpu": 1 if quick else 9}
    names = ("condition_number", "released_condition_number")
    return [_sweep(name, device, jobs[:count], data) for name in names for device, count in counts.items()]


def _sweep(name: str, device: str, jobs: Iterable[tuple[tuple[int, int], int]], data: Sequence[str]) -> Row:
    ratios, started = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for (primary, harmful), seed in jobs:
            options = [f"method={name}", f"device={device}", f"seed={seed}", "tracker=none", "figures=false", *data]
            options += [f"dataset.primary={primary}", f"dataset.harmful={harmful}"]
            place = Path(folder, f"{primary}{harmful}{seed}")
            ratios.append(immunization.run(options, place, quiet=True).metrics["rir"])
    took = time.perf_counter() - started
    return {
        "method": name,
        "device": device,
        "runs": len(ratios),
        "seconds": took,
        "minutes for 270": 4.5 * took / len(ratios),
        "RIR, median": statistics.median(ratios),
    }


# --- 4. nets ----------------------------------------------------------------------------------------------------------


def net_steps(quick: bool) -> list[Row]:
    """Every variant of every net; what fails is a line that says so."""
    names = ("float64", "float32", "bfloat16", "channels_last", "bfloat16, channels_last")
    names = names if quick else (*names, "compiled")
    rows = []
    for net, shape in (QUICK_NETS if quick else NETS).items():
        for name in names:
            try:
                rows.append({"net": net, "variant": name, **_net(net, shape, name, 1 if quick else 20)})
            except RuntimeError as error:  # no memory, or what the compiler cannot do: the others are measured
                rows.append({"net": net, "variant": name, "failed": " ".join(str(error).split())[:200]})
    return rows


def _net(name: str, shape: tuple[str, int, int], variant: str, repeats: int) -> Row:
    trainable, size, batch = shape
    dtype = torch.float64 if variant == "float64" else torch.float32
    steps = NetSteps(name, trainable, size, batch, 2, "cuda", dtype)
    steps.model.channels_last, steps.model.amp = "channels_last" in variant, "bfloat16" in variant
    if variant == "compiled":
        steps.model.extractor.compile()
    step = steps.step(condition_number(batch))
    with machine.full_precision():
        plain, ours = seconds(steps.supervised, step, repeats=repeats, cuda=True)
        return {"steps/s": 1 / ours, "plain steps": ours / plain, **watched(step, repeats, ours)}


# --- what is written --------------------------------------------------------------------------------------------------


def markdown(report: Mapping[str, Any]) -> str:
    """All tables, ready for docs/performance.md."""
    kind = "Quick: a check that everything runs, no measurement. " if report["quick"] else ""
    parts = [f"{kind}{report['gpu']}, torch {report['torch']}, CUDA {report['cuda']}."]
    parts += [f"### {title}\n\n{_table(report[key])}" for key, title in TITLES.items() if key in report]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_shown(row.get(key)) for key in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that everything runs, in minutes")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of gpu.json and gpu.md")
    parser.add_argument(
        "--parts", nargs="+", choices=TITLES, default=list(TITLES), help="which of the four; default: all"
    )
    parser.add_argument("--data", nargs="*", default=[], help="of Table 2, such as dataset=mnist dataset.root=...")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch finds no GPU here: nothing to measure")
        return 1
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    report |= {"cuda": torch.version.cuda, "quick": options.quick}
    options.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], list[Row]]] = {
        "agreement": lambda: agreement(options.quick),
        "linear": lambda: linear_steps(options.quick),
        "table2": lambda: table2(options.quick, options.data),
        "nets": lambda: net_steps(options.quick),
    }
    for name in options.parts:
        print(f"{name} ...", flush=True)
        report[name] = parts[name]()
        (options.out / "gpu.json").write_text(json.dumps(report, indent=1))  # what is done is kept
    (options.out / "gpu.md").write_text(text := markdown(report))
    print(text)
    return 0 if all(row["agrees"] for row in report.get("agreement", [])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
