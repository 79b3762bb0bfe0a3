"""Whether a training diverges, seen without waiting for a GPU in every step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from immunization.errors import Diverged

DIVERGENCE = 1e12  # a loss above this multiple of the first one counts as diverged
UNSEEN = 1000  # most losses that stay on a GPU


@dataclass
class Progress:
    """Where a training stands: epochs ended, steps taken, and the loss above which it has diverged."""

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
