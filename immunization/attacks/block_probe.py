"""Attackers who read the blocks of a net, pooled in several ways, and choose blocks on validation rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from immunization.attacks.altered import redrawn, renew_from
from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.blocks import blocks_behind
from immunization.attacks.patches import outputs_of_images
from immunization.attacks.pooling import (
    SIDE,
    TILES,
    TWICE,
    Outputs,
    Remembered,
    at_twice_the_size,
    in_tiles,
    outputs_of,
    outputs_of_both,
)
from immunization.attacks.readings import (
    SEARCHED,
    Blend,
    Fit,
    best_readings,
    blended,
    curve_of,
    nested,
    searched,
)
from immunization.attacks.victim import Victim, images_of
from immunization.attacks.words import probe_words, reads_texts
from immunization.checks import Positive
from immunization.data.task import Task
from immunization.errors import ConfigError, Inapplicable
from immunization.models.base import Model
from immunization.models.chain import Network, norms_of
from immunization.runs.records import Stage

OUTPUTS = "outputs"
"""A `Victim` keeps outputs of blocks as (OUTPUTS, net, renewed, what, stage): what is `TWICE`, `TILES` or ""."""

WEIGHTS = 0
"""Seed of a random net."""


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
    `Patches`, is read beside its blocks. Texts have no mirror images and one size, and are not read beside blocks. Deep
    nets only.
    """

    scope = ""
    setting_name, tries = "ridge", "ridges"
    natural_ends = True
    reads_blocks = True
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
        trained = self.scope == "trained" and victim.model.deep
        return tuple(victim.network("baseline").trained) if trained else ()

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        place = (OUTPUTS, self.net, self.renewed)
        for key in list(victim.once):
            if isinstance(key, tuple) and key[0] == OUTPUTS and key[: len(place)] != place:
                del victim.once[key]  # those of several nets may not fit into memory
        what = self.enlarged, self.images, self.tiles
        outputs = victim.once((*place, what, stage), lambda: self.read(victim, stage))
        outputs.remembered = victim.once("remembered", Remembered)
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
        outputs = self.outputs(victim, stage, partial(victim.network, precision=self.precision), self.renewed)
        return outputs | self.raw(victim) if self.images and images_of(victim)["train"].ndim == 4 else outputs

    def raw(self, victim: Victim) -> Outputs:
        """What the images show without the net."""
        return victim.once(("images", self.mirrored), lambda: outputs_of_images(images_of(victim), self.mirrored))

    def outputs(self, victim: Victim, stage: Stage, network: Callable[[Stage], Network], renewed: bool) -> Outputs:
        """The outputs of all blocks of the net of a stage, also at twice the size where images are `enlarged`.

        `network` gives a new copy of that net. With the baseline, theta_I is read where both begin alike. Raises
        Inapplicable where BatchNorm is to be `renewed` and the net has none.
        """
        images, place = images_of(victim), (OUTPUTS, self.net, self.renewed)
        are_images = images["train"].is_floating_point()
        mirrored = self.mirrored and are_images
        start = victim.same_until() if stage == "baseline" and self.reads_changed(victim) else 0

        def passed(prepare: Callable[[Network], Network | None], end: str = "", side: int = 1) -> Outputs | None:
            if (key := (*place, end, stage)) in victim.once:
                return victim.once[key]
            if (net := prepare(network(stage))) is None:
                return None
            rows = renew_from(net, images["train"]) if renewed else 0
            other = (*place, end, "immunized")
            if start and other not in victim.once and (changed := prepare(network("immunized"))):
                if renewed:
                    renew_from(changed, images["train"])
                if both := outputs_of_both(net, changed, start, images, mirrored, rows, self.inside, side):
                    victim.once[other] = both[1].named(end)
                    return victim.once(key, lambda: both[0].named(end))
            return victim.once(key, lambda: outputs_of(net, images, mirrored, rows, self.inside, side).named(end))

        outputs = cast(Outputs, passed(lambda net: net))
        enlarged = self.enlarged and not victim.model.fixed  # else theta_0 alone could read images of another size
        if enlarged and (larger := passed(partial(at_twice_the_size, images=images["train"]), TWICE)):
            outputs |= larger
        if self.tiles:
            if (tiled := passed(partial(in_tiles, images=images["train"]), TILES, SIDE)) is None:
                raise Inapplicable("the net reads images of one size, and no tiles of them")
            outputs |= tiled
        return outputs

    def reads_changed(self, victim: Victim) -> bool:
        """Whether theta_I is read, too, and is another net than the baseline."""
        return not (self.reference or self.untouched(victim) or victim.unchanged())

    def probe(self, task: Task, outputs: Outputs) -> AttackCurve:
        """The curve of the best readings of `outputs` within any number of operations."""
        few, ridges = self.rows(task), self.settings
        everything = torch.arange(len(task.train)) if few is None else few
        blends: list[Blend] = []
        fits: list[Fit] = []
        spent = 0.0
        for rows in nested(task, everything, self.seed):
            known = best_readings(fits) if len(rows) > SEARCHED else ()
            key = (known, *ridges, *rows.tolist())  # those of few images are among those of more
            fits, flops = outputs.once(key, partial(searched, task, outputs, rows, ridges, known))
            blends += [Blend.of(rows, [fit], fit.error, fit.val, outputs) for fit in fits]
            blends.append(blended(task, outputs, rows, fits))
            spent += flops
        most = max(len(blend.rows) for blend in blends)
        mirrored = max(len(blend.rows) * (fit.reading.views - 1) for blend in blends for fit in blend.fits)
        spent += outputs.cost(outputs.blocks, most + mirrored)  # one pass for all readings
        return curve_of(task, blends, outputs, spent)


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
        behind = victim.once(("behind", self.scope), lambda: blocks_behind(victim.network("baseline"), self.scope))
        own = tuple(block for block in outputs.blocks if block.removesuffix(TWICE) not in behind)
        if not own:
            raise Inapplicable(f"attack.*.scope={self.scope}: no block of the net precedes it")
        return outputs.once(own, lambda: outputs.of(own))


