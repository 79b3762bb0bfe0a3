"""What measures read: computed once, and let go with the comparison."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers.matrices import gaussian

from immunization import run
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


@pytest.mark.parametrize("scale", [2.0**-530, 2.0**490])
def test_a_run_does_not_depend_on_the_scale_of_its_inputs(scale, tmp_path):
    """Squares of rows at 1e-160 underflowed: identity was said to immunize."""
    draw, stored = np.random.default_rng(0), {}
    for role in ("primary", "harmful"):
        x = draw.normal(size=(60, 4)) @ draw.normal(size=(4, 4))
        stored |= {f"{role}_x": x, f"{role}_y": (x[:, 0] > 0).astype(int)}
    found = []
    for factor in (1.0, scale):
        path = tmp_path / f"{factor}.npz"
        np.savez(path, **{name: x * factor if name.endswith("x") else x for name, x in stored.items()})
        options = ["dataset=arrays", f"dataset.path={path}", "dataset.normalize=none", "method=identity"]
        options += ["tracker=none", "figures=false", "evaluation=[rir,definition,learning_curves]"]
        found.append(run(options, tmp_path / f"run{factor}", quiet=True).metrics)
    for name, value in found[0].items():
        if "authors" not in name:  # whose ridge has a scale
            assert found[1][name] == pytest.approx(value, rel=1e-9), name
