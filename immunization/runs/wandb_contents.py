"""What a run shows on W&B: its name, its curves as history, its attacks as a table, its model as an artifact."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from immunization.config import snake_case
from immunization.runs.filenames import CONFIG, MODEL_CARD, WEIGHTS
from immunization.runs.result import Result
from immunization.runs.verdict import ATTACK, attack_names, successes

if TYPE_CHECKING:
    import wandb

STEPS = "curves/step"
"""What the curves are drawn against: steps of the probe or attack, not of the training."""

NO_STEPS = ("spectrum/", "/compute", "/excess")
"""In names of curves that are left to result.json: against an index, against operations, and twice as much to send."""


POINTS = 64
"""At most about so many of each curve: thousands of runs have to fit into a project."""


def with_method_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `method.name`, which W&B can group runs by; a configuration without a method as it is."""
    method = config.get("method")
    if not isinstance(method, Mapping):
        return dict(config)
    return {**config, "method": {**method, "name": snake_case(str(method["_target_"]))}}


def title(config: Mapping[str, Any], name: str, sweep: bool) -> str:
    """`closed_form digits 0-1 seed 3`; in a sweep the run folder's name in place of the seed."""
    if "method" not in config:
        return name
    data = config.get("dataset", {})
    pair = [data.get(role) for role in ("primary", "harmful")]
    classes = f" {pair[0]}-{pair[1]}" if all(isinstance(label, int) for label in pair) else ""
    last = name if sweep else f"seed {config.get('seed')}"
    return f"{config['method'].get('name')} {data.get('name', '')}{classes} {last}".strip()[:128]


def job_type(config: Mapping[str, Any]) -> str:
    """What a run does: `immunize`, `audit` of a model as it stands, or `summary` of many runs."""
    if "method" not in config:
        return "summary"
    return "immunize" if config.get("immunize", True) else "audit"


def curve_rows(result: Result) -> Iterator[dict[str, float]]:
    """The curves over steps, a row a step: `curves/step` and `curves/<name>` of every curve that has a point there."""
    rows: dict[float, dict[str, float]] = {}
    for name, curve in result.as_dict()["curves"].items():
        if not any(part in name for part in NO_STEPS):
            points = list(zip(curve["x"], curve["y"], strict=True))
            for x, y in points[:: len(points) // POINTS + 1] + points[-1:]:
                if y is not None:
                    rows.setdefault(x, {STEPS: x})[f"curves/{name}"] = y
    for x in sorted(rows):
        yield rows[x]


def attack_table(result: Result) -> tuple[list[str], list[list[str | float | bool | None]]]:
    """Header and a row an attack: its name, whether it learns the harmful task, and its measures as numbers."""
    metrics, names, learned = result.as_dict()["metrics"], attack_names(result), successes(result)
    tails = (key.removeprefix(ATTACK).partition("/") for key in metrics if key.startswith(ATTACK))
    measures = list(dict.fromkeys(measure for name, _, measure in tails if name in names))
    rows = []
    for name in names:
        values = [metrics.get(f"{ATTACK}{name}/{measure}") for measure in measures]
        found = dict(zip(measures, values, strict=True))
        learns = None if found.get("final") is None else name in learned
        rows.append([name, learns, *values])
    return ["attack", "learns", *measures], rows


def model_artifact(result: Result, folder: Path) -> tuple[wandb.Artifact, list[str]] | None:
    """The weights with card, configuration and result, and the aliases of this version; None where there are none.

    Runs of one model on one data set are versions of one artifact.
    """
    import wandb

    if not (folder / WEIGHTS).is_file():
        return None
    name = re.sub(r"[^\w.-]+", "-", f"immunized-{result.model}-{result.dataset}")[:128]
    facts = {key: getattr(result, key) for key in ("method", "seed", "dataset", "model", "flags")}
    measured = {key: value for key, value in result.as_dict()["metrics"].items() if "/" not in key}
    artifact = wandb.Artifact(name, type="model", metadata=facts | measured)
    for path in (folder / file for file in (WEIGHTS, MODEL_CARD, CONFIG, Result.file)):
        if path.is_file():
            artifact.add_file(str(path), policy="immutable")  # not copied: an offline run uploads it from where it is
    seed = f"seed-{result.seed}"
    return artifact, [result.method, seed, f"{result.method}-{seed}"]
