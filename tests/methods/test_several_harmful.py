"""Methods against several harmful tasks: each is held off, one is as before, and what a step is made of."""

import copy
from functools import cache

import pytest
import torch

from immunization import run
from immunization.config import build, compose
from immunization.data import digits
from immunization.errors import ConfigError
from immunization.methods import Combined, Method, combined
from immunization.models import Linear
from immunization.models.base import Batch
from immunization.training.batches import PairedBatches

pytestmark = pytest.mark.trains

QUICK = ("tracker=none", "figures=false", "dataset.max_samples=40", "evaluation=[rir]", "log_every=50")
EPOCHS = {"learning_curve": 40, "clamp": 5, "ntl": 5, "encoderlock": 5, "sophon": 5, "tar": 5}
HOLDS = ("closed_form", "condition_number", "learning_curve", "opt_kappa", "r_ill_only", "released_condition_number")


@cache
def metrics_of(method: str, *overrides: str) -> dict[str, float]:
    options = [*QUICK, f"method={method}", f"method.epochs={EPOCHS.get(method, 60)}", *overrides]
    return run(options, quiet=True).metrics


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("method", HOLDS)
def test_every_method_of_the_condition_number_reaches_more_than_nothing_on_both(method):
    found = metrics_of(method, "dataset.harmful=[3,5]")
    assert min(found["rir"], found["rir_harmful_5"]) > 1.05
    assert found["worst/rir"] == min(found["rir"], found["rir_harmful_5"])


@pytest.mark.parametrize("method", ["clamp", "encoderlock", "imma", "ntl", "sophon", "tar"])
def test_every_other_method_takes_several_tasks(method):
    overrides = ("evaluation=[rir,learning_curves]", "dataset.harmful=[3,5]")
    found = metrics_of(method, *overrides, *(() if method == "imma" else ("method.batch_size=16",)))
    assert {"loss_harmful", "loss_harmful_5"}.isdisjoint(found)  # terms of a step, in metrics.jsonl
    assert found["ratio_harmful_5"] != 1.0


@pytest.mark.parametrize("method", ["condition_number", "learning_curve", "opt_kappa"])
def test_the_worst_alone_is_another_way_that_holds_both_off(method):
    two = "dataset.harmful=[3,5]"
    worst, total = metrics_of(method, two, "method.combine=worst"), metrics_of(method, two)
    assert worst != total
    assert min(worst["worst/rir"], total["worst/rir"]) > 1.05


def test_what_cannot_combine_is_refused():
    with pytest.raises(ConfigError, match=r"method\.combine must be one of sum, worst, not 'mean'"):
        build(compose(["method=ntl", "method.combine=mean"]), "method")

    class AtOnce(Method):
        """Works in `setup`, for one task."""

    pair = digits(seed=0, harmful=[3, 5])
    with pytest.raises(ConfigError, match=r"method=at_once takes one harmful task, not 2"):
        combined(AtOnce(), pair)
    assert isinstance(combined(AtOnce(), digits(seed=0)), AtOnce)


class Toy(Method):
    """Loss c ||theta||^2 with c the number of harmful rows."""

    def step(self, model, primary: Batch, harmful: Batch) -> dict[str, torch.Tensor]:
        return {"loss": len(harmful.y) * model.extractor.theta.square().sum()}


@pytest.mark.parametrize(("how", "factor"), [("sum", (80 + 40) / 2), ("worst", 80)])
def test_the_loss_is_the_mean_or_the_worst_of_those_against_each_task(how, factor):
    pair = digits(seed=0, harmful=[3, 5], max_samples=40)
    method = Toy(epochs=1)
    method.combine = how
    both, model = combined(method, pair), Linear(pair)
    assert isinstance(both, Combined)
    both.setup(model, pair)
    generator = torch.Generator().manual_seed(0)
    (primary, first, second), *_ = PairedBatches(pair, None, generator).epoch()
    second = Batch(second.x[:40], second.y[:40], second.rank)
    terms = both.step(model, primary, first, second)
    terms["loss"].backward()
    theta = model.extractor.theta
    torch.testing.assert_close(theta.grad, 2 * factor * theta.detach())
    assert terms["loss"].item() == pytest.approx(factor * 64)
    assert terms["loss_harmful"] > terms["loss_harmful_5"]


class Moving(Toy):
    """Fits the head itself."""

    def step(self, model, primary: Batch, harmful: Batch) -> dict[str, torch.Tensor]:
        model.head.weight.data += len(harmful.y)
        return super().step(model, primary, harmful)


def test_a_step_that_moves_parameters_itself_is_refused_for_several_tasks():
    pair = digits(seed=0, harmful=[3, 5], max_samples=40)
    method, model = combined(Moving(epochs=1), pair), Linear(pair)
    method.setup(model, pair)
    with pytest.raises(ConfigError, match=r"Moving.step changes parameters itself, and there are 2 harmful tasks"):
        method.step(model, *next(PairedBatches(pair, None, torch.Generator()).epoch()))


@pytest.mark.parametrize(("method", "rate"), [("condition_number", 1e-3), ("opt_kappa", 1e-3), ("imma", 0.1)])
def test_two_copies_of_one_task_are_that_task(method, rate):
    """With the same batches twice, theta takes the steps of a single task up to rounding."""
    pair = digits(seed=0, harmful=3, max_samples=40)
    twice = copy.copy(pair)
    object.__setattr__(twice, "more", {"harmful_again": pair.harmful})
    maps = []
    for one in (pair, twice):
        torch.manual_seed(0)
        asked = combined(build(compose([f"method={method}", "method.epochs=5"]), "method"), one)
        model = Linear(one)
        asked.setup(model, one)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(5):
            for primary, *harmful in PairedBatches(one, None, torch.Generator().manual_seed(0)).epoch():
                optimizer.zero_grad()
                asked.step(model, primary, *harmful)["loss"].backward()
                optimizer.step()
        maps.append(model.extractor.theta.detach())
    assert (maps[0] - torch.eye(64)).abs().max() > 1e-4
    torch.testing.assert_close(maps[0], maps[1])
