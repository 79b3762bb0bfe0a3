"""The model card beside an immunized net: what it is made of, what was measured, and what it does not promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from immunization.results.formatting import number
from immunization.runs import files
from immunization.runs.filenames import MODEL_CARD
from immunization.runs.result import Result

STEPS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
MEASURES = {
    "primary/head_accuracy": "primary accuracy, own head",
    "primary/head_accuracy_baseline": "the same before",
    "primary/changed_predictions": "test images whose prediction changed",
    "steps_ratio/harmful": "steps a harmful probe needs, relative to before (should be large)",
    "steps_ratio/primary": "steps a fresh primary probe needs, relative to before (should be at most 1)",
    "steps_ratio/benign": "steps a benign third task needs, relative to before (should be at most 1)",
    "rir": "RIR, training images",
    "test/rir": "RIR, held-out images",
    "authors/rir": "RIR by the paper's sampled protocol",
}
LIMITS = """\
- It slows gradient descent on a linear probe of the features. Whoever solves least squares directly, or whitens the
  features first, is hardly hindered.
- Fine-tuning of the whole network or of adapters is hindered little or not at all, as far as is known.
- A map folded behind the features is a layer of its own: whoever finds and removes it has the old features back.
- It was measured on the data above; another harmful task, or other data of the same one, may behave differently.
- Benign tasks can be slowed as well. Where no third task is listed above, that was not measured.
"""


def write(folder: str | Path, result: Result, config: DictConfig, facts: dict[str, Any]) -> Path:
    """Write model_card.md; `facts` are what the model stores with its weights (`Timm.metadata`)."""
    settings = OmegaConf.to_container(config.method, resolve=True)
    del settings["_target_"]
    about = result.about
    source = facts["weights"]
    license = facts.get("license") or "not stated with them; look it up before you publish"
    lines = [
        f"# {result.model}, immunized by {result.method}",
        "",
        f"`immunized.safetensors` holds a `{facts['architecture']}` of timm in {facts['dtype']}. Load it with",
        "",
        "```python",
        "import immunization",
        'model = immunization.load("<this folder>")',
        "```",
        "",
        f"Preprocessing: `{json.dumps(facts['data_config'])}`.",
        "",
        "## Made from",
        "",
        f"- Base model: `{facts['architecture']}`, {source}.",
        f"- License of its weights: {license}.",
        *(f"- {role.capitalize()} data: {name}" + _counts(about, role) for role, name in about["data"].items()),
        "- License of the data: that of its owner; ImageNet and Stanford Cars are for non-commercial research.",
        f"- Method: `{result.method}` with `{json.dumps(settings)}`, seed {result.seed}.",
        "",
        "## Measured",
        "",
        "| measure | value |",
        "|---|---|",
        *(f"| {text} | {_value(result, name)} |" for name, text in MEASURES.items() if name in result.metrics),
        "",
        *_curves(result),
        "## Known limits",
        "",
        LIMITS,
    ]
    if result.flags:
        lines += ["Flags of the run:", "", *(f"- `{flag}`: {result.reasons.get(flag, '')}" for flag in result.flags)]
    path = Path(folder) / MODEL_CARD
    files.write(path, "\n".join(lines) + "\n")
    return path


def _counts(about: dict[str, Any], role: str) -> str:
    rows = about["rows"][role]
    images = f"{rows['train']} training, {rows['val']} validation and {rows['test']} test images"
    return f", {about['classes'][role]} classes; {images}"


def _value(result: Result, name: str) -> str:
    value = result.metrics[name]
    return f"none: {result.reasons.get(name, '')}" if value is None else number(value)


def _curves(result: Result) -> list[str]:
    """A table of held-out accuracy after so many steps of gradient descent on a linear probe."""
    rows = []
    for role in ("harmful", "primary", "benign"):
        for suffix, when in (("/baseline", "before"), ("", "after")):
            if curve := result.curves.get(f"probe/{role}{suffix}"):
                nearest = [min(range(len(curve["x"])), key=lambda i: abs(curve["x"][i] - t)) for t in STEPS]
                rows.append(f"| {role}, {when} | " + " | ".join(f"{curve['y'][i]:.3f}" for i in nearest) + " |")
    if not rows:
        return []
    return [
        "Held-out accuracy of a linear probe after steps of gradient descent:",
        "",
        "| task | " + " | ".join(f"{t:,}" for t in STEPS) + " |",
        "|---" * (len(STEPS) + 1) + "|",
        *rows,
        "",
    ]
