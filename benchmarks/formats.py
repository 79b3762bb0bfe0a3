"""What deployment tools leave of an immunization: `python benchmarks/formats.py --runs FILE --page PAGE`.

Two small nets are fitted to digits 0 to 3 and immunized against a probe for 4 to 6; every tool of `deployed.OPTIONS`
ships them. FILE has a line of JSON for each, and a run goes on where it stopped; PAGE gets the tables. `--predict`
makes only what `in_format` says anew. Tools are those of the extra `formats`; `--nets`, `--bounds`, `--tools` choose.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import timm
import torch
from deployed import OPTIONS, Artefact, Net, Option, hooked
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import immunization
from immunization.attacks.base import step_grid
from immunization.theory.probe import Probe

NETS = {"test_resnet": 3e-3, "test_convnext": 2e-3}
"""Nets of timm, and Adam's rate at its peak."""
DIGITS = {"primary": range(4), "harmful": range(4, 7)}
BOUNDS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "before": None,
    "64": ("learning_curve", {}),
    "1e4": ("learning_curve", {"max_condition": 1e4}),
    "none": ("closed_form", {}),
}
"""How a net is immunized, by the bound of the map's condition number."""
EPOCHS, BATCH, SIZE = 15, 64, 32
GRID = torch.tensor(step_grid(2**20))

Rows = tuple[Tensor, Tensor]
"""Images [n, 1, SIZE, SIZE] and labels from 0 on."""


