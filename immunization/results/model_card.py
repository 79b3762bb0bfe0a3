"""The model card beside an immunized net: what it is made of, what was measured, and what it does not promise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from immunization.results.columns import Place, placed
from immunization.results.formatting import number, roles_in
from immunization.runs import files
from immunization.runs.filenames import MODEL_CARD, WEIGHTS
from immunization.runs.result import Result
from immunization.runs.verdict import EASIER

STEPS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
SOURCES = ("hfds", "hfids", "tfds", "torch", "wds")
HUB_LICENSES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")
CITATION = """\
```bibtex
@inproceedings{zheng2025immunization,
  title = {Model Immunization from a Condition Number Perspective},
  author = {Zheng, Amber Yijia and Bai, Cedar Site and Bullins, Brian and Yeh, Raymond A.},
  booktitle = {International Conference on Machine Learning},
  year = {2025},
  url = {https://arxiv.org/abs/2505.23760}
}
```
"""
LIMITS = """\
- At best it slows gradient descent on a linear probe of the features. Whoever solves least squares directly, or whitens
  the features first, is hardly hindered.
- Fine-tuning of the whole network or of adapters is hindered little or not at all, as far as is known.
- A map folded behind the features is a layer of its own: whoever finds and removes it has the old features back.
- It was measured on the data above; another harmful task, or other data of the same one, may behave differently.
- Benign tasks can be slowed as well. Where no third task is listed above, that was not measured.
"""


def recipe(method: str, config: DictConfig, seed: int) -> dict[str, Any]:
    """How a net was immunized: the method, its options and the seed."""
    settings = OmegaConf.to_container(config, resolve=True)
    return {"method": method, "settings": {k: v for k, v in settings.items() if not k.startswith("_")}, "seed": seed}


def write(folder: str | Path, facts: dict[str, Any], made: dict[str, Any] | None, result: Result | None) -> Path:
    """Write model_card.md, ready to be the README.md of a repository on the Hugging Face Hub.

    `facts` are what the model stores with its weights (`exported`, `facts_of`), `made` is its `recipe`, `result` what
    was measured; the latter two may not be known.
    """
    made, license = made or {"method": "an unknown method"}, facts.get("license")
    lines = [
        *_front_matter(facts),
        f"# {facts['architecture']}, immunized by {made['method']}",
        "",
        *_warnings(result, made.get("doubts", [])),
        *_loading(facts),
        "## Made from",
        "",
        f"- Base model: `{facts['architecture']}`, {facts['weights']}.",
        f"- License of its weights: {license or 'not stated with them; look it up before you publish'}.",
        *_data(result),
        f"- Method: `{made['method']}`"
        + (f" with `{json.dumps(made['settings'])}`, seed {made['seed']}." if "settings" in made else "."),
        "",
        *_measured(result, facts.get("rounding", made.get("rounding"))),
        "## Known limits",
        "",
        LIMITS + "".join(f"- Stripped by {act}.\n" for act in _list(facts.get("stripped_by"))),
        *_flags(result),
        "## Citation",
        "",
        CITATION,
    ]
    path = Path(folder) / MODEL_CARD
    files.write(path, "\n".join(lines))
    return path


def _warnings(result: Result | None, doubts: Sequence[str]) -> list[str]:
    """What a reader has to know before anything else: what was measured, else what `immunize` warned of."""
    flags = [flag for flag in (EASIER, "head_at_chance") if result and flag in result.flags]
    reasons = [result.reasons[flag] for flag in flags] if result else doubts
    return [line for reason in reasons for line in (f"**Do not use this model: {reason}.**", "")]


def _front_matter(facts: dict[str, Any]) -> list[str]:
    """The YAML block that the Hub reads."""
    license = facts.get("license")
    known = [f"license: {license}"] if license in HUB_LICENSES else ["license: other", f"license_name: {license}"]
    library = "timm" if facts.get("timm", True) else "pytorch"
    tags = [f"- {tag}" for tag in ("image-classification", library, "immunization", "arxiv:2505.23760")]
    license_lines = known if license else ["license: unknown"]
    return [
        "---",
        *license_lines,
        f"library_name: {library}",
        "pipeline_tag: image-classification",
        "tags:",
        *tags,
        "---",
    ]


def _loading(facts: dict[str, Any]) -> list[str]:
    """How the net is loaded, with this project and without it."""
    name, arguments = facts["architecture"], facts.get("arguments") or {}
    timm = facts.get("timm", True)
    lines = [f"`{WEIGHTS}` holds a `{name}` {'of timm ' if timm else ''}in {facts['dtype']}. In its folder:", ""]
    lines += [
        "```python",
        "import immunization",
        "",
        f'model = immunization.load("{WEIGHTS}"{"" if timm else ", net"})',
        "```",
    ]
    if not timm:
        return [*lines, "", f"`net` is a `{name}` as it was before.", ""]
    options = "".join(f", {key}={value!r}" for key, value in arguments.items())
    cast = "" if facts["dtype"] == "float32" else f".to(torch.{facts['dtype']})"
    plain = [f'model = timm.create_model("{name}"{options}).eval(){cast}']
    imports = ["import timm", *(["import torch"] if cast else []), "from safetensors.torch import load_file"]
    if "fold" in facts:
        imports.append("from torch import nn")
        layers = f'OrderedDict(original=model.get_submodule("{facts["fold"]}"), {facts["layer"]}{cast})'
        plain.append(f'model.set_submodule("{facts["fold"]}", nn.Sequential({layers}))')
        imports.insert(0, "from collections import OrderedDict\n")
    plain.append(f'model.load_state_dict(load_file("{WEIGHTS}"))')
    lines += ["", "Without it, in plain timm:", "", "```python", *imports, "", *plain, "```", ""]
    return [*lines, f"Preprocessing: `{json.dumps(facts['data_config'])}`.", ""]


def _data(result: Result | None) -> list[str]:
    """The data of a run, without the folders where they lay."""
    about = result.about if result else {}
    if "data" not in about:
        return ["- Data: loaders of the one who made it, of which nothing else is known."]
    named = [f"- {role.capitalize()} data: {_name(name)}{_counts(about, role)}" for role, name in about["data"].items()]
    return [*named, "- License of the data: that of their owners; look it up before you publish."]


def _name(data: str) -> str:
    """What `data` is called, a source of timm and a folder: the folder's own name alone."""
    source, _, folder = data.rpartition(" ") if data.partition("/")[0] in SOURCES else ("", "", data)
    return f"{source} {Path(folder).name}".strip()


