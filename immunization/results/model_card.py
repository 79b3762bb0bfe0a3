"""The model card beside an immunized net: what it is made from, its measures and its limits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from immunization.results.columns import listed
from immunization.results.formatting import markdown, template
from immunization.results.settings import BENIGN_STEPS, HARMFUL_STEPS, PRIMARY_STEPS, RIR, authors
from immunization.runs import files
from immunization.runs.filenames import MODEL_CARD, WEIGHTS
from immunization.runs.interpretation import at_least, shown
from immunization.runs.numbers import changed
from immunization.runs.records import STAGES, Query, Record, in_order
from immunization.runs.result import Result, by_task
from immunization.runs.verdict import EASIER

HEADINGS = {
    Query("head_accuracy", "primary"): "primary accuracy, own head",
    Query("head_accuracy", "primary", "baseline"): "the same before",
    Query("changed_predictions", "primary"): "test images whose prediction changed",
    HARMFUL_STEPS: "steps a harmful probe needs, relative to before (should be large)",
    PRIMARY_STEPS: "steps a fresh primary probe needs, relative to before (should be at most 1)",
    BENIGN_STEPS: "steps a benign third task needs, relative to before (should be at most 1)",
    RIR: "RIR, training images",
    RIR._replace(split="test"): "RIR, held-out images",
    authors(RIR): "RIR by authors' κ",
}
STEPS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
SOURCES = ("hfds", "torch")
"""Of images, which stand before the folder in the name of data."""
HUB_LICENSES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0")


def recipe(method: str, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """How a net was immunized: method, options and seed."""
    return {"method": method, "settings": {k: v for k, v in settings.items() if not k.startswith("_")}, "seed": seed}


def write(
    folder: str | Path,
    facts: dict[str, Any],
    made: dict[str, Any] | None,
    result: Result | None,
    file: str = WEIGHTS,
) -> Path:
    """Write model_card.md, ready to be the README.md of a repository on the Hugging Face Hub.

    `facts` are stored with the weights (`exported`, `facts_of`), `made` is the `recipe`, `result` holds the measures;
    the last two may be unknown.
    """
    flags = result.flags if result else []
    facts, made = changed(facts, _plain), changed(made or {"method": "an unknown method"}, _plain)
    told = [flag for flag in (EASIER, "head_at_chance") if flag in flags]
    # before anything else: what was measured, else what `immunize` warned of
    reasons = result.reasons if result else {}
    warnings = [reasons[flag] for flag in told] if result else made.get("doubts", [])
    verdict = [said for said in result.verdict if not any(why in said for why in warnings)] if result else []
    text = template("model_card.jinja", json=json.dumps).render(
        facts=facts,
        made=made,
        file=file,
        task="text-classification" if "Sequence" in facts["architecture"] else "image-classification",
        license=facts.get("license"),
        hub_licenses=HUB_LICENSES,
        timm=facts.get("timm", True),
        warnings=[*map(_plain, warnings)],
        arguments="".join(f", {key}={value!r}" for key, value in (facts.get("arguments") or {}).items()),
        data=[*map(_plain, _data(result))],
        verdict=[*map(_plain, verdict)],
        rows=_rows(result, facts.get("rounding", made.get("rounding"))),
        steps=[f"{step:,}" for step in STEPS],
        curves=_curves(result) if result else [],
        stripped_by=[act] if isinstance(act := facts.get("stripped_by") or [], str) else act,
        flags=[(_plain(flag), _plain(reasons.get(flag, ""))) for flag in flags],
    )
    path = Path(folder) / MODEL_CARD
    files.write(path, text)
    return path


def _plain(value: Any) -> Any:
    """Text of the file that the weights came in, for a line of Markdown, also between backticks."""
    return markdown(value).replace("`", "'") if isinstance(value, str) else value


def _data(result: Result | None) -> list[str]:
    """The data of a run, without the folders where they lay."""
    about, lines = result.about if result else {}, []
    if "data" not in about:
        return ["Data: the maker's own loaders; nothing else is known."]
    for role, name in about["data"].items():
        rows = about["rows"][role]
        images = f"{rows['train']} training, {rows['val']} validation and {rows['test']} test images"
        lines.append(f"{role.capitalize()} data: {_name(name)}, {about['classes'][role]} classes; {images}")
    return [*lines, "License of the data: their owners'; look it up before you publish."]


def _name(data: str) -> str:
    """The name of `data`; of a source of timm with a folder, only the folder's name."""
    source, _, folder = data.rpartition(" ") if data.partition("/")[0] in SOURCES else ("", "", data)
    return f"{source} {Path(folder).name}".strip()


def _rows(result: Result | None, rounding: float | None) -> list[tuple[str, str]]:
    """Measures and their values."""
    headings = (HEADINGS | listed()).items() if result else ()
    rows = [(text, _value(result, record)) for of, text in headings if result and (record := result.records.get(*of))]
    change = "outputs, rounded to the file's dtype: largest change, relative to the largest"
    return rows if rounding is None else [*rows, (change, f"{rounding:.1g}")]


def _value(result: Result, record: Record) -> str:
    if record.value is None:
        return _plain(f"none: {result.reasons.get(record.of.name, '')}")
    return shown(result, record) + " (capped: not reached within the counted steps)" * at_least(result, record)


def _curves(result: Result) -> list[list[str]]:
    """Held-out accuracy of a linear probe against its steps of gradient descent, one row per task and state."""
    rows = []
    probes = by_task(result.curves, "probe")
    for role in in_order(probes):
        for stage, when in zip(reversed(STAGES), ("before", "after"), strict=True):
            if curve := probes[role].get(stage):
                nearest = [min(range(len(curve["x"])), key=lambda i: abs(curve["x"][i] - t)) for t in STEPS]
                rows.append([f"{role}, {when}", *(f"{curve['y'][i]:.3f}" for i in nearest)])
    return rows
