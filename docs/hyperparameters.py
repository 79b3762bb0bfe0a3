"""Print docs/hyperparameters.md from conf/dataset and conf/hparams: `python docs/hyperparameters.py`."""

from pathlib import Path

import yaml

from immunization.config import CONF, hparams

HEAD = """# Default hyper-parameters

What a method starts from on a data set: the method's own defaults (`conf/method/`), changed by what the data set's kind
has for the method (`conf/hparams/<kind>.yaml`), by a file of your own (`hparams/<dataset>/<method>.yaml`), by an
experiment, by the command line. A data set [names its kind](components.md#data-set) in its YAML; on one without a kind,
methods start from their own defaults. Written by `python docs/hyperparameters.py`; the test suite compares.

| kind | its data |
|---|---|"""
TABLE = """
| data set | method | values that differ from the method's own | source |
|---|---|---|---|"""


def kinds() -> list[str]:
    """One table row for every kind of data, with the first line of its file; what experiments choose is left out."""
    found = [path for path in sorted((CONF / "hparams").glob("*.yaml")) if not path.stem.startswith("paper")]
    return [f"| {path.stem} | {path.read_text().splitlines()[0].removeprefix('# ')} |" for path in found]


def rows(datasets: Path = CONF / "dataset") -> list[str]:
    """One table row for every data set and method for which the data set's kind has values."""
    lines = []
    for path in sorted(datasets.glob("*.yaml")):
        chosen = [entry for entry in yaml.safe_load(path.read_text()).get("defaults", []) if isinstance(entry, dict)]
        for kind in (entry["override /kind@_global_"] for entry in chosen):
            for method, section in sorted(hparams(kind).items()):
                values = [
                    f"`{group}.{key}={value}`"
                    for group in ("method", "optimizer")
                    for key, value in section.get(group, {}).items()
                ]
                source = section["source"]
                if scheduler := section.get("scheduler"):
                    values.append(f"`scheduler={scheduler}`")
                    source += f"; scheduler: {section['scheduler_source']}"
                lines.append(f"| {path.stem} | {method} | {', '.join(values)} | {source} |")
    return lines


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *kinds(), TABLE, *rows()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
