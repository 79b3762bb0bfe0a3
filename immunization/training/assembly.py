"""What a training and its measures are made of, put together from objects: of a run, or of a call from Python."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from immunization.compute import distributed
from immunization.data.images import ImagePair
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods import Method, combined
from immunization.models import Model

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What a run is made of: the tasks as they are measured (`pair`) and trained on; `start` holds theta_0.

    `inputs` says what the data, files and code of somebody's own were when they were read.
    """

    method: Method
    model: Model
    pair: TaskPair
    trained_on: TaskPair
    start: dict[str, Tensor]
    device: torch.device
    inputs: Mapping[str, Any]


def assemble(
    method: Method,
    make: Callable[..., Model],
    data: TaskPair | ImagePair,
    device: torch.device,
    dtype: torch.dtype,
    *,
    attacked: bool = True,
    samples: int | None = None,
    seed: int = 0,
    inputs: Mapping[str, Any] | None = None,
) -> Parts:
    """The parts of a training by `method` of the model that `make(pair=...)` builds for data in `dtype`.

    `attacked`: theta_0 is kept, however large. Of each class of the harmful tasks only `samples` training rows, drawn
    by `seed`, are trained on. Raises ConfigError for a method and a model that do not go together.
    """
    data = data.to(device, torch.float64)
    with distributed.main_process_first():
        model, pair = make(pair=data.to(device, dtype)).read(data, method.folds)
    if distributed.size() > 1 and (method.alone or method.keep or not model.trains_layers):
        raise ConfigError(
            f"method={method.name} on {model.name} is not trained by several processes: nets whose layers are trained "
            "are, by methods that simulate no attacker and without method.keep; start it without torchrun"
        )
    if pair.about.get("keep") and not method.keeps:
        told = "method=%s does nothing with the images of dataset.keep_root; most methods can, by method.keep"
        log.warning(told, method.name)
    method, shown = combined(method, pair), pair.harmful_tasks
    if samples is not None:
        if model.loaders is not None:
            raise ConfigError(
                "harmful_samples needs activations that are kept: set dataset.augment=false, or raise "
                "dataset.cache_limit"
            )
        few = {role: task.few(samples, seed) for role, task in shown.items()}
        if model.trains_layers:
            model.few = few
        shown = {role: replace(task, train=task.train.take(few[role])) for role, task in shown.items()}
    trained_on = pair.with_tasks(shown).to(device, model.dtype)
    kept = attacked or not model.trains_layers  # of rows it is small, and a baseline of its own
    start = copy.deepcopy(model.extractor.state_dict()) if kept else {}
    return Parts(method, model, pair, trained_on, start, device, inputs or {})
