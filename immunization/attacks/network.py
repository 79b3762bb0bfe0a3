"""Attacks that train the net itself on harmful images, beside a fresh head: fine-tuning and LoRA."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from immunization.attacks.base import Attack, AttackCurve, step_grid
from immunization.attacks.victim import Inapplicable, Precision, Stage, Victim
from immunization.checks import AtLeastOne, AtLeastTwo, checked
from immunization.errors import ConfigError
from immunization.models.chain import Network

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}

NORM = 10.0
"""Longest gradient that is not clipped."""


class FineTune(Attack):
    """A fresh linear head and a part of the net trained by cross-entropy on mini-batches, one learning rate for both.

    `scope`: `full`, the whole net and the map behind it, if there is one, or `last`, its last block and the map.
    Features are scaled to a mean square of 1 at the start, by one factor; the head starts at 0. What is trained is in
    train mode. The clipped gradient of a mini-batch is one step.
    """

    @checked("attack.*")
    def __init__(
        self,
        scope: Literal["full", "last"] = "full",
        optimizer: Literal["sgd", "adamw"] = "sgd",
        rates: Sequence[float] = (0.003, 0.03, 0.3),
        steps: int = 64,
        batch_size: AtLeastTwo = 32,
        samples: int | None = None,
        precision: Precision | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(steps, rates, samples, precision, seed)
        self.scope, self.optimizer, self.batch_size = scope, OPTIMIZERS[optimizer], batch_size

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        if stage == "start":
            raise Inapplicable("the start of a deep net is its baseline")
        victim.network("baseline")  # Inapplicable where there is no net
        rows = self.rows(victim.task)
        splits = {"train": victim.images("train", None if rows is None else tuple(rows.tolist()))}
        splits |= {split: victim.images(split) for split in ("val", "test")}
        if not all(len(y) for _, y in splits.values()):
            raise Inapplicable("the harmful task needs validation and test images")
        grid = step_grid(self.steps, per_octave=1)
        curves = [self._train(rate, victim, stage, splits, grid) for rate in self.settings]
        val, test = (torch.tensor([curve[i] for curve in curves], dtype=torch.float64) for i in (0, 1))
        flops = curves[0][2] * torch.tensor(grid, dtype=torch.float64)
        return self.choose(grid, flops, val, test, victim.task.chance)

    def adapt(self, victim: Victim, network: Network) -> tuple[list[nn.Parameter], list[nn.Module]]:
        """Parameters of `network` to train, and what of it is in train mode meanwhile."""
        parts = [network] if self.scope == "full" else network.last()
        return [p for part in parts for p in part.parameters()], parts

    def _train(
        self, rate: float, victim: Victim, stage: Stage, splits: dict[str, tuple[Tensor, Tensor]], grid: list[int]
    ) -> tuple[list[float], list[float], float]:
        """Validation and test measures at the steps of the grid, and the operations of one step."""
        task, (x, y) = victim.task, splits["train"]
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            network = victim.network(stage, self.precision)
            with torch.no_grad():
                features = network(x[: self.batch_size])
            head = nn.Linear(features.shape[1], task.outputs).to(features)
            nn.init.zeros_(head.weight)
            scale = features.square().mean().rsqrt()
            parameters, moving = self.adapt(victim, network)
        network.requires_grad_(False)
        parameters = [parameter.requires_grad_(True) for parameter in [*parameters, *head.parameters()]]
        optimizer = self.optimizer(parameters, lr=rate)
        generator = torch.Generator().manual_seed(self.seed)

        def measure(split: str) -> float:
            images, labels = splits[split]
            network.eval()
            with torch.no_grad():
                logits = torch.cat([head(scale * network(part)) for part in images.split(256)])
            return task.measure(logits, labels).item() if torch.isfinite(logits).all() else torch.nan

        val, test, flops = [], [], 0.0
        order: list[int] = []
        for step in range(1, self.steps + 1):
            if len(order) < self.batch_size:
                order += torch.randperm(len(x), generator=generator).tolist()
            batch, order = order[: self.batch_size], order[self.batch_size :]
            for part in moving:
                part.train()
            with FlopCounterMode(display=False) if step == 1 else torch.enable_grad() as counter:
                loss = task.loss(head(scale * network(x[batch])), y[batch])
                optimizer.zero_grad()
                loss.backward()
            flops = float(counter.get_total_flops()) if step == 1 else flops
            nn.utils.clip_grad_norm_(parameters, NORM)
            optimizer.step()
            if step in grid:
                val.append(measure("val"))
                test.append(measure("test"))
                if math.isnan(val[-1]):  # for good
                    val, test = ([*curve, *[torch.nan] * (len(grid) - len(curve))] for curve in (val, test))
                    break
        return val, test, flops


class LoRA(FineTune):
    """Low-rank adapters of peft on every convolution and linear layer, and a fresh head; the net stays in eval mode."""

    @checked("attack.lora")
    def __init__(
        self,
        rank: AtLeastOne = 8,
        optimizer: Literal["sgd", "adamw"] = "adamw",
        rates: Sequence[float] = (0.001, 0.01, 0.1),
        steps: int = 64,
        batch_size: AtLeastTwo = 32,
        samples: int | None = None,
        precision: Precision | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__("full", optimizer, rates, steps, batch_size, samples, precision, seed)
        self.rank = rank

    def adapt(self, victim: Victim, network: Network) -> tuple[list[nn.Parameter], list[nn.Module]]:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError("attack=[lora] needs peft: pip install 'immunization[lora]'") from error
        layers = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        ]
        exactly = "|".join(map(re.escape, layers))  # peft takes a list of names for their endings
        inject_adapter_in_model(LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=exactly), network)
        return [p for name, p in network.named_parameters() if "lora_" in name], []
