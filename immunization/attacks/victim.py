"""What an attacker downloads: the extractor, before and after immunization, and what harmful data become in it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from immunization.data.images import create_loader
from immunization.data.task import Task
from immunization.evaluation.comparison import Comparison
from immunization.models import Folded, Linear, Model, Timm
from immunization.models.activations import take
from immunization.models.chain import Whole
from immunization.models.folded import folded_map
from immunization.models.image_tasks import preprocessing

Stage = Literal["immunized", "baseline", "start"]
"""theta_I, what it is compared with (raw inputs or theta_0), and theta_0 where that is something else."""

Precision = Literal["float32", "bfloat16", "int8"]

GIB = 2**30
MOST = 4
"""GiB of images that an attack on a net keeps in memory."""


class Inapplicable(Exception):
    """An attack that does not exist for this model or these data; the message is the reason."""


class Victim:
    """The harmful task as an attacker sees it through the extractor of each stage.

    `start` is the extractor's state dict before immunization. Features are float64, computed once for each stage, split
    and precision of the weights; `precision=None` leaves them as they are.
    """

    def __init__(self, model: Model, comparison: Comparison, start: Mapping[str, Tensor]) -> None:
        self.model, self.comparison, self.start = model, comparison, start
        self.task: Task = comparison.tasks["harmful"]
        self.stages: list[Stage] = ["immunized", "baseline"]
        if isinstance(model, Linear):
            theta = start["theta"]
            if not _is_identity(theta) and not torch.equal(theta, model.extractor.theta):
                self.stages.append("start")
        self.features, self.flops_per_row = cache(self.features), cache(self.flops_per_row)
        self.images = cache(self.images)

    @torch.no_grad()
    def features(self, stage: Stage, split: str, precision: Precision | None = None, role: str = "harmful") -> Tensor:
        """Features [N, D] of one split of a task."""
        raw = stage == "baseline" and isinstance(self.model, Linear)  # the map is I, which every precision holds
        if raw or (precision is None and stage != "start"):
            return self.comparison.features(role, split, "after" if stage == "immunized" else "before")
        inputs, extractor = getattr(self.comparison.tasks[role], split).x, self.extractor(stage, precision)
        like = next(extractor.parameters())
        return torch.cat([extractor(part.to(like)).double() for part in inputs.split(256)])

    def extractor(self, stage: Stage, precision: Precision | None = None) -> nn.Module:
        """A copy of the extractor, its weights rounded to `precision`."""
        if stage != "immunized" and isinstance(self.model, Timm) and self.model.before:
            return rounded(copy.deepcopy(self.model.before[0].extractor), precision)
        extractor = copy.deepcopy(self.model.extractor)
        if stage != "immunized":
            extractor.load_state_dict(self.start)
        return rounded(extractor, precision)

    def linear_map(self, stage: Stage, precision: Precision | None = None) -> Tensor:
        """theta [D_in, D_out] in float64 of a linear model, or of the map folded behind a net."""
        extractor = self.extractor("immunized" if stage == "baseline" else stage, precision)
        theta = folded_map(extractor)
        if isinstance(self.model, Linear) and self.model.extractor.bias is None:
            theta = extractor.theta
        if theta is None:
            raise Inapplicable("the extractor holds no linear map that could be inverted")
        return torch.eye(len(theta)).to(theta.detach().double()) if stage == "baseline" else theta.detach().double()

    # --- the network itself -------------------------------------------------------------------------------------------

    def network(self, stage: Stage, precision: Precision | None = None) -> nn.Module:
        """A copy of the whole net, images -> features [N, D], all of it trainable and in eval mode."""
        base = self._base()
        if stage != "immunized" and base.before:
            (base,) = base.before
        net, extractor = copy.deepcopy((base.net, base.extractor))
        whole: nn.Module = Whole(net)
        if isinstance(self.model, Folded):
            if stage == "immunized":  # the baseline has no map
                layer = nn.Linear(*self.model.extractor.theta.shape, bias=False)
                layer.weight.data = self.model.extractor.theta.detach().T.clone()
                whole = nn.Sequential(whole, layer)
        elif stage != "immunized" and base is self.model:
            extractor.load_state_dict(self.start)  # shares its parameters with `net`
        return rounded(whole, precision).to(base.head.weight).eval().requires_grad_(True)

    def last(self, network: nn.Module) -> list[nn.Module]:
        """The last block of a net and the map behind it, if there is one."""
        whole = network if isinstance(network, Whole) else network[0]
        name = self._base().last_block()
        return [whole.net.get_submodule(name), *([] if whole is network else [network[1]])]

    def images(self, split: str, rows: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Images [N, C, H, W], preprocessed for the net, and labels [N] of some rows of a split of the harmful task."""
        base = self._base()
        if not base._trunk and base is self.model:  # what the extractor reads are images
            x, y = getattr(self.task, split).x, getattr(self.task, split).y
            rows = torch.arange(len(y)) if rows is None else torch.tensor(rows)
            return take(x, rows).to(base.head.weight), y[rows.to(y.device)]
        pair, task = base.images, base.images.tasks["harmful"]
        part = task.splits[split]
        if rows is not None:
            own = torch.arange(len(part)) if part.rows is None else part.rows
            part = replace(part, rows=own[list(rows)])
        config = preprocessing(base.config, pair, task)
        size = len(part) * torch.Size(base.config["input_size"]).numel() * base.dtype.itemsize / GIB
        if size > MOST:
            raise Inapplicable(f"{len(part)} images take {size:.0f} GiB; lower samples to come under {MOST} GiB")
        batches = [(images, labels) for images, labels, _ in create_loader(pair, part, config) if len(images)]
        labels = base.order["harmful"][torch.cat([y for _, y in batches])]
        return torch.cat([x for x, _ in batches]).to(base.head.weight), labels.to(base.head.weight.device)

    def flops_per_row(self) -> float:
        """Floating-point operations of one forward pass of one input through the immunized extractor."""
        d = self.task.dim
        if not isinstance(self.model, Timm | Folded):
            return 2.0 * d * d
        return forward_flops(self.network("immunized"), self._base().config["input_size"])

    def _base(self) -> Timm:
        base = self.model.base[0] if isinstance(self.model, Folded) else self.model
        if not isinstance(base, Timm):
            raise Inapplicable("a linear map has no layers to fine-tune: this attack needs a deep net")
        return base


def _is_identity(theta: Tensor) -> bool:
    return theta.shape[0] == theta.shape[1] and torch.equal(theta, torch.eye(len(theta)).to(theta))


def forward_flops(network: nn.Module, input_size: tuple[int, int, int]) -> float:
    """Floating-point operations of one image, a multiplication and an addition counting as two."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *input_size).to(next(network.parameters())))
    return float(counter.get_total_flops())


@torch.no_grad()
def rounded(module: nn.Module, precision: Precision | None) -> nn.Module:
    """`module` with its parameters rounded in place; int8 has one scale a tensor and leaves vectors as they are."""
    for parameter in module.parameters() if precision else ():
        parameter.copy_(round_to(parameter, precision))
    return module


def round_to(x: Tensor, precision: Precision) -> Tensor:
    """The nearest values that `precision` holds, in the dtype of `x`."""
    if precision != "int8":
        return x.to(getattr(torch, precision)).to(x.dtype)
    scale = x.abs().max() / 127
    return x if x.ndim < 2 or not scale > 0 else (x / scale).round() * scale
