"""What measures read: computed once, and let go with the comparison."""

import gc
import weakref

import torch
from helpers.matrices import gaussian

from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison, RelativeRatio
from immunization.models import Linear


def test_features_go_with_the_comparison_without_the_garbage_collector():
    x, y = gaussian(40, 4, seed=0), gaussian(40, seed=1)
    task = Task("task", *(Split(x[rows], y[rows]) for rows in (slice(20), slice(0), slice(20, 40))))
    model = Linear(TaskPair("pair", task, task))
    model.linear_map = lambda: None  # its features are then taken one by one
    gc.disable()
    try:
        comparison = Comparison(TaskPair("pair", task, task), model)
        RelativeRatio()(comparison)
        features = weakref.ref(comparison.features("harmful", "train", "immunized"))
        assert torch.equal(features(), task.train.x)
        assert features() is comparison.features("harmful", "train", "immunized")
        del comparison
        assert features() is None
    finally:
        gc.enable()
