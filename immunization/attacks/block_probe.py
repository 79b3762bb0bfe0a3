"""An attacker who reads any blocks of the net, pooled in several ways, and chooses them on validation rows."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, lru_cache, partial, reduce

import numpy as np
import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.pooling import POOLINGS, TWICE, Outputs, at_twice_the_size, outputs_of
from immunization.attacks.renewed import images_of, norms_of, renew_from
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.data.task import SPLITS, Task
from immunization.models import Model
from immunization.models.chain import Network

FEWEST = 5
"""Training images of each class at which the curve begins; every further point has twice as many."""

MOST = 3500
"""Most training images, mirror images among them, that are read."""

SEARCHED = 1000
"""Most training images on which all readings are compared; with more, those that were best on fewer are."""

CANDIDATES = 8
"""How many these are, and how many are also fitted with mirror images."""

KEPT = 1e9
"""Bytes of kernels of training and mirror images that are kept while several readings of the same parts are fitted."""

LARGEST = 4
"""Most blocks that are read side by side, apart from all of them."""

OUTPUTS, PASSES = "outputs", ("as it is", "renewed", TWICE)
"""A victim keeps outputs of blocks as (OUTPUTS, net, how, stage): how is one of PASSES, or the options of who reads."""

MEMBERS = 16
"""Most readings whose predictions are averaged."""

NOISE = 10 * torch.finfo(torch.float32).eps
"""Deviation of a column, relative to its largest value, below which it holds nothing but rounding."""


@dataclass(frozen=True)
class Reading:
    """The part of the net that a ridge regression reads.

    `root`: signed square roots of the columns, which evens out the large ones. `radial`: a Gaussian kernel of them.
    """

    blocks: tuple[str, ...]
    poolings: str
    views: int = 1
    root: bool = False
    radial: bool = False


@dataclass(frozen=True)
class Kernel:
    """Inner products of columns with mean 0 and deviation 1: `own` [n, n] of training rows, `others` [M, n] with them.

    `squares` [M] are those of other rows with themselves. Kernels of blocks side by side add up. `columns` were read.
    """

    own: Tensor
    others: Tensor
    squares: Tensor
    columns: int = 0

    def __add__(self, more: Kernel) -> Kernel:
        sums = (self.own + more.own, self.others + more.others, self.squares + more.squares)
        return Kernel(*sums, self.columns + more.columns)

    @classmethod
    def of(cls, train: Tensor, others: Tensor, root: bool = False) -> Kernel:
        """From columns [n, D] and [M, D]; those that do not vary, up to rounding, are left out."""
        alive = _deviation(train) > NOISE * train.abs().amax(0)
        train, others = (x[:, alive] for x in (train, others))
        if root:
            train, others = (x.sign() * x.abs().sqrt() for x in (train, others))
        mean, deviation = train.mean(0), _deviation(train)
        train, others = ((x - mean) / deviation for x in (train, others))
        own = torch.from_numpy(np.matmul(train.numpy(), train.numpy().T))  # by BLAS's syrk: half the time of torch's
        return cls(own, others @ train.T, others.square().sum(1), int(alive.sum()))

    def gaussian(self) -> Kernel:
        """exp(-d^2 / 2) of distances, in units in which the mean of d^2 over training rows is 1."""
        if not self.columns:
            return self
        square = self.own.diagonal()
        own = square[:, None] + square - 2 * self.own
        others = self.squares[:, None] + square - 2 * self.others
        scale = -2 * own.mean()
        return Kernel(torch.exp(own / scale), torch.exp(others / scale), torch.ones_like(self.squares), self.columns)

    def ridge_predictions(self, targets: Tensor, ridges: Sequence[float]) -> Tensor:
        """Predictions [ridges, M, C] by ridge regression with an intercept, for targets [n, C].

        Ridges are relative to the mean of the diagonal: as the smallest is far above the rounding of float64, the
        systems are solved directly.
        """
        mean, size = targets.mean(0), self.own.diagonal().mean()
        if not self.columns:
            return mean.expand(len(ridges), len(self.others), -1)
        eye = torch.eye(len(self.own), dtype=self.own.dtype)
        factors = (torch.linalg.cholesky(self.own + ridge * size * eye) for ridge in ridges)
        return torch.stack([self.others @ torch.cholesky_solve(targets - mean, factor) for factor in factors]) + mean


@dataclass(frozen=True)
class Fit:
    """A ridge regression: what it reads, its ridge, its measure on validation rows, and its operations.

    `on_val` [V, outputs] are its predictions for validation rows, and `predicted` [N, outputs] for test rows, empty
    where these have not been read.
    """

    reading: Reading
    ridge: float
    val: float
    flops: float
    on_val: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class Blend:
    """The mean prediction of fits on the same training rows, of which one may be there several times.

    `val`: its measure on validation rows. `flops`: of one pass of the net for all fits, and of their regressions.
    """

    rows: Tensor
    fits: Sequence[Fit]
    val: float
    flops: float

    @classmethod
    def of(cls, rows: Tensor, fits: Sequence[Fit], val: float, outputs: Outputs) -> Blend:
        readings = {fit.reading: fit for fit in fits}
        blocks = {block for reading in readings for block in reading.blocks}
        passes = outputs.cost(blocks, len(rows) * max(reading.views for reading in readings))
        return cls(rows, fits, val, passes + sum(fit.flops for fit in readings.values()))

    @property
    def found(self) -> list[dict[str, object]]:
        """What is read, with its weight in the mean."""
        weights = Counter((fit.reading, fit.ridge) for fit in self.fits)
        return [
            {
                "blocks": list(reading.blocks),
                "poolings": reading.poolings,
                "mirrored": reading.views > 1,
                "root": reading.root,
                "kernel": "gaussian" if reading.radial else "linear",
                "ridge": ridge,
                "weight": count / len(self.fits),
            }
            for (reading, ridge), count in weights.items()
        ]


class BlockProbe(Attack, group="attack.block_probe", without=["steps"]):
    """Ridge regression on any blocks of the net side by side, pooled in several ways, with mirror images.

    The blocks of a net are those that `forward_features` applies one after another. The best block is found first, then
    blocks are added one at a time as long as validation rows gain, then other poolings, signed square roots of what is
    read, a Gaussian kernel of it, and mirror images are tried, and the mean prediction of several of all these: one is
    added at a time, by the squared error on validation rows (Caruana et al., ICML 2004). All this is done with 5
    training images of each class, with twice as many, and so on up to all: the curve goes through what does better on
    validation rows than all that costs less. Operations are those of the part of the net that is passed, of the
    regressions, and not of the search, which `AttackCurve.others` has.

    `renewed`: BatchNorm first gets the statistics of all training images, also with `samples`. `enlarged`: images of at
    most 64 x 64 pixels are read at twice their size, too, with the statistics of these. Deep nets only.
    """

    setting_name, tries = "ridge", "ridges"
    natural_ends = True

    steps = 1
    _: KW_ONLY
    ridges: Sequence[float] = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)
    mirrored: bool = True
    renewed: bool = False
    enlarged: bool = False

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        place = (OUTPUTS, self.net, (self.renewed, self.enlarged))
        _keep(victim, lambda net, how: net == self.net and how in (place[2], *PASSES))
        outputs = victim.once((*place, stage), lambda: self.read(victim, stage))
        return self.probe(victim.task, self.readable(victim, outputs))

    @property
    def net(self) -> tuple[object, ...]:
        """What tells the net that is read, and its images, from others."""
        return type(self).read, self.precision, self.mirrored

    def readable(self, victim: Victim, outputs: Outputs) -> Outputs:
        """The outputs that the attacker reads, out of those of all blocks. Raises Inapplicable."""
        return outputs

    def read(self, victim: Victim, stage: Stage) -> Outputs:
        """The outputs of all blocks. Raises Inapplicable."""
        return self.outputs(victim, stage, lambda: victim.network(stage, self.precision), self.renewed)

    def outputs(self, victim: Victim, stage: Stage, network: Callable[[], Network], renewed: bool | None) -> Outputs:
        """The outputs of all blocks of copies of a net, also at twice the size where images are `enlarged`.

        `renewed` None: if the net has BatchNorm, which is the rule at twice the size. A net without BatchNorm cannot be
        renewed, and raises Inapplicable unless it is read at twice the size.
        """
        images = images_of(victim)
        larger = at_twice_the_size(network(), images["train"]) if self.enlarged else None
        own = network()
        normed = bool(norms_of(own))
        renewed = normed if renewed is None or (renewed and larger) else renewed
        once = PASSES[renewed]
        _keep(victim, lambda _, how: how not in PASSES or how == once or (how == TWICE and larger is not None))
        found = victim.once((OUTPUTS, self.net, once, stage), lambda: self._passed(own, images, renewed))
        if larger is None:
            return found
        twice = (OUTPUTS, self.net, TWICE, stage)
        return found.beside(victim.once(twice, lambda: self._passed(larger, images, normed)))

    def _passed(self, network: Network, images: Mapping[str, Tensor], renewed: bool) -> Outputs:
        rows = renew_from(network, images["train"]) if renewed else 0
        return outputs_of(network, images, self.mirrored, rows)

    def probe(self, task: Task, outputs: Outputs) -> AttackCurve:
        """The curve of the best readings of `outputs` within any number of operations."""
        everything = self.rows(task)
        everything = torch.arange(len(task.train)) if everything is None else everything
        blends: list[Blend] = []
        searched, found = 0.0, []
        for rows in nested(task, everything, self.seed):
            known = best_readings(found) if len(rows) > SEARCHED else ()
            key = (known, *self.settings, *rows.tolist())  # those of few images are among those of more
            found, spent = outputs.once(key, partial(self._search, task, outputs, rows, known))
            blends += [Blend.of(rows, [fit], fit.val, outputs) for fit in found]
            blends.append(blended(task, outputs, rows, found))
            searched += spent
        most = max(len(blend.rows) for blend in blends)
        mirrored = max(len(blend.rows) * (fit.reading.views - 1) for blend in blends for fit in blend.fits)
        searched += outputs.cost(outputs.blocks, most + mirrored)  # one pass for all readings
        best: list[Blend] = []
        for blend in sorted(blends, key=lambda blend: blend.flops):
            if not best or (blend.val, len(blend.rows)) > (best[-1].val, len(best[-1].rows)):
                best.append(blend)
        predicted = torch.stack([self._predicted(task, outputs, blend) for blend in best])
        last = best[-1]
        return AttackCurve(
            steps=torch.tensor([len(blend.rows) for blend in best]),
            flops=torch.tensor([blend.flops for blend in best], dtype=torch.float64),
            val=torch.tensor([blend.val for blend in best], dtype=torch.float64),
            test=task.measure(predicted, task.test.y.cpu()),
            scores=task.scores(predicted, task.test.y.cpu()),
            setting=last.fits[0].ridge,
            others=max(0.0, searched - last.flops),
            path=False,
            found={"readings": last.found},
        )

    def _search(self, task: Task, outputs: Outputs, rows: Tensor, known: Sequence[Reading]) -> tuple[list[Fit], float]:
        """Fits on some training rows: of every block, of blocks side by side, and of variations of the best of them.

        Only of the readings `known`, if there are any. And the operations of all regressions, also of those on fewer
        rows, which only say what to read.
        """
        tried = [] if known else self._tried(task, outputs, rows[:: math.ceil(len(rows) / SEARCHED)])
        kept = tried if len(rows) <= SEARCHED else []
        views = {1, outputs.views if len(rows) * outputs.views <= MOST else 1} - {fit.reading.views for fit in kept}
        kernel = _kernels(outputs, rows)
        readings = [replace(reading, views=n) for n in sorted(views) for reading in known or best_readings(tried)]
        made = [self._fit(task, outputs, reading, rows, kernel, self.settings) for reading in readings]
        return kept + made, sum(fit.flops for fit in tried + made)

    def _tried(self, task: Task, outputs: Outputs, few: Tensor) -> list[Fit]:
        """Fits of all readings that are compared, without mirror images. Raises Inapplicable."""
        kernel = cache(partial(_kernel, outputs, few, SPLITS[:2]))

        def tried(readings: Iterable[Reading]) -> list[Fit]:
            return [self._fit(task, outputs, reading, few, kernel, self.settings) for reading in readings]

        def grown(poolings: str) -> list[Fit]:
            """Of every block, and of the best one with one block more at a time as long as that gains."""
            found = tried(Reading((block,), poolings) for block in outputs.blocks)
            best = max(found, key=_val)
            while len(best.reading.blocks) < min(LARGEST, len(outputs.blocks)):
                own = best.reading.blocks
                larger = tried(Reading((*own, block), poolings) for block in outputs.blocks if block not in own)
                found = found + larger
                if max(larger, key=_val).val <= best.val:
                    break
                best = max(larger, key=_val)
            return found

        if not sum(kernel(block, pooling, 1, False).columns for block, pooling in outputs.parts):
            raise Inapplicable("no block of the net tells the images of the harmful task apart")
        whole_net = tuple(outputs.blocks)
        fits = tried([*(Reading((block,), "average") for block in whole_net), Reading(whole_net, "rich")])
        fits += grown("rich") + grown("covariance")
        chosen = max(fits, key=_val).reading
        fits += tried(Reading(chosen.blocks, name) for name in POOLINGS if name != chosen.poolings)
        several = dict.fromkeys([max(fits, key=_val).reading, Reading(whole_net, "fine")])
        ways = ((True, False), (False, True), (True, True))
        return fits + tried(replace(reading, root=root, radial=radial) for reading in several for root, radial in ways)

    def _fit(
        self,
        task: Task,
        outputs: Outputs,
        reading: Reading,
        rows: Tensor,
        kernel: Callable[[str, str, int, bool], Kernel],
        ridges: Sequence[float],
    ) -> Fit:
        """The best ridge on validation rows; one whose columns do not vary guesses."""
        views, y = reading.views, task.train.y.cpu()[rows].repeat(reading.views)
        everything = list(itertools.product(reading.blocks, POOLINGS[reading.poolings]))
        parts = [part for part in everything if part in outputs.parts] or everything[:1]
        read = reduce(operator.add, (kernel(*part, views, reading.root) for part in parts))
        read = read.gaussian() if reading.radial else read
        predicted = read.ridge_predictions(task.targets(y), ridges)
        predicted = predicted.unflatten(1, (views, -1)).mean(1)
        val = task.measure(predicted[:, : len(task.val)], task.val.y.cpu())
        best, n = int(val.argmax()), len(y)
        flops = 2.0 * n**2 * read.columns + n**3 / 3
        on_val, on_test = predicted[best].clone().tensor_split([len(task.val)])  # fits are kept, other ridges are not
        return Fit(reading, ridges[best], val[best].item(), flops, on_val, on_test)

    def _predicted(self, task: Task, outputs: Outputs, blend: Blend) -> Tensor:
        """Predictions for test rows."""
        kernel = _kernels(outputs, blend.rows)

        @cache
        def of(reading: Reading, ridge: float) -> Tensor:
            return self._fit(task, outputs, reading, blend.rows, kernel, [ridge]).predicted

        own = [fit.predicted if len(fit.predicted) else of(fit.reading, fit.ridge) for fit in blend.fits]
        return torch.stack(own).mean(0)


def best_readings(fits: Sequence[Fit]) -> tuple[Reading, ...]:
    """The `CANDIDATES` that do best on validation rows, without their mirror images."""
    ranked = sorted(fits, key=_val, reverse=True)
    return tuple(dict.fromkeys(replace(fit.reading, views=1) for fit in ranked))[:CANDIDATES]


def blended(task: Task, outputs: Outputs, rows: Tensor, fits: Sequence[Fit]) -> Blend:
    """Fits added one at a time for the least mean squared error on validation rows, up to the best measure on them."""
    predicted = torch.stack([fit.on_val for fit in fits])
    labels, total = task.val.y.cpu(), torch.zeros_like(predicted[0])
    targets = task.targets(labels)
    chosen: list[Fit] = []
    means: list[Tensor] = []
    for count in range(1, MEMBERS + 1):
        errors = ((total + predicted) / count - targets).square().mean((1, 2))
        best = int(errors.argmin())
        chosen.append(fits[best])
        total = total + predicted[best]
        means.append(total / count)
    val = task.measure(torch.stack(means), labels)
    count = int(val.argmax()) + 1
    return Blend.of(rows, chosen[:count], val[count - 1].item(), outputs)


class FrozenBlocks(BlockProbe, group="attack.frozen_blocks", without=["steps"]):
    """`BlockProbe` on the blocks before a part of the net: no defense of this part can stop it.

    `scope` is where that part begins: at `trained`, what was immunized, or at a block or stage, by its name.
    """

    scope: str = "trained"
    enlarged = True

    def check(self, task: Task, model: Model) -> None:
        if model.deep and self.scope != "trained":
            model.network().part(self.scope)

    def untouched(self, victim: Victim) -> bool:
        return victim.same_outside(self.scope)

    def readable(self, victim: Victim, outputs: Outputs) -> Outputs:
        before = victim.once(("before", self.scope), lambda: self._before(victim, outputs.blocks))
        if not before:
            raise Inapplicable(f"attack.*.scope={self.scope}: no block of the net stands before it")
        own = tuple(block for block in outputs.blocks if block.removesuffix(TWICE) in before)
        return outputs.once(own, lambda: outputs.of(own))

    def _before(self, victim: Victim, blocks: Sequence[str]) -> set[str]:
        network = victim.network("baseline")
        part = {parameter for module in network.part(self.scope) for parameter in module.parameters()}
        modules = dict(network.whole.blocks())
        once = [block for block in blocks if not block.endswith(TWICE)]
        return set(itertools.takewhile(lambda block: part.isdisjoint(modules[block].parameters()), once))


def _keep(victim: Victim, wanted: Callable[[object, object], bool]) -> None:
    """Drop the outputs of blocks that are not `wanted` (net, how), as those of several nets may not fit into memory."""
    for key in [key for key in victim.once if key[0] == OUTPUTS and not wanted(*key[1:3])]:
        del victim.once[key]


def _deviation(x: Tensor) -> Tensor:
    return (x - x.mean(0)).square().mean(0).sqrt()


def _val(fit: Fit) -> float:
    return fit.val


def _kernel(
    outputs: Outputs, rows: Tensor, splits: Sequence[str], block: str, pooling: str, views: int, root: bool
) -> Kernel:
    """That of one pooling of a block; training rows of all views below each other, then other rows of each view."""
    train, *others = (outputs.columns(block, pooling, split)[:views].double() for split in splits)
    return Kernel.of(train[:, rows].flatten(0, 1), torch.cat(others, 1).flatten(0, 1), root)


def _kernels(outputs: Outputs, rows: Tensor) -> Callable[[str, str, int, bool], Kernel]:
    """`_kernel` for all splits, of which the last used are kept."""
    others = sum(outputs.columns("", "", split).shape[1] for split in SPLITS[1:])
    size = 8 * outputs.views**2 * len(rows) * (len(rows) + others)
    return lru_cache(max(1, int(KEPT / size)))(partial(_kernel, outputs, rows, SPLITS))


def nested(task: Task, rows: Tensor, seed: int) -> Iterator[Tensor]:
    """Growing parts of training rows: `FEWEST` of each class, twice as many, and so on to all, but at most `MOST`."""
    chosen, count = set(rows.tolist()), FEWEST
    while True:
        own = torch.tensor([row for row in task.few(count, seed).tolist() if row in chosen])
        if len(own) >= min(len(rows), MOST):
            break
        yield own
        count *= 2
    yield own if len(own) <= MOST else own[torch.linspace(0, len(own) - 1, MOST).long()]
