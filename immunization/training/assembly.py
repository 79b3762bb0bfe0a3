"""Data, model and method put together for a training and its measures. `debug` shortens or watches it."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from immunization.checks import AtLeastOne
from immunization.compute import distributed
from immunization.data.images import ImagePair, ImageTask
from immunization.data.task import TaskPair, evenly
from immunization.errors import ConfigError
from immunization.methods import Identity, Method, Unmodified, combined
from immunization.models import Model

log = logging.getLogger(__name__)

TRACE = "trace.json"


@dataclass(frozen=True)
class Debug:
    """The key `debug` of a configuration: exactly `steps` steps, on `rows` training rows of each task, profiled."""

    steps: AtLeastOne | None = None
    rows: AtLeastOne | None = None
    profile: bool | None = None

    def few(self, data: TaskPair | ImagePair) -> TaskPair | ImagePair:
        """`data` with `rows` training rows of each task, evenly spaced, so that every class has its share.

        Of folders of images at least one of each class.
        """
        if self.rows is None:
            return data
        tasks = {}
        for role, task in data.tasks.items():
            train = task.splits["train"]
            if isinstance(task, ImageTask) and (labels := train.labels) is not None:
                own = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
                rows = torch.cat([places[: max(1, self.rows // len(own))] for places in own]).sort().values
            else:
                rows = evenly(len(train), self.rows)
            few = train.take(rows)
            if isinstance(task, ImageTask):
                few = replace(few, identity=f"{train.identity} {rows.tolist()}")
                tasks[role] = replace(task, splits=task.splits | {"train": few})
            else:
                tasks[role] = replace(task, train=few)
        return replace(data, tasks=tasks) if isinstance(data, ImagePair) else data.with_tasks(tasks)

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """With `profile`, inside is profiled by torch: a table on the screen, and trace.json in `folder`."""
        if not self.profile:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(str(folder / TRACE))
        print(profiler.key_averages().table("self_cpu_time_total", row_limit=12, max_name_column_width=40))
        print(f"every call: {folder / TRACE}, for chrome://tracing or https://ui.perfetto.dev", flush=True)


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
        made = make(pair=data.to(device, dtype))
        if method.folds:
            made.check_fold()
        model, pair = made.read(data, method.folds)
    if distributed.size() > 1 and (method.alone or method.keep or not model.trains_layers):
        raise ConfigError(
            f"method={method.name} on {model.name} cannot be trained by several processes, which "
            "needs trained layers, a method that simulates no attacker, and method.keep=0; start it without torchrun"
        )
    if model.fixed and not isinstance(method, Identity | Unmodified):
        raise ConfigError(f"method={method.name} changes a net, and {model.fixed}: audit it with experiment=audit")
    if model.doubt and model.trains_layers and not isinstance(method, Identity | Unmodified):
        log.warning(model.doubt)
    if pair.about.get("keep") and not method.keeps:
        told = "method=%s ignores the images of dataset.keep_root; set method.keep above 0 where the method has it"
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
