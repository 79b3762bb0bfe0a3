"""CLAMP, SOPHON, EncoderLock, NTL and TAR: their terms on cases known by hand, and their objectives descended."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.methods import full_batches, make_pair
from helpers.runs import QUICK, resumed
from torch.testing import assert_close

from immunization import run
from immunization.errors import ConfigError
from immunization.methods import CLAMP, NTL, TAR, Encoderlock, Method, Sophon
from immunization.methods.fine_tuning import divergence_from_uniform, inverse_cross_entropy, negative_entropy
from immunization.methods.probing import attack_terms, fitted_head, grow, mmd, scaled
from immunization.models import Linear
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains

RIVALS = ("clamp", "ntl", "encoderlock", "sophon", "tar")


# --- The attacker's head ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_head_is_fitted_whatever_the_scale_of_the_features(scale):
    """From zero, one step is -rate times the gradient there, -2/N sum_i y_i f_i, f of mean squared norm 1."""
    task = make_pair().harmful
    x, y = task.train.x, task.train.y
    unit = x / x.square().sum(1).mean().sqrt()
    assert_close(scaled(scale * x), unit)
    head = fitted_head(task, torch.zeros(1, 4, dtype=torch.float64), scale * x, y, 0.3, 1)
    assert_close(head[0], 0.3 * 2 / len(y) * y @ unit)


# --- CLAMP on a quadratic ---------------------------------------------------------------------------------------------


CURVATURES = torch.tensor([2.0, 0.5], dtype=torch.float64)
SETTINGS = {"eps": 0.1, "margin": 0.0, "cap": 100.0, "c_max": 0.5, "kappa_min": 1.0}


def quadratic(w: torch.Tensor) -> torch.Tensor:
    return (CURVATURES * w.square()).sum() / 2


def terms_along(axis: int, steps: int = 2, rate: float = 0.25, **changes: float) -> dict[str, float]:
    """The terms where the attacker starts at 3 on one axis of the quadratic, and so stays on it."""
    start = torch.zeros(2, dtype=torch.float64)
    start[axis] = 3.0
    found = attack_terms(quadratic, start, steps=steps, rate=rate, **(SETTINGS | changes))
    return {name: term.item() for name, term in found.items()}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_clamp_on_a_quadratic_by_hand(axis, steps):
    """w_t = 3 q^t with q = 1 - rate a, which is c; every kappa_t is a, and so is L."""
    a, rate = CURVATURES[axis].item(), 0.25
    q = 1 - rate * a
    end, last = 3 * q**steps, 3 * q ** (steps - 1) * (1 - q)
    terms = terms_along(axis, steps, rate)
    b = last / (1 - q)  # = w_(K-1): at least what is left to go
    assert terms["long"] == pytest.approx(a / 2 * (9 - end**2) + a * end * b + a / 2 * b**2)
    assert terms["contraction"] == pytest.approx(math.log1p(math.exp(q - 0.5)))
    assert terms["curvature"] == pytest.approx(steps * math.log1p(math.exp(1 - a)))
    assert terms["invert"] == pytest.approx(-a / 2 * 9)


def test_clamps_bound_is_one_on_all_that_an_attacker_can_take_off():
    for axis in (0, 1):
        assert terms_along(axis)["long"] >= quadratic(3 * torch.eye(2, dtype=torch.float64)[axis]).item()


def test_clamps_terms_stop_at_margin_and_cap():
    long = terms_along(0)["long"]
    assert terms_along(0, margin=1.0)["long"] == pytest.approx(long - 1)
    assert terms_along(0, margin=2 * long)["long"] == 0
    assert terms_along(0, cap=4.0)["invert"] == -4


def test_clamp_differentiates_through_the_attackers_steps():
    """A quadratic a w^2 / 2 in one dimension: central differences of every term in a."""
    start = torch.full((1,), 3.0, dtype=torch.float64)

    def terms(a: torch.Tensor) -> dict[str, torch.Tensor]:
        return attack_terms(lambda w: (a * w.square()).sum() / 2, start, steps=3, rate=0.25, **SETTINGS)

    a = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    above, below = terms(a.detach() + 1e-5), terms(a.detach() - 1e-5)
    for name, term in terms(a).items():
        (slope,) = torch.autograd.grad(term, a, retain_graph=True)
        assert slope.item() == pytest.approx((above[name] - below[name]).item() / 2e-5, rel=1e-6)


# --- SOPHON -----------------------------------------------------------------------------------------------------------


def test_suppression_losses_by_hand():
    logits, y = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64).log(), torch.tensor([1, 0])
    assert inverse_cross_entropy(logits, y).item() == pytest.approx(-(math.log(0.5) + math.log(0.4)) / 2)
    by_hand = -math.log(3) - sum(map(math.log, (0.2, 0.5, 0.3, 0.6, 0.3, 0.1))) / 6
    assert divergence_from_uniform(logits, y).item() == pytest.approx(by_hand)
    assert divergence_from_uniform(torch.zeros_like(logits), y).item() == pytest.approx(0)


def test_one_output_stands_for_two_classes():
    """p_1 = sigmoid(z); the published code's cross-entropy of -logits is the inverse one here."""
    z, y = torch.tensor([[1.5], [-0.5]]), torch.tensor([1, 0])
    p = torch.sigmoid(torch.tensor([1.5, 0.5]))  # of the label
    assert inverse_cross_entropy(z, y).item() == pytest.approx(-(1 - p).log().mean().item())
    both = torch.cat([torch.zeros_like(z), z], 1)
    assert_close(inverse_cross_entropy(z, y), torch.nn.functional.cross_entropy(-both, y))


