"""CLAMP (Sarker et al., CVPR 2026): what an attacker's optimizer can reach at all, differentiated through its steps."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from immunization.checks import AtLeastOne, Fraction, NonNegative, Positive
from immunization.methods.attacker import AgainstAttacker, scaled
from immunization.models.base import Batch, Model

Loss = Callable[[Tensor], Tensor]
"""L_H as a function of the attacker's head."""

LARGEST_CONTRACTION = 0.99
"""Largest contraction factor in 1 / (1 - c)."""


class CLAMP(AgainstAttacker):
    """Minimize lambda_P L(D_P) + long L_long + contraction L_contraction + curvature L_curvature + invert L_invert.

    The attacker takes K = `attack_steps` gradient steps of rate `attack_lr` of a head w on D_H; the terms
    (`attack_terms`) are differentiated through these.

    From the paper, of which only notes by others were at hand: the four terms and the sum. Ours: every number; that
    only the head is trained, on features scaled to a mean squared norm of 1; that w starts anew in every step, standard
    normal; the smoothness L, the largest curvature on the way; v along the last step; c of at most 0.99 in B.
    """

    lambda_P: NonNegative
    long: NonNegative
    contraction: NonNegative
    curvature: NonNegative
    invert: NonNegative
    attack_steps: AtLeastOne
    attack_lr: Positive
    margin: NonNegative
    cap: NonNegative
    c_max: Fraction
    kappa_min: NonNegative
    eps: Positive

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        logits, _ = model.outputs(primary)
        loss, features = self.pair.primary.loss(logits, primary.y), scaled(model.training_features(harmful.x))

        def harmful_loss(w: Tensor) -> Tensor:
            return self.pair.harmful.loss(F.linear(features, w), harmful.y)

        shape = self.pair.harmful.outputs, features.shape[1]
        start = torch.randn(shape, dtype=features.dtype).to(features)  # the same numbers on every device
        limits = {name: getattr(self, name) for name in ("eps", "margin", "cap", "c_max", "kappa_min")}
        terms = attack_terms(harmful_loss, start, steps=self.attack_steps, rate=self.attack_lr, **limits)
        total = self.lambda_P * loss + sum(getattr(self, name) * term for name, term in terms.items())
        return {"loss": total, "task_loss": loss, **terms}


def attack_terms(
    loss: Loss,
    start: Tensor,
    *,
    steps: int,
    rate: float,
    eps: float,
    margin: float,
    cap: float,
    c_max: float,
    kappa_min: float,
) -> dict[str, Tensor]:
    """The four terms, before their weights.

    T(w) = w - rate grad loss(w) leads from w_0 = `start` to w_K in K = `steps` steps u_t = w_t - w_(t-1).

        long        = max(0, loss(w_0) - loss(w_K) + ||grad loss(w_K)|| B + L/2 B^2 - margin), B = ||u_K|| / (1 - c)
        contraction = softplus(c - c_max), c = ||T(w_K + eps v) - T(w_K)|| / eps, v = u_K / ||u_K||
        curvature   = sum_t softplus(kappa_min - kappa_t), kappa_t the second difference of loss at w_(t-1) along u_t
        invert      = -min(loss(w_0), cap)

    L is the largest kappa_t. `long` bounds the loss that further steps can still take off, however many.
    """

    def gradient(w: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss(w), w, create_graph=True)
        return found

    path, tiny = [start.detach().requires_grad_()], torch.finfo(start.dtype).tiny
    for _ in range(steps):
        path.append(path[-1] - rate * gradient(path[-1]))
    ways = [b - a for a, b in pairwise(path)]
    directions = [way / way.norm().clamp(min=tiny) for way in ways]
    kappas = torch.stack([second_difference(loss, w, v, eps) for w, v in zip(path[:-1], directions, strict=True)])
    first, last, slope = path[0], path[-1], gradient(path[-1])
    c = (directions[-1] - rate * (gradient(last + eps * directions[-1]) - slope) / eps).norm()
    rest = ways[-1].norm() / (1 - c.clamp(max=LARGEST_CONTRACTION))
    gain = loss(first) - loss(last) + slope.norm() * rest + kappas.max() / 2 * rest**2
    return {
        "long": F.relu(gain - margin),
        "contraction": F.softplus(c - c_max),
        "curvature": F.softplus(kappa_min - kappas).sum(),
        "invert": -loss(first).clamp(max=cap),
    }


def second_difference(loss: Loss, w: Tensor, v: Tensor, eps: float) -> Tensor:
    """Curvature of `loss` at `w` along the unit `v`, from three values eps apart."""
    return (loss(w + eps * v) - 2 * loss(w) + loss(w - eps * v)) / eps**2
