"""What holds for every method: dtypes, descent, names, options that cannot be."""

import math

import pytest
import torch
from helpers.methods import fit, full_batches, make_pair

from immunization.errors import ConfigError
from immunization.methods import (
    CLAMP,
    IMMA,
    NTL,
    TAR,
    ConditionNumber,
    Encoderlock,
    Forget,
    Identity,
    OptKappa,
    ReleasedConditionNumber,
    RIllOnly,
    Sophon,
)
from immunization.models import Linear
from immunization.theory.spectrum import condition_number
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains

METHODS = {
    "condition_number": lambda **options: ConditionNumber(lambda_P=1.0, lambda_H=1.0, balance=False, **options),
    "condition_number, ridge": lambda **options: ConditionNumber(
        lambda_P=1.0, lambda_H=1.0, precondition="ridge", balance=False, **options
    ),
    "r_ill_only": RIllOnly,
    "opt_kappa, raw": OptKappa,
    "opt_kappa, log": lambda **options: OptKappa(form="log", **options),
    "imma": IMMA,
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        *((make, batch_size) for make in METHODS.values() for batch_size in (None, 3, 6)),
        *((make, 6) for make in (CLAMP, NTL, TAR, Encoderlock, Forget, Sophon)),
    ],
)
def test_theta_keeps_its_dtype_and_stays_finite(make, batch_size, dtype):
    """On full batches, and on mini-batches of fewer rows than columns and of more; rivals need classes."""
    rival = make not in METHODS.values()
    pair = make_pair(classes=2 if rival else 0).to("cpu", dtype)
    optimizer, rate = (torch.optim.Adam, 1e-3) if rival else (torch.optim.SGD, 1e-4)
    for parameter in fit(make(epochs=3, batch_size=batch_size), pair, optimizer, rate).parameters():
        assert parameter.dtype == dtype
        assert torch.isfinite(parameter).all()


@every_method
def test_a_small_step_descends(make):
    pair = make_pair()
    method, model = make(epochs=1), Linear(pair, "random")
    if isinstance(method, IMMA):
        method.head_steps = 0  # or the second loss would be another one
    method.setup(model, pair)
    batches = PairedBatches(pair, None, torch.Generator())
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    train(method, model, batches, optimizer, lambda step, terms: seen.append(terms["loss"].item()))
    method.bound = None  # likewise: its factor is 1
    assert method.step(model, *full_batches(pair))["loss"].item() < seen[0]


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (ConditionNumber(lambda_P=3.0, lambda_H=1.0, epochs=300, balance=True), 0.8),
        (OptKappa(epochs=300, form="log"), 0.99),
    ],
)
def test_methods_raise_the_ratio(method, share):
    """RIR against its ceiling kappa(K_P^-1 K_H) kappa(K_P) / kappa(K_H) (docs/theory.md), in logarithms."""
    pair = make_pair()
    theta = fit(method, pair, torch.optim.Adam, 1e-2, "orthogonal").extractor.theta.detach()
    harmful, primary = (
        condition_number(one.train.x @ theta) / condition_number(one.train.x) for one in (pair.harmful, pair.primary)
    )
    k_p, k_h = (one.train.x.T @ one.train.x for one in (pair.primary, pair.harmful))
    relative = torch.linalg.eigvals(torch.linalg.solve(k_p, k_h)).real
    ceiling = relative.max() / relative.min() * torch.linalg.cond(k_p) / torch.linalg.cond(k_h)
    assert share * math.log(ceiling) < math.log(harmful / primary) < math.log(ceiling) + 1e-9


def test_identity_takes_no_step_whatever_the_epochs():
    pair = make_pair()
    model, method = Linear(pair), Identity(epochs=5)
    method.setup(model, pair)
    assert train(method, model, PairedBatches(pair, None, torch.Generator()), torch.optim.SGD(model.parameters())) == 0
    assert torch.equal(model.extractor.theta, torch.eye(4, dtype=torch.float64))


def test_names_are_those_of_the_yaml_files():
    names = {cls.__name__: cls.name.fget(object.__new__(cls)) for cls in (ConditionNumber, RIllOnly, OptKappa, IMMA)}
    assert names == {
        "ConditionNumber": "condition_number",
        "RIllOnly": "r_ill_only",
        "OptKappa": "opt_kappa",
        "IMMA": "imma",
    }


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ConditionNumber(lambda_P=-1.0, lambda_H=1.0, epochs=1, balance=False), "lambda_P"),
        (lambda: ConditionNumber(lambda_P=1.0, lambda_H=math.nan, epochs=1, balance=False), "lambda_H"),
        (lambda: ReleasedConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, precondition="pinv"), "side"),
        (lambda: ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, power=7, balance=False), "power"),
        (lambda: ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, power=-math.inf, balance=False), "power"),
        (lambda: ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, power=math.nan, balance=False), "power"),
        (lambda: RIllOnly(epochs=1, batch_size=1), "batch_size"),
        (lambda: IMMA(epochs=1, inner_steps=-1), "inner_steps"),
        (lambda: IMMA(epochs=1, mode="implicit"), "mode"),
    ],
)
def test_impossible_options_are_named(make, key):
    with pytest.raises(ConfigError, match=rf"method\.{key}\b"):
        make()
