"""The one training loop that all methods share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from immunization.errors import Diverged
from immunization.methods.base import Method
from immunization.models.base import Model
from immunization.training.batches import PairedBatches
from immunization.training.loaders import LoaderBatches

DIVERGENCE = 1e12
"""A loss above this multiple of the first one counts as diverged."""


@dataclass
class Progress:
    """Where a training stands: epochs ended, steps taken, and the loss above which it has diverged."""

    epoch: int = 0
    step: int = 0
    limit: float = math.inf


def train(
    method: Method,
    model: Model,
    batches: PairedBatches | LoaderBatches,
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[int, dict[str, Tensor]], None] = lambda step, terms: None,
    progress: Progress | None = None,
    scheduler: LRScheduler | None = None,
    most: int | None = None,
) -> int:
    """Run `method` for its epochs and return the number of steps taken.

    `on_step(step, terms)` sees every step (counted from 1) after the update. `progress` is where to go on, and is
    kept up to date. `scheduler` steps after every step of `optimizer` (ReduceLROnPlateau is told the loss), and the
    learning rate of the step joins its terms as `lr`. After step `most` it ends, wherever its epoch is. Raises
    Diverged on a non-finite loss, or one above 1e12 times the first; the parameters are then those before the bad
    step.
    """
    at = Progress() if progress is None else progress
    while at.epoch < method.epochs:
        for primary, harmful in batches.epoch():
            try:
                terms = method.step(model, primary, harmful)
                value = terms["loss"].item()
            except torch.linalg.LinAlgError:  # a decomposition of non-finite features
                value = math.nan
            if at.step == 0:
                at.limit = DIVERGENCE * max(abs(value), 1.0)
            if not (math.isfinite(value) and value <= at.limit):
                raise Diverged(
                    f"{type(method).__name__} diverged at step {at.step + 1} (loss {value:.3g}); lower optimizer.lr "
                    "or the weights in method.*"
                )
            optimizer.zero_grad()
            terms["loss"].backward()
            optimizer.step()
            if scheduler is not None:
                rate = torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64)
                terms = {**terms, "lr": rate}
                scheduler.step(*[value] if isinstance(scheduler, ReduceLROnPlateau) else ())
            at.step += 1
            on_step(at.step, terms)
            if at.step == most:
                return at.step
        ended = method.epoch_end(model, at.epoch)
        at.epoch = method.epochs if ended else at.epoch + 1
    return at.step