def _measured(result: Result | None, rounding: float | None) -> list[str]:
    lines = ["## Measured", ""]
    metrics = result.metrics if result else {}
    rows = [f"| {c.heading} | {_value(result, c.measure)} |" for c in placed(Place.CARD) if c.measure in metrics]
    if rounding is not None:
        rows.append(
            f"| outputs, rounded to the file's dtype: largest change, relative to the largest | {rounding:.1g} |"
        )
    if not rows:
        return [*lines, "Nothing, as far as this card knows: run `immunization.audit`.", ""]
    return [*lines, "| measure | value |", "|---|---|", *rows, "", *(_curves(result) if result else [])]


def _flags(result: Result | None) -> list[str]:
    if result is None or not result.flags:
        return []
    return ["Flags of the run:", "", *(f"- `{flag}`: {result.reasons.get(flag, '')}" for flag in result.flags), ""]


def _list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _counts(about: dict[str, Any], role: str) -> str:
    rows = about["rows"][role]
    images = f"{rows['train']} training, {rows['val']} validation and {rows['test']} test images"
    return f", {about['classes'][role]} classes; {images}"


def _value(result: Result, name: str) -> str:
    value = result.metrics[name]
    if value is None:
        return f"none: {result.reasons.get(name, '')}"
    group, _, role = name.partition("/")
    if group == "steps_ratio" and f"capped_{role}" in result.flags:
        return f"> {number(value)} (capped: it never came there in the steps that were counted)"
    return number(value)


def _curves(result: Result) -> list[str]:
    """A table of held-out accuracy after so many steps of gradient descent on a linear probe."""
    rows = []
    for role in roles_in(result.curves, "probe"):
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
