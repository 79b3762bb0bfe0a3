"""What does not depend on the scale of features does not where their squares leave the range of float64 either."""

import pytest
import torch
from helpers.matrices import gaussian, with_spectrum
from torch.testing import assert_close

from immunization.attacks.base import Rows
from immunization.attacks.kernels import Kernel, Rule
from immunization.attacks.least_squares import LeastSquares
from immunization.attacks.predictors import unit_rows
from immunization.data.task import Split, Task
from immunization.evaluation import selectivity
from immunization.theory import optimal_map, regularizers, spectrum
from immunization.theory.probe import Probe, leave_one_out, residuals, ridge_weights

SCALES = [1e-200, 1e-150, 1e-30, 1e30, 1e150, 1e200]
X = with_spectrum(torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64), 20, 4, seed=0)
Y = gaussian(20, 3, seed=1)
STEPS = torch.tensor([1, 4, 1000])
LABELS = torch.arange(20) % 3
RIDGES = torch.tensor([1e-4, 0.1], dtype=torch.float64)


def probe(x):
    return Probe.of(x, Y)


def least_squares(x):
    half = Split(torch.zeros(20, 4), LABELS)
    return LeastSquares.of(Task("t", half, half, half, classes=3), Rows(x, LABELS, x, x, 0.0))


def kernel(x):
    return Kernel.of(x.clone(), x.clone()).gaussian().predictions(Y, [Rule(0.1)])[0]


def slope(function):
    """The gradient at x, times the scale: that of a function which ignores the scale."""

    def scaled(x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x)
        return gradient * spectrum.singular_values(x.detach())[0]

    return scaled


def forgotten(x):
    """`selectivity.lost` and `switched` of inputs, as the evaluation takes them."""
    rows = selectivity.in_range(*(selectivity.halves(part.unflatten(0, (4, -1))) for part in (x, x.flip(1))))
    (own, own_held), (bad, bad_held) = ([selectivity.covariance(half) for half in part] for part in rows)
    switched = selectivity.switched(*rows, (own, bad), 0.9, 1e-3)
    weight = gaussian(2, 4, seed=4)
    return torch.tensor([selectivity.lost(weight, own, bad, 0.25, (own_held, bad_held)), switched])


INVARIANT = {
    "leave_one_out": lambda x: leave_one_out(x, Y, [1e-4, 0.1]),
    "leave_one_out, wide": lambda x: leave_one_out(x.mT, gaussian(4, 2, seed=3), [1e-4, 0.1]),
    "leave_one_out, slope": slope(lambda x: leave_one_out(x, Y, [1e-2]).square().sum()),
    "residuals": lambda x: residuals([(x, Y)], STEPS)[0][0],
    "residuals, expected": lambda x: residuals([(x, Y)], STEPS)[0][1],
    "residuals, slope": slope(lambda x: residuals([(x, Y)], STEPS)[0][0].square().sum()),
    "kappa": lambda x: torch.tensor(spectrum.condition_number(x)),
    "kappa, deficient": lambda x: torch.tensor(spectrum.condition_number(torch.cat([x, x[:, :2]], 1))),
    "outside": lambda x: torch.tensor(spectrum.dimensions_outside(x[:2], x, 20)),
    "probe": lambda x: probe(x).residuals(STEPS),
    "probe, predictions": lambda x: x @ probe(x).weights(STEPS),
    "probe, optimum": lambda x: x @ probe(x).optimum(),
    "probe, norm ratio": lambda x: probe(x).norm_ratio(10),
    "log kappa": lambda x: regularizers.log_condition_number(x, 4),
    "log kappa, slope": slope(lambda x: regularizers.log_condition_number(x, 4)),
    "ceiling": lambda x: torch.tensor(optimal_map.relative_condition_number(probe(x), probe(gaussian(20, 4, seed=2)))),
    "ceiling of the other": lambda x: torch.tensor(
        optimal_map.relative_condition_number(probe(gaussian(20, 4, seed=2)), probe(x))
    ),
    "ridge": lambda x: x @ ridge_weights(probe(x).sigma, probe(x).vectors, probe(x).coefficients, RIDGES * 0),
    "selectivity": forgotten,
    "attackers' least squares": lambda x: least_squares(x).val,
    "attackers' kernels": kernel,
    "attackers' neighbours": unit_rows,
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", INVARIANT)
def test_no_scale_matters(name, scale):
    expected = INVARIANT[name](X)
    assert expected.double().abs().sum() > 0
    assert_close(INVARIANT[name](scale * X), expected, rtol=1e-6, atol=1e-8)
