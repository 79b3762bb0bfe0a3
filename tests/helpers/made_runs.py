"""Run folders with made-up numbers, written as the runner writes them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import yaml

from immunization.runs.records import from_flat
from immunization.runs.result import Result
from immunization.runs.verdict import verdict

METHODS = ("condition_number", "opt_kappa")


def made_result(
    *identity: object, metrics: Mapping[str, float | None] = MappingProxyType({}), **content: object
) -> Result:
    """A result with these metrics, given by their flat names, and the verdict on them."""
    return measure(Result(*identity, **content), metrics)


def measure(result: Result, metrics: Mapping[str, float | None]) -> Result:
    """The result with more metrics, and the verdict on them all."""
    result.records = from_flat(result.metrics | metrics, result.reasons)
    result.verdict = verdict([result])
    return result


def make_run(
    folder: Path,
    method: str = "condition_number",
    seed: int = 0,
    pair: tuple[int, int] = (0, 1),
    rir: float | None = 10.0,
    protocol: str = "one_vs_rest",
    lambdas: tuple[float, float] | None = None,
    measures: Mapping[str, float | None] = MappingProxyType({}),
    **changes,
) -> Path:
    """One completed run; `measures` are further metrics, `changes` replace metrics or attributes of the result."""
    folder.mkdir(parents=True)
    harmful = None if rir is None else rir * 0.5
    metrics = {"rir": rir, "ratio_harmful": harmful, "ratio_primary": 0.5, "authors/rir": rir}
    metrics |= {"primary/accuracy": 0.95 + seed / 1000, "primary/accuracy_baseline": 0.95, "ceiling/attained": 0.5}
    metrics |= {"steps_ratio/harmful": 100.0, "steps_ratio/primary": 1.0, "definition/immunized": 1, "definition/c": 1}
    metrics |= measures
    curve = {"x": [1, 10, 100], "y": [1.0, 0.5, 0.1 + seed / 100]}
    names = ("norm_ratio/harmful", "norm_ratio/primary", "probe/harmful", "probe/primary")
    content = {"seed": seed, "dataset": "digits", "model": "linear", "method": method, "status": "completed"}
    content["curves"] = dict.fromkeys(names, curve) | {f"{name}/baseline": curve for name in names}
    content |= {"seconds": {"immunize": 1.0, "evaluate": 0.5}, "about": {"data": "made up"}, "metrics": metrics}
    made_result(**content | changes).write(folder)
    settings = {"_target_": f"immunization.methods.{method}", "epochs": 3}
    if lambdas:
        settings |= {"lambda_P": lambdas[0], "lambda_H": lambdas[1]}
    dataset = {"name": "digits", "seed": seed, "primary": pair[0], "harmful": pair[1], "protocol": protocol}
    config = {"seed": seed, "dataset": dataset, "model": {"name": "linear"}, "method": settings, "tracker": None}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder
