"""Measures of nets: exact on all images, in batches, and each feature computed once."""

import pytest
import torch
from helpers.nets import build, open_pair

from immunization.evaluation import Comparison, LearningCurves, RelativeRatio, SampledRatio

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("kept", [2**31, 0])
def test_comparison_is_exact_and_batched(folders, monkeypatch, kept):
    monkeypatch.setattr("immunization.evaluation.comparison.KEPT", kept)
    pair = open_pair(folders)
    model, tasks = build(pair).read_tasks(pair, False)
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
    model, tasks = build(open_pair(folders)).read_tasks(open_pair(folders), False)
    seen = []
    model.extractor.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    comparison = Comparison(tasks, model)
    for measure in (RelativeRatio(), LearningCurves(), SampledRatio(groups=2, samples=20)):
        measure(comparison)
    assert sum(seen) == sum(len(task.train) + len(task.test) for task in tasks.tasks.values())


def test_sampled_protocol(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).read_tasks(pair, False)
    comparison = Comparison(tasks, model)
    same = SampledRatio(groups=3, samples=20)(comparison)
    assert same.metrics["authors/rir"] == pytest.approx(1.0)
    assert not same.flags
    fewer = SampledRatio(groups=20, samples=20)(comparison)
    assert set(fewer.flags) == {"fewer_groups_primary", "fewer_groups_harmful"}
    none = SampledRatio(groups=20, samples=100)(comparison)
    assert none.metrics["authors/rir"] is None
    assert "66 training rows" in none.reasons["authors/rir"]
