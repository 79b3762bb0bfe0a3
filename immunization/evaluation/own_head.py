"""A net's own head before and after immunization: on test images, in number formats, on classes outside D_P."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from immunization.checks import Component
from immunization.compute.machine import onto
from immunization.data.class_folders import Order
from immunization.data.image_folders import Crop, open_task
from immunization.data.images import ImagePair, ImageTask
from immunization.data.task import MARGIN, Task
from immunization.errors import ConfigError, DataError
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.evaluation.primary import interval_of
from immunization.models.chain import reads, twice
from immunization.models.reading import outputs_of
from immunization.runs.records import STAGES, Stage

NOT_KEPT = "the net as it was before training is not kept"


def nets_of(comparison: Comparison) -> dict[Stage, nn.Module | None]:
    """The net as people run it, images -> primary logits, after and before; the latter where it was kept."""
    model = comparison.model
    return {"immunized": model.deployed(), "baseline": model.deployed_before(comparison.start)}


def head_at_chance(accuracy: float, chance: float, majority: float = 0.0) -> str | None:
    """Why a model with this accuracy of its own head should not be immunized; None if it can be.

    That is below chance + MARGIN, or no more than the `majority`, the share of the most frequent class.
    """
    if accuracy >= chance + MARGIN and (accuracy > majority or majority == 1):
        return None
    guess = f"chance is {chance:.3f}" if majority < chance + MARGIN else f"the most frequent class has {majority:.3f}"
    return (
        f"before immunization the model's own head reaches accuracy {accuracy:.3f} on the primary task, {guess}: it "
        "was not trained on this task, or its outputs mean other classes; there is nothing to keep"
    )


def foreign(task: Task, logits: Tensor, outputs: int) -> str | None:
    """Why the head that gave `logits` [N, C] is none for the classes of a model with `outputs`; None if it may be."""
    if logits.shape[1] in (outputs, task.outputs):
        return None
    return f"the reference has {logits.shape[1]} outputs, the model {outputs}: they mean other classes"


class OwnHead:
    """Held-out accuracy and loss of the net's own primary head, before and after, and the predictions that changed.

    `primary/head_accuracy`, `primary/head_loss` (cross-entropy), also with `_baseline`, and
    `primary/changed_predictions`, a number of test images. Flag `head_at_chance`: before, accuracy is below chance +
    MARGIN, or no more than the most frequent class has. Linear models have no such measures.
    """

    names = ("primary/head_*", "primary/changed_predictions", "interval/primary/head_*")

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, task = Measures(), comparison.tasks["primary"]
        before = comparison.model.baseline_logits(task)
        if before is None:
            return measures
        of: dict[str, Any] = {"task": "primary", "split": "test"}
        if reason := comparison.no_test("primary"):
            measures.miss(reason, "head_accuracy", "head_loss", stage=STAGES, **of)
            measures.miss(reason, "changed_predictions", **of)
            return measures
        logits = {"immunized": comparison.model.logits(task.test.x), "baseline": before}
        if reason := foreign(task, before, logits["immunized"].shape[1]):
            measures.miss(reason, "head_accuracy", "head_loss", stage=("baseline",), **of)
            measures.miss(reason, "changed_predictions", **of)
            del logits["baseline"]
        for stage in logits:
            accuracy, (low, high) = task.measure(logits[stage], task.test.y).item(), interval_of(task, logits[stage])
            measures.put("head_accuracy", accuracy, stage=stage, low=low, high=high, **of)
            measures.put("head_loss", task.loss(logits[stage], task.test.y).item(), stage=stage, **of)
        if reason:
            return measures
        if reason := head_at_chance(accuracy, task.chance, task.majority):  # the baseline's
            measures.flag("head_at_chance", reason)
        decisions = [x.argmax(1) if x.shape[1] > 1 else x[:, 0] > 0 for x in logits.values()]
        measures.put("changed_predictions", (decisions[0] != decisions[1]).sum().item(), **of)
        return measures


NAMES = ("accuracy", "called_primary")


class OtherClasses(Component, group="evaluation.other_classes"):
    """Accuracy of the own head on images of classes outside D_P, and the share it classifies as one of D_P.

    `other_classes/accuracy` (argmax over all outputs) and `other_classes/called_primary`, the share of these images
    whose prediction is a class of D_P; also with `_baseline`, where the weights before training are kept: where
    attackers run, or in an audit. With `enlarged` also `..._enlarged`, of the images at twice their size, if the net
    reads these.
    The folder `root` has a folder of images per class; classes of D_P are left out, and so are those with the name of a
    folder that dataset.keep_root gives. `classes`, `crop`, `outputs` and `order` are as for dataset.primary. Models
    without a head for other classes have no such measures. Raises DataError where no class of `root` is left.
    """

    names = ("other_classes/*",)

    root: str | None
    classes: str | Sequence[str | int] | None
    crop: Crop | None
    outputs: str | None
    order: Order | None
    enlarged: bool

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, model = Measures(), comparison.model
        shown = comparison.tasks["primary"].head
        if not model.deep or shown is None:
            return measures
        sizes = ("", "_enlarged") if self.enlarged else ("",)
        if self.root is None:
            names = [f"other_classes/{name}{size}" for size in sizes for name in NAMES]
            measures.miss("evaluation.other_classes.root names no folder of images", *names, stage=STAGES)
            return measures
        shown, task = shown.cpu(), self._task()
        with _own_keys():
            split, outputs = task.splits["train"], outputs_of(task, model.head.out_features, model.name)
        truth = outputs[split.labels]
        kept = {folder.name for images in cast(ImagePair, model.images).keep for folder in images.folders}
        held_out = torch.tensor([name not in kept for name in task.classes])[split.labels]
        rows = (torch.isin(truth, shown, invert=True) & held_out).nonzero()[:, 0]
        if not len(rows):
            raise DataError(
                f"evaluation.other_classes.root={self.root}: every class in it is one of the primary task or of "
                "dataset.keep_root; give a folder with other classes"
            )
        nets = nets_of(comparison)
        predictions: dict[tuple[Stage, str], list[Tensor]] = {(stage, size): [] for size in sizes for stage in STAGES}
        labels = []
        for images, classes in model.images_of(task, split.take(rows)):
            labels.append(outputs[classes])
            for (stage, size), predicted in predictions.items():
                if (net := nets[stage]) is None:
                    continue
                x = onto(images, next(net.parameters()))
                x = twice(x) if size else x
                if not size or predicted or reads(net, x):
                    predicted.append(net(x).argmax(1).cpu())
        if not labels:
            raise DataError(
                f"evaluation.other_classes.root={self.root}: none of its images can be read; give sound ones"
            )
        truth = torch.cat(labels)
        measures.about["other_classes"] = {"classes": len(truth.unique()), "images": len(truth)}
        for (stage, size), parts in predictions.items():
            names = [f"other_classes/{name}{size}" for name in NAMES]
            if not parts:
                not_kept = f"{NOT_KEPT}; runs with attackers and audits keep it"
                reason = not_kept if nets[stage] is None else "the net reads images of one size"
                measures.miss(reason, *names, stage=stage)
                continue
            called = torch.cat(parts)
            for name, hits in zip(names, (called == truth, torch.isin(called, shown)), strict=True):
                measures.put(name, hits.double().mean().item(), stage=stage)
        return measures

    def _task(self) -> ImageTask:
        """The task below `root`, which is read as D_P is; errors name the keys of this evaluation."""
        own: dict[str, Any] = {"classes": self.classes, "crop": self.crop, "outputs": self.outputs, "order": self.order}
        with _own_keys():
            return open_task("primary", self.root, 0.0, 0.0, 0, **own)


@contextmanager
def _own_keys() -> Iterator[None]:
    """Inside, errors that name keys of dataset.primary name those of this evaluation."""
    try:
        yield
    except (ConfigError, DataError) as error:
        own = re.sub(r"dataset\.primary[._]", "evaluation.other_classes.", str(error))
        raise type(error)(own) from error
