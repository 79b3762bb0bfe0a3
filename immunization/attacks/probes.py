"""Linear probes of frozen features: gradient descent, quasi-Newton, whitening, closed form, and behind a map."""

import copy
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from immunization.attacks.altered import Precision
from immunization.attacks.base import AttackCurve, Rows, areas
from immunization.attacks.least_squares import LeastSquares, ProbeAttack, ProbeCurves
from immunization.attacks.optimizers import Maker, optimizer_named
from immunization.attacks.victim import Victim
from immunization.checks import AtLeastOne, NonNegative
from immunization.runs.records import Stage
from immunization.theory.probe import ridge_weights

log = logging.getLogger(__name__)

ROOM = 2**28
"""Bytes that the pairs of L-BFGS may take."""

BESIDE = 2**12
"""Most numbers of a problem that descends beside others: what they are computed with stays in the cache."""

Descent = tuple[LeastSquares, ProbeCurves, np.ndarray]
"""A problem, its curves, and what multiplies its gradient in the eigenbasis, [settings, k]."""

Pairs = deque[tuple[np.ndarray, np.ndarray]]


class LinearProbe(ProbeAttack):
    """Steepest descent with exact line search, one step size for all outputs (the paper's probe, Eq. 2 and 16)."""

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        steepest_descents([(problem, curves, np.ones((1, len(problem.sigma))))], self.steps)


class Rounded(LinearProbe, group="attack.rounded"):
    """`LinearProbe` on features of an extractor whose weights the attacker rounds first, to each of `formats`.

    What a map squeezes by more than a format's steps comes back at the size of the rounding errors, so that a probe
    learns from it soon. The format with the best validation curve is kept; `setting` has its bits.
    """

    setting_name = "bits"

    formats: Sequence[Precision]

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        curves, floor, descents = [], victim.task.chance, []
        for form in self.formats:
            attack = copy.copy(self)
            attack.precision = form
            problem = attack.problem(victim, stage)
            descents.append((problem, attack.curves(problem), np.ones((1, len(problem.sigma)))))
        steepest_descents(descents, self.steps)
        for form, (problem, own, _) in zip(self.formats, descents, strict=True):
            curve = self.best(problem, own)
            curves.append(replace(curve, setting=float("".join(filter(str.isdigit, form.partition("_")[0])))))
        best = int(torch.stack([areas(curve.val[None], floor)[0] for curve in curves]).argmax())
        spent = sum(curve.flops[-1].item() for place, curve in enumerate(curves) if place != best)
        return replace(curves[best], others=spent)


class WhitenedProbe(ProbeAttack):
    """`LinearProbe` on features whitened by (H + ridge I)^-1/2 for `ridges` relative to lambda_1; 0 takes one step."""

    setting_name, tries = "ridge", "ridges"
    natural_ends = True

    ridges: Sequence[float]

    def problem(self, victim: Victim, stage: Stage) -> LeastSquares:
        return decomposed(super().problem(victim, stage))

    def condition_number(self, problem: LeastSquares) -> Tensor:
        ridges = torch.tensor(self.settings, dtype=torch.float64)
        low, high = (problem.sigma[i].square().item() for i in (-1, 0))
        return high / (high + ridges) * (low + ridges) / low

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        squares = problem.sigma.square().cpu().numpy()
        gains = 1 / (squares + np.array(self.settings)[:, None])
        steepest_descents([(problem, curves, gains * squares.min())], self.steps)


class ClosedFormProbe(ProbeAttack):
    """Ridge regression by one SVD, w = V S / (S^2 + ridge) c, for `ridges` relative to lambda_1, as one step.

    No bias.
    """

    setting_name, tries = "ridge", "ridges"
    order = None
    natural_ends = True

    steps = 1
    ridges: Sequence[float]

    def problem(self, victim: Victim, stage: Stage) -> LeastSquares:
        return decomposed(super().problem(victim, stage))

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        ridges = torch.tensor(self.settings, dtype=torch.float64).to(problem.sigma)
        curves.record(1, ridge_weights(problem.sigma, problem.vectors, problem.target, ridges), passes=0)


