"""Distillation of theta_0: features and class probabilities of images to keep, and weights that move little."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from immunization.compute.machine import onto
from immunization.data.task import TaskPair, log_probabilities
from immunization.models.activations import Stream, take
from immunization.models.base import Batch, Model
from immunization.models.chain import multiplies, rows_of

log = logging.getLogger(__name__)


class Damped(nn.Module):
    """The weights W [out, ...] = W_0 + V S of a layer, trained by V, which is 0 at first.

    S [d, d] = (I + a C / mean diag C)^-1/2, where C are the second moments of the rows [N, d] that W multiplies: what a
    layer reads, or the patches of a convolution. A step of V then moves what a layer gives for such rows by about the
    same in every direction, and W most where they have nothing. With a projection in place of S this is training in the
    null space of the features (Wang et al., CVPR 2021).
    """

    def __init__(self, w_0: Tensor, root: Tensor) -> None:
        super().__init__()
        self.w_0, self.root = w_0, root
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._moved(v)
        if not v.any():  # theta_0, which every step asks for
            return self.w_0
        if self.last is None or not torch.equal(v, self.last[0]):  # a fused optimizer leaves v._version as it is
            self.last = v.clone(), self._moved(v)
        return self.last[1]

    def _moved(self, v: Tensor) -> Tensor:
        return self.w_0 + (v.flatten(1) @ self.root).view_as(self.w_0).to(self.w_0)

    def right_inverse(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w)


@torch.no_grad()
def damp(net: nn.Module, batches: Iterable[Tensor], damping: float) -> list[nn.Module]:
    """Make the trained weights of a net's linear layers and ungrouped convolutions `Damped`, for a = `damping`.

    `batches` are what the net reads of the images to keep. Returns the layers, for `release`; none where they are
    damped already.
    """
    layers = [part for part in net.modules() if multiplies(part)]
    if not layers:
        log.warning(
            "method.damping has nothing to damp: no trained layer is linear or a plain convolution (one group, zeros)"
        )
    if any(parametrize.is_parametrized(layer) for layer in layers):
        return []
    moments: dict[nn.Module, Tensor] = {}

    def add(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        rows = rows_of(layer, inputs[0]).flatten(0, 1)
        moments[layer] = moments.get(layer, 0.0) + rows.T @ rows

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(add))
        for batch in batches:
            net(batch)
    layers = [layer for layer in layers if layer in moments]  # attention reads some weights itself
    for layer in layers:
        c = moments.pop(layer)
        c *= damping / c.diagonal().mean().clamp(min=torch.finfo(c.dtype).tiny)
        c.diagonal().add_(1)
        values, vectors = torch.linalg.eigh(c)  # of C alone, which may be singular, LAPACK does not always converge
        root = vectors / values.sqrt() @ vectors.T
        damped = Damped(layer.get_parameter("weight").detach().clone(), root)
        parametrize.register_parametrization(layer, "weight", damped, unsafe=True)
    return layers


def release(layers: Iterable[nn.Module]) -> None:
    """Make the weights of damped layers plain ones again, as they are now."""
    for layer in layers:
        parametrize.remove_parametrizations(layer, "weight")


DAMPED = 1000
"""Most images to keep whose second moments damp the weights; of D_P, whose few classes are not all, a fifth of that."""


class Distillation:
    """L_distill = mean_K ||f - f_0||^2 / mean_P ||f_0 - mean f_0||^2 + mean_K KL(p_0 || p) of a model as it is now.

    f, f_0 are the features and p, p_0 the class probabilities of theta and theta_0; K is a batch of D_P and as many
    images of dataset.keep_root, if there are any, drawn anew for every step. Only nets have probabilities to distill:
    the head of a model of rows starts untrained.
    """

    def __init__(
        self, model: Model, pair: TaskPair, keeps: bool = True, damping: float = 0.0, enlarged: bool = False
    ) -> None:
        """`keeps`: images of dataset.keep_root are read; without, K is the batch of D_P.

        `damping` of the trained weights until `release`, by such images. `enlarged`: `larger` has those of D_P and any
        to keep at twice the size, and the weights are damped by these, too.
        """
        self.kept = model.kept() if keeps else None
        self.larger = [model.enlarged("primary", pair.primary.train)] if enlarged else []
        if enlarged and (kept := model.kept(enlarged=True)) is not None:
            self.larger.append(kept)
        self.omega_0 = [p.detach().clone() for p in model.head.parameters()]
        once = [pair.primary.train.x] if self.kept is None else [pair.primary.train.x, self.kept]
        sizes = chain(self._read(once, DAMPED), self._read(self.larger, DAMPED // 4))  # of as many places
        self.layers = damp(model.extractor, sizes, damping) if damping else []
        self.theta_0 = {name: p.detach().clone() for name, p in model.trained().items()}
        features = model.features(pair.primary.train.x)
        self.mean, self.size = features.mean(0), features.square().sum(1).mean()
        self.spread = self.size - self.mean.square().sum()

    def _read(self, parts: Sequence[Tensor | Stream], most: int) -> Iterator[Tensor]:
        """What the weights are damped by, in batches: rows of D_P and images to keep, where there are any."""
        for rows, count in zip(parts, (most // 5, most)[-len(parts) :], strict=False):
            few = torch.linspace(0, len(rows) - 1, min(len(rows), count)).long()  # of all classes
            yield from (onto(batch, self.omega_0[0]) for batch in take(rows, few).split(50))

    def release(self) -> None:
        """Make damped weights plain ones again."""
        release(self.layers)

    def drawn(self, x: Tensor) -> Tensor:
        """As many images to keep as x has rows; none where there are none."""
        return x[:0] if self.kept is None else self.kept[torch.randint(len(self.kept), (len(x),))].to(x)

    @torch.no_grad()
    def before(self, model: Model, x: Tensor) -> Tensor:
        """f_0 [N, D]."""
        return model.training_features(x, self.theta_0)

    def loss(self, model: Model, features: Tensor, before: Tensor) -> Tensor:
        """L_distill of f and f_0 [N, D]."""
        p_0 = log_probabilities(F.linear(before, *self.omega_0))
        moved = (features - before).square().sum(1).mean() / self.spread
        if not model.deep:
            return moved
        return moved + F.kl_div(log_probabilities(model.head(features)), p_0, log_target=True, reduction="batchmean")

    def __call__(self, model: Model, primary: Batch) -> Tensor:
        """L_distill of a batch of D_P beside as many images to keep."""
        x = torch.cat([primary.x, self.drawn(primary.x)])
        return self.loss(model, model.training_features(x), self.before(model, x))
