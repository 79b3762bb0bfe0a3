"""Every measure of a run is a legitimate objective, and nothing else is."""

import pytest
from helpers.runs import DEEP, QUICK

from immunization import run
from immunization.config import compose
from immunization.errors import ConfigError
from immunization.evaluation import Measures
from immunization.experiment import check_objective, resolve

pytestmark = pytest.mark.trains

ALL = "evaluation=[rir,definition,primary,ceiling,norm_ratio,learning_curves,sampled,own_head,validity,alignment]"
ATTACK = "attack=[closed_form_probe]"


def check(*overrides: str) -> None:
    resolve(compose(overrides), overrides)


@pytest.mark.parametrize(
    "options",
    [[*QUICK[:2], "figures=false", "method=closed_form"], [*DEEP, "dataset.benign=[7,8]"]],
    ids=["linear", "net"],
)
def test_whatever_a_run_measures_may_be_its_objective(options, tmp_path):
    result = run([*options, ALL, ATTACK], folder=tmp_path)
    experiment = resolve(compose([ALL, ATTACK]))
    for name in result.metrics:
        check_objective(name, experiment.evaluation, experiment.attack)


@pytest.mark.parametrize(
    ("objective", "others"),
    [("rirr", []), ("attack/adam/final", [ATTACK]), ("attack/worst/final", []), ("ceiling/rir", ["evaluation=[rir]"])],
)
def test_what_nothing_measures_is_refused(objective, others):
    with pytest.raises(ConfigError, match=f"objective={objective}: no chosen evaluation or attack measures that"):
        check(*others, f"objective={objective}")


def test_an_evaluation_that_does_not_say_its_names_may_measure_anything(monkeypatch):
    monkeypatch.delattr("immunization.evaluation.Validity.names")
    check("objective=rirr")


def test_an_objective_of_a_file_is_left_to_the_end_of_the_run():
    check("evaluation=[primary]")


class Dimensions:
    """An evaluation that is not of the package."""

    def __call__(self, comparison):
        measures = Measures()
        measures.put("mine/dimensions", comparison.pair.dim)
        return measures


class Clash(Dimensions):
    def __call__(self, comparison):
        measures = Measures()
        measures.put("rir", 1e9)
        return measures


class Bare(Dimensions):
    def __call__(self, comparison):
        return {"mine/dimensions": 3.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Clash", r"evaluation\.own measures rir, as another"),
        ("Bare", r"evaluation\.own must return Measures, not dict"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_an_evaluation_of_ones_own_that_is_none_or_replaces_measures_is_refused(name, said, first, tmp_path):
    config = compose([*QUICK, "method=identity", "evaluation=[rir]"])
    own = {"own": {"_target_": f"{__name__}.{name}"}}
    config.evaluation = {**own, **config.evaluation} if first else {**config.evaluation, **own}
    config.trusted = [__name__]
    with pytest.raises(ConfigError, match=said.replace("own measures", "(own|rir) measures")):
        run(config, folder=tmp_path)


def test_measures_of_ones_own_evaluation_are_on_the_screen_and_told_from_the_others(tmp_path, capsys):
    config = compose([*QUICK, "method=identity"])
    config.evaluation = {**config.evaluation, "dimensions": {"_target_": f"{__name__}.Dimensions"}}
    config.trusted = [__name__]
    result = run(config, folder=tmp_path)
    assert result.own_measures == ["mine/dimensions"]
    assert ["mine/dimensions", "64"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert run([*QUICK, "method=identity"], folder=tmp_path / "usual").own_measures == []