class TorchProbe(ProbeAttack):
    """A head trained by an optimizer with each learning rate."""

    tries = "rates"

    rates: Sequence[float]

    def maker(self) -> Maker:
        """What makes an optimizer of one parameter."""
        raise NotImplementedError

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        self.minimize(problem.target.new_zeros(len(self.settings), *problem.shape), problem.gradient, curves)

    def minimize(
        self, weights: Tensor, gradient_of: Callable[[Tensor], Tensor], curves: ProbeCurves, basis: Tensor | None = None
    ) -> None:
        """Train `weights` [settings, ...] in place; with `basis`, those of the features are basis @ weights."""
        parameters = [nn.Parameter(part) for part in weights]  # views: the optimizer writes into `weights`
        make = self.maker()  # some optimizers look at all of their parameters: each rate has its own
        optimizers = [make([p], lr=rate) for p, rate in zip(parameters, self.settings, strict=True)]
        for step in range(1, self.steps + 1):
            for parameter, gradient in zip(parameters, gradient_of(weights), strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            if curves.due(step) and curves.record(step, weights if basis is None else basis @ weights):
                break


class Momentum(TorchProbe):
    """Gradient descent with heavy-ball momentum; rates are relative to 1/lambda_1, stable below 2 (1 + momentum)."""

    natural_ends = True

    momentum: float

    def maker(self) -> Maker:
        return partial(torch.optim.SGD, momentum=self.momentum)

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        # it is the same in every basis: in that of the Hessian a step costs k C operations instead of D k C
        sigma, start = problem.sigma[:, None], problem.target.new_zeros(len(self.settings), *problem.target.shape)
        self.minimize(start, lambda w: sigma * (sigma * w - problem.target), curves, problem.vectors)


class Adam(TorchProbe):
    """Adam with decoupled weight decay (AdamW), on features scaled to lambda_1 = 1.

    Or any other `optimizer` of torch or timm (`optimizer_named`), with further `arguments`.
    """

    order = None

    optimizer: str
    weight_decay: NonNegative
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.maker()

    def maker(self) -> Maker:
        options = {"weight_decay": self.weight_decay, **self.arguments}
        return optimizer_named(self.optimizer, f"{self.group}.optimizer", **options)


class LBFGS(ProbeAttack, group="attack.lbfgs"):
    """L-BFGS in float64 with exact line search, which the l2 loss has in closed form: a step takes one gradient.

    It remembers `memory` pairs of a step and the change of the gradient, whose cost is counted; None: as many as there
    are features, or as fit into `ROOM` bytes. So it ends after D steps, as conjugate gradients would without rounding.
    """

    order = None

    memory: AtLeastOne | None

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        factor, error = problem.factor.cpu().numpy(), -problem.target.cpu().numpy()  # F w - c
        weights, gradient, passes = np.zeros(problem.shape), factor.T @ error, 0.0
        fit = max(1, ROOM // (2 * 8 * weights.size))
        if self.memory is None and fit < len(weights):
            log.info("L-BFGS remembers %d pairs (%d MiB), fewer than features: %d", fit, ROOM >> 20, len(weights))
        pairs: Pairs = deque(maxlen=self.memory or min(len(weights), fit))
        for step in range(1, self.steps + 1):
            direction = -quasi_newton(gradient, pairs)
            passes += 1 + 8 * len(pairs) * weights.size / problem.per_pass
            along = factor @ direction
            length = -np.vdot(gradient, direction) / (np.vdot(along, along) or np.inf)
            weights += length * direction
            error += length * along
            last, gradient = gradient, factor.T @ error
            bend = gradient - last
            if length * np.vdot(direction, bend) > 0 < np.vdot(bend, bend):
                pairs.append((length * direction, bend))
            elif pairs:  # rounding has made the pairs useless: begin anew
                pairs.clear()
            else:
                break
            if curves.record(step, as_weights(weights, problem), passes):
                break


class ConjugateGradients(ProbeAttack):
    """scipy's conjugate gradients on the normal equations of all outputs at once."""

    order = 0.5

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        from scipy.sparse.linalg import LinearOperator, cg

        factor, target = problem.factor.cpu().numpy(), problem.target.cpu().numpy()
        size, step = problem.shape[0] * problem.shape[1], 0

        def product(w: np.ndarray) -> np.ndarray:
            return (factor.T @ (factor @ w.reshape(problem.shape))).ravel()

        def callback(w: np.ndarray) -> None:
            nonlocal step
            step += 1
            if curves.record(step, as_weights(w, problem)):
                raise StopIteration

        hessian = LinearOperator((size, size), matvec=product, dtype=np.float64)
        with suppress(StopIteration):
            cg(hessian, (factor.T @ target).ravel(), rtol=1e-15, atol=0, maxiter=self.steps, callback=callback)


class Undo(LinearProbe, group="attack.undo"):
    """The attacker takes the map back before they probe.

    `how=relearn`: by the least-squares map from the features of theta_I to those of theta_0, on all training inputs of
    both tasks, which need no labels: also with `samples`.
    `how=strip`: by the pseudo-inverse of the linear map itself, found in the weights.
    """

    how: Literal["relearn", "strip"]

    def needs_theta_0(self, victim: Victim) -> bool:
        if self.how != "relearn" or not victim.model.trains_layers:
            return False
        return victim.model.last_map(victim.model.extractor) is None  # whose inputs are theta_0's features

    def problem(self, victim: Victim, stage: Stage) -> LeastSquares:
        problem, d = super().problem(victim, stage), victim.task.dim
        if self.how == "strip":
            problem.flops += svd_flops(d, d)
            return problem
        primary, own = len(victim.comparison.tasks["primary"].train), len(victim.task.train)
        passed = primary if victim.raw(victim.role, "train") else primary + primary + own  # theta_0, where it is a net
        problem.flops += svd_flops(primary + own, d) + victim.flops_per_row(stage) * passed
        return problem

    def features(self, victim: Victim, stage: Stage) -> Rows:
        rows, inverse = super().features(victim, stage), self._inverse(victim, stage)
        train, val, test = (x @ inverse for x in (rows.train, rows.val, rows.test))
        return replace(rows, train=train, val=val, test=test)

    def _inverse(self, victim: Victim, stage: Stage) -> Tensor:
        if self.how == "strip":
            return torch.linalg.pinv(victim.theta(stage, self.precision))
        pairs = [
            (victim.features(stage, "train", self.precision, role), victim.features("baseline", "train", None, role))
            for role in ("primary", victim.role)
        ]
        mine, theirs = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return torch.linalg.pinv(mine) @ theirs


def steepest_descents(descents: Sequence[Descent], steps: int) -> None:
    """W <- W - a P gradient with exact line search a, for preconditioners P = V diag(gains) V^T, [settings, k].

    In the eigenbasis of the Hessian, in numpy, which has several times less overhead than torch for arrays this small.
    Small problems of the same shape [k, C] descend side by side: a row is one of their settings.
    """

    def shape_of(descent: Descent) -> Hashable:
        shape = len(descent[2]), *descent[0].target.shape
        return shape if math.prod(shape) <= BESIDE else id(descent)

    for _, alike in itertools.groupby(descents, shape_of):
        _descend(list(alike), steps)


def _descend(descents: Sequence[Descent], steps: int) -> None:
    shape = len(descents), len(descents[0][2]), *descents[0][0].target.shape

    def rows(parts: Iterable[np.ndarray]) -> np.ndarray:
        return np.stack([np.broadcast_to(part, shape[1:]) for part in parts]).reshape(shape[0] * shape[1], -1)

    sigma = rows(problem.sigma.cpu().numpy()[:, None] for problem, _, _ in descents)
    error = rows(problem.target.cpu().numpy() for problem, _, _ in descents)  # c - S V^T W
    gains = rows(gains[:, :, None] for _, _, gains in descents)
    moved, gradient, direction, change = (np.zeros_like(error) for _ in range(4))  # V^T W is the first
    going = dict(enumerate(descents))
    for step in range(1, steps + 1):
        np.multiply(sigma, error, out=gradient)
        np.multiply(gains, gradient, out=direction)
        np.multiply(sigma, direction, out=change)
        along = np.square(change, out=change).sum(1)
        length = np.multiply(gradient, direction, out=gradient).sum(1) / np.where(along > 0, along, np.inf)
        direction *= length[:, None]
        moved += direction
        error -= np.multiply(sigma, direction, out=change)
        for place, (problem, curves, _) in list(going.items()):
            if curves.due(step):
                weights = problem.vectors @ torch.from_numpy(moved.reshape(shape)[place]).to(problem.vectors)
                if curves.record(step, weights):
                    del going[place]
        if not going:
            break


def quasi_newton(gradient: np.ndarray, pairs: Pairs) -> np.ndarray:
    """The gradient times the inverse Hessian that L-BFGS makes of `pairs`, the oldest first, by two loops."""
    moved, shares = gradient.copy(), []
    for step, bend in reversed(pairs):
        shares.append(np.vdot(step, moved) / np.vdot(step, bend))
        moved -= shares[-1] * bend
    if pairs:
        step, bend = pairs[-1]
        moved *= np.vdot(step, bend) / np.vdot(bend, bend)
    for step, bend in pairs:
        moved += (shares.pop() - np.vdot(bend, moved) / np.vdot(step, bend)) * step
    return moved


def as_weights(w: np.ndarray, problem: LeastSquares) -> Tensor:
    """A flat vector of scipy's as weights [1, D, C]."""
    return torch.from_numpy(w.reshape(1, *problem.shape)).to(problem.vectors)


def decomposed(problem: LeastSquares) -> LeastSquares:
    """`problem`, of which the operations have one thin SVD of the training features more, for all settings."""
    d, c = problem.shape
    problem.flops += svd_flops(problem.per_pass / (4 * d * c), d)
    return problem


def svd_flops(rows: float, d: int) -> float:
    """Operations of a thin SVD of a [rows, d] matrix by its QR: about 2 N D^2 + 22 D^3 (Golub and Van Loan)."""
    return 2.0 * rows * d**2 + 22.0 * d**3
