"""What a slow harmful probe costs and tells: `python benchmarks/decoys.py --runs FILE --page PAGE`.

Every run is one of `launch.py`, with `method=decoys` and a number of squeezed directions, or with another method.
FILE has a line of JSON for each, and a run goes on where it stopped; PAGE gets the medians. `--tracks` names some of
`TRACKS`; those that read real data need `--data`, the folder of docs/install.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import Compose, Resize

import immunization
from immunization.errors import UserError

MEASURES = {
    "steps_ratio/harmful": "harmful steps",
    "steps_ratio/primary": "primary",
    "benign": "benign",
    "leak/auc": "AUC, no label",
    "leak/auc_random": "the same, random direction",
    "leak/with_1": "1 label",
    "leak/without_1": "1 label, random directions",
    "leak/worth_1": "told, 1 label",
    "leak/worth_5": "told, 5 labels",
}
OPTIONS = ["tracker=none", "figures=false", "evaluation=[learning_curves,leak]"]
BENIGN = ["dataset.benign_root={data}/caltech101", "dataset.benign.classes=0:20"]
DATA = {
    "house_prices": ["dataset=house_prices", "dataset.root={data}/house_prices"],
    "resnet18_cars": ["experiment=resnet18_cars_small", *BENIGN],
    "vit_cars": ["experiment=vit_cars_small", *BENIGN],
    "resnet18_1000": ["dataset=arrays", "dataset.normalize=none", "method.max_condition=64"],
    "minilm_banking77": ["experiment=minilm_banking77"],
}
DIMENSIONS = {
    "digits": [None, 4, 16, 32, 48],
    "house_prices": [None, 4, 16, 32],
    "resnet18_cars": [None, 128, 160, 256, 384, 480],
    "vit_cars": [None, 96, 128, 160],
    "resnet18_1000": [None, 128, 256, 384],
    "minilm_banking77": [None, 128, 160, 256],
}
PLACES = ("data_root=", "dataset.path=")
"""Overrides that say where this machine has its data."""
OTHERS = ("learning_curve", "closed_form", "condition_number")


def settings(track: str, data: str) -> list[tuple[str, list[str]]]:
    """Labels of the methods of a track, and the overrides of each of their runs."""
    if track == "digits":
        chosen = []
        for primary, harmful in permutations(range(10), 2):
            benign = [digit for digit in range(10) if digit not in (primary, harmful)]
            third = benign[harmful % 8], benign[(harmful + 3) % 8]
            chosen.append([f"dataset.primary={primary}", f"dataset.harmful={harmful}", f"dataset.benign={list(third)}"])
    elif track == "resnet18_1000":
        chosen = [[*DATA[track], f"dataset.path={thousand_classes(data)}"]]
    else:
        chosen = [[part.format(data=data) for part in DATA[track]] + [f"data_root={data}"]]
        if track == "house_prices":
            chosen = [[*chosen[0], f"dataset.seed={seed}"] for seed in range(3)]
    methods = [(f"decoys, m = {m or 'least'}", [f"method.dimensions={m or 'null'}"]) for m in DIMENSIONS[track]]
    methods = [(label, ["method=decoys", *options]) for label, options in methods]
    others = OTHERS if track in ("digits", "house_prices") else OTHERS[:2]
    few = chosen[::9] if track == "digits" else chosen  # ten pairs, for methods that train
    return [(label, [*data_of, *method]) for label, method in methods for data_of in chosen] + [
        (name, [*data_of, f"method={name}"]) for name in others for data_of in few
    ]


def thousand_classes(data: str) -> Path:
    """A file of features of the pretrained ResNet18: of 1,000 classes of ImageNet, as the net tells them, and of cars.

    The images of the primary task are one of each class of ImageNet, 250 of ten of them, and Caltech-101.
    """
    path = Path(tempfile.gettempdir()) / "resnet18_1000.npz"
    if path.exists():
        return path
    net = timm.create_model("resnet18")
    net.load_state_dict(load_file(Path(data) / "weights/resnet18_imagenet.safetensors"))
    net.eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net), is_training=False)
    arrays: dict[str, Any] = {}

    def features(*folders: str, seen: Any = transform) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = [], []
        for folder in folders:
            images = ImageFolder(Path(data) / folder, seen)
            for batch, labels in DataLoader(images, batch_size=64):
                with torch.inference_mode():
                    x.append(net.forward_head(net.forward_features(batch), pre_logits=True))
                y.append(labels)
        return torch.cat(x).double(), torch.cat(y)

    splits = [f"{folder}/{split}" for folder in ("imagenette224", "caltech101") for split in ("train", "val")]
    x, _ = features("imagenet1k_sample/val", *splits)
    arrays |= {"primary_x": x, "primary_y": (x.float() @ net.fc.weight.T + net.fc.bias).argmax(1)}
    squashed = Compose([Resize((224, 224)), *transform.transforms[-2:]])
    for split, name in (("train", "harmful"), ("val", "harmful_test")):
        arrays[f"{name}_x"], arrays[f"{name}_y"] = features(f"stanford_cars80/{split}", seen=squashed)
    for split, name in (("train", "benign"), ("val", "benign_test")):
        arrays[f"{name}_x"], arrays[f"{name}_y"] = features(f"caltech101/{split}")
    np.savez(path, **{name: value.detach().numpy() for name, value in arrays.items()})
    return path


def measured(overrides: list[str]) -> dict[str, Any]:
    """What one run measures, the slowest benign task counting; or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = immunization.run([*overrides, *OPTIONS], folder=folder, quiet=True)
        except UserError as error:
            return {"error": str(error)}
    metrics = result.metrics
    benign = [value for name, value in metrics.items() if name.startswith("steps_ratio/benign") and value is not None]
    found = {name: metrics.get(name) for name in MEASURES if name != "benign"} | {"benign": max(benign, default=None)}
    found["seconds"] = result.seconds["immunize"]
    return {name: value and float(f"{value:.4g}") for name, value in found.items()}