class FreshFrom(BlockProbe, group="attack.fresh_from"):
    """`BlockProbe` on theta_0 with a part drawn anew, and the statistics of the attacker's images.

    `scope` is where that part begins: at `trained`, what was immunized, or at a block or stage, by its name. What is
    left of theta_0 is left by every defense of that part, too: `ceiling/partial_<name>`. The weights are the same for
    all draws of images, so that the net is passed once.
    """

    reference = True

    scope: str

    @property
    def partial(self) -> str | None:
        return self.scope

    @property
    def net(self) -> tuple[object, ...]:
        return *super().net, self.scope

    def check(self, model: Model) -> None:
        if self.partial in ("head", "last", "full"):
            raise ConfigError(f"attack.*.scope={self.scope}: name a block or a stage, or trained")
        if model.deep:
            model.network().part(self.scope)

    def untouched(self, victim: Victim) -> bool:
        return self.scope == "trained" and victim.same_outside(self.scope)

    def read(self, victim: Victim, stage: Stage) -> Outputs:
        victim.check_changeable(self.reference)

        def drawn(stage: Stage) -> Network:
            with torch.random.fork_rng():
                torch.manual_seed(WEIGHTS)
                return redrawn(victim.network(stage), self.scope)

        return self.outputs(victim, stage, drawn, bool(norms_of(victim.network(stage))))


class RandomNet(FreshFrom, group="attack.random_net"):
    """`BlockProbe` on the net's architecture with random weights and the statistics of the attacker's images."""

    scope = "full"

    @property
    def partial(self) -> None:
        return None


class RawInputs(BlockProbe, group="attack.raw_inputs"):
    """`BlockProbe` on the images themselves, without any net; of texts, `probe_words`.

    Filters and whitening come from all training images, which need no labels: also with `samples`.
    """

    reference = True

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        if reads_texts(victim):
            few = self.rows(victim.task)
            return probe_words(
                victim, torch.arange(len(victim.task.train)) if few is None else few, self.settings, self.seed
            )
        return super().run(victim, stage)

    def read(self, victim: Victim, stage: Stage) -> Outputs:
        return self.raw(victim)
