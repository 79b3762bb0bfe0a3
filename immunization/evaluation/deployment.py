"""The primary task of an immunized net in the number formats in which nets are deployed."""

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from immunization.checks import AtLeastOne, Component, NonNegative
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.models.activations import take
from immunization.runs.records import STAGES


def _int8(net: nn.Module) -> nn.Module:
    """Linear layers in int8 by torch's dynamic quantization on a CPU; convolutions stay in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this module goes
        quantize = getattr(getattr(torch.ao, "quantization", None), "quantize_dynamic", None)
        if quantize is None:
            raise NotImplementedError("this version of torch has no torch.ao.quantization")
        return quantize(net.float().cpu(), {nn.Linear})


class _Half(TorchFunctionMode):
    """float16 as GPUs have it: sums in float32, each result rounded. A CPU without it takes 30 times as long."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, lambda x: x.half().float() if x.dtype == torch.float32 else x, found)


FORMATS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "float64": (nn.Module.double, torch.float64),
    "float32": (nn.Module.float, torch.float32),
    "float16": (nn.Module.half, torch.float16),
    "bfloat16": (nn.Module.bfloat16, torch.bfloat16),
    "int8": (_int8, torch.float32),
}
"""Formats: how to convert a net, and the dtype of its images."""


class Deployment(Component, group="evaluation.deployment"):
    """Accuracy of the whole net with its own head on primary test images, in formats that people run nets in.

    `deployment/accuracy_<format>`, also with `_baseline`, on up to `images` evenly spaced images. Flag
    `breaks_in_low_precision`: in some format it is more than `tolerance` below the baseline's. Flag
    `fold_stripped_by_reset`: timm's `reset_classifier` throws the folded map away. Linear models have no such measures.
    """

    names = ("deployment/*",)

    images: AtLeastOne = 256
    tolerance: NonNegative = 0.03

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, model = Measures(), comparison.model
        if not model.deep:
            return measures
        if model.stripped_by:
            measures.flag(
                "fold_stripped_by_reset",
                f"{model.stripped_by} throws the folded map away: no module before the pooling could hold it",
            )
        if reason := comparison.no_test("primary"):
            for stage in STAGES:
                measures.miss(reason, *(f"deployment/accuracy_{form}" for form in FORMATS), stage=stage)
            return measures
        nets = dict(zip(STAGES, (model.deployed(), model.deployed_before(comparison.start)), strict=True))
        batches = self._batches(comparison)
        broken = [self._compare(comparison, form, nets, batches, measures) for form in FORMATS]
        if any(broken):
            measures.flag("breaks_in_low_precision", "; ".join(filter(None, broken)))
        return measures

    def _batches(self, comparison: Comparison) -> list[tuple[Tensor, Tensor]]:
        """Images and labels of evenly spaced rows of the primary test split."""
        model, part = comparison.model, comparison.tasks["primary"].test
        rows = torch.linspace(0, len(part) - 1, min(self.images, len(part))).round().long()
        if model.reads != "images":
            return list(model.image_batches("primary", "test", rows))
        return [(take(part.x, some), part.y[some.to(part.y.device)]) for some in rows.split(32)]

    def _compare(
        self,
        comparison: Comparison,
        form: str,
        nets: dict[str, nn.Module | None],
        batches: list[tuple[Tensor, Tensor]],
        measures: Measures,
    ) -> str | None:
        """Measure both nets in a format; returns what it breaks, if anything."""
        task, found = comparison.tasks["primary"], {}
        labels = torch.cat([labels for _, labels in batches])
        measure = f"deployment/accuracy_{form}"
        for stage in STAGES:
            if (net := nets[stage]) is None:
                measures.miss("the net as it was before training is not kept", measure, stage=stage)
                continue
            try:
                logits = logits_in(net, form, batches).to(labels.device, comparison.model.dtype)
            except (RuntimeError, NotImplementedError) as error:  # an operation that this machine lacks in the format
                measures.miss(
                    f"the net does not run in {form}: {' '.join(str(error).split())[:100]}", measure, stage=stage
                )
                continue
            found[stage] = task.measure(logits, labels).item()
            measures.put(measure, found[stage], stage=stage)
        if len(found) == 2 and found["baseline"] - found["immunized"] > self.tolerance + 1e-9:
            return f"primary accuracy in {form} is {found['immunized']:.3f}, before {found['baseline']:.3f}"
        return None


def logits_in(net: nn.Module, form: str, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Outputs [n, classes] of a copy of `net` in one of `FORMATS`, for all images of `batches`, on the CPU."""
    convert, dtype = FORMATS[form]
    converted, device = convert(copy.deepcopy(net)).eval(), next(net.parameters()).device
    if form == "int8":
        device = torch.device("cpu")
    if form != "float16" or device.type != "cpu":
        return torch.cat([converted(images.to(device, dtype)).cpu() for images, _ in batches])
    converted.float()  # weights stay rounded
    with _Half():
        return torch.cat([converted(images.half().float()) for images, _ in batches])
