"""The effect of immunization on classes of a net's own head that are not in D_P."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from immunization.checks import Component
from immunization.data.class_folders import Order
from immunization.data.image_folders import Crop, open_task
from immunization.data.images import ImageTask
from immunization.errors import ConfigError, DataError
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.models.chain import reads, twice
from immunization.models.image_tasks import outputs_of
from immunization.runs.records import STAGES, Stage

ENLARGED = "_enlarged"
NAMES = ("accuracy", "called_primary")
NOT_KEPT = "the net as it was before training is not kept; runs with attackers and audits keep it"
ONE_SIZE = "the net reads images of one size"


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

    root: str | None = None
    classes: str | Sequence[str | int] | None = None
    crop: Crop | None = None
    outputs: str | None = None
    order: Order | None = None
    enlarged: bool = False

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, model = Measures(), comparison.model
        shown = comparison.tasks["primary"].head
        if not model.deep or shown is None:
            return measures
        names = {
            (stage, size): [f"other_classes/{name}{size}" for name in NAMES]
            for size in (("", ENLARGED) if self.enlarged else ("",))
            for stage in STAGES
        }
        if self.root is None:
            for (stage, _), own in names.items():
                measures.miss("evaluation.other_classes.root names no folder of images", *own, stage=stage)
            return measures
        task, shown = self._task(), shown.cpu()
        with _own_keys():
            split, outputs = task.splits["train"], outputs_of(task, model.head.out_features, model.name)
        truth = outputs[split.labels]
        kept = {folder.name for images in model.images.keep for folder in images.folders}
        held_out = torch.tensor([name not in kept for name in task.classes])[split.labels]
        rows = (torch.isin(truth, shown, invert=True) & held_out).nonzero()[:, 0]
        if not len(rows):
            raise DataError(
                f"evaluation.other_classes.root={self.root}: every class in it is one of the primary task or of "
                "dataset.keep_root"
            )
        nets = {"immunized": model.deployed(), "baseline": model.deployed_before(comparison.start)}
        predictions: dict[tuple[Stage, str], list[Tensor]] = {key: [] for key in names if nets[key[0]] is not None}
        labels = []
        for images, found in model.images_of(task, split.take(rows)):
            labels.append(outputs[found])
            for (stage, size), made in predictions.items():
                net = nets[stage]
                x = images.to(next(net.parameters()))
                x = twice(x) if size else x
                if not size or made or reads(net, x):
                    made.append(net(x).argmax(1).cpu())
        if not labels:
            raise DataError(f"evaluation.other_classes.root={self.root}: none of its images can be read")
        wanted = torch.cat(labels)
        measures.about["other_classes"] = {"classes": len(wanted.unique()), "images": len(wanted)}
        for (stage, size), own in names.items():
            made = predictions.get((stage, size))
            if not made:
                measures.miss(ONE_SIZE if made == [] else NOT_KEPT, *own, stage=stage)
                continue
            predicted = torch.cat(made)
            for name, hits in zip(own, (predicted == wanted, torch.isin(predicted, shown)), strict=True):
                measures.put(name, hits.double().mean().item(), stage=stage)
        return measures

    def _task(self) -> ImageTask:
        """The task below `root`, which is read as D_P is; errors name the keys of this evaluation."""
        own = {"classes": self.classes, "crop": self.crop, "outputs": self.outputs, "order": self.order}
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
