"""What the weights of a map tell about the harmful task: to an attacker without labels, and with a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from immunization.checks import AtLeastOne, Component, Positive
from immunization.data.task import SPLITS, Task
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.runs.records import Role, of_role
from immunization.theory.singled_out import (
    auc,
    ends,
    random_directions,
    random_rotation,
    read_directions,
    singled_out,
    varying,
)
from immunization.theory.statistics import Estimate, estimate

MORE = 4
"""Directions more than the task has classes, up to which the smallest and the largest ones of a map are read."""
TELLING = 0.1
"""AUC above that of random directions from which on a direction in the weights counts as telling the task."""
WORTH = 0.02
"""Accuracy that the map adds, with few labels, from which on it counts as telling the task."""


def bases(theta: Tensor | None, rows: Tensor, most: int, whole: Sequence[Tensor] = ()) -> list[Tensor | None]:
    """What an attacker reads of features: all of them (None), principal directions, and what theta singles out.

    `theta` [D, E] is a map of features, None for an attacker without it; `rows` [N, D] are features before the map,
    without labels. Bases [D, k]; of all features and of the two sides of the widest gap there are the directions along
    which rows vary most, too, and all of them scaled to the same variance. `whole` are those of all features, where
    they are known.
    """
    subspaces = [] if theta is None else singled_out(theta, most)
    read: list[Tensor | None] = [None, *subspaces, *(whole or directions(rows, most))]
    for basis in subspaces[:2]:
        read += varying(rows, basis, most)
    return read


def directions(rows: Tensor, most: int) -> list[Tensor]:
    """Bases of the directions of all features along which rows [N, D] vary most, as in `varying`."""
    return varying(rows, torch.eye(rows.shape[1]).to(rows), most)


def readings(
    task: Task,
    train: Tensor,
    y: Tensor,
    held_out: Tensor,
    reads: Sequence[Sequence[Tensor | None]],
    ridges: Sequence[float],
) -> list[Tensor]:
    """Predictions [..., R, V + T, outputs] for each ridge, of the basis of each of `reads` that validation rows choose.

    `train` [..., N, D] and `y` [..., N] are labeled rows of each draw, `held_out` [V + T, D] those of validation, V,
    and test. Bases of one width are read at once, and one that several have only once.
    """
    targets, val = task.targets(y.flatten()).unflatten(0, y.shape), held_out[: len(task.val)]
    known = {id(basis): basis for read in reads for basis in read}
    groups: dict[int, dict[int, Tensor | None]] = {}
    for key, basis in known.items():
        groups.setdefault(0 if basis is None else basis.shape[1], {})[key] = basis
    scores, fits = dict[int, Tensor](), dict[int, Callable[[Tensor], Tensor]]()
    for group in groups.values():
        own = [basis for basis in group.values() if basis is not None]
        predict = read_directions(train, targets, torch.stack(own) if own else None, ridges)
        found = task.measure(predict(val), task.val.y)
        scores |= zip(group, found if own else found[None], strict=True)
        fits |= {key: partial(predict, place=place) for place, key in enumerate(group)}
    predicted = []
    for read in reads:
        best = first_of_the_best(torch.stack([scores[id(basis)] for basis in read])).to(held_out.device)
        predictions = held_out.new_empty(*best.shape, len(held_out), targets.shape[-1])
        for place in best.unique().tolist():
            predictions[best == place] = fits[id(read[place])](held_out)[best == place]
        predicted.append(predictions)
    return predicted


def best_on_validation(task: Task, predictions: Iterable[Tensor]) -> Tensor:
    """Of several predictions [..., V, outputs] of validation rows the place of the best one, [...]."""
    return first_of_the_best(torch.stack([task.measure(own, task.val.y) for own in predictions]))


def first_of_the_best(scores: Tensor) -> Tensor:
    """The places [...] of the largest of scores [B, ...], of equals the first, which torch does not promise."""
    return torch.from_numpy(scores.cpu().numpy().argmax(0))


class Leak(Component, group="evaluation.leak"):
    """What the weights of a map theta tell of each harmful task, for linear models and maps folded behind a net.

    An attacker reads features before the map: they project these on the directions with the smallest and the largest
    singular values of theta (`singled_out`), and on those inside along which rows without labels vary most.

    `leak/auc`: the mean AUC of directions drawn from the subspace with the smallest or the largest singular value,
    whichever tells more, without any label; `leak/auc_random`: that of directions drawn from all features.
    `leak/worth_<n>`, with `n` labeled rows of each class: test accuracy (or R^2) of the best ridge regression with the
    map's directions (`leak/with_<n>`) less that with a map of the same singular values along random directions
    (`leak/without_<n>`), mean over `draws`, with its interval. Either attacker may also take all features or their
    principal directions; validation rows choose ridge and subspace. Flag `weights_tell_the_task`: AUC or worth is
    clearly above that of random directions.
    """

    names = ("leak/*",)

    labels: Sequence[AtLeastOne]
    draws: AtLeastOne
    ridges: Sequence[Positive]

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, model = Measures(), comparison.model
        theta = model.last_map(model.extractor)
        for role in comparison.pair.attacked:
            if theta is None:
                measures.miss("the model ends in no linear map whose weights could be read", "leak/auc", task=role)
            elif reason := self._nothing(comparison, role):
                measures.miss(reason, "leak/auc", task=role)
            else:
                self._measure(comparison, role, theta.detach(), measures)
        return measures

    @staticmethod
    def _nothing(comparison: Comparison, role: Role) -> str | None:
        """Why a task cannot be measured; None where it can."""
        task = comparison.tasks[role]
        if task.constant or not len(task.val):
            return "there is nothing to learn, or no validation row to choose on"
        return comparison.no_test(role)

    def _measure(self, comparison: Comparison, role: Role, theta: Tensor, measures: Measures) -> None:
        task = comparison.tasks[role]
        train, val, test = (comparison.features(role, split, "baseline") for split in SPLITS)
        told, most = [], task.outputs + MORE
        if task.classes:
            own, chance = self._aucs(task, theta.to(train.device), test)
            measures.put("leak/auc", own, task=role)
            measures.put("leak/auc_random", chance, task=role)
            if own > chance + TELLING:
                told.append(
                    "without a label, a direction that they single out separates test rows with an AUC of "
                    f"{own:.2f} (a random one: {chance:.2f})"
                )
        else:
            measures.miss("a regression has no classes to separate", "leak/auc", task=role)
        held_out, elsewhere = torch.cat([val, test]), random_rotation(len(theta)).to(theta) @ theta
        whole = comparison.once(role, "baseline")(("directions", role, most), lambda: directions(train, most))
        reads = [bases(t.to(train.device), train, most, whole) for t in (theta, elsewhere)]
        for labels in self.labels:
            after, before = self._scores(task, train, held_out, reads, labels)
            worth = estimate(after - before)
            of = {"task": role, "images": labels}
            measures.put("leak/with", after.mean().item(), **of)
            measures.put("leak/without", before.mean().item(), **of)
            measures.put("leak/worth", worth.value, low=worth.low, high=worth.high, **of)
            if worth.value > WORTH and worth.low > 0:
                told.append(_told(task, labels, after, before, worth))
        if told:
            measures.flag(of_role("weights_tell_the_task", role), "; ".join(told))

    @staticmethod
    def _aucs(task: Task, theta: Tensor, test: Tensor) -> tuple[float, float]:
        """AUC of what theta singles out at either end, and of random directions."""
        everything = torch.eye(test.shape[1]).to(test)
        own = max(_auc(task, test, basis) for basis in ends(theta) or [everything])
        return own, _auc(task, test, everything)

    def _scores(
        self, task: Task, train: Tensor, held_out: Tensor, reads: Sequence[Sequence[Tensor | None]], labels: int
    ) -> list[Tensor]:
        """Of each of `reads` what each test row adds to the measure in each draw, [draws, N].

        Of the ridges, the one that is best on validation counts.
        """
        rows = torch.stack([task.few(labels, draw) for draw in range(self.draws)]).to(train.device)
        found = []
        for predicted in readings(task, train[rows], task.train.y[rows], held_out, reads, self.ridges):
            val, test = predicted.split([len(task.val), len(task.test)], -2)
            best = task.measure(val, task.val.y).argmax(-1)
            found.append(task.scores(test[torch.arange(self.draws), best], task.test.y).cpu())
        return found


def _auc(task: Task, rows: Tensor, basis: Tensor) -> float:
    return auc(rows @ random_directions(basis), task.test.y, task.classes).mean().item()


def _told(task: Task, labels: int, after: Tensor, before: Tensor, worth: Estimate) -> str:
    """A sentence's part: what few labels reach with the weights and without."""
    return (
        f"with {labels} labeled {'row' if labels == 1 else 'rows'}{' of each class' * bool(task.classes)} an attacker "
        f"has {task.measure_name} {after.mean().item():.2f} with the map's weights and {before.mean().item():.2f} "
        f"without ({worth.low:+.2f} to {worth.high:+.2f})"
    )