def page(lines: list[dict[str, Any]]) -> str:
    """Markdown: for each track a table of the medians over its runs."""
    parts = [INTRODUCTION]
    for track in DIMENSIONS:
        own = [line for line in lines if line["track"] == track and "error" not in line]
        if not own:
            continue
        parts.append(f"## {track}\n\n| method | runs | {' | '.join(MEASURES.values())} | seconds |")
        parts.append("|---|---:|" + "---:|" * (len(MEASURES) + 1))
        for label in dict.fromkeys(line["label"] for line in own):
            runs = [line for line in own if line["label"] == label]
            cells = [_median([run.get(name) for run in runs]) for name in [*MEASURES, "seconds"]]
            parts.append(f"| {label} | {len(runs)} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


INTRODUCTION = """# What hiding costs

*Needs: the data of [Install](../install.md#data), and hours.*

```sh
python benchmarks/decoys.py --runs docs/results/decoys.jsonl --page docs/results/decoys.md --data data
```

`method=decoys` places a linear map behind the features that [squeezes](../glossary.md#squeeze) m directions
([theory](../theory.md#a-map-in-closed-form)). Some of them are the directions of the harmful task; the others are
*decoys*, random directions that hide the harmful ones. This page measures what decoys hide, and what they cost. *m =
least* is a map without decoys.

Each section is a data set. Numbers are medians over the runs.

- *harmful steps*, *primary*, *benign*: how many steps of gradient descent a fresh probe of this task takes, divided
  by its steps on the baseline. Steps are counted up to 2^20. Benign tasks are two digits, or 20 classes of
  Caltech-101, that no method was shown; of several benign tasks, the slowest counts.
- *AUC, no label*: how well a direction that the map singles out separates the harmful classes, and the same for a
  random direction.
- *1 label*: the test accuracy of an attacker with one label per class who reads the map; *1 label, random
  directions*: without reading the map.
- *told*: the accuracy that an attacker gains by reading the map (`evaluation.leak`), with 1 and with 5 labels per
  class. House Prices is a regression. There the labels are 1 and 5 rows in all, and no attacker learns anything from
  them.
- The digits have 90 ordered pairs; methods that train have ten of these.
- The primary task of `resnet18_1000` has the 1,000 classes of ImageNet, as the net predicts them, on 6,800 images.
"""


def _median(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.3g}" if known else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="lines of JSON; a run goes on where it stopped")
    parser.add_argument("--page", type=Path, help="Markdown to write")
    parser.add_argument("--tracks", nargs="*", default=list(DIMENSIONS), choices=list(DIMENSIONS))
    parser.add_argument("--data", default="data", help="folder of the real data")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.runs.read_text().splitlines()] if options.runs.exists() else []
    done = {(line["track"], *line["options"]) for line in lines}
    for track in options.tracks:
        for label, overrides in settings(track, options.data):
            named = [part.replace(options.data, "data") for part in overrides if not part.startswith(PLACES)]
            if (track, *named) not in done:
                lines.append({"track": track, "label": label, "options": named, **measured(overrides)})
                with options.runs.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    if options.page:
        options.page.write_text(page(lines))


if __name__ == "__main__":
    main()
