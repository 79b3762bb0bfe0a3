"""A bound on ratio (ii): a controller of the weight that lowers kappa(H_P), and the choice of the final state."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from immunization.checks import Share
from immunization.data.task import Task, TaskPair
from immunization.methods.base import MIN_GAIN, Callback, Method, Stopping, parameters_of
from immunization.methods.linear_map import fit_head, probe_of_inputs
from immunization.models.base import Model, kept_of, load_into
from immunization.theory.optimal_map import conditioned

BOUND = 0.99
"""Largest ratio (ii) of `hold_primary="auto"`."""
MARGIN = 0.01
"""The controller aims at log (ii) this much below the bound, so that it settles on the right side."""
PACE, REACTION, LARGEST = 2.0, 10.0, 0.3
"""Integral gain, proportional gain, and the value at which the violation |log (ii) - target| is clipped."""
HIGHEST = 6.0
"""Largest log of the factor on lambda_P: beyond, R_well is all that an optimizer sees."""
START, SETTLED = 0.25, 0.5
"""Shares of the training: unconstrained until START; then the target falls from (ii) at START to the bound at SETTLED,
since weights that will hold kappa(H_P) often let it rise first."""
UNSCORED = 2**24
"""Bytes of iterates that wait for their scores at most."""
LARGE, SELDOM = 256, 5
"""Models of more features are measured every SELDOM epochs only: their condition numbers cost more than a step."""


class Bound(Stopping):
    """Ends the training where ratio (ii) = kappa(H_P) / kappa(K_P) is within a bound and ratio (i) is largest.

    After `START` of the training, `factor` multiplies lambda_P. It is set after every epoch by a proportional-integral
    controller of log (ii): exp(multiplier + REACTION violation), where the violation is the distance of log (ii) from
    the target, and the multiplier sums up PACE violations, but never falls below 0. A run that needed the factor ends
    with the iterate of the largest (i) among those within the bound. Where theta is a linear map and the last iterate
    is outside, the nearest maps within the bound (`conditioned`) compete.
    """

    def __init__(self, method: Method, model: Model, limit: float) -> None:
        """`limit` is the log of the bound."""
        super().__init__(method, model)
        self.limit, self.multiplier, self.factor = limit, 0.0, 1.0
        self.ratio = -math.inf  # the last log (ii); not in `state_dict`, as it decides how it is measured and no more
        self.allowed: float | None = None  # log (ii) at START, or the target if that is larger
        self.acted = False
        self.every = SELDOM if method.pair.dim > LARGE else 1
        self.stops = method.patience is not None or method.max_accuracy_drop is not None
        self.unscored: list[tuple[int, dict[str, Tensor], float | None]] = []  # the last: log (ii), where it is known
        self.model, self.parts = model, kept_of(model, attached=True)  # looked up once: every epoch copies them
        self.room = UNSCORED // sum(part.nbytes for part in self.parts.values())

    def epoch_end(self, model: Model, epoch: int) -> bool:
        controls = self.scores(epoch) and epoch + 1 >= START * self.method.epochs
        if self.stops or controls:
            self.ratio = self._log_ratio(model)
        if controls:
            self._control(self.ratio, (epoch + 1) / self.method.epochs)
        if self.stops:
            return super().epoch_end(model, epoch)
        outside = controls and self.ratio > self.limit  # it cannot be the best
        if self.scores(epoch) and (self.method.latest or not outside):
            now = {name: part.detach().clone() for name, part in self.parts.items()}
            self.unscored.append((epoch, now, self.ratio if controls else None))
            if len(self.unscored) > self.room:
                self._score()
        return False

    def _log_ratio(self, model: Model) -> float:
        """log (ii), rough where it is so far below the bound that neither controller nor bound see a difference."""
        far = self.limit - MARGIN - LARGEST - MIN_GAIN
        if not self.method.pair.primary.width and self.ratio < far:  # one that was near probably still is
            rough = self.method.ratios.roughly(model, "primary")
            if rough < far:
                return rough
        return self.method.ratios.of(model, "primary")

    def _score(self) -> None:
        """Score the iterates that were not: a run that holds the bound by itself never needs their scores."""
        last = parameters_of(self.model)
        for epoch, parameters, ratio in self.unscored:
            load_into(self.model, parameters)
            self.ratio = self._log_ratio(self.model) if ratio is None else ratio
            self.compare(self.model, epoch)
        load_into(self.model, last)
        self.unscored = []

    def _control(self, ratio: float, share: float) -> None:
        """Set the factor by log (ii) after this share of the training."""
        bound = self.limit - MARGIN
        self.allowed = max(ratio, bound) if self.allowed is None else self.allowed
        remaining = max(0.0, (SETTLED - share) / (SETTLED - START))
        target = bound + remaining * (self.allowed - bound)
        violation = min(max(ratio - target, -LARGEST), LARGEST)
        self.multiplier = min(max(self.multiplier + PACE * violation, 0.0), HIGHEST)
        self.factor = math.exp(min(max(self.multiplier + REACTION * violation, 0.0), HIGHEST))
        self.acted |= self.factor > 1

    def scores(self, epoch: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch + 1 == self.method.epochs

    def score_of(self, model: Model) -> float:
        """log (i), of several tasks the smallest, where the bound is satisfied."""
        return self._smallest(model, lambda task: model.factor(task)) if self.ratio <= self.limit else -math.inf

    def _smallest(self, model: Model, factor: Callable[[Task], Tensor]) -> float:
        ratios = self.method.ratios
        return min(ratios.of_factor(factor(ratios.tasks[role]).double(), model, role) for role in ratios.harmful)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        self._score()
        own = {name: getattr(self, name) for name in ("multiplier", "factor", "allowed", "acted")}
        return super().state_dict() | own

    @torch.no_grad()
    def finish(self, model: Model) -> None:
        method, theta = self.method, model.linear_map()
        last = method.ratios.of(model, "primary")
        if last <= self.limit and not self.acted and not self.stops:
            self.unscored = []
            return  # the weights held the bound by themselves: the run is what it is without one
        self._score()
        maps = [] if theta is None or last <= self.limit else self._nearest(model, theta.double())
        super().finish(model)
        score, nearest = max(maps, key=lambda candidate: candidate[0], default=(-math.inf, None))
        if theta is not None and nearest is not None and score > self.score + MIN_GAIN:
            theta.copy_(nearest)
        elif self.score == -math.inf and last > self.limit:
            method.flags["primary_not_held"] = (
                f"no iterate has a ratio (ii) of at most method.hold_primary={math.exp(self.limit):.3g}; that of the "
                f"last one is {math.exp(last):.3g}{'; theta_0 is kept' if self.best else ''}"
            )
        if theta is not None:
            fit_head(model, probe_of_inputs(method.pair.primary))

    def _nearest(self, model: Model, theta: Tensor) -> list[tuple[float, Tensor]]:
        """Score and map, for both ways to bring theta within the bound."""
        ratios, root = self.method.ratios, self.method.pair.primary.root.double()
        kappa = math.exp(ratios.baseline(model, "primary")[1] + self.limit)
        maps = [conditioned(theta, root, kappa, raised) for raised in (True, False)]

        def score(a: Tensor) -> float:
            return self._smallest(model, lambda task: task.root.double() @ a)

        return [(score(a), a) for a in maps if a.isfinite().all()]


class HoldsPrimary(Method):
    """A method whose weight of the term that lowers kappa(H_P) is multiplied by the factor of a `Bound`.

    `hold_primary` is the largest ratio (ii) that the training may end with; "auto": `BOUND` where `holds`, else none.
    """

    hold_primary: Share | Literal["auto"] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bound: Bound | None = None

    @property
    def factor(self) -> float:
        return 1.0 if self.bound is None else self.bound.factor

    def holds(self, model: Model) -> bool:
        """Whether the ratio is bounded where `hold_primary` is "auto"."""
        raise NotImplementedError

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.follow(self.callbacks)

    def follow(self, callbacks: Sequence[Callback]) -> None:
        """Take the factor of the `Bound` among these callbacks."""
        self.bound = next((callback for callback in callbacks if isinstance(callback, Bound)), None)

    def stopping(self, model: Model, judge: Method) -> Stopping | None:
        largest = self.hold_primary
        if isinstance(largest, str):
            largest = BOUND if self.holds(model) else None
        return super().stopping(model, judge) if largest is None else Bound(judge, model, math.log(largest))
