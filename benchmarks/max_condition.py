"""What a bound on the condition number of a folded map costs in harmful steps, and what it saves in low precision.

    python benchmarks/max_condition.py experiment=resnet18_cars_small data_root=<folder>

runs the configuration once for each bound and prints a table (docs/deploy_precision.md).
"""

from __future__ import annotations

import sys

from immunization import run

BOUNDS = (8, 16, 32, 64, 128, 256, "null")
FORMATS = ("float32", "float16", "bfloat16", "int8")
COLUMNS = ("steps_ratio/harmful", "steps_ratio/primary", *(f"deployment/accuracy_{form}" for form in FORMATS))


def main(overrides: list[str]) -> None:
    print("| bound | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for bound in BOUNDS:
        metrics = run([*overrides, f"method.max_condition={bound}", "tracker=none"], quiet=True).metrics
        if bound == BOUNDS[0]:
            before = [metrics.get(f"{name}_baseline") for name in COLUMNS]
            print("| baseline | " + " | ".join("" if value is None else f"{value:.3f}" for value in before) + " |")
        values = (metrics.get(name) for name in COLUMNS)
        print(
            f"| {bound} | " + " | ".join("" if value is None else f"{value:.4g}" for value in values) + " |", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
