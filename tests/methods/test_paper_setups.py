"""Options for the set-ups that the paper may have run, each against a direct computation, and those set-ups."""

import math

import numpy as np
import pytest
import torch
from helpers.images import write_idx
from helpers.matrices import gaussian
from helpers.methods import full_batches, make_pair
from torch.autograd import gradcheck

from immunization import run
from immunization.config import compose
from immunization.errors import ConfigError
from immunization.methods import IMMA, ConditionNumber, OptKappa, RIllOnly
from immunization.models import Linear
from immunization.theory import spectrum
from immunization.theory.regularizers import log_authors_condition_number

pytestmark = pytest.mark.trains


def dense_log_authors(h: torch.Tensor) -> torch.Tensor:
    eigenvalues = torch.linalg.eigvalsh(h) + spectrum.AUTHORS_RIDGE
    return eigenvalues[-1].log() - eigenvalues[0].clamp(min=spectrum.AUTHORS_RIDGE).log()


@pytest.mark.parametrize("shape", [(12, 4), (4, 4)])
def test_log_of_the_authors_kappa_is_that_of_its_eigenvalues(shape):
    features = gaussian(*shape, seed=0).requires_grad_()
    value = log_authors_condition_number(features)
    assert value.item() == pytest.approx(math.log(spectrum.authors_condition_number(features.detach())), rel=1e-10)
    assert gradcheck(log_authors_condition_number, (features,), eps=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(dense_log_authors(features.T @ features), features)
    torch.testing.assert_close(torch.autograd.grad(value, features)[0], gradient)


@pytest.mark.parametrize("shape", [(3, 6), (12, 6)])
def test_of_a_singular_hessian_the_largest_eigenvalue_alone_has_a_gradient(shape):
    features = (gaussian(shape[0], 3, seed=1) @ gaussian(3, 6, seed=2)).requires_grad_()
    value = log_authors_condition_number(features)
    largest = torch.linalg.matrix_norm(features, 2).square() + spectrum.AUTHORS_RIDGE
    assert value.item() == pytest.approx(math.log(largest.item() / spectrum.AUTHORS_RIDGE), rel=1e-6)
    (expected,) = torch.autograd.grad(largest.log(), features)
    torch.testing.assert_close(torch.autograd.grad(value, features)[0], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("form", ["raw", "log", "reciprocal_log", "reciprocal_loglog"])
@pytest.mark.parametrize("conditioning", ["rank", "authors"])
def test_forms_of_opt_kappa(form, conditioning):
    pair, options = make_pair(), {"form": form, "conditioning": conditioning, "power": math.inf, "rate": None}
    model, method = Linear(pair, "random"), OptKappa(epochs=1, task_weight=0.5, **options)
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    terms = method.step(model, primary, harmful)
    kappa = spectrum.authors_condition_number if conditioning == "authors" else spectrum.condition_number
    log_p, log_h = (math.log(kappa(model.features(batch.x))) for batch in (primary, harmful))
    objective = {
        "raw": math.exp(log_p) - math.exp(log_h),
        "log": log_p - log_h,
        "reciprocal_log": log_p + 1 / log_h,
        "reciprocal_loglog": math.log(log_p) + 1 / math.log(log_h),
    }[form]
    loss = pair.primary.loss(model(primary.x), primary.y).item()
    assert terms["loss"].item() == pytest.approx(objective + 0.5 * loss, rel=1e-9)


def test_r_ill_with_the_gradients_of_the_release():
    pair = make_pair()
    plain, changed = RIllOnly(epochs=1), RIllOnly(epochs=1, precondition="ridge", ridge=0.5, side="output")
    gradients = []
    for method in (plain, changed):
        torch.manual_seed(0)
        model = Linear(pair, "random")
        method.setup(model, pair)
        primary, harmful = full_batches(pair)
        method.step(model, primary, harmful)["loss"].backward()
        gradients.append(model.extractor.theta.grad)
    k = harmful.x.T @ harmful.x + 0.5 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(gradients[1], gradients[0] @ torch.linalg.inv(k))


@pytest.mark.parametrize("method", [RIllOnly, OptKappa])
def test_the_side_of_the_outputs_is_one_of_ridge_alone(method):
    with pytest.raises(ConfigError, match=r"method\.side=output needs method\.precondition=ridge, not pinv"):
        method(epochs=1, precondition="pinv", side="output")


def test_k_cancels_in_the_authors_kappa_alone():
    with pytest.raises(ConfigError, match=r"method\.precondition=cancelled needs method\.conditioning=authors"):
        OptKappa(epochs=1, precondition="cancelled")
    pair = make_pair()
    model, method = Linear(pair, "random"), OptKappa(epochs=1, conditioning="authors", precondition="cancelled")
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    method.step(model, primary, harmful)["loss"].backward()
    cancelled = model.extractor.theta.grad
    kappas = (spectrum.authors_condition_number(model.features(b.x)) for b in (primary, harmful))
    gradients = []
    for batch, sign, kappa in zip((primary, harmful), (1, -1), kappas, strict=True):
        theta = model.extractor.theta.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(log_authors_condition_number(batch.x @ theta), theta)
        gradients.append(sign * kappa * torch.linalg.solve(batch.x.T @ batch.x, gradient))
    torch.testing.assert_close(cancelled, sum(gradients))


@pytest.mark.parametrize("root", [True, False])
def test_a_task_weight_of_zero_leaves_the_regularizers(root):
    pair = make_pair()
    model, method = (
        Linear(pair, "random"),
        ConditionNumber(lambda_P=2.0, lambda_H=3.0, epochs=1, balance=False, task_weight=0.0),
    )
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    if not root:
        primary, harmful = (type(b)(b.x, b.y, b.rank) for b in (primary, harmful))
    terms = method.step(model, primary, harmful)
    assert terms["loss"].item() == pytest.approx((2 * terms["r_well"] + 3 * terms["r_ill"]).item())
    terms["loss"].backward()
    assert model.head.weight.grad is None or not model.head.weight.grad.any()


def test_heads_of_imma():
    pair = make_pair()
    primary, harmful = full_batches(pair)
    for heads in ("trained", "fixed", "shared"):
        torch.manual_seed(0)
        model, method = Linear(pair, "random"), IMMA(epochs=1, heads=heads, head_start="random")
        method.setup(model, pair)
        omega, w = model.head.weight.clone(), method.attackers["harmful"].weight.clone()
        method.step(model, primary, harmful)
        assert torch.equal(omega, model.head.weight) == (heads == "fixed")
        assert torch.equal(w, method.attackers["harmful"].weight) == (heads == "fixed")
        assert (method.attackers["harmful"] is model.head) == (heads == "shared")
        assert w.any()
    other = type(pair)("pair", make_pair(classes=3).primary, pair.harmful)
    shared, model = IMMA(epochs=1, heads="shared"), Linear(other)
    with pytest.raises(ConfigError, match="as many outputs"):
        shared.setup(model, other)


EXPERIMENT = "experiment=paper/table2_closest"


@pytest.mark.parametrize(
    ("method", "chosen"),
    [
        ("r_ill_only", {"lr": 5e4, "init": "identity", "epochs": 1, "batch_size": 64, "normalize": False}),
        ("imma", {"lr": 1e-3, "init": "random", "epochs": 4, "heads": "shared"}),
        ("opt_kappa", {"lr": 3e-3, "init": "random", "epochs": 1, "form": "reciprocal_log", "task_weight": 0}),
        ("released_condition_number", {"lr": 5e-3, "bias": True, "lambda_P": 1, "lambda_H": 5e7, "epochs": 1}),
    ],
)
def test_every_method_has_its_set_up(method, chosen):
    cfg = compose([EXPERIMENT, f"method={method}"])
    assert (cfg.dataset.protocol, list(cfg.evaluation)) == ("authors_pixels", ["rir", "theta0"])
    assert {**cfg.optimizer, **cfg.model, **cfg.method}.items() >= chosen.items()


@pytest.mark.parametrize("method", ["r_ill_only", "imma", "opt_kappa", "released_condition_number"])
def test_a_pair_of_digits(method, tmp_path):
    """The images are noise: MNIST itself need not be there."""
    raw, draw = tmp_path / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, count in (("train", 1500), ("t10k", 50)):
        write_idx(raw / f"{part}-images-idx3-ubyte", draw.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    options = [f"method={method}", f"dataset.root={tmp_path}", "dataset.download=false", "tracker=none"]
    result = run([EXPERIMENT, *options, "dataset.val_fraction=0", "figures=false"], folder=tmp_path / "run")
    assert result.status == "completed"
    for name in ("rir", "ratio_harmful", "ratio_primary", "rir_theta0"):
        assert result.metrics[f"authors/{name}"] > 0
    assert result.metrics["authors/rir_theta0"] != 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) <= 3
