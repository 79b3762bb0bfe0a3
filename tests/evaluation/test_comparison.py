"""What measures read: exact, computed once, in batches, and let go with the comparison."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers.matrices import gaussian
from helpers.nets import build, open_pair

from immunization import run
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison, LearningCurves, RelativeRatio, SampledRatio
from immunization.models import Linear

pytestmark = pytest.mark.trains


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


@pytest.mark.parametrize("kept", [2**31, 0])
def test_comparison_is_exact_and_batched(folders, monkeypatch, kept):
    monkeypatch.setattr("immunization.evaluation.comparison.KEPT", kept)
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, False)
    with torch.no_grad():
        for parameter in model.extractor.parameters():
            parameter.mul_(1.1)
    comparison = Comparison(tasks, model)
    features = model.features(tasks.harmful.train.x)
    sigma = torch.linalg.svdvals(features)
    found = comparison.sigma("harmful", "train", "immunized")
    torch.testing.assert_close(found, sigma[: len(found)], rtol=1e-8, atol=1e-12)
    probe = comparison.probe("harmful", "immunized")
    targets = tasks.harmful.targets(tasks.harmful.train.y)
    expected = torch.linalg.lstsq(features, targets, driver="gelsd").solution
    torch.testing.assert_close(features @ probe.optimum(), features @ expected, rtol=1e-6, atol=1e-6)
    rows = torch.tensor([5, 60, 2])
    torch.testing.assert_close(comparison.sampled("harmful", "immunized", rows), features[rows])


def test_features_are_computed_once_for_all_measures(folders):
    model, tasks = build(open_pair(folders)).read(open_pair(folders), False)
    seen = []
    model.extractor.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    comparison = Comparison(tasks, model)
    for measure in (RelativeRatio(), LearningCurves(), SampledRatio(groups=2, samples=20)):
        measure(comparison)
    assert sum(seen) == sum(len(task.train) + len(task.test) for task in tasks.tasks.values())


def test_sampled_protocol(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, False)
    comparison = Comparison(tasks, model)
    same = SampledRatio(groups=3, samples=20)(comparison)
    assert same.metrics["authors/rir"] == pytest.approx(1.0)
    assert not same.flags
    fewer = SampledRatio(groups=20, samples=20)(comparison)
    assert set(fewer.flags) == {"fewer_groups_primary", "fewer_groups_harmful"}
    none = SampledRatio(groups=20, samples=100)(comparison)
    assert none.metrics["authors/rir"] is None
    assert "66 training rows" in none.reasons["authors/rir"]
