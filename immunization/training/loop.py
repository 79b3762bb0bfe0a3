"""The training loop, and a check for divergence that does not wait for the GPU in every step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from immunization.errors import Diverged
from immunization.methods.base import Method, checked_step
from immunization.models.base import Model
from immunization.training.batches import Batches

DIVERGENCE = 1e12  # a loss above this multiple of the first one counts as diverged
UNSEEN = 1000  # most losses that stay on a GPU


@dataclass
class Progress:
    """The progress of a training: epochs ended, steps taken, and the loss above which it has diverged."""

    epoch: int = 0
    step: int = 0
    limit: float = math.inf


class Watch:
    """Judges the loss of every step: on a CPU at once, on a GPU together with those before whenever it is looked at.

    As a context, it also looks at the end and before an error leaves, which may have met what a bad step left behind.
    """

    def __init__(self, name: str, at: Progress) -> None:
        self.name, self.at = name, at
        self.unseen: list[tuple[int, Tensor]] = []

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.look()

    def see(self, loss: Tensor, look: bool) -> None:
        """Take the loss of the step to come; `look`: also where that means to wait for a GPU. Raises Diverged."""
        self.unseen.append((self.at.step + 1, loss.detach()))
        if look or loss.device.type == "cpu" or self.at.step == 0 or len(self.unseen) == UNSEEN:
            self.look()

    def look(self) -> None:
        """Judge all losses that were not looked at; raises Diverged."""
        steps, losses = [step for step, _ in self.unseen], [loss for _, loss in self.unseen]
        self.unseen = []
        for step, value in zip(steps, torch.stack(losses).tolist() if losses else (), strict=True):
            self._judge(step, value)

    def failed(self) -> None:
        """Say that a decomposition of non-finite features failed in the step to come; raises Diverged."""
        self.look()
        self._judge(self.at.step + 1, math.nan)

    def _judge(self, step: int, value: float) -> None:
        if step == 1:
            self.at.limit = DIVERGENCE * max(abs(value), 1.0)
        if not (math.isfinite(value) and value <= self.at.limit):
            raise Diverged(
                f"{self.name} diverged at step {step} (loss {value:.3g}); lower optimizer.lr or the weights in method.*"
            )


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
            end_epoch(method, model, at)
    return at.step


def end_epoch(method: Method, model: Model, at: Progress) -> None:
    """Tell a method and its callbacks that an epoch has ended: the last one of the training, if one of them says so."""
    ended = [hook.epoch_end(model, at.epoch) for hook in (method, *method.callbacks)]
    at.epoch = method.epochs if any(ended) else at.epoch + 1
