"""An attacker who reads any blocks of the net, pooled in several ways, and chooses them on validation rows."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.kernels import Kernel, Rule, probabilities
from immunization.attacks.patches import outputs_of_images
from immunization.attacks.pooling import POOLINGS, SIDE, TILES, TWICE, Outputs, at_twice_the_size, in_tiles, outputs_of
from immunization.attacks.renewed import renew_from
from immunization.attacks.victim import Inapplicable, Stage, Victim, images_of
from immunization.checks import Positive
from immunization.data.task import SPLITS, Task
from immunization.models import Model
from immunization.models.chain import Network

FEWEST = 5
"""Training images of each class at which the curve begins; every further point has twice as many."""

MOST = 3500
"""Most training images that are read."""

SEARCHED = 400
"""Most training images on which all readings are compared; with more, those that were best on fewer are."""

CANDIDATES = 16
"""How many these are, and how many are also fitted without mirror images."""

KEPT = 1e9
"""Bytes of kernels that are kept at a time while several readings of the same parts are fitted."""

BY_ERROR = operator.attrgetter("error")
LARGEST = 4
"""Most blocks that are read side by side, apart from all of them."""

OUTPUTS = "outputs"
"""A victim keeps outputs of blocks as (OUTPUTS, net, renewed, what, stage): what is `TWICE`, `TILES` or ""."""

MEMBERS = 16
"""Most readings whose predictions are averaged."""


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


@dataclass(frozen=True)
class Fit:
    """What is read, by which rule, and the operations.

    `on_val` [V, outputs] are predictions for validation rows, for classes their probabilities, with their squared
    `error` and their measure `val`. `predicted` [N, outputs] are those for test rows, empty where these are not read.
    """

    reading: Reading
    rule: Rule
    error: float
    val: float
    flops: float
    on_val: Tensor
    predicted: Tensor


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
    def found(self) -> list[dict[str, object]]:
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


class BlockProbe(Attack, group="attack.block_probe"):
    """Ridge regression or discriminant analysis on any blocks of the net side by side, pooled in several ways.

    What is read of an image is averaged over the image and its mirror image.

    The blocks of a net are those that `forward_features` applies one after another. The best block is found first, then
    blocks are added one at a time as long as validation rows gain, then other poolings, signed square roots of what is
    read and a Gaussian kernel of it are tried, the best of these without mirror images, and the mean prediction of
    several of all these: one is added at a time, by the squared error on validation rows (Caruana et al., ICML 2004).
    All this is done with 5 training images of each class, with twice as many, and so on up to all: the curve goes
    through what does better on validation rows than all that costs less. Operations are those of the part of the net
    that is passed, of the regressions, and not of the search, which `AttackCurve.others` has.

    `renewed`: BatchNorm first gets the statistics of all training images, also with `samples`. `enlarged`: images of at
    most 128 x 128 pixels are read at twice their size, too. `images`: what they show without the net, their pixels and
    `Patches`, is read beside its blocks. Deep nets only.
    """

    scope = ""
    setting_name, tries = "ridge", "ridges"
    natural_ends = True
    inside = False  # whether what layers inside of blocks give is read, too
    tiles = False  # whether tiles of the image are passed alone, too

    steps = 1
    ridges: Sequence[Positive]
    mirrored: bool
    renewed: bool
    enlarged: bool
    images: bool

    def untouched(self, victim: Victim) -> bool:
        return victim.same_blocks()

    def beside(self, victim: Victim) -> tuple[object, ...]:
        return tuple(victim.network("baseline").trained) if self.scope == "trained" else ()

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        place = (OUTPUTS, self.net, self.renewed)
        for key in [key for key in victim.once if key[0] == OUTPUTS and key[: len(place)] != place]:
            del victim.once[key]  # those of several nets may not fit into memory
        what = self.enlarged, self.images, self.tiles
        outputs = victim.once((*place, what, stage), lambda: self.read(victim, stage))
        return self.probe(victim.task, self.readable(victim, outputs))

    @property
    def net(self) -> tuple[object, ...]:
        """What tells the net that is read, and its images, from others."""
        return type(self).read, self.precision, self.mirrored, self.inside

    def readable(self, victim: Victim, outputs: Outputs) -> Outputs:
        """The outputs that the attacker reads, out of those of all blocks. Raises Inapplicable."""
        return outputs

    def read(self, victim: Victim, stage: Stage) -> Outputs:
        """The outputs of all blocks. Raises Inapplicable."""
        found = self.outputs(victim, stage, lambda: victim.network(stage, self.precision), self.renewed)
        return found | self.raw(victim) if self.images else found

    def raw(self, victim: Victim) -> Outputs:
        """What the images show without the net."""
        return victim.once(("images", self.mirrored), lambda: outputs_of_images(images_of(victim), self.mirrored))

    def outputs(self, victim: Victim, stage: Stage, network: Callable[[], Network], renewed: bool) -> Outputs:
        """The outputs of all blocks of copies of a net, also at twice the size where images are `enlarged`.

        Raises Inapplicable where BatchNorm is to be `renewed` and the net has none.
        """
        images, place = images_of(victim), (OUTPUTS, self.net, self.renewed)

        def passed(net: Network, end: str = "", side: int = 1) -> Outputs:
            def read() -> Outputs:
                rows = renew_from(net, images["train"]) if renewed else 0
                return outputs_of(net, images, self.mirrored, rows, self.inside, side).named(end)

            return victim.once((*place, end, stage), read)

        found = passed(network())
        if self.enlarged and (larger := at_twice_the_size(network(), images["train"])):
            found = found | passed(larger, TWICE)
        if self.tiles:
            if (tiled := in_tiles(network(), images["train"])) is None:
                raise Inapplicable("the net reads images of one size, and no tiles of them")
            found = found | passed(tiled, TILES, SIDE)
        return found

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
            blends += [Blend.of(rows, [fit], fit.error, fit.val, outputs) for fit in found]
            blends.append(blended(task, outputs, rows, found))
            searched += spent
        most = max(len(blend.rows) for blend in blends)
        mirrored = max(len(blend.rows) * (fit.reading.views - 1) for blend in blends for fit in blend.fits)
        searched += outputs.cost(outputs.blocks, most + mirrored)  # one pass for all readings
        best: list[Blend] = []
        for blend in sorted(blends, key=lambda blend: blend.flops):
            if not best or blend.error < best[-1].error:
                best.append(blend)
        predicted = torch.stack([self._predicted(task, outputs, blend) for blend in best])
        val, last = torch.tensor([blend.val for blend in best], dtype=torch.float64), best[-1]
        return AttackCurve(
            steps=torch.tensor([len(blend.rows) for blend in best]),
            flops=torch.tensor([blend.flops for blend in best], dtype=torch.float64),
            val=val.flip(0).cummin(0).values.flip(0),  # more hits with a larger error are chance
            test=task.measure(predicted, task.test.y.cpu()),
            scores=task.scores(predicted, task.test.y.cpu()),
            setting=last.fits[0].rule.ridge,
            others=max(0.0, searched - last.flops),
            path=False,
            found={"readings": last.found},
        )

    def _search(self, task: Task, outputs: Outputs, rows: Tensor, known: Sequence[Reading]) -> tuple[list[Fit], float]:
        """Fits on some training rows: of every block, of blocks side by side, and of variations of the best of them.

        Only of the readings `known`, if there are any. And the operations of all regressions, also of those on fewer
        rows, which only say what to read.
        """
        tried = [] if known else self._tried(task, outputs, fewer(task, rows))
        kept = tried if len(rows) <= SEARCHED else []
        views = {1, outputs.views} - {fit.reading.views for fit in kept}
        kernel = _kernels(outputs, rows)
        readings = [replace(reading, views=n) for n in sorted(views) for reading in known or best_readings(tried)]
        made = [self._fit(task, outputs, reading, rows, kernel) for reading in readings]
        return kept + made, sum(fit.flops for fit in tried + made)

    def _tried(self, task: Task, outputs: Outputs, few: Tensor) -> list[Fit]:
        """Fits of all readings that are compared, with mirror images. Raises Inapplicable."""
        kernel = _kernels(outputs, few, SPLITS[:2])

        def tried(readings: Iterable[Reading]) -> list[Fit]:
            with_views = (replace(reading, views=outputs.views) for reading in readings)
            return [self._fit(task, outputs, reading, few, kernel) for reading in with_views]

        def grown(poolings: str) -> list[Fit]:
            """Of every block, and of the best one with one block more at a time as long as that gains."""
            found = tried(Reading((block,), poolings) for block in outputs.blocks)
            best = min(found, key=BY_ERROR)
            while len(best.reading.blocks) < min(LARGEST, len(outputs.blocks)):
                own = best.reading.blocks
                larger = tried(Reading((*own, block), poolings) for block in outputs.blocks if block not in own)
                found = found + larger
                if min(larger, key=BY_ERROR).error >= best.error:
                    break
                best = min(larger, key=BY_ERROR)
            return found

        if not sum(kernel(block, pooling, outputs.views, False).columns for block, pooling in outputs.parts):
            raise Inapplicable("no block of the net tells the images of the harmful task apart")
        whole_net = tuple(outputs.blocks)
        fits = tried([*(Reading((block,), "average") for block in whole_net), Reading(whole_net, "rich")])
        fits += grown("rich") + grown("covariance")
        chosen = min(fits, key=BY_ERROR).reading
        fits += tried(Reading(chosen.blocks, name) for name in POOLINGS if name != chosen.poolings)
        several = dict.fromkeys([min(fits, key=BY_ERROR).reading, Reading(whole_net, "fine")])
        ways = ((True, False), (False, True), (True, True))
        return fits + tried(replace(reading, root=root, radial=radial) for reading in several for root, radial in ways)

    def _fit(
        self,
        task: Task,
        outputs: Outputs,
        reading: Reading,
        rows: Tensor,
        kernel: Callable[[str, str, int, bool], Kernel],
        rules: Sequence[Rule] = (),
    ) -> Fit:
        """By the best of `rules` on validation rows, or of all; where no column varies it guesses."""
        y, labels = task.train.y.cpu()[rows], task.val.y.cpu()
        rules = rules or [
            Rule(ridge, which) for which in ((False, True) if task.classes else (False,)) for ridge in self.settings
        ]
        everything = list(itertools.product(reading.blocks, POOLINGS[reading.poolings]))
        parts = [part for part in everything if part in outputs.parts] or everything[:1]
        read = reduce(operator.add, (kernel(*part, reading.views, reading.root) for part in parts))
        read = read.gaussian() if reading.radial else read
        predicted = read.predictions(targets_of(task, y), rules)
        predicted = probabilities(predicted, labels) if task.classes else predicted
        on_val = predicted[:, : len(labels)]
        errors = errors_of(task, on_val)
        best, n = int(errors.argmin()), len(y)
        flops = 2.0 * n**2 * read.columns + n**3 / 3
        on_val, on_test = predicted[best].clone().tensor_split([len(labels)])  # fits are kept, other rules are not
        val = task.measure(on_val, labels).item()
        return Fit(reading, rules[best], errors[best].item(), val, flops, on_val, on_test)

    def _predicted(self, task: Task, outputs: Outputs, blend: Blend) -> Tensor:
        """Predictions for test rows."""
        kernel = _kernels(outputs, blend.rows)

        @cache
        def of(reading: Reading, rule: Rule) -> Tensor:
            return self._fit(task, outputs, reading, blend.rows, kernel, [rule]).predicted

        own = [fit.predicted if len(fit.predicted) else of(fit.reading, fit.rule) for fit in blend.fits]
        return torch.stack(own).mean(0)


def best_readings(fits: Sequence[Fit]) -> tuple[Reading, ...]:
    """The `CANDIDATES` that do best on validation rows, each once, whatever its views."""
    ranked = sorted(fits, key=BY_ERROR)
    return tuple(dict.fromkeys(replace(fit.reading, views=1) for fit in ranked))[:CANDIDATES]


def errors_of(task: Task, on_val: Tensor) -> Tensor:
    """Mean squared errors [...] of predictions [..., V, outputs] for validation rows (of probabilities: Brier's)."""
    y = task.val.y.cpu()
    return (on_val - targets_of(task, y)).square().mean((-2, -1))


def targets_of(task: Task, y: Tensor) -> Tensor:
    """What readings learn, [N, outputs] in float64: one-hot classes, or y itself."""
    return F.one_hot(y, task.classes).double() if task.classes else task.targets(y)


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
    return Blend.of(rows, chosen, error, task.measure(total / len(chosen), task.val.y.cpu()).item(), outputs)


class LayerProbe(BlockProbe, group="attack.layer_probe"):
    """`BlockProbe` that also reads what the layers inside of each block give, side by side, as one more block.

    A defense that watches the outputs of blocks may leave inside of them what it takes from these.
    """

    inside = True


class TileProbe(BlockProbe, group="attack.tile_probe"):
    """`BlockProbe` that also reads tiles of the image, each passed alone.

    A defense that switches features off where it recognizes what is harmful may leave them in tiles, which show only
    a part of that.
    """

    tiles = True


class FrozenBlocks(BlockProbe, group="attack.frozen_blocks"):
    """`BlockProbe` on the blocks before a part of the net: no defense of this part can stop it.

    `scope` is where that part begins: at `trained`, what was immunized, or at a block or stage, by its name.
    """

    scope: str

    def check(self, model: Model) -> None:
        if model.deep and self.scope != "trained":
            model.network().part(self.scope)

    def untouched(self, victim: Victim) -> bool:
        return super().untouched(victim) or victim.same_outside(self.scope)

    def readable(self, victim: Victim, outputs: Outputs) -> Outputs:
        behind = victim.once(("behind", self.scope), lambda: self._behind(victim, outputs.blocks))
        own = tuple(block for block in outputs.blocks if block.removesuffix(TWICE) not in behind)
        return outputs.once(own, lambda: outputs.of(own))

    def _behind(self, victim: Victim, blocks: Sequence[str]) -> set[str]:
        """The blocks of the net from the part on. Raises Inapplicable where these are all."""
        network = victim.network("baseline")
        part = {parameter for module in network.part(self.scope) for parameter in module.parameters()}
        modules = dict(network.whole.blocks())
        own = [block for block in blocks if block in modules]
        behind = set(itertools.dropwhile(lambda block: part.isdisjoint(modules[block].parameters()), own))
        if len(behind) == len(own):
            raise Inapplicable(f"attack.*.scope={self.scope}: no block of the net stands before it")
        return behind


def _kernel(
    outputs: Outputs, rows: Tensor, splits: Sequence[str], block: str, pooling: str, views: int, root: bool
) -> Kernel:
    """That of one pooling of a block, averaged over views, of training rows and of the rows of other splits."""
    train, *others = (outputs.columns(block, pooling, split)[:views] for split in splits)
    train, *others = (_mean(x) for x in (train[:, rows.to(train.device)], *others))
    return Kernel.of(train, torch.cat(others), root)


def _mean(views: Tensor) -> Tensor:
    """That of one or two views [views, N, D], in float64."""
    first = views[0].to(torch.float64, copy=True)  # which the kernel overwrites
    return first if len(views) == 1 else first.add_(views[1]).mul_(0.5)


def _kernels(outputs: Outputs, rows: Tensor, splits: Sequence[str] = SPLITS) -> Callable[[str, str, int, bool], Kernel]:
    """`_kernel`, of which the last used are kept."""
    others = sum(outputs.columns("", "", split).shape[1] for split in splits[1:])
    size = 8 * len(rows) * (len(rows) + others)
    return lru_cache(max(1, int(KEPT / size)))(partial(_kernel, outputs, rows, splits))


def fewer(task: Task, rows: Tensor) -> Tensor:
    """Every n-th of the rows, about `SEARCHED`, and one of each class that these lack."""
    few, y = rows[:: math.ceil(len(rows) / SEARCHED)], task.train.y.cpu()
    of_class = dict(zip(y[rows].tolist(), rows.tolist(), strict=True)) if task.classes else {}
    lacking = [of_class[label] for label in sorted(of_class.keys() - set(y[few].tolist()))]
    return torch.cat([few, torch.tensor(lacking, dtype=few.dtype)])


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
