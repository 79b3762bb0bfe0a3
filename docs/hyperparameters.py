"""Print the table of docs/hyperparameters.md from conf/method and conf/hparams: `python docs/hyperparameters.py`."""

from pathlib import Path

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
HEAD = """# Default hyper-parameters

What a method starts from on a data set: the method's own defaults (`conf/method/`), changed by
`conf/hparams/<dataset>/<method>.yaml`, changed by an experiment, changed by the command line. Written by
`python docs/hyperparameters.py`; the test suite compares.

| data set | method | values that differ from the method's own | source |
|---|---|---|---|"""


def rows() -> list[str]:
    """One table row for every file of conf/hparams."""
    lines = []
    for path in sorted(CONF.glob("hparams/*/*.yaml")):
        _, source, *_ = path.read_text().splitlines()
        groups = yaml.safe_load(path.read_text())
        values = [f"`{group}.{key}={value}`" for group, keys in groups.items() for key, value in keys.items()]
        lines.append(f"| {path.parent.name} | {path.stem} | {', '.join(values)} | {source.removeprefix('# ')} |")
    return lines


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *rows()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
