"""Print docs/hyperparameters.md from conf/dataset and conf/hparams: `python docs/hyperparameters.py`."""

from pathlib import Path

import yaml

from immunization.checks import CONF
from immunization.config import hparams

HEAD = """# Default hyper-parameters

This page is for users who want to know with which values a method starts on their data. Five places can set a value.
A later place overrides the earlier ones:

1. the method's own file, `conf/method/<method>.yaml`,
2. the method's section in the file of the data set's *kind*, `conf/hparams/<kind>.yaml`. A data set
   [names its kind](components.md#data-set) in its YAML file,
3. a file of your own in place of this section, `hparams/<kind>/<method>.yaml`,
4. an experiment,
5. the command line.

The table has the values from the second place, where they differ from the first. The source of each value is beside
it in [conf/hparams](../conf/hparams). Experiments at 128 pixels have a kind of their own, `resnet18_cars128`.
`python docs/hyperparameters.py` writes this page.

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
