"""Print docs/hyperparameters.md from conf/dataset and conf/hparams: `python docs/hyperparameters.py`."""

from pathlib import Path

import yaml

from immunization.checks import CONF
from immunization.config import hparams

HEAD = """# Default hyper-parameters

A method starts from its own defaults (`conf/method/`). The section for it in the file of the data set's kind
(`conf/hparams/<kind>.yaml`), or a file of your own in its place (`hparams/<kind>/<method>.yaml`), an experiment and the
command line override them, in this order. A data set [names its kind](components.md#data-set) in its YAML. The source
of every value is beside it in [conf/hparams](../conf/hparams); experiments at 128 pixels have a kind of their own,
`resnet18_cars128`. Written by
`python docs/hyperparameters.py`.

| method | data sets | values that differ from the method's own |
|---|---|---|"""


def rows(datasets: Path = CONF / "dataset") -> list[str]:
    """One table row for every method and its values on some data sets, with the data sets that share them."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(datasets.glob("*.yaml")):
        chosen = [entry for entry in yaml.safe_load(path.read_text()).get("defaults", []) if isinstance(entry, dict)]
        for kind in (entry["override /kind@_global_"] for entry in chosen):
            for method, section in hparams(kind).items():
                values = [
                    f"`{group}.{key}={value}`"
                    for group in ("method", "optimizer")
                    for key, value in section.get(group, {}).items()
                ]
                if scheduler := section.get("scheduler"):
                    values.append(f"`scheduler={scheduler}`")
                found.setdefault((method, ", ".join(values)), []).append(path.stem)
    return [f"| {method} | {', '.join(names)} | {values} |" for (method, values), names in sorted(found.items())]


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *rows()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