def test_a_sure_attacker_gives_a_finite_gradient():
    logits = torch.tensor([[80.0, 0.0, 0.0]], requires_grad=True)
    loss = inverse_cross_entropy(logits, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(80 - math.log(2))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(("suppression", "at"), [("inverse", [0, 1, 2, 3, 4, 5]), ("uniform", [0, 5])])
def test_sophon_alternates(suppression, at):
    """Suppression moves theta in `step` itself, at each step (inverse) or at every fifth one (uniform)."""
    pair = make_pair(classes=3)
    model, method = Linear(pair, "random"), Sophon(epochs=1, suppression=suppression)
    method.setup(model, pair)
    moved = []
    for step in range(6):
        before = model.extractor.theta.detach().clone()
        method.step(model, *full_batches(pair))
        moved += [step] if not torch.equal(before, model.extractor.theta) else []
    assert moved == at


@pytest.mark.parametrize("make", [Sophon, TAR])
def test_those_who_suppress_probabilities_need_classes(make):
    pair, method = make_pair(), make(epochs=1)
    with pytest.raises(ConfigError, match=rf"method={method.name} suppresses the probabilities of classes.*regression"):
        method.setup(Linear(pair), pair)


# --- TAR --------------------------------------------------------------------------------------------------------------


def test_entropy_of_guesses_is_the_largest():
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]])
    p = logits.softmax(1)
    assert negative_entropy(logits[:1], None).item() == pytest.approx(-math.log(3))
    assert negative_entropy(logits, None).item() == pytest.approx((p * p.log()).sum(1).mean().item())


def test_tar_descends_what_holds_for_the_attacked_copy():
    """The gradient of its loss: that of what is kept, and `tamper` times the weighted ones where the copy stands."""
    pair = make_pair(classes=3)
    primary, harmful = full_batches(pair)
    model, method = Linear(pair, "random"), TAR(inner_steps=3, inner_lrs=[0.1], late=0.5, tamper=2.0)
    method.setup(model, pair)
    theta, before = model.extractor.theta, model.extractor.theta.detach().clone()
    torch.manual_seed(0)
    terms = method.step(model, primary, harmful)
    (found,) = torch.autograd.grad(terms["loss"], theta)
    weights = [math.exp(-1.0), math.exp(-0.5), 1.0]
    torch.manual_seed(0)
    torch.randint(1, ())  # which rate
    (attacked,), resistance = method.attacked(model, pair.harmful, harmful, negative_entropy, 0.1, weights)
    features = primary.x @ theta
    moved = (features - primary.x @ before).norm(dim=1).mean() / (primary.x @ before).square().sum(1).mean().sqrt()
    kept = pair.primary.loss(model.head(features), primary.y)
    (own,) = torch.autograd.grad(kept, theta)
    assert_close(found, own + 2 * attacked)
    assert_close(terms["loss"], kept + moved + 2 * resistance)
    assert torch.equal(theta, before)


def test_without_steps_the_attacked_copy_is_theta_itself():
    pair = make_pair(classes=3)
    _, harmful = full_batches(pair)
    model, method = Linear(pair, "random"), TAR(head_steps=5)
    method.setup(model, pair)
    kept = len(harmful.y) - round(0.1 * len(harmful.y))
    (found,), value = method.attacked(model, pair.harmful, harmful, negative_entropy, 0.0, [1.0])
    theta = model.extractor.theta
    zeros = torch.zeros(3, model.head.in_features, dtype=theta.dtype)
    w = fitted_head(pair.harmful, zeros, harmful.x[:kept] @ theta, harmful.y[:kept], 1.0, 5)
    loss = negative_entropy(scaled(harmful.x[kept:] @ theta) @ w.T, None)
    (expected,) = torch.autograd.grad(loss, theta)
    assert_close(value, loss.detach())
    assert_close(found, expected)


