"""Options for the set-ups that the paper may have run: each against a direct computation."""

import math

import pytest
import torch
from helpers.matrices import gaussian
from helpers.methods import full_batches, make_pair
from torch.autograd import gradcheck
from torch.func import functional_call

from immunization.errors import ConfigError
from immunization.evaluation import Comparison, StartRatio
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


def test_the_score_against_theta_0():
    pair = make_pair()
    torch.manual_seed(0)
    model = Linear(pair, "random")
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    model.extractor.theta.data.copy_(gaussian(4, 4, seed=7))
    metrics = StartRatio()(Comparison(pair, model, start)).metrics
    kappa = {}
    for role, task in (("harmful", pair.harmful), ("primary", pair.primary)):
        before = functional_call(model.extractor, start, (task.train.x,))
        after = model.features(task.train.x)
        kappa[role] = spectrum.condition_number(after) / spectrum.condition_number(before)
        assert metrics[f"ratio_{role}_theta0"] == pytest.approx(kappa[role], rel=1e-9)
        authors = spectrum.authors_condition_number(after) / spectrum.authors_condition_number(before)
        assert metrics[f"authors/ratio_{role}_theta0"] == pytest.approx(authors, rel=1e-9)
    assert metrics["rir_theta0"] == pytest.approx(kappa["harmful"] / kappa["primary"], rel=1e-9)
    assert StartRatio()(Comparison(pair, model)).metrics == {}
