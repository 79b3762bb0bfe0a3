"""harmful_samples: a method is shown a few harmful rows of each class, attackers and measures have all of them."""

import math

import pytest
import torch

from immunization import run
from immunization.config import compose
from immunization.errors import ConfigError
from immunization.experiment import assemble, resolve
from immunization.runs.result import Result
from immunization.training.session import Monitor

pytestmark = pytest.mark.trains


def parts_of(*overrides: str):
    return assemble(resolve(compose(["tracker=none", *overrides])))


def test_the_method_has_so_many_rows_of_each_harmful_class():
    parts = parts_of("harmful_samples=7")
    shown, whole = parts.trained_on.harmful.train, parts.pair.harmful.train
    assert torch.bincount(shown.y).tolist() == [7, 7]
    assert len(whole) > 14
    assert {tuple(x.tolist()) for x in shown.x} <= {tuple(x.tolist()) for x in whole.x}
    assert len(parts.trained_on.primary.train) == len(parts.pair.primary.train)
    assert torch.equal(shown.x, parts_of("harmful_samples=7").trained_on.harmful.train.x)


def test_further_harmful_tasks_and_nets_too():
    small = ("experiment=digits_deep", "dataset.size=16", "model.fit_epochs=1", "dataset.benign=null")
    parts = parts_of(*small, "dataset.harmful=[[4,5],[6,7]]", "harmful_samples=3")
    for task in parts.trained_on.harmful_tasks.values():
        assert torch.bincount(task.train.y).tolist() == [3, 3]
    assert len(parts.trained_on.harmful_tasks) == 2


def test_an_unchanged_net_has_ratio_1_on_so_few_rows():
    small = ("experiment=digits_deep", "dataset.size=16", "model.fit_epochs=1", "harmful_samples=3")
    parts = parts_of(*small, "method=condition_number")
    parts.method.setup(parts.model, parts.trained_on)
    monitor = Monitor(parts.model, parts.trained_on, Result(0, "digits", "net", "condition_number"))
    values = monitor(0, {})
    assert [values["ratio_harmful"], values["ratio_primary"], values["rir"]] == pytest.approx([1] * 3, rel=1e-4)
    assert monitor.ranks["harmful"] <= len(parts.trained_on.harmful.train)
    assert parts.method.score(parts.model) == pytest.approx(0, abs=1e-4)


def test_where_a_net_lost_directions_of_the_primary_task_rir_is_not_known():
    parts = parts_of("experiment=digits_deep", "dataset.size=16", "model.fit_epochs=1", "method=condition_number")
    parts.method.setup(parts.model, parts.trained_on)
    monitor = Monitor(parts.model, parts.trained_on, Result(0, "digits", "net", "condition_number"))
    with torch.no_grad():
        last = [layer for layer in parts.model.modules() if isinstance(layer, torch.nn.BatchNorm2d)][-1]
        last.bias[:8] = -1e6  # ReLU makes 0 of them
    values = monitor(0, {})
    assert values["kappa_primary"] == parts.trained_on.primary.kappa_bound
    assert math.isnan(values["rir"])
    assert parts.method.score(parts.model) == -math.inf


def test_it_changes_what_is_learned_and_not_what_is_measured(tmp_path):
    options = ["tracker=none", "figures=false", "method=closed_form", "evaluation=[rir]", "attack=[closed_form_probe]"]
    few, whole = (run([*options, f"harmful_samples={n}"], folder=tmp_path / f"{n}", quiet=True) for n in (5, "null"))
    assert few.metrics["kappa_harmful_baseline"] == whole.metrics["kappa_harmful_baseline"]
    assert (
        few.metrics["attack/closed_form_probe/flops_baseline"]
        == whole.metrics["attack/closed_form_probe/flops_baseline"]
    )
    assert few.metrics["rir"] < whole.metrics["rir"]


@pytest.mark.parametrize("samples", [0, "few"])
def test_what_cannot_be(samples, tmp_path):
    with pytest.raises(
        ConfigError, match=f"harmful_samples must be an integer of at least 1, or null, not '?{samples}"
    ):
        run(["tracker=none", f"harmful_samples={samples}"], folder=tmp_path, quiet=True)
