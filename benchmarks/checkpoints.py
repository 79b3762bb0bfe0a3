"""What checkpoints cost: asking after every step, writing one, and the share of a run at the default interval of 60 s.

python benchmarks/checkpoints.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from immunization.compute import randomness
from immunization.models.base import kept_of
from immunization.runs.filenames import CHECKPOINT
from immunization.training.checkpoint import SHARE, Checkpointer
from immunization.training.signals import Stop

SECONDS = 60.0


def state(model: nn.Module) -> dict:
    """What a run keeps: the model, Adam after one step, random states."""
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    return {"model": kept_of(model), "optimizer": optimizer.state_dict(), "random": randomness.states()}


def main() -> None:
    models = {
        "linear, D = 64": nn.Linear(64, 64, dtype=torch.float64),
        "linear, D = 784": nn.Linear(784, 784, dtype=torch.float64),
        "layer4 of ResNet18": nn.Linear(8_393_728, 1, bias=False),  # as many parameters
        "a block of ViT-B/16": nn.Linear(7_087_872, 1, bias=False),
    }
    with tempfile.TemporaryDirectory() as folder:
        idle = Checkpointer(Path(folder), {}, Stop(), seconds=SECONDS)
        began = time.process_time()
        for step in range(1_000_000):
            idle(step, dict)
        print(f"asking whether one is due: {time.process_time() - began:.2f} microseconds a step")
        print("| what is trained | MB | seconds (processor) to write one | share of the time, every 60 s |")
        print("|---|---|---|---|")
        for name, model in models.items():
            keeper, content = Checkpointer(Path(folder), {}, Stop(), seconds=SECONDS), state(model)
            keeper.write(0, lambda content=content: content)
            wall, cpu = time.monotonic(), time.process_time()
            for _ in range(3):
                keeper.write(0, lambda content=content: content)
            wall, cpu = (time.monotonic() - wall) / 3, (time.process_time() - cpu) / 3
            share = wall / max(SECONDS, wall / SHARE)
            size = (Path(folder) / CHECKPOINT).stat().st_size / 1e6
            print(f"| {name} | {size:.3g} | {wall:.2g} ({cpu:.2g}) | {share:.2%} |")


if __name__ == "__main__":
    main()