def test_every_inner_step_sees_another_batch(monkeypatch):
    """Of each, the attacker reads nine rows in ten, and suppression the others."""
    pair, seen = make_pair((40, 40), classes=3), []
    _, harmful = full_batches(pair)
    harmful = replace(harmful, x=harmful.x[:10], y=harmful.y[:10])
    model, method = Linear(pair, "random"), Sophon(inner_steps=3)
    method.setup(model, pair)
    read = model.training_features
    monkeypatch.setattr(model, "training_features", lambda x, *theta: seen.append(x) or read(x, *theta))
    method.step(model, harmful, harmful)
    head, *steps = seen
    assert [len(x) for x in steps] == [9, 1] * 3
    batches = [torch.cat(steps[i : i + 2]) for i in (0, 2, 4)]
    assert torch.equal(batches[0], harmful.x)
    assert torch.equal(head, harmful.x[:9])
    rows = {tuple(row) for row in pair.harmful.train.x.tolist()}
    for batch in batches[1:]:
        assert not torch.equal(batch, harmful.x)
        assert {tuple(row) for row in batch.tolist()} <= rows


# --- EncoderLock ------------------------------------------------------------------------------------------------------


def test_encoderlock_moves_few_weights_more_with_each_round():
    pair = make_pair(classes=2)
    model, method = Linear(pair, "random"), Encoderlock(epochs=1, weights=3, round_steps=2)
    method.setup(model, pair)
    start, counts = model.extractor.theta.detach().clone(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        method.step(model, *full_batches(pair))["loss"].backward()
        optimizer.step()
        counts.append((model.extractor.theta != start).sum().item())
    assert counts == [3, 3, 6, 6, 9]


def test_encoderlock_takes_the_weights_that_move_the_harmful_loss_alone():
    """Largest |g_H| / |g_P|, in the layer with the largest one, whatever their sum."""
    masks = {"a": torch.zeros(2, 2, dtype=torch.bool), "b": torch.zeros(3, dtype=torch.bool)}
    harmful = torch.tensor([[16.5, 5.0], [1.0, 1.0]]), torch.tensor([-3.0, 6.0, 6.0])
    primary = torch.tensor([[3.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 1.0, -6.0])
    grow(masks, harmful, primary, 2)
    assert not masks["a"].any()
    assert masks["b"].tolist() == [True, True, False]
    grow(masks, harmful, primary, 1)  # what is left of b scores 1
    assert masks["a"].tolist() == [[True, False], [False, False]]


def test_encoderlock_scores_weights_by_ten_pairs_of_batches(monkeypatch):
    """Mean gradients, of the step's own batches and of nine more that are drawn; one pair has those of the step."""
    pair = make_pair((40, 40), classes=2)
    found = {}
    monkeypatch.setattr("immunization.methods.probing.grow", lambda _masks, *slopes: found.update(now=slopes))
    primary, harmful = (replace(batch, x=batch.x[:8], y=batch.y[:8]) for batch in full_batches(pair))
    for pairs in (1, 10, 1000):
        torch.manual_seed(0)
        model, method = Linear(pair, "random"), Encoderlock(score_batches=pairs)
        method.setup(model, pair)
        method.step(model, primary, harmful)
        (of_harmful,), (of_primary,), _ = found["now"]
        found[pairs] = of_harmful, of_primary
    losses = method._losses(model, *full_batches(pair))
    for place, loss in enumerate(reversed(losses)):
        (slope,) = torch.autograd.grad(loss, model.extractor.theta)
        errors = [(found[pairs][place] - slope).norm().item() for pairs in (1, 10, 1000)]
        assert errors[2] < errors[1] < errors[0]


# --- NTL --------------------------------------------------------------------------------------------------------------


def test_mmd_of_two_points_by_hand():
    """Rows 0 and d: the mean squared distance is d^2, so the kernels are exp(-4), exp(-2), exp(-1), exp(-1/2), ..."""
    a, b = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 3.0, dtype=torch.float64)
    cross = sum(math.exp(-(2.0**i)) for i in (2, 1, 0, -1, -2))
    assert mmd(a, b).item() == pytest.approx(5 + 5 - 2 * cross)


def test_mmd_is_0_for_the_same_rows_and_grows_with_the_distance():
    x = make_pair().primary.train.x
    assert mmd(x, x).item() == pytest.approx(0, abs=1e-12)
    values = [mmd(x, x + shift).item() for shift in (0.5, 1.0, 4.0)]
    assert values == sorted(values)
    assert values[-1] < 10


def test_mmd_of_rows_that_are_all_equal_is_0():
    x = torch.ones(3, 2, requires_grad=True)
    mmd(x, x[:2]).backward()
    assert torch.equal(x.grad, torch.zeros(3, 2))


@pytest.mark.parametrize("alpha", [0.1, 100.0])
def test_ntls_caps_are_on_the_mean_over_classes(alpha):
    """KL of one-hot labels, averaged over rows and classes as in the paper's code, times the classes."""
    pair = make_pair(classes=3)
    model, method = Linear(pair, "random"), NTL(alpha=alpha, head_lr=0.0)
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    terms = method.step(model, primary, harmful)
    features = model.training_features(primary.x)
    logits = model.head(features)
    one_hot = torch.nn.functional.one_hot(primary.y, 3).to(logits)
    divergence = torch.nn.functional.kl_div(logits.log_softmax(1), one_hot, reduction="none").mean()
    theirs = math.log(3) / 3  # of the attacker's head, which is 0
    distance = mmd(features, model.training_features(harmful.x))
    assert_close(terms["loss"] / 3, divergence - min(1, alpha * theirs) * min(1, 0.1 * distance))


# --- All of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "term", "falls"),
    [
        (CLAMP(epochs=60, batch_size=None), "long", True),
        (NTL(epochs=60, batch_size=None), "mmd", False),
        (Encoderlock(epochs=60, batch_size=None, weights=4, round_steps=10), "harmful_loss", False),
        (Sophon(epochs=60, batch_size=None, suppress_lr=1e-2, held_out=0.5), "suppression", True),
        (
            Sophon(epochs=60, batch_size=None, suppress_lr=1e-2, held_out=0.5, suppression="uniform", primary_steps=1),
            "suppression",
            True,
        ),
    ],
    ids=["clamp", "ntl", "encoderlock", "inverse", "uniform"],
)
def test_the_objective_falls(method: Method, term: str, falls: bool):
    """Full batches of three classes: what is meant for D_H moves as it should, and L(D_P) does not rise."""
    pair = make_pair((60, 60), columns=6, classes=3)
    model, seen = Linear(pair, "random"), []
    torch.manual_seed(0)
    method.setup(model, pair)
    batches = PairedBatches(pair, None, torch.Generator())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(
        method,
        model,
        batches,
        optimizer,
        lambda _, terms: seen.append([terms[name].item() for name in ("task_loss", term)]),
    )
    task_loss, harm = torch.tensor(seen).T
    assert task_loss[-10:].mean() < task_loss[:10].mean()
    assert (harm[-10:].mean() < harm[:10].mean()) == falls


