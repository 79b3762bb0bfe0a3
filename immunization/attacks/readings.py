"""Readings of block outputs: fitting, comparison on validation rows, and averaging."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from immunization.attacks.base import AttackCurve, as_outputs
from immunization.attacks.kernels import Kernel, Rule, Solved, predicted_by, probabilities, regression_of
from immunization.attacks.pooling import POOLINGS, Outputs, Remembered
from immunization.data.task import SPLITS, Task
from immunization.errors import Inapplicable

FEWEST = 5
"""Training images of each class at which the curve begins; every further point has twice as many."""

MOST = 3500
"""Most training images that are read."""

SEARCHED = 400
"""Most training images on which all readings are compared; with more, the best `CANDIDATES` on fewer are."""

KEPT = 10**9
"""Bytes of kernels that are kept at a time while several readings of the same parts are fitted, and then let go of."""

CANDIDATES = 16
"""Readings that are also fitted without mirror images, and on many training images."""

LARGEST = 4
"""Most blocks that are read side by side, apart from all of them."""

MEMBERS = 16
"""Most readings whose predictions are averaged."""

BY_ERROR = operator.attrgetter("error")


@dataclass(frozen=True)
class Reading:
    """The part of the net that is read, averaged over so many `views`: the image and, as the second, its mirror image.

    `root`: signed square roots of the columns, which evens out the large ones. `radial`: a Gaussian kernel of them.
    """

    blocks: tuple[str, ...]
    poolings: str
    views: int = 1
    root: bool = False
    radial: bool = False


@dataclass(eq=False)
class Fit:
    """What is read, by which rule, and the operations.

    `on_val` [V, outputs] are predictions for validation rows, for classes their probabilities, with their squared
    `error` and their measure `val`. `predicted` [N, outputs] are those for test rows, empty until these are read.
    `solved` is the regression, None where it guesses.
    """

    reading: Reading
    rule: Rule
    error: float
    val: float
    flops: float
    on_val: Tensor
    predicted: Tensor
    solved: Solved | None = None

    def nbytes(self, tested: int) -> int:
        """Bytes with the predictions for so many test rows, which come later."""
        rows = len(self.on_val) + tested
        return rows * self.on_val[:1].nbytes + (self.solved[0].nbytes if self.solved else 0)


@dataclass(frozen=True)
class Blend:
    """The mean prediction of fits on the same training rows, of which one may be there several times.

    `error` and `val` are those of `Fit`. `flops`: of one pass of the net for all fits, and of their regressions.
    """

    rows: Tensor
    fits: Sequence[Fit]
    error: float
    val: float
    flops: float

    @classmethod
    def of(cls, rows: Tensor, fits: Sequence[Fit], error: float, val: float, outputs: Outputs) -> Blend:
        readings = {fit.reading: fit for fit in fits}
        blocks = {block for reading in readings for block in reading.blocks}
        passes = outputs.cost(blocks, len(rows) * max(reading.views for reading in readings))
        return cls(rows, fits, error, val, passes + sum(fit.flops for fit in readings.values()))

    @property
    def described(self) -> list[dict[str, object]]:
        """What is read, with its weight in the mean."""
        weights = Counter((fit.reading, fit.rule) for fit in self.fits)
        return [
            {
                "blocks": list(reading.blocks),
                "poolings": reading.poolings,
                "mirrored": reading.views > 1,
                "root": reading.root,
                "kernel": "gaussian" if reading.radial else "linear",
                "rule": "discriminant" if rule.discriminant else "regression",
                "ridge": rule.ridge,
                "weight": count / len(self.fits),
            }
            for (reading, rule), count in weights.items()
        ]


@dataclass
class Fitter:
    """Fits readings of `outputs` on some training rows, by every ridge, and predicts rows of other splits."""

    task: Task
    outputs: Outputs
    rows: Tensor
    ridges: Sequence[float]
    rules: list[Rule] = field(init=False)

    def __post_init__(self) -> None:
        kinds = (False, True) if self.task.classes else (False,)
        self.rules = [Rule(ridge, discriminant) for discriminant in kinds for ridge in self.ridges]
        self.kernels = Remembered(KEPT)
        self.asked = hashlib.sha256(self.rows.numpy().tobytes()).digest()
        self.targets = targets_of(self.task, self.task.train.y.cpu()[self.rows])

    def fit(self, reading: Reading, rules: Sequence[Rule] = ()) -> Fit:
        """By the best of `rules` on validation rows, or of all; where no column varies it guesses."""
        rules = tuple(rules or self.rules)
        key = reading, self._origin(reading.blocks), rules, self.asked
        size = len(self.task.test)
        return self.outputs.remembered(key, partial(self._fit, reading, rules), lambda fit: fit.nbytes(size))

    def _fit(self, reading: Reading, rules: Sequence[Rule]) -> Fit:
        kernel = self.kernel_of(reading)
        return best_fit(self.task, self.rows, reading, kernel.gaussian() if reading.radial else kernel, rules)

    def kernel_of(self, reading: Reading, splits: Sequence[str] = SPLITS[:2]) -> Kernel:
        """That of training rows, with rows of the other splits."""
        groups = itertools.product(reading.blocks, POOLINGS[reading.poolings])
        return reduce(operator.add, (self.kernel(*group, reading.views, reading.root, splits) for group in groups))

    def kernel(
        self, block: str, poolings: Sequence[str], views: int, root: bool, splits: Sequence[str] = SPLITS[:2]
    ) -> Kernel:
        """That of some poolings of a block, averaged over views."""

        def compute() -> Kernel:
            parts = [(block, name) for name in poolings if (block, name) in self.outputs.parts] or [("", "")]
            return reduce(operator.add, (Kernel.of(*self._columns(*p, views, splits), root=root) for p in parts))

        key = block, poolings, views, root
        return compute() if len(splits) > 2 else self.kernels(key, compute, Kernel.nbytes)

    def _columns(self, block: str, pooling: str, views: int, splits: Sequence[str]) -> list[Tensor]:
        train, *others = (self.outputs.columns(block, pooling, split)[:views] for split in splits)
        return [train[:, self.rows.to(train.device)], *others]

    def _origin(self, blocks: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.outputs.origin[block] for block in blocks)

    def all(self, *readings: Reading) -> list[Fit]:
        """Fits of readings with as many views as there are."""
        return [self.fit(replace(reading, views=self.outputs.views)) for reading in readings]

    def read_test(self, fits: Sequence[Fit]) -> None:
        """Predict test rows by fits, all with one pass over their columns: by inner products where these are radial."""
        labels, size = self.task.val.y.cpu(), self.targets.shape[1]
        sums = [self.targets.new_zeros(len(labels) + len(self.task.test), size) for _ in fits]
        readers: dict[tuple[str, str, int, bool], list[tuple[Tensor, Tensor]]] = {}
        for total, fit in zip(sums, fits, strict=True):
            own = fit.reading
            if fit.solved and own.radial:
                total += self.kernel_of(own, SPLITS).gaussian().others @ fit.solved[0]
            elif fit.solved:
                for part in itertools.product(own.blocks, itertools.chain(*POOLINGS[own.poolings])):
                    readers.setdefault((*part, own.views, own.root), []).append((fit.solved[0], total))
        for (block, pooling, views, root), users in readers.items():
            columns = self._columns(block, pooling, views, SPLITS)
            found = regression_of(*columns, duals=torch.cat([dual for dual, _ in users], 1), root=root)
            for (_, total), more in zip(users, found.split(size, 1), strict=True):
                total += more
        for total, fit in zip(sums, fits, strict=True):
            guess = total + self.targets.mean(0)
            made = predicted_by(fit.rule.discriminant, total, self.targets, fit.solved) if fit.solved else guess
            made = probabilities(made[None], labels)[0] if self.task.classes else made
            fit.predicted = made[len(labels) :].clone()


def best_fit(task: Task, rows: Tensor, reading: Reading, kernel: Kernel, rules: Sequence[Rule]) -> Fit:
    """By the best of `rules` on validation rows."""
    y, labels = task.train.y.cpu()[rows], task.val.y.cpu()
    predicted, solved = kernel.predictions(targets_of(task, y), rules)
    predicted = probabilities(predicted, labels) if task.classes else predicted
    errors = errors_of(task, predicted[:, : len(labels)])
    best, n = int(errors.argmin()), len(y)
    flops = 2.0 * n**2 * kernel.columns + n**3 / 3
    fit = fit_of(task, reading, rules[best], predicted[best].clone(), errors[best].item(), flops)  # other rules go
    return replace(fit, solved=(solved[best][0].clone(), solved[best][1].clone()) if solved else None)


def fit_of(task: Task, reading: Reading, rule: Rule, predicted: Tensor, error: float, flops: float) -> Fit:
    """With predictions [V + T, outputs] for validation and test rows."""
    on_val, on_test = predicted.tensor_split([len(task.val)])
    val = task.measure(as_outputs(task, on_val), task.val.y.cpu()).item()
    return Fit(reading, rule, error, val, flops, on_val, on_test)


def searched(
    task: Task, outputs: Outputs, rows: Tensor, ridges: Sequence[float], known: Sequence[Reading]
) -> tuple[list[Fit], float]:
    """Fits on some training rows: of every block, of blocks side by side, and of variations of the best of them.

    Only of the readings `known`, if there are any. And the operations of all regressions, also of those on fewer rows,
    which only say what to read. Raises Inapplicable where the blocks tell nothing apart.
    """
    tried = [] if known else compared(Fitter(task, outputs, fewer(task, rows), ridges))
    kept = tried if len(rows) <= SEARCHED else []
    views = {1, outputs.views} - {fit.reading.views for fit in kept}
    fitter = Fitter(task, outputs, rows, ridges)
    readings = [replace(reading, views=n) for n in sorted(views) for reading in known or best_readings(tried)]
    made = [fitter.fit(reading) for reading in readings]
    return kept + made, sum(fit.flops for fit in tried + made)


def compared(fitter: Fitter) -> list[Fit]:
    """Fits of all readings that are compared, with mirror images. Raises Inapplicable."""
    outputs, net = fitter.outputs, tuple(fitter.outputs.blocks)
    groups = itertools.product(net, dict.fromkeys(itertools.chain(*POOLINGS.values())))
    if not any(fitter.kernel(block, group, outputs.views, False).columns for block, group in groups):
        raise Inapplicable("no block of the net tells the images of the harmful task apart")
    fits = fitter.all(*(Reading((block,), "average") for block in net), Reading(net, "rich"))
    fits += grown(fitter, "rich") + grown(fitter, "covariance")
    best = min(fits, key=BY_ERROR).reading
    fits += fitter.all(*(Reading(best.blocks, name) for name in POOLINGS if name != best.poolings))
    several = dict.fromkeys([min(fits, key=BY_ERROR).reading, Reading(net, "fine")])
    ways = ((True, False), (False, True), (True, True))
    return fits + fitter.all(*(replace(reading, root=r, radial=g) for reading in several for r, g in ways))


def grown(fitter: Fitter, poolings: str) -> list[Fit]:
    """Fits of every block, and of the best one with one block more at a time as long as that gains."""
    net = fitter.outputs.blocks
    fits = fitter.all(*(Reading((block,), poolings) for block in net))
    best = min(fits, key=BY_ERROR)
    while len(own := best.reading.blocks) < min(LARGEST, len(net)):
        larger = fitter.all(*(Reading((*own, block), poolings) for block in net if block not in own))
        fits += larger
        if (found := min(larger, key=BY_ERROR)).error >= best.error:
            break
        best = found
    return fits


def best_readings(fits: Sequence[Fit]) -> tuple[Reading, ...]:
    """The `CANDIDATES` that do best on validation rows, each once, whatever its views."""
    ranked = sorted(fits, key=BY_ERROR)
    return tuple(dict.fromkeys(replace(fit.reading, views=1) for fit in ranked))[:CANDIDATES]


def blended(task: Task, outputs: Outputs, rows: Tensor, fits: Sequence[Fit]) -> Blend:
    """Fits added one at a time, the one with which the mean has the least error, as long as that gains."""
    predicted = torch.stack([fit.on_val for fit in fits])
    total, error = torch.zeros_like(predicted[0]), math.inf
    chosen: list[Fit] = []
    while len(chosen) < MEMBERS:
        errors = errors_of(task, (total + predicted) / (len(chosen) + 1))
        best = int(errors.argmin())
        if not errors[best] < error:
            break
        chosen.append(fits[best])
        total, error = total + predicted[best], errors[best].item()
    val = task.measure(as_outputs(task, total / len(chosen)), task.val.y.cpu()).item()
    return Blend.of(rows, chosen, error, val, outputs)


def curve_of(task: Task, blends: Sequence[Blend], outputs: Outputs, spent: float) -> AttackCurve:
    """The curve through those of `blends` that do better on validation rows than all that cost less."""
    best: list[Blend] = []
    for blend in sorted(blends, key=lambda blend: blend.flops):
        if not best or blend.error < best[-1].error:
            best.append(blend)
    for rows in {id(blend.rows): blend.rows for blend in best}.values():
        fits = {id(fit): fit for blend in best if blend.rows is rows for fit in blend.fits if not len(fit.predicted)}
        if fits:
            Fitter(task, outputs, rows, ()).read_test(list(fits.values()))
    means = [torch.stack([fit.predicted for fit in blend.fits]).mean(0) for blend in best]
    predicted = as_outputs(task, torch.stack(means))
    val, last = torch.tensor([blend.val for blend in best], dtype=torch.float64), best[-1]
    return AttackCurve(
        steps=torch.tensor([len(blend.rows) for blend in best]),
        flops=torch.tensor([blend.flops for blend in best], dtype=torch.float64),
        val=val.flip(0).cummin(0).values.flip(0),  # more hits with a larger error are chance
        test=task.measure(predicted, task.test.y.cpu()),
        scores=task.scores(predicted, task.test.y.cpu()),
        setting=last.fits[0].rule.ridge,
        others=max(0.0, spent - last.flops),
        path=False,
        found={"readings": last.described},
    )


def errors_of(task: Task, on_val: Tensor) -> Tensor:
    """Mean squared errors [...] of predictions [..., V, outputs] for validation rows (of probabilities: Brier's)."""
    return (on_val - targets_of(task, task.val.y.cpu())).square().mean((-2, -1))


def targets_of(task: Task, y: Tensor) -> Tensor:
    """What readings learn, [N, outputs] in float64: one-hot classes, or y itself."""
    return F.one_hot(y, task.classes).double() if task.classes else task.targets(y)


def fewer(task: Task, rows: Tensor) -> Tensor:
    """Every n-th of the rows, about `SEARCHED`, and one of each class that these lack."""
    few, y = rows[:: math.ceil(len(rows) / SEARCHED)], task.train.y.cpu()
    of_class = dict(zip(y[rows].tolist(), rows.tolist(), strict=True)) if task.classes else {}
    lacking = [of_class[label] for label in sorted(of_class.keys() - set(y[few].tolist()))]
    return torch.cat([few, torch.tensor(lacking, dtype=few.dtype)])


def nested(task: Task, rows: Tensor, seed: int, most: int = MOST) -> Iterator[Tensor]:
    """Growing parts of training rows: `FEWEST` of each class, twice as many, and so on to all, but at most `most`."""
    chosen, count = set(rows.tolist()), FEWEST
    while True:
        own = torch.tensor([row for row in task.few(count, seed).tolist() if row in chosen])
        if len(own) >= min(len(rows), most):
            break
        yield own
        count *= 2
    yield own if len(own) <= most else own[torch.linspace(0, len(own) - 1, most).long()]
