"""Whether the trained layers of a net can forget harmful images and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from immunization.checks import AtLeastOne, AtLeastTwo, Component
from immunization.compute.machine import onto
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.models import Model
from immunization.models.activations import Stream, take
from immunization.models.chain import multiplies, rows_of
from immunization.theory import selectivity
from immunization.theory.spectrum import power_of_two

LEFT, HITS = 0.25, 0.9
"""Share of harmful outputs' variance that is left, and of harmful places that are switched off."""

RIDGE = 1e-3
"""Added to the variance of inputs, relative to its mean."""

BATCH = 16
"""Images of a batch, since a convolution's inputs are many times its image."""


class Selectivity(Component, group="evaluation.selectivity"):
    """What trained layers of a net lose of other images where they forget the harmful ones.

    `selectivity/<layer>/lost`: by the best weights for that (`theory.selectivity`), the share of the variance of other
    images' outputs that is lost where a quarter of that of harmful images is left. Half the weights, which a ridge
    doubles again, lose a quarter, too. `selectivity/<layer>/switched`: the share of other images' places that a
    threshold on the best linear unit switches off with .9 of the harmful ones; .9 if it cannot tell them apart.

    Other images are those of D_P and dataset.keep_root. Up to `images` training images of either kind are read at
    `places` drawn at random. Every second image chooses weights and unit, the others are measured. Linear layers and
    convolutions without groups, as they are after training; with method=identity those of theta_0. Deep nets only.
    """

    names = ("selectivity/*",)

    images: AtLeastTwo = 2000
    places: AtLeastOne = 8

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, model = Measures(), comparison.model
        if not model.trains_layers:
            return measures
        layers = {name: layer for name, layer in model.net.named_modules() if multiplies(layer)}
        kept = model.kept()
        others = [comparison.tasks["primary"].train.x, *([] if kept is None else [kept])]
        found = [self._inputs(model, layers, x) for x in (others, [comparison.tasks["harmful"].train.x])]
        for name in list(found[0]):
            layer = layers[name]
            names = [f"selectivity/{name}/{what}" for what in ("lost", "switched")]
            rows = [_halves(inputs.pop(name)) for inputs in found]
            rows = _in_range(rows)
            (own, own_held), (bad, bad_held) = ([selectivity.covariance(half) for half in x] for x in rows)
            if not (own.trace() > 0 and bad.trace() > 0):
                measures.miss("what the layer reads does not vary", *names)
                continue
            switched = selectivity.switched(*rows, (own, bad), HITS, RIDGE)
            own.diagonal().add_(RIDGE * own.diagonal().mean())
            weight = layer.weight.flatten(1).cpu().double()
            lost = selectivity.lost(weight, own, bad, LEFT, (own_held, bad_held))
            measures.put(names[1], switched)
            if math.isnan(lost):
                inputs, seen = weight.shape[1], min(rows[0].shape[1], rows[1].shape[1])
                measures.miss(f"{seen} places say too little of {inputs} inputs: raise images or places", names[0])
            else:
                measures.put(names[0], lost)
        return measures

    def _inputs(self, model: Model, layers: Mapping[str, nn.Module], sources: Sequence[Tensor | Stream]) -> dict:
        """Inputs [images, places, D] of layers by name, for some rows of all sources."""
        generator, found = torch.Generator().manual_seed(0), {name: [] for name in layers}

        def keep(name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
            rows = rows_of(layer, inputs[0])
            chosen = torch.randperm(rows.shape[1], generator=generator)[: self.places]
            found[name].append(rows[:, chosen.to(rows.device)].cpu())

        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.enter_context(layer.register_forward_pre_hook(partial(keep, name)))
            for x in sources:
                rows = torch.randperm(len(x), generator=generator)[: self.images // len(sources)].sort().values
                for batch in take(x, rows).split(BATCH):
                    model.extractor(onto(batch, model.head.weight))
        return {name: torch.cat(parts) for name, parts in found.items() if parts}  # attention reads some weights itself


def _in_range(rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows of both kinds over one power of two: their covariances have the square of the scale."""
    scale = power_of_two(*rows)
    return [part / scale for part in rows]


def _halves(x: Tensor) -> Tensor:
    """Every second image, and the others: [2, rows, D] in float64."""
    x = x[: len(x) // 2 * 2].double()
    return torch.stack([x[half::2].flatten(0, 1) for half in range(2)])
