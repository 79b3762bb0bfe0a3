"""A model that the package does not know, as a user adds one: everything runs on it, and nothing asks for its class."""

import pytest
import torch
from torch import Tensor, nn

import immunization
from immunization import run
from immunization.checks import CONF
from immunization.config import compose
from immunization.errors import ConfigError, DataError
from immunization.models import Model
from immunization.training import checkpoint

pytestmark = pytest.mark.trains

QUICK = ("tracker=none", "figures=false", "dataset.max_samples=120", "evaluation=[rir]")
MEASURES = [path.stem for path in (CONF / "evaluation").glob("*.yaml")]
ATTACKS = ("linear_probe", "closed_form_probe", "undo", "strip", "weights_int8", "lora")


class TwoLayers(Model):
    """x -> x + tanh(x A) B, which no matrix is; all that a model of rows has to say."""

    def __init__(self, pair, hidden: int = 80) -> None:
        super().__init__()
        self.extractor = Residual(pair.dim, hidden)
        self.head = nn.Linear(pair.dim, pair.primary.outputs, bias=False)
        self.to(pair.primary.train.x)


class Residual(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Scaling(Model):
    """Every feature times a factor of its own; it says that this is a matrix, which `load` and attackers can use."""

    def __init__(self, pair) -> None:
        super().__init__()
        self.extractor = Factors(pair.dim)
        self.head = nn.Linear(pair.dim, pair.primary.outputs, bias=False)
        self.to(pair.primary.train.x)

    def last_map(self, extractor):
        return extractor.factors.diag()

    def export(self):
        return {"theta": self.extractor.factors.detach().diag().cpu(), "omega": self.head.weight.detach().cpu()}


class Factors(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def config_of(model: type[Model], *overrides: str):
    """A configuration as `trusted=[package] model=<own yaml>` composes it."""
    config = compose([*QUICK, *overrides])
    config.model, config.trusted = {"_target_": f"{__name__}.{model.__name__}"}, [__name__]
    return config


@pytest.mark.parametrize("model", [TwoLayers, Scaling])
@pytest.mark.parametrize(
    "method",
    [
        ("condition_number", "method.precondition=none"),
        ("r_ill_only",),
        ("opt_kappa",),
        ("imma",),
        ("learning_curve_net",),
    ],
    ids=lambda method: method[0],
)
def test_methods_of_any_extractor_train_it(model, method, tmp_path):
    name, *options = method
    config = config_of(model, f"method={name}", *options, "method.epochs=2", "method.batch_size=60")
    result = run(config, folder=tmp_path)
    assert result.status == "completed"
    assert result.model == model.__name__.lower()
    assert result.metrics["kappa_harmful"] != result.metrics["kappa_harmful_baseline"]


@pytest.mark.parametrize("method", ["closed_form", "learning_curve"])
def test_methods_of_linear_maps_say_that_it_is_none(method, tmp_path):
    with pytest.raises(ConfigError, match=f"{method} acts on a linear extractor.*not twolayers"):
        run(config_of(TwoLayers, f"method={method}"), folder=tmp_path)


def test_its_inputs_are_no_matrix_to_precondition_by(tmp_path):
    with pytest.raises(ConfigError, match=r"method\.precondition=\w+ needs model=linear"):
        run(config_of(TwoLayers, "method=condition_number"), folder=tmp_path)


@pytest.mark.parametrize("model", [TwoLayers, Scaling])
def test_all_measures_and_attacks_run_on_it(model, tmp_path):
    chosen = (f"evaluation=[{','.join(MEASURES)}]", f"attack=[{','.join(ATTACKS)}]", "dataset.max_samples=null")
    chosen += tuple(f"attack.{name}.steps=256" for name in ("linear_probe", "undo", "strip", "weights_int8"))
    result = run(config_of(model, "method=learning_curve_net", "method.epochs=3", *chosen), folder=tmp_path)
    metrics, reasons = result.metrics, result.reasons
    for name in ("rir", "test/rir", "authors/rir", "ceiling/rir", "alignment/score", "steps_ratio/harmful"):
        assert metrics[name] is not None or reasons[name]
    assert 0 < metrics["primary/accuracy"] <= 1
    assert "primary/changed_predictions" not in metrics  # it came without a head of its own
    for name in ("linear_probe", "closed_form_probe", "undo", "weights_int8"):
        assert metrics[f"attack/{name}/final"] > 0.5
        assert metrics[f"attack/{name}/final_baseline"] > 0.5
    assert "needs a deep net" in reasons["attack/lora/final"]
    if model is Scaling:
        assert metrics["attack/strip/final"] == pytest.approx(metrics["attack/strip/final_baseline"])
    else:
        assert "no linear map" in reasons["attack/strip/final"]


def test_a_model_that_is_not_trained_is_audited(tmp_path):
    config = config_of(Scaling, "method=identity", "attack=[linear_probe]")
    result = run(config, folder=tmp_path)
    assert result.metrics["rir"] == pytest.approx(1)
    assert result.metrics["attack/linear_probe/steps_ratio"] == 1
    assert "attack/linear_probe/final_start" not in result.metrics


def audit_of(folder):
    attack = ("attack=[linear_probe]", "attack.linear_probe.steps=256")
    config = compose([*QUICK, "experiment=audit", *attack, f"model.checkpoint={folder}"])
    config.trusted = [__name__]
    return config


def test_an_audit_of_its_run_folder_has_its_weights(tmp_path):
    options = ("method=learning_curve_net", "method.epochs=3", "seed=2")
    first = run(config_of(TwoLayers, *options), folder=tmp_path / "run")
    again = run(audit_of(tmp_path / "run"), folder=tmp_path / "audit")
    assert (again.model, again.seed, again.method) == ("twolayers", 2, "unmodified")
    for name in ("kappa_harmful", "kappa_harmful_baseline", "rir"):
        assert again.metrics[name] == pytest.approx(first.metrics[name], rel=1e-9)


def test_an_audit_names_weights_that_it_cannot_put_back(tmp_path):
    run(config_of(Scaling, "method=identity"), folder=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"the state dict of Scaling .*; a model with an `export` of its own needs"):
        run(audit_of(tmp_path / "run"), folder=tmp_path / "audit")


def test_it_goes_on_from_a_checkpoint_and_is_loaded(tmp_path, monkeypatch):
    options = ("method=learning_curve_net", "method.epochs=4", "method.batch_size=60", "checkpoint.every=1")
    whole = run(config_of(Scaling, *options), folder=tmp_path / "whole")
    taken = checkpoint.Checkpointer.__call__

    def killed(self, step, state):
        taken(self, step, state)
        if step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            run(config_of(Scaling, *options), folder=tmp_path / "cut")
    again = run(config_of(Scaling, *options, "resume=true"), folder=tmp_path / "cut")
    assert again.metrics == whole.metrics

    model = immunization.load(tmp_path / "cut")
    assert model.theta.count_nonzero() == len(model.theta)
    run(config_of(TwoLayers, "method=identity"), folder=tmp_path / "layers")
    with pytest.raises(DataError, match="neither a linear map nor a net of this project"):
        immunization.load(tmp_path / "layers")
