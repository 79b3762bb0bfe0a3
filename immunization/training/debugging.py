"""What `debug=one_step`, `overfit` and `profiler` change in a training: its length, its rows, and who watches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from immunization.checks import AtLeastOne
from immunization.data.images import ImagePair, ImageTask
from immunization.data.task import TaskPair

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
                rows = torch.linspace(0, len(train) - 1, min(self.rows, len(train))).round().long()
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
