"""Print the table of docs/hyperparameters.md from conf/method and conf/hparams: `python docs/hyperparameters.py`."""

from pathlib import Path

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
HEAD = """# Default hyper-parameters

What a method starts from on a data set: the method's own defaults (`conf/method/`), changed by
`conf/hparams/<dataset>/<method>.yaml`, with the scheduler that `conf/hparams/scheduler/<dataset>/<method>.yaml` chooses
where there is one, changed by an experiment, changed by the command line. Written by
`python docs/hyperparameters.py`; the test suite compares.

| data set | method | values that differ from the method's own | source |
|---|---|---|---|"""


def rows(hparams: Path = CONF / "hparams") -> list[str]:
    """One table row for every data set and method with files in `hparams`."""
    lines = []
    for path in sorted(hparams.glob("*/*.yaml")):
        values, sources = [], []
        for one in (path, hparams / "scheduler" / path.relative_to(hparams)):
            if one.exists():
                _, source, *_ = one.read_text().splitlines()
                sources.append(source.removeprefix("# "))
                groups = yaml.safe_load(one.read_text())
                chosen = groups.pop("defaults", [])  # /scheduler/cosine@scheduler
                values += [f"`{option.partition('@')[0].lstrip('/').replace('/', '=')}`" for option in chosen]
                values += [f"`{group}.{key}={value}`" for group, keys in groups.items() for key, value in keys.items()]
        lines.append(f"| {path.parent.name} | {path.stem} | {', '.join(values)} | {'; scheduler: '.join(sources)} |")
    return lines


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *rows()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
