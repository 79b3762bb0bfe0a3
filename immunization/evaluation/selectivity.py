"""Whether the trained layers of a net can forget harmful images and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import scipy.linalg
import torch
from torch import Tensor, nn

from immunization.checks import AtLeastOne, AtLeastTwo, Component
from immunization.compute.machine import onto
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.models.activations import take
from immunization.models.base import Model
from immunization.models.chain import multiplies, rows_of
from immunization.theory.spectrum import power_of_two

LEFT, HITS = 0.25, 0.9
"""Share of harmful outputs' variance that is left, and of harmful places that are switched off."""

RIDGE = 1e-3
"""Added to the variance of inputs, relative to its mean."""

BATCH = 16
"""Images of a batch, since a convolution's inputs are many times its image."""

BISECTIONS, SMALLEST, LARGEST = 60, 1e-6, 1e12
"""Of the bisection for a strength, relative to tr(K) / tr(H)."""


class Selectivity(Component, group="evaluation.selectivity"):
    """What trained layers of a net lose of other images where they forget the harmful ones.

    `selectivity/<layer>/lost`: by the best weights for that (`lost`), the share of the variance of other
    images' outputs that is lost where a quarter of that of harmful images is left. Half the weights, which a ridge
    doubles again, lose a quarter, too. `selectivity/<layer>/switched`: the share of other images' places that a
    cut on the best linear unit switches off with .9 of the harmful ones; .9 if it cannot tell them apart.

    Other images are those of D_P and dataset.keep_root. Up to `images` training images of either kind are read at
    `places` drawn at random. Every second image chooses weights and unit, the others are measured. Linear layers and
    convolutions without groups, as they are after training; with method=identity those of theta_0. Deep nets only.
    """

    names = ("selectivity/*",)

    images: AtLeastTwo
    places: AtLeastOne

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, model = Measures(), comparison.model
        if not model.trains_layers:
            return measures
        net = cast(nn.Module, model.net)
        layers = {name: layer for name, layer in net.named_modules() if multiplies(layer)}
        kept = model.kept()
        others = [comparison.tasks["primary"].train.x, *([] if kept is None else [kept])]
        read = [self._inputs(model, layers, x) for x in (others, [comparison.tasks["harmful"].train.x])]
        for name in list(read[0]):
            names = [f"selectivity/{name}/{what}" for what in ("lost", "switched")]
            rows, bad_rows = in_range(*(halves(inputs.pop(name)) for inputs in read))
            (own, own_held), (bad, bad_held) = ([covariance(half) for half in x] for x in (rows, bad_rows))
            if not (own.trace() > 0 and bad.trace() > 0):
                measures.miss("what the layer reads does not vary", *names)
                continue
            measures.put(names[1], switched(rows, bad_rows, (own, bad), HITS, RIDGE))
            own.diagonal().add_(RIDGE * own.diagonal().mean())
            weight = layers[name].get_parameter("weight").flatten(1).cpu().double()
            share = lost(weight, own, bad, LEFT, (own_held, bad_held))
            if math.isnan(share):
                inputs, seen = weight.shape[1], min(rows.shape[1], bad_rows.shape[1])
                measures.miss(f"{seen} places are too few for {inputs} inputs: raise images or places", names[0])
            else:
                measures.put(names[0], share)
        return measures

    def _inputs(self, model: Model, layers: Mapping[str, nn.Module], sources: Sequence[Any]) -> dict[str, Tensor]:
        """Inputs [images, places, D] of layers by name, for some rows of all sources."""
        generator, read = torch.Generator().manual_seed(0), {name: list[Tensor]() for name in layers}

        def keep(name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
            rows = rows_of(layer, inputs[0])
            chosen = torch.randperm(rows.shape[1], generator=generator)[: self.places]
            read[name].append(rows[:, chosen.to(rows.device)].cpu())

        with ExitStack() as hooks:
            for name, layer in layers.items():
                hooks.enter_context(layer.register_forward_pre_hook(partial(keep, name)))
            for x in sources:
                rows = torch.randperm(len(x), generator=generator)[: self.images // len(sources)].sort().values
                for batch in take(x, rows).split(BATCH):
                    model.extractor(onto(batch, model.head.weight))
        return {name: torch.cat(parts) for name, parts in read.items() if parts}  # attention reads some weights itself


def in_range(*rows: Tensor) -> list[Tensor]:
    """Rows of both kinds over one power of two: their covariances have the square of the scale."""
    scale = power_of_two(*rows)
    return [part / scale for part in rows]


def halves(x: Tensor) -> Tensor:
    """Every second image, and the others: [2, rows, D] in float64."""
    x = x[: len(x) // 2 * 2].double()
    return torch.stack([x[half::2].flatten(0, 1) for half in range(2)])


def lost(weight: Tensor, kept: Tensor, harmful: Tensor, share: float, held_out: tuple[Tensor, Tensor]) -> float:
    """Share of the variance of kept outputs that is lost where a `share` of that of harmful outputs is left.

    K and H [D, D], `kept` and `harmful`, are covariances of a layer's inputs in float64, K positive definite. The
    weights W' = W K (K + strength H)^-1 have the least tr((W' - W) K (W' - W)^T) + strength tr(W' H W'^T), for W
    [out, D]; the strength is that which leaves this share. With H V = K V diag(m) and V^T K V = I, W' is
    W K V diag(g) V^T with gains g = 1 / (1 + strength m): variances of outputs are quadratic forms of g.

    Both shares are those of `held_out` covariances of kept and harmful inputs. Weights times 1 - s leave (1 - s)^2 and
    lose s^2, of any inputs: they lose (1 - sqrt(share))^2. NaN where no strength leaves so little of held-out rows: too
    few rows for so many inputs say what the weights should be.
    """
    ratios, vectors = (torch.from_numpy(x) for x in scipy.linalg.eigh(harmful.numpy(), kept.numpy()))
    own = weight @ kept @ vectors
    of_kept, of_harmful = ((own.mT @ own) * (vectors.mT @ x @ vectors) for x in held_out)
    scale, low, high = kept.trace() / harmful.trace(), SMALLEST, LARGEST
    for _ in range(BISECTIONS):
        strength = (low * high) ** 0.5
        gains = 1 / (1 + strength * scale * ratios.clamp(min=0))
        enough = gains @ of_harmful @ gains <= share * of_harmful.sum()
        low, high = (low, strength) if enough else (strength, high)
    if high == LARGEST:
        return torch.nan
    return ((1 - gains) @ of_kept @ (1 - gains) / of_kept.sum()).item()


def switched(kept: Tensor, harmful: Tensor, covariances: tuple[Tensor, Tensor], share: float, ridge: float) -> float:
    """Share of `kept` inputs [2, N, D] beyond the cut that a `share` of `harmful` ones [2, M, D] is beyond.

    Along Fisher's linear discriminant of the first rows of both, whose `covariances` are given, with a ridge relative
    to the mean variance; counted in the second ones. A ReLU behind this direction would switch them off with the
    harmful ones.
    """
    n, m = kept.shape[1], harmful.shape[1]
    within = (covariances[0] * n + covariances[1] * m) / (n + m)
    within.diagonal().add_(ridge * within.diagonal().mean())
    direction = torch.linalg.solve(within, harmful[0].mean(0) - kept[0].mean(0))
    threshold = (harmful[1] @ direction).quantile(1 - share)
    return (kept[1] @ direction >= threshold).double().mean().item()


def covariance(x: Tensor) -> Tensor:
    """That of rows [N, D] around their mean."""
    x = x - x.mean(0)
    return x.mT @ x / len(x)
