"""What a released model is worth to an attacker, and how much of it a defense takes away.

Validation rows choose the settings and the best attacker. With n training images of each class and within b
operations, its test accuracy is A_0(n, b) with theta_0, A_I(n, b) with theta_I and A_none(n, b) without the model. An
attacker with a model may leave it aside, so A_none is at most A_0 and A_I but for noise, and for validation rows that
choose badly. Intervals are those of the attackers that were chosen: they leave this choice out.

    worth = A_0 - A_none,    removed = (A_0 - A_I) / (A_0 - A_none)

`removed` is 0 for no defense, and 1 for a model that is of no use any more. With A_left(n, b) for attackers who use
nothing of theta_0 that immunization changed, no defense of the same part of the net removes more than its

    ceiling = (A_0 - A_left) / (A_0 - A_none).

The same holds of any part from a block to the end, with A_left for who has theta_0 before it and draws it anew.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.evaluation.measures import Measures
from immunization.runs.records import Role, Stage, of_role
from immunization.runs.result import Curve
from immunization.theory.statistics import Estimate, estimate

Curves = Mapping[Stage, AttackCurve]
"""Of one attacker by stage; those of a reference are of the baseline only."""

PER_DECADE = 2
"""Budgets of operations in a decade at which worth is measured."""


@dataclass
class Draw:
    """Curves of all attackers with the images of one draw: with theta_0, with theta_I, and without the model.

    `untouched` are those who use nothing that immunization changed; `partial`, by name, those with a part of theta_0.
    """

    before: list[AttackCurve] = field(default_factory=list)
    after: list[AttackCurve] = field(default_factory=list)
    without: list[AttackCurve] = field(default_factory=list)
    untouched: list[AttackCurve] = field(default_factory=list)
    partial: dict[str, list[AttackCurve]] = field(default_factory=dict)

    @classmethod
    def of(cls, attacks: Mapping[str, Attack], curves: Mapping[str, Curves], untouched: Container[str]) -> Draw:
        """Of those curves that say what each test row adds."""
        draw = cls()
        for name in sorted(curves, key=lambda name: attacks[name].reference):  # of equals, an attacker counts
            attack, known = attacks[name], {s: curve for s, curve in curves[name].items() if curve.scores is not None}
            before, after = ([known[stage]] if stage in known else [] for stage in ("baseline", "immunized"))
            if not attack.reference:
                draw.before += before
                draw.after += after
            elif not attack.partial:
                draw.without += before
            elif before:
                draw.partial[name] = before
            if name in untouched and (attack.partial or not attack.reference):
                draw.untouched += before
        return draw


@dataclass(frozen=True)
class Worth:
    """Best accuracies, what theta_0 is worth, how much of it is lost, which share of it, and how much could be.

    `partial`: best accuracy and ceiling of those who have only a part of theta_0, by name. All shares are None where
    theta_0 is worth nothing; `removed` also where validation rows chose badly, the `ceiling` where nobody leaves the
    immunized part aside.
    """

    before: float
    after: float
    without: float
    worth: Estimate
    lost: Estimate
    removed: Estimate | None
    ceiling: Estimate | None = None
    partial: Mapping[str, tuple[float, Estimate | None]] = field(default_factory=dict)


def worth(
    before: Tensor,
    after: Tensor,
    without: Tensor,
    left: Tensor | None = None,
    partial: Mapping[str, Tensor] | None = None,
) -> Worth:
    """From scores [draws, N] of the best attackers: what each test row adds to their accuracy in each draw.

    The rows are the same for all, so that differences are taken row by row. `removed` is None where the interval of the
    worth holds 0, or where its own lies above 1: no attacker has to do worse with theta_I than without the model.
    """
    gain = before - without
    value = estimate(gain)

    def share(other: Tensor | None) -> Estimate | None:
        return None if other is None or not value.low > 0 else _share(before - other, gain)

    def ceiling(other: Tensor | None) -> Estimate | None:
        found = share(other)  # nothing removes more than everything
        return found and Estimate(min(found.value, 1.0), min(found.low, 1.0), min(found.high, 1.0))

    removed = share(after)
    return Worth(
        before.mean().item(),
        after.mean().item(),
        without.mean().item(),
        value,
        estimate(before - after),
        removed if removed and removed.low <= 1 else None,
        ceiling(left),
        {name: (scores.mean().item(), ceiling(scores)) for name, scores in (partial or {}).items()},
    )


def _share(loss: Tensor, gain: Tensor) -> Estimate:
    ratio = (loss.mean() / gain.mean()).item()
    around = estimate((loss - ratio * gain) / gain.mean())  # of mean 0: what a row moves the ratio by
    return Estimate(ratio, ratio + around.low, ratio + around.high)


def best(curves: Iterable[AttackCurve], guess: Tensor, budget: float = math.inf) -> Tensor:
    """Scores [N] of test rows by the attacker who is best on validation rows within a budget; `guess` without one."""
    top, scores = -math.inf, guess
    for curve in curves:
        val = curve.val.where((curve.flops <= budget) & torch.isfinite(curve.val), -torch.inf)
        place = len(val) - 1 - int(val.flip(0).argmax())  # of equals, the one who has learned from most
        if val[place] > top and curve.scores is not None:
            top, scores = val[place].item(), curve.scores[place].to(guess)
    return scores


def at(draws: Sequence[Draw], guess: Tensor, public: bool, budget: float = math.inf) -> Worth:
    """The worth that all attackers show within a budget; where theta_0 is `public`, who has theta_I has it, too."""

    def scores(groups: Iterable[list[AttackCurve]]) -> Tensor:
        """Scores of the best among each draw's group and those without the model."""
        pairs = zip(groups, draws, strict=True)
        return torch.stack([best(group + draw.without, guess, budget) for group, draw in pairs])

    before = scores(draw.before for draw in draws)
    after = before if public else scores(draw.after for draw in draws)
    untouched = any(draw.untouched for draw in draws) and not public
    left = scores(draw.untouched for draw in draws) if untouched else None
    names = dict.fromkeys(name for draw in draws for name in draw.partial if not public)
    partial = {name: scores(draw.partial.get(name, []) for draw in draws) for name in names}
    return worth(before, after, scores([] for _ in draws), left, partial)


