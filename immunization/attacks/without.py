"""Attackers who do without the weights of the model, or of a part: what the harmful task comes to, and costs, so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from immunization.attacks.block_probe import BlockProbe
from immunization.attacks.network import FineTune
from immunization.attacks.pooling import Outputs
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.errors import ConfigError
from immunization.models import Model
from immunization.models.chain import Network, norms_of

WEIGHTS = 0
"""Seed of a random net."""


class FreshPart(FineTune, group="attack.fresh_part"):
    """A part of the net drawn anew, and then trained, behind what stands before it: nothing of the part is used."""

    def trains_all(self, victim: Victim) -> bool:
        return False

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.scope,)

    def untouched(self, victim: Victim) -> bool:
        return victim.same_outside(self.scope)

    def network(self, victim: Victim, stage: Stage, part: str) -> Network:
        return redrawn(super().network(victim, stage, part), part)


class Distilled(FreshPart, group="attack.distilled"):
    """`FreshPart`, which learns the features of the net as it was, beside the labels.

    So it takes over what the part can still do, and none of the weights that make it hard to train.
    """

    def untouched(self, victim: Victim) -> bool:
        return False

    def teacher(self, victim: Victim, stage: Stage) -> Network:
        return victim.network(stage, self.precision)


class Scratch(FreshPart, group="attack.scratch"):
    """The net's architecture from random weights, trained as `FineTune` trains the whole net."""

    reference = True

    scope = "full"


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
        def drawn() -> Network:
            with torch.random.fork_rng():
                torch.manual_seed(WEIGHTS)
                return redrawn(victim.network(stage), self.scope)

        return self.outputs(victim, stage, drawn, bool(norms_of(victim.network(stage))))


class RandomNet(FreshFrom, group="attack.random_net"):
    """`BlockProbe` on the net's architecture with random weights and the statistics of the attacker's images."""

    partial = None

    scope = "full"


class RawInputs(BlockProbe, group="attack.raw_inputs"):
    """`BlockProbe` on the images themselves, without any net.

    Filters and whitening come from all training images, which need no labels: also with `samples`.
    """

    reference = True

    def read(self, victim: Victim, stage: Stage) -> Outputs:
        return self.raw(victim)


@torch.no_grad()
def redrawn(network: Network, part: str = "full") -> Network:
    """`network` with every weight of a part drawn anew, in place, as its layers and then the net itself draw them.

    Raises Inapplicable for a part with weights that neither draws.
    """
    drawn = copy.deepcopy(network)
    for parameter in drawn.parameters():
        parameter.fill_(torch.nan)
    for module in drawn.modules():
        if isinstance(draw := getattr(module, "reset_parameters", None), Callable):
            draw()
    if isinstance(draw := getattr(drawn.whole.net, "init_weights", None), Callable):  # of timm
        draw()
    left = {parameter: name for name, parameter in drawn.named_parameters() if not torch.isfinite(parameter).all()}
    for old, new in zip(network.part(part), drawn.part(part), strict=True):
        if names := [left[parameter] for parameter in new.parameters() if parameter in left]:
            raise Inapplicable(f"nobody knows how to draw the weights {', '.join(names)} anew")
        old.load_state_dict(new.state_dict())
    return network
