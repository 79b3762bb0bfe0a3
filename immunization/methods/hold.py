"""Condition (b) of Definition 3.1 as a constraint on a training (docs/theory.md, section 3)."""

import math
from dataclasses import KW_ONLY
from typing import Any, Literal

import torch
from torch import Tensor

from immunization.checks import Share
from immunization.data.task import TaskPair
from immunization.methods.base import MIN_GAIN, Method
from immunization.methods.linear_map import fit_head, probe_of_inputs
from immunization.models import Model
from immunization.theory.optimal_map import conditioned
from immunization.theory.products import SMALL

BOUND = 0.99
"""Largest ratio (ii) of `hold_primary="auto"`."""

MARGIN = 0.01
"""The ascent aims at log (ii) this much below the bound, so that it comes to rest on the right side."""
PACE, REACTION, LARGEST = 2.0, 10.0, 0.3
"""Gain of the ascent, of the violation itself, and the largest violation |log (ii) / bound| that counts."""
HIGHEST = 6.0
"""Largest log of the factor on lambda_P: beyond, R_well is all that an optimizer sees."""
START, SETTLED = 0.25, 0.5
"""Shares of the training: before the first the weights are left alone, since those that will hold kappa(H_P) often let
it rise first; up to the second, what is allowed falls from (ii) at the first to the bound."""
SELDOM = 5
"""Epochs between two looks at models of more than `SMALL` features, whose condition numbers cost more than a step."""


class Hold(Method):
    """A method whose ratio (ii) = kappa(H_P) / kappa(K_P) ends at most at `hold_primary`, where ratio (i) is largest.

    After `START` of the training `factor` multiplies lambda_P: the exponential of a multiplier that rises with
    log((ii) / bound) in every epoch, and falls to 0 at most. A run that needed it ends with the iterate of the largest
    (i) among those within the bound. Where theta is a linear map and the last iterate is outside, the nearest maps
    within it (`conditioned`) compete.
    "auto" is `BOUND` where `holds_by_default`, None takes weights as they are.
    """

    _: KW_ONLY
    hold_primary: Share | Literal["auto"] | None = "auto"

    def holds_by_default(self, model: Model) -> bool:
        raise NotImplementedError

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        bound = self.hold_primary
        if bound == "auto":
            bound = BOUND if self.holds_by_default(model) else None
        self.limit = None if bound is None else math.log(bound)
        self.multiplier, self.factor = 0.0, 1.0
        self.allowed: float | None = None
        self.acted, self.ratio = False, None
        if bound is not None:
            self.every = SELDOM if pair.dim > SMALL else 1

    def _ratio(self, model: Model) -> float:
        """log (ii) after this epoch, computed once."""
        if self.ratio is None:
            self.ratio = self.log_ratio(model, "primary")
        return self.ratio

    def epoch_end(self, model: Model, epoch: int) -> bool:
        self.ratio = None
        if self._looks(epoch) and epoch + 1 >= START * self.epochs:
            self._ascend(self._ratio(model), (epoch + 1) / self.epochs)
        return super().epoch_end(model, epoch)

    def _ascend(self, ratio: float, share: float) -> None:
        """A step of the multiplier at this log (ii), after this share of the training."""
        bound = self.limit - MARGIN
        self.allowed = max(ratio, bound) if self.allowed is None else self.allowed
        early = max(0.0, (SETTLED - share) / (SETTLED - START))
        violation = ratio - bound - early * (self.allowed - bound)
        violation = max(-LARGEST, min(LARGEST, violation))
        self.multiplier = max(0.0, min(HIGHEST, self.multiplier + PACE * violation))
        self.factor = math.exp(max(0.0, min(HIGHEST, self.multiplier + REACTION * violation)))
        self.acted |= self.factor > 1

    def _looks(self, epoch: int) -> bool:
        return self.limit is not None and ((epoch + 1) % self.every == 0 or epoch + 1 == self.epochs)

    def takes_score(self, epoch: int) -> bool:
        return super().takes_score(epoch) if self.limit is None else self._looks(epoch)

    def score(self, model: Model) -> float:
        """log (i) where the bound is satisfied; without a bound, that of every method."""
        if self.limit is None:
            return super().score(model)
        return self.log_ratio(model, "harmful") if self._ratio(model) <= self.limit else -math.inf

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            name: getattr(self, name) for name in ("multiplier", "factor", "allowed", "acted")
        }

    def keeps_last(self, model: Model) -> bool:
        """Whether the weights held the bound by themselves: the run is what it is without one."""
        free = not self.acted and self.patience is None and self.max_accuracy_drop is None
        return free and self.limit is not None and self.log_ratio(model, "primary") <= self.limit

    @torch.no_grad()
    def finish(self, model: Model) -> None:
        if self.limit is None:
            return super().finish(model)
        if self.keeps_last(model):
            return None
        theta, last = model.linear_map(), self.log_ratio(model, "primary")
        found = [] if theta is None or last <= self.limit else self._nearest(model, theta.double())
        super().finish(model)
        ratio, nearest = max(found, key=lambda one: one[0], default=(-math.inf, None))
        if ratio > self.best[0] + MIN_GAIN:
            theta.copy_(nearest)
        elif self.best[0] == -math.inf and last > self.limit:
            self.flags["primary_not_held"] = (
                f"no iterate has a ratio (ii) of at most method.hold_primary={math.exp(self.limit):.3g}; that of the "
                f"last one is {math.exp(last):.3g}{'; theta_0 is kept' if self.best[2] else ''}"
            )
        if theta is not None:
            fit_head(model, probe_of_inputs(self.pair.primary))

    def _nearest(self, model: Model, theta: Tensor) -> list[tuple[float, Tensor]]:
        """log (i) and the map, for both ways to bring theta within the bound."""
        root, kappa = self.pair.primary.root.double(), math.exp(self.baseline(model, "primary")[1] + self.limit)
        maps = [conditioned(theta, root, kappa, raised) for raised in (True, False)]
        harmful, (rank, before) = self.pair.harmful, self.baseline(model, "harmful")
        return [
            (math.log(harmful.condition_number(harmful.root.double() @ a, rank)) - before, a)
            for a in maps
            if a.isfinite().all()
        ]
