"""What holds for every measure: names, defaults, reasons for null and strict JSON."""

import json
import math

import hydra.utils
import pytest
from helpers.comparisons import compare
from helpers.matrices import gaussian
from helpers.repository import ROOT
from omegaconf import OmegaConf

from immunization import data, evaluation
from immunization.errors import ConfigError
from immunization.evaluation import (
    Alignment,
    Definition,
    LearningCurves,
    Measures,
    NormRatio,
)
from immunization.runs.records import Record, from_flat

pytestmark = pytest.mark.trains

CONFIGS = sorted((ROOT / "conf" / "evaluation").glob("*.yaml"))


def test_values_that_are_not_finite_become_null_with_a_reason():
    measures = Measures()
    for name, value in {"a": 1.0, "b": math.nan, "c": math.inf}.items():
        measures.put(name, value)
    assert measures.metrics == {"a": 1.0, "b": None, "c": None}
    assert set(measures.reasons) == {"b", "c"}


def test_the_worst_is_the_smallest_and_null_where_one_is():
    measures = Measures()
    for task, value in {"harmful": 3.0, "harmful_8": 2.0, "harmful_9": None}.items():
        measures.add(Record("rfd", value, task, reason="why"))
    measures.worst("rfd", ("harmful", "harmful_8"))
    assert measures.metrics["worst/rfd"] == 2
    measures.worst("rfd", ("harmful", "harmful_8", "harmful_9"))
    assert measures.metrics["worst/rfd"] is None
    assert measures.reasons["worst/rfd"] == "rfd/harmful_9 is missing: why"
    measures.worst("steps_ratio", ["harmful"])
    assert measures.reasons["worst/steps_ratio"] == "steps_ratio/harmful is missing: not measured"


def test_merging_keeps_every_part_and_no_flag_twice():
    first, second = (Measures(from_flat({name: 1.0}, {})) for name in "ab")
    first.flag("x", "old")
    for flag in "xy":
        second.flag(flag, "why")
    first.merge(second)
    assert first == Measures(from_flat({"a": 1.0, "b": 1.0}, {}), flags={"x": "why", "y": "why"})
    assert list(first.flags) == ["x", "y"]


def test_every_evaluation_has_a_config_of_one_key_its_name():
    nodes = {path.stem: OmegaConf.load(path) for path in CONFIGS}
    assert [name for name, node in nodes.items() if list(node) != [name]] == []
    targets = {node[name]._target_.split(".")[-1] for name, node in nodes.items()}
    classes = {name for name, value in vars(evaluation).items() if isinstance(value, type)}
    assert targets == classes - {"Comparison", "Measures"}


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: NormRatio(steps=0), "norm_ratio.steps"),
        (lambda: LearningCurves(octaves=0), "learning_curves.octaves"),
        (lambda: LearningCurves(octaves=64), "octaves must be an integer of at least 1 and at most 40, not 64"),
        (lambda: LearningCurves(share=1.1), "learning_curves.share"),
        (lambda: Alignment(energy=0.0), "alignment.energy"),
        (lambda: Definition(tolerance=-0.1), "definition.tolerance"),
    ],
)
def test_a_value_that_cannot_work_is_named(build, key):
    with pytest.raises(ConfigError, match=key):
        build()


def test_everything_on_digits_is_strict_json_with_a_reason_for_every_null():
    pair = data.digits(seed=0, benign=2)
    comparison, measures = compare(pair, gaussian(pair.dim, pair.dim, seed=1)), Measures()
    for path in CONFIGS:
        ((_, node),) = OmegaConf.load(path).items()
        measures.merge(hydra.utils.instantiate(node)(comparison))
    json.dumps([measures.metrics, measures.reasons, measures.curves, measures.flags], allow_nan=False)
    assert {name for name, value in measures.metrics.items() if value is None} <= set(measures.reasons)
    assert set(measures.flags) <= set(measures.reasons)
    assert {f"steps_ratio/{role}" for role in pair.tasks} <= set(measures.metrics)
    assert all(len(curve["x"]) == len(curve["y"]) for curve in measures.curves.values())


def test_what_is_withheld_is_that_of_every_task_but_no_baseline():
    names = ("rir", "ratio_harmful", "rir_harmful_5", "kappa_unseen", "worst/rir", "test/rir", "ratio_primary_theta0")
    names += ("authors/rir_theta0", "definition/rir_kept", "rir_harmful_stanford-cars", "kappa_unseen_v1.2")
    kept = ("kappa_harmful_baseline", "kappa_harmful_5_baseline", "steps_ratio/harmful_5", "worst/rfd", "rank_unseen")
    measures = Measures(from_flat(dict.fromkeys([*names, *kept], 2.0), {}))
    measures.withhold("undetermined", "why")
    assert {name for name, value in measures.metrics.items() if value is None} == set(names)
    assert {name for name in measures.metrics if name.startswith("undetermined/")} == {
        f"undetermined/{name}" for name in names
    }
