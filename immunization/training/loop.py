"""The one training loop that all methods share."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from immunization.methods.base import Method, checked_step
from immunization.models.base import Model
from immunization.training.batches import Batches
from immunization.training.divergence import Progress, Watch


def train(
    method: Method,
    model: Model,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[int, dict[str, Tensor]], None] = lambda step, terms: None,
    progress: Progress | None = None,
    scheduler: LRScheduler | None = None,
    most: int | None = None,
    logged: Callable[[int], bool] = lambda step: True,
) -> int:
    """Run `method` for its epochs and return the number of steps taken.

    `on_step(step, terms)` sees every step (counted from 1) after the update. `progress` is where to go on, and is kept
    up to date. `scheduler` steps after every step of `optimizer` (ReduceLROnPlateau is told the loss); the learning
    rate joins the terms as `lr`. Training ends after step `most`. Raises ConfigError for a step without a loss, and
    Diverged on a non-finite loss, or one above 1e12 times the first; what `optimizer` trains is then as before the bad
    step, on a GPU as before the look at it, which comes with `logged` steps and at the end.
    """
    at = Progress() if progress is None else progress
    most = math.inf if most is None else most
    told = isinstance(scheduler, ReduceLROnPlateau)
    with Watch(type(method).__name__, at) as watch:
        while at.epoch < method.epochs and at.step < most:
            for primary, *harmful in batches.epoch():
                try:
                    terms = checked_step(method, model, primary, *harmful)
                except torch.linalg.LinAlgError:
                    watch.failed()
                watch.see(terms["loss"], told or logged(at.step + 1))
                optimizer.zero_grad()
                terms["loss"].backward()
                optimizer.step()
                if scheduler is not None:
                    rate = torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64)
                    scheduler.step(*[terms["loss"].item()] if told else ())
                    terms = {**terms, "lr": rate}
                at.step += 1
                on_step(at.step, terms)
                if at.step >= most:
                    return at.step
            ended = [hook.epoch_end(model, at.epoch) for hook in (method, *method.callbacks)]
            at.epoch = method.epochs if any(ended) else at.epoch + 1
    return at.step