HELD = ["method.epochs=40", "method.lambda_P=1", "method.lambda_H=30"]  # the bound on ratio (ii) acts
LITTLE = ["method.epochs=4", "method.batch_size=20", "method.max_accuracy_drop=0.5"]


@pytest.mark.parametrize(
    ("method", "options", "at"),
    [
        *((method, LITTLE, 5) for method in RIVALS),
        ("ntl", [*LITTLE, "dataset.harmful=[3,5]"], 5),
        ("forget", [*LITTLE[:2], "method.patience=3"], 5),
        ("condition_number", HELD, 20),
    ],
)
def test_interrupted_runs_go_on(method, options, at, tmp_path, monkeypatch, cut):
    options = [f"method={method}", "dataset.val_fraction=0.2", *options]
    whole, again = resumed([*QUICK, *options], tmp_path, monkeypatch, cut, at)
    assert whole == again


@pytest.mark.parametrize("rival", ["clamp", "ntl", "encoderlock"])
def test_they_run_on_regressions(rival, data_dir, tmp_path):
    options = ["dataset=house_prices", f"dataset.root={data_dir / 'house_prices'}", "dataset.download=false"]
    if not (data_dir / "house_prices").exists():
        pytest.skip("no data for it")
    result = run([*options, f"method={rival}", "method.epochs=2", "tracker=none", "figures=false"], folder=tmp_path)
    assert result.metrics["kappa_harmful"] != result.metrics["kappa_harmful_baseline"]
