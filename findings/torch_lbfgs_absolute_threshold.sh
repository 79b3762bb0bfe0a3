#!/usr/bin/env bash
# torch 2.14.1: torch.optim.LBFGS is no quasi-Newton method where the loss is small, whatever its tolerances are.
#
# A pair of a step s and the change of the gradient y is kept only if s.y > 1e-10, an absolute number that no option
# changes. For a quadratic s.y is about the loss itself, so that L-BFGS forgets everything as soon as the loss is below
# about 1e-10 in the units it is written in, and becomes gradient descent. Exact arithmetic would not see the units.
#
# Behaviour seen: least squares with 10 columns of condition number 1,000 in float64, tolerance_grad = tolerance_change
# = 0, strong Wolfe line search, at most 60 iterations. The same loss times 1, 1e-4, 1e-8, 1e-12 ends at a relative error of 0 (exact),
# 2e-9, 1e-2 and 2e-1, with 30, 18, 2 and 0 pairs kept. scipy 1.17.1's L-BFGS-B, whose thresholds are relative,
# comes below 1e-15 for all four once its own two tolerances are 0.
# What helps: scale the loss so that it starts near 1 or above, and expect no progress below 1e-10 of that.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 scipy==1.17.1 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import scipy
import torch
from scipy.optimize import minimize

torch.manual_seed(0)
x = torch.randn(200, 10, dtype=torch.float64) * torch.logspace(0, -1.5, 10, dtype=torch.float64)
y = x @ torch.randn(10, dtype=torch.float64)


def relative(w):
    return ((x @ w - y).square().mean() / y.square().mean()).item()


def by_torch(unit):
    w = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    options = {"max_iter": 60, "history_size": 50, "tolerance_grad": 0, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS([w], lr=1, line_search_fn="strong_wolfe", **options)

    def closure():
        optimizer.zero_grad()
        loss = unit * (x @ w - y).square().mean() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return relative(w.detach()), len(optimizer.state[w]["old_dirs"])


def by_scipy(unit):
    a, b = x.numpy(), y.numpy()

    def loss(w):
        error = a @ w - b
        return unit * np.mean(error**2) / 2, unit * a.T @ error / len(b)

    found = minimize(loss, np.zeros(10), jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 0, "maxcor": 50})
    return relative(torch.from_numpy(found.x))


units = (1.0, 1e-4, 1e-8, 1e-12)
errors, pairs = zip(*map(by_torch, units))
others = [by_scipy(unit) for unit in units]
print(scipy.__version__, errors, pairs, others)
assert errors[0] < 1e-20 and pairs[0] >= 20
assert 1e-12 < errors[1] < 1e-6 and errors[2] > 1e-3 and errors[3] > 1e-2
assert pairs[2] <= 4 and pairs[3] == 0
assert max(others) < 1e-15, others
PYTHON
