"""An attacker who reads any blocks of the net, pooled in several ways, and chooses them on validation rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.pooling import POOLINGS, Outputs, outputs_of
from immunization.attacks.renewed import images_of, renew_from
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.data.task import SPLITS, Task

FEWEST = 5
"""Training images of each class at which the curve begins; every further point has twice as many."""

SEARCHED = 1000
"""Most training images on which sets of blocks are compared."""

LARGEST = 4
"""Most blocks that are read side by side, apart from all of them."""

NOISE = 10 * torch.finfo(torch.float32).eps
"""Deviation of a column, relative to its largest value, below which it holds nothing but rounding."""


@dataclass(frozen=True)
class Reading:
    """What of the net a ridge regression reads."""

    blocks: tuple[str, ...]
    poolings: str
    views: int = 1


@dataclass(frozen=True)
class Fit:
    """A ridge regression: what it reads, its ridge, its measure on validation rows and the operations it takes."""

    reading: Reading
    ridge: float
    val: float
    flops: float
    predicted: Tensor
    """For test rows, [N, outputs]."""


class BlockProbe(Attack, group="attack.block_probe", without=["steps"]):
    """Ridge regression on any blocks of the net side by side, pooled in several ways, with mirror images.

    The blocks of a net are those that `forward_features` applies one after another. The best block is found first, then
    blocks are added one at a time as long as validation rows gain, then other poolings and mirror images are tried. All
    this is done with 5 training images of each class, with twice as many, and so on up to all: the curve goes through
    the readings that do better on validation rows than all that cost less. Operations are those of the part of the net
    that is passed, of the regression, and not of the search, which `AttackCurve.found` has.

    `renewed`: BatchNorm first gets the statistics of the attacker's training images. Deep nets only.
    """

    setting_name, tries = "ridge", "ridges"
    natural_ends = True

    steps = 1
    _: KW_ONLY
    ridges: Sequence[float] = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)
    mirrored: bool = True
    renewed: bool = False

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        key = ("outputs", type(self), stage, self.precision, self.mirrored, self.renewed)
        outputs, extra = victim._once(key, lambda: self.read(victim, stage))
        return self.probe(victim.task, outputs, extra)

    def read(self, victim: Victim, stage: Stage) -> tuple[Outputs, float]:
        """The outputs of all blocks, and the operations of what was done to the net before. Raises Inapplicable."""
        network, images = victim.network(stage, self.precision), images_of(victim)
        passes = renew_from(network, images["train"], None) if self.renewed else 0
        return outputs_of(network, images, self.mirrored), victim.flops_per_row() * passes

    def probe(self, task: Task, outputs: Outputs, extra: float = 0.0) -> AttackCurve:
        """The curve of the best readings of `outputs` within any number of operations; `extra` are paid by each."""
        everything = self.rows(task)
        everything = torch.arange(len(task.train)) if everything is None else everything
        fits: list[tuple[int, Fit]] = []
        searched = 0.0
        for rows in nested(task, everything, self.seed):
            for fit in self._search(task, outputs, rows):
                fits.append((len(rows), fit))
                searched += fit.flops
        best: list[tuple[int, Fit]] = []
        for rows, fit in sorted(fits, key=lambda item: item[1].flops):
            if not best or (fit.val, rows) > (best[-1][1].val, best[-1][0]):
                best.append((rows, fit))
        predicted = torch.stack([fit.predicted for _, fit in best])
        last = best[-1][1]
        return AttackCurve(
            steps=torch.tensor([rows for rows, _ in best]),
            flops=torch.tensor([fit.flops + extra for _, fit in best], dtype=torch.float64),
            val=torch.tensor([fit.val for _, fit in best], dtype=torch.float64),
            test=task.measure(predicted, task.test.y.cpu()),
            scores=task.scores(predicted, task.test.y.cpu()),
            setting=last.ridge,
            found={
                "blocks": list(last.reading.blocks),
                "poolings": last.reading.poolings,
                "mirrored": last.reading.views > 1,
                "ridge": last.ridge,
                "search_flops": searched,
            },
        )

    def _search(self, task: Task, outputs: Outputs, rows: Tensor) -> Iterator[Fit]:
        """Fits on some training rows: of every block, of blocks side by side, and of variations of the best of them."""
        few = rows[:: math.ceil(len(rows) / SEARCHED)]

        def tried(readings: Iterator[Reading] | Sequence[Reading]) -> list[Fit]:
            found = (self._fit(task, outputs, reading, few) for reading in readings)
            return [fit for fit in found if fit is not None]

        single = tried([Reading((block,), poolings) for block in outputs.blocks for poolings in ("average", "rich")])
        if not single:
            raise Inapplicable("no block of the net tells the images of the harmful task apart")
        fits = single + tried([Reading(tuple(outputs.blocks), "rich")])
        best = max((fit for fit in single if fit.reading.poolings == "rich"), key=_val)
        while len(best.reading.blocks) < min(LARGEST, len(outputs.blocks)):
            own = best.reading.blocks
            larger = tried([Reading((*own, block), "rich") for block in outputs.blocks if block not in own])
            fits += larger
            better = max(larger, key=_val)
            if better.val <= best.val:
                break
            best = better
        best = max(fits, key=_val)
        blocks = best.reading.blocks
        fits += tried([Reading(blocks, name) for name in POOLINGS if name != best.reading.poolings])
        best = max(fits, key=_val)
        if len(few) < len(rows):
            fits = [fit for fit in (self._fit(task, outputs, best.reading, rows),) if fit is not None]
        yield from fits
        views = next(iter(outputs.parts.values()))["train"].shape[0]
        if views > 1:
            best = max(fits, key=_val)
            mirrored = self._fit(task, outputs, Reading(best.reading.blocks, best.reading.poolings, views), rows)
            yield from [] if mirrored is None else [mirrored]

    def _fit(self, task: Task, outputs: Outputs, reading: Reading, rows: Tensor) -> Fit | None:
        """The best ridge; None where nothing that is read varies."""
        parts = [outputs.columns(reading.blocks, reading.poolings, split)[: reading.views].double() for split in SPLITS]
        train, y = parts[0][:, rows].flatten(0, 1), task.train.y.cpu()[rows].repeat(reading.views)
        mean, largest = train.mean(0), train.abs().amax(0)
        deviation = train.std(0, correction=0)
        alive = deviation > NOISE * largest
        if not alive.any():
            return None
        train, val, test = ((x[..., alive] - mean[alive]) / deviation[alive] for x in (train, *parts[1:]))
        targets = task.targets(y)
        predicted = ridge_predictions(train, targets, torch.cat([val, test], 1).flatten(0, 1), self.settings)
        predicted = predicted.unflatten(1, (reading.views, -1)).mean(1)
        found = task.measure(predicted[:, : val.shape[1]], task.val.y.cpu())
        best = int(found.argmax())
        n, d = train.shape
        small = min(n, d)
        flops = outputs.cost(reading.blocks) * n + 2.0 * n * d * small + small**3 / 3
        return Fit(reading, self.settings[best], found[best].item(), flops, predicted[best, val.shape[1] :])


def _val(fit: Fit) -> float:
    return fit.val


def nested(task: Task, rows: Tensor, seed: int) -> Iterator[Tensor]:
    """Growing parts of training rows, those that have `FEWEST`, 2 `FEWEST` ... of each class, and all of them."""
    chosen, count = set(rows.tolist()), FEWEST
    while True:
        own = torch.tensor([row for row in task.few(count, seed).tolist() if row in chosen])
        if len(own) >= len(rows):
            break
        yield own
        count *= 2
    yield rows


def ridge_predictions(train: Tensor, targets: Tensor, others: Tensor, ridges: Sequence[float]) -> Tensor:
    """Predictions [ridges, M, C] for `others` [M, D] by ridge regression with an intercept on `train` [N, D].

    Columns have mean 0. Ridges are relative to the mean eigenvalue of the smaller Gram matrix; as the smallest is far
    above the rounding of float64, that matrix is solved directly.
    """
    n, d = train.shape
    mean = targets.mean(0)
    gram = train @ train.T if n <= d else train.T @ train
    right = targets - mean if n <= d else train.T @ (targets - mean)
    left = others @ train.T if n <= d else others
    size = gram.diagonal().mean()
    eye = torch.eye(len(gram), dtype=gram.dtype)
    return (
        torch.stack(
            [left @ torch.cholesky_solve(right, torch.linalg.cholesky(gram + ridge * size * eye)) for ridge in ridges]
        )
        + mean
    )