def digits(role: str) -> tuple[Rows, Rows]:
    """Training and test rows of a task."""
    pixels, digit = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = F.interpolate(pixels.float().view(-1, 1, 8, 8) / 8 - 1, size=SIZE, mode="bilinear")
    order = torch.randperm(len(digit), generator=torch.Generator().manual_seed(0))
    rows = order[torch.isin(digit[order], torch.tensor(DIGITS[role]))]
    train, test = rows[: len(rows) * 3 // 4], rows[len(rows) * 3 // 4 :]
    return tuple((images[part], digit[part] - DIGITS[role][0]) for part in (train, test))


def fitted(name: str) -> nn.Module:
    """A net fitted to the primary digits, moved by up to three pixels."""
    torch.manual_seed(0)
    net, ((x, y), _) = (
        timm.create_model(name, in_chans=1, num_classes=len(DIGITS["primary"])).train(),
        digits("primary"),
    )
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, NETS[name], EPOCHS * (len(x) // BATCH))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x))[: len(x) - len(x) % BATCH].split(BATCH):
            moved = torch.roll(x[rows], torch.randint(-3, 4, (2,)).tolist(), (2, 3))
            optimizer.zero_grad()
            F.cross_entropy(net(moved), y[rows], label_smoothing=0.1).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return net.eval()


def made(name: str, bound: str, folder: Path) -> Net:
    """The net under a bound, from `folder` where it stands there already."""
    path = folder / f"{name}_before.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(fitted(name).state_dict(), path)
    net = timm.create_model(name, in_chans=1, num_classes=len(DIGITS["primary"])).eval()
    net.load_state_dict(load_file(path))
    if chosen := BOUNDS[bound]:
        kept = folder / f"{name}_{bound}"
        if not kept.exists():
            loaders = [DataLoader(TensorDataset(*digits(role)[0]), BATCH) for role in DIGITS]
            immunization.save(immunization.immunize(net, *loaders, chosen[0], verbose=False, **chosen[1]), kept)
        net = immunization.load(kept)
    return Net(net.requires_grad_(False), digits("primary")[0][0][: 2 * BATCH].split(BATCH))


@torch.no_grad()
def measured(artefact: Artefact, bar: float) -> dict[str, float]:
    """Accuracy of the artefact's own logits on primary test rows, and steps of a harmful probe on its features."""
    images, labels = digits("primary")[1]
    own = (artefact(images)[0].argmax(1) == labels).double().mean().item()
    reached = (curve(artefact) >= bar).nonzero()
    return {"own": round(own, 3), "steps": (GRID[reached[0, 0]] if len(reached) else GRID[-1]).item()}


@torch.no_grad()
def curve(artefact: Artefact) -> Tensor:
    """Held-out accuracy of the harmful probe over GRID."""
    (x, y), (test, truth) = digits("harmful")
    features = artefact(x)[1].double()
    if not features.isfinite().all():
        return torch.zeros(len(GRID))
    probe = Probe.of(features, F.one_hot(y).double(), eps=torch.finfo(torch.float32).eps)
    weights = probe.weights(GRID.double())
    return ((artefact(test)[1].double() @ weights).argmax(-1) == truth).double().mean(1)


def bar_of(net: Net) -> float:
    """90 % of the way from guessing to the best of the net before immunization."""
    chance = 1 / len(DIGITS["harmful"])
    best = curve(hooked(net.copy(), net.head)).max().item()
    return chance + 0.9 * (best - chance)


def tried(option: Option, net: Net, bar: float) -> dict[str, Any]:
    """What the tool's artefact does, or why there is none."""
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            return measured(option.make(net), bar)
    except Exception as error:  # of any kind: the tool's
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}


INTRODUCTION = """# What deployment tools leave of an immunization

This page measures what is left of immunization when deployment tools convert a net to another number format, and how
well this project predicts it. {nets} were fitted to digits 0 to 3 (the primary task) and immunized against a probe
for digits 4 to 6 (the harmful task). There are three immunized versions of each net:

- *64*: by `learning_curve` with the default bound on the condition number of the map, `method.max_condition=64`.
- *1e4*: by `learning_curve` with the bound 1e4. The maps of the two nets reach condition numbers of 311 and 8,310.
- *no bound*: by `closed_form` without a bound.

Each tool converts the nets, and the converted file itself is run.

- *own*: accuracy on the primary task, by the logits of the file, on {own} test rows.
- *steps*: how many steps a harmful probe takes on the tensor before the last linear layer of the file, until it is 90
  % of the way from guessing to its best on the net before immunization. 1,048,576 means that it never gets there.
- In brackets: the prediction of `immunization.models.formats.in_format`, which knows the conventions of each tool. A
  number is **bold** if the prediction is off by more than .05 (accuracy) or by more than a factor of 2 (steps).

*Needs: the network, once, and hours.*

```sh
pip install '.[formats]'
python benchmarks/formats.py --runs docs/results/formats.jsonl --page docs/results/formats.md --deploy docs/deploy.md
```

Versions: {versions}. The processor has AVX2 only. Without VNNI, the 8-bit sums of some tools can saturate. Without
AMX or AVX512, OpenVINO computes bfloat16 in float32.
"""
GPU = """
## On a GPU

This was measured once by hand, with the net of `experiment=digits_deep` on an H200. A cell has the own accuracy and
the steps of a harmful probe. Before immunization they are 1.00 and 3.

| format | `learning_curve`, 64 | bound 1e4 | `closed_form`, no bound |
|---|---|---|---|
| float32 | 1.00 / 5,793 | | |
| TF32 | 1.00 / 4,871 | 1.00 | 1.00 |
| float16 | 1.00 / 4,871 | | |
| bfloat16 | 1.00 / 5,793 | .85 | .49 |
| torchao, float8 | 1.00 / 5,793 | .85 | .49 |
| torchao, float8 weights | 1.00 / 8,192 | .38 | .68 |
"""


def page(lines: Sequence[dict[str, Any]]) -> str:
    """docs/results/formats.md."""
    order = {(option.tool, option.name): i for i, option in enumerate(OPTIONS)}
    versions = {line["tool"]: line["version"] for line in lines}
    text = [
        INTRODUCTION.format(
            nets=" and ".join(f"timm's {name}" for name in NETS),
            own=len(digits("primary")[1][1]),
            versions=", ".join(f"{tool} {number}" for tool, number in versions.items()),
        ),
        agreement(lines),
    ]
    for name in NETS:
        own = [line for line in lines if line["net"] == name]
        heads = [f"{BOUND_NAMES[bound]}, {what}" for bound in BOUNDS for what in ("own", "steps")]
        text += [f"\n## {name}\n", f"| tool | option | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
        for tool, option in sorted({(line["tool"], line["option"]) for line in own}, key=order.__getitem__):
            of = {line["bound"]: line for line in own if (line["tool"], line["option"]) == (tool, option)}
            cells = [cell for bound in BOUNDS for cell in cells_of(of.get(bound))]
            text.append(f"| {tool} | {option} | {' | '.join(cells)} |")
        errors = {(line["tool"], line["option"]): line["error"] for line in own if "error" in line}
        text += ["", *(f"- {tool}, {option}: {why.replace('|', '/')}" for (tool, option), why in errors.items())]
    return "\n".join([*text, GPU])


EXCERPT = {
    "torch": ("float16", "bfloat16"),
    "torchao": ("PT2E, X86Inductor",),
    "optimum-quanto": ("qint8", "qfloat8", "qint4"),
    "onnxruntime": ("float32", "dynamic, per_channel", "static", "MatMulNBits, 4 bits"),
    "openvino": ("save_model", "save_model, compress_to_fp16=False, f32"),
    "nncf": ("quantize", "compress_weights", "compress_weights, INT4_ASYM"),
    "litert-torch": ("dynamic_wi8", "static_wi8_ai8", "weight_only_wi4"),
    "executorch": ("XNNPACK, int8",),
}
"""What docs/deploy.md shows."""


def excerpt(lines: Sequence[dict[str, Any]]) -> str:
    """The table of docs/deploy.md: own accuracy / harmful steps."""
    of = {(line["net"], line["bound"], line["tool"], line["option"]): line for line in lines if "error" not in line}
    shown = [(name, bound) for name in NETS for bound in ("64", "1e4")]
    heads = [f"{name}, bound {bound}: accuracy / steps" for name, bound in shown]
    rows = [f"| tool | option | {' | '.join(heads)} |", "|---" * (len(shown) + 2) + "|"]
    for tool, options in EXCERPT.items():
        for option in options:
            found = [of.get((*one, tool, option)) for one in shown]
            cells = [f"{line['own']:.2f} / {line['steps']:,}" if line else "" for line in found]
            number = next(line["version"] for line in found if line)
            rows.append(f"| {tool} {number} | {option} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


BOUND_NAMES = {"before": "before", "64": "64", "1e4": "1e4", "none": "no bound"}


def cells_of(line: dict[str, Any] | None) -> list[str]:
    """Accuracy and steps of the tool, and in brackets what was predicted."""
    if line is None or "error" in line:
        return ["", ""] if line is None else ["fails", ""]
    said, bold = line["predicted"], ("**" * (not near(line)), "**" * (not alike(line)))
    return [
        f"{bold[0]}{line['own']:.2f} ({said['own']:.2f}){bold[0]}",
        f"{bold[1]}{line['steps']:,} ({said['steps']:,}){bold[1]}",
    ]


def near(line: dict[str, Any]) -> bool:
    return abs(line["own"] - line["predicted"]["own"]) <= 0.05 + 1e-9


def alike(line: dict[str, Any]) -> bool:
    """Steps within a factor of 2, and the grid's rounding."""
    steps = line["steps"], line["predicted"]["steps"]
    return max(steps) <= 2.01 * min(steps)


def agreement(lines: Sequence[dict[str, Any]]) -> str:
    """How often tools and predictions agree, by bound."""
    heads = "bound | artefacts | own within .05 | predicted too high by over .10 | steps within a factor of 2"
    rows = [f"\n| {heads} |", "|---" * 5 + "|"]
    read = [line for line in lines if "error" not in line]
    for bound in (*BOUNDS, None):
        own = [line for line in read if bound in (line["bound"], None)]
        high = sum(line["predicted"]["own"] - line["own"] > 0.1 + 1e-9 for line in own)
        name = "all" if bound is None else BOUND_NAMES[bound]
        rows.append(f"| {name} | {len(own)} | {sum(map(near, own))} | {high} | {sum(map(alike, own))} |")
    return "\n".join(rows)


def lines_of(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that are not done yet."""
    known = {(line["net"], line["bound"], line["tool"], line["option"]) for line in done}
    for name in args.nets:
        bar = bar_of(made(name, "before", args.folder))
        for bound in args.bounds:
            net = made(name, bound, args.folder)
            for option in OPTIONS:
                if option.tool in args.tools and (name, bound, option.tool, option.name) not in known:
                    line = {"net": name, "bound": bound, "tool": option.tool, "option": option.name}
                    found = tried(option, net, bar)
                    yield (
                        line | {"version": option.version} | found | {"predicted": measured(option.predicted(net), bar)}
                    )


def predicted_anew(lines: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The lines, with what `in_format` says now, in place; options of one format share it."""
    options = {(option.tool, option.name): option for option in OPTIONS}
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    for name, bound in dict.fromkeys((line["net"], line["bound"]) for line in lines):
        net, bar = made(name, bound, folder), bar_of(made(name, "before", folder))
        for line in lines:
            if (line["net"], line["bound"]) == (name, bound):
                option = options[line["tool"], line["option"]]
                key = name, bound, option.form, option.fed, option.then, option.gemm
                if key not in known:
                    known[key] = measured(option.predicted(net), bar)
                line["predicted"] = known[key]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("docs/results/formats.jsonl"))
    parser.add_argument("--page", type=Path, help="write the tables here")
    parser.add_argument("--deploy", type=Path, help="docs/deploy.md, whose table is made anew")
    parser.add_argument("--folder", type=Path, default=Path("outputs/formats"), help="where the nets are kept")
    parser.add_argument("--nets", nargs="*", default=list(NETS))
    parser.add_argument("--bounds", nargs="*", default=list(BOUNDS))
    parser.add_argument("--tools", nargs="*", default=list(dict.fromkeys(option.tool for option in OPTIONS)))
    parser.add_argument("--predict", action="store_true", help="only what in_format says is made anew")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in args.runs.read_text().splitlines()] if args.runs.exists() else []
    if args.predict:
        args.runs.write_text("".join(json.dumps(line) + "\n" for line in predicted_anew(lines, args.folder)))
    else:
        for line in lines_of(args, lines):
            lines.append(line)
            with args.runs.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    if args.page:
        args.page.write_text(page(lines))
    if args.deploy:
        text = args.deploy.read_text()
        args.deploy.write_text(re.sub(r"\| tool \| option \|.*?\n(?=\n)", lambda _: excerpt(lines), text, flags=re.S))


if __name__ == "__main__":
    main()