def budgets(draws: Sequence[Draw]) -> list[float]:
    """A geometric grid of operations from the cheapest attacker to the dearest."""
    flops = torch.cat([curve.flops for draw in draws for curve in (*draw.before, *draw.after, *draw.without)])
    low, high = (max(value, 1.0) for value in (flops.min().item(), flops.max().item()))
    count = max(2, math.ceil(math.log10(high / low) * PER_DECADE) + 1)
    return np.geomspace(low, high, count).tolist()  # both ends as they are


def measure(
    draws: Sequence[Draw],
    guess: Tensor,
    images: int | None,
    role: Role,
    measures: Measures,
    public: bool = False,
    rows: int | None = None,
) -> None:
    """Put what `Worth` holds of the task `role`, with `images` of each class (None: all), and its curves.

    `draws` without an attacker who has the model, or without any, are a reason for it to be missing. `rows`: how many
    validation rows choose attackers.
    """
    if not any(draw.before for draw in draws):
        reason, lost = "no attacker with the model ran", ("worth/lost",) if images is None else ()
        if images is not None:
            reason = f"no class of the harmful task has more than {images} training images"
            reason = "no attacker takes so few images" if draws else reason
        measures.miss(reason, "worth/theta_0", *lost, "worth/removed", task=role, images=images)
        return
    put(at(draws, guess, public), measures, role, images, rows)
    grid, group, few = budgets(draws), of_role("worth", role), "" if images is None else f"_{images}"
    steps = [at(draws, guess, public, budget) for budget in grid]
    for name in ("before", "after", "without"):
        measures.curves[f"{group}/{name}{few}"] = {"x": grid, "y": [getattr(step, name) for step in steps]}
    removed: Curve = {"x": [], "y": []}
    for budget, step in zip(grid, steps, strict=True):
        if step.removed:
            removed["x"].append(budget)
            removed["y"].append(step.removed.value)
    if removed["x"]:
        measures.curves[f"{group}/removed{few}"] = removed


def put(worth: Worth, measures: Measures, role: Role, images: int | None = None, rows: int | None = None) -> None:
    """Put best accuracies and shares; those that are unknown have a reason."""
    of: dict[str, Any] = {"task": role, "images": images}
    for name in ("before", "after", "without"):
        measures.put(f"worth/{name}", getattr(worth, name), **of)
    for name, (accuracy, _) in worth.partial.items():
        measures.put(f"worth/partial_{name}", accuracy, **of)
    shares = {"worth/theta_0": worth.worth, "worth/lost": worth.lost, "worth/removed": worth.removed}
    ceilings = {"worth": worth.ceiling} | {f"partial_{name}": share for name, (_, share) in worth.partial.items()}
    # of one that is None nobody leaves a part aside, or `removed` has the reason
    shares |= {f"ceiling/{name}": share for name, share in ceilings.items() if share is not None}
    for name, share in shares.items():
        if share is not None:
            measures.put(name, share.value, low=share.low, high=share.high, **of)
            continue
        reason = (
            f"with theta_0 the best attacker has {worth.before:.3f}, without the model {worth.without:.3f}: what "
            "the model is worth cannot be told from 0, and no defense of it can be measured"
        )
        if misled := worth.worth.low > 0:
            reason = (
                f"with {images or 'all'} images of each class, the best attacker with theta_I by {rows or 'the'} "
                f"validation rows has {worth.after:.3f}, the best without the model {worth.without:.3f}: who has "
                "theta_I can leave it aside, so these rows chose badly, and more are needed"
            )
        measures.miss(reason, name, low=math.nan, high=math.nan, **of)
        if misled and of_role("worth_misled", role) not in measures.flags:
            measures.flag(of_role("worth_misled", role), reason)
        elif images is None and not misled:
            measures.flag(of_role("worth_undetermined", role), reason)
    if worth.ceiling and worth.removed and worth.ceiling.low > 0:
        measures.put("ceiling/worth_attained", worth.removed.value / worth.ceiling.value, **of)
    elif worth.ceiling:
        reason = "what precedes the immunized part serves as well as the whole net"
        reason = reason if worth.removed else "how much is removed is unknown"
        measures.miss(reason, "ceiling/worth_attained", **of)
