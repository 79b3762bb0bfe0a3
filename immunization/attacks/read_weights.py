"""Attackers who read from the released weights in which directions the harmful task lies."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from immunization.attacks.base import AttackCurve, Predictor, as_outputs
from immunization.attacks.victim import Victim
from immunization.checks import AtLeastOne, Fraction, Positive
from immunization.data.task import Task, evenly
from immunization.errors import Inapplicable
from immunization.evaluation.leak import MORE, bases, best_on_validation, readings
from immunization.runs.records import Stage
from immunization.theory.singled_out import nearest, singled_out, unit_rows, whitened_by_neighbours

SHARPER = 3
"""Power of the cosine of two rows that is the weight of the edge between them."""


class ReadWeights(Predictor, group="attack.read_weights"):
    """Ridge regression on features before the map, projected on what the map singles out.

    The map is theta of a linear model, or the one folded behind a net. Where layers were trained, it is the linear map
    that takes the features of theta_0 to those of theta_I best, I + F_0^+ (F_I - F_0) for features F of all training
    rows, which need no label. Subspaces are those of `evaluation.leak.bases`: the smallest and the largest singular
    directions of theta, and those among them along which all training rows vary most, which takes no label. Validation
    rows choose the subspace, for every ridge of `ridges`, relative to lambda_1. The baseline has no map, so that there
    principal directions of features are all that can be chosen.
    """

    setting_name, tries = "ridge", "ridges"

    steps = 1
    ridges: Sequence[Positive]

    def needs_theta_0(self, victim: Victim) -> bool:
        return not has_map(victim)

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        task, rows = victim.task, self.features(victim, "baseline")  # what the map of every stage reads
        unlabelled = victim.features("baseline", "train", self.precision)
        theta = None if stage == "baseline" else self.map(victim, stage, unlabelled)
        read = bases(theta, unlabelled, task.outputs + MORE)
        held_out = torch.cat([rows.val, rows.test])
        (predictions,) = readings(task, rows.train, rows.y, held_out, [read], self.settings)
        widths = sum(unlabelled.shape[1] if basis is None else basis.shape[1] for basis in read)
        flops = rows.flops + 2.0 * widths * len(rows.train) * (unlabelled.shape[1] + task.outputs)
        return self.curve(task, predictions, torch.tensor([[flops]], dtype=torch.float64), flops)

    def map(self, victim: Victim, stage: Stage, before: Tensor) -> Tensor:
        """theta [D, D] of a stage, whose features were `before` [N, D]."""
        if has_map(victim):
            return victim.theta(stage, self.precision).to(before)
        change = finite(victim.features(stage, "train", self.precision)) - before
        return torch.eye(before.shape[1]).to(before) + torch.linalg.pinv(before) @ change


class Spread(Predictor, group="attack.spread"):
    """Label spreading (Zhou et al., 2004) from the attacker's labeled rows over training rows without a label.

    Rows are whitened by the scatter of near neighbours, which stands for that within classes, centered, and scaled to
    length 1. Each has an edge to its `neighbours` nearest ones. With the normalized graph S and labels Y, scores are
    (I - alpha S)^-1 Y for each of `alphas`, and a held-out row takes those of its neighbours; alpha = 0 is the nearest
    mean of a class. This is done on all features and, before a map, on what lies on either side of its widest gap, too;
    validation rows choose. At most `most` training rows are used, labeled ones first, evenly spaced. Classes only.
    """

    setting_name, tries = "alpha", "alphas"

    steps = 1
    alphas: Sequence[Fraction]
    neighbours: AtLeastOne
    most: AtLeastOne

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        task = victim.task
        if not task.classes:
            raise Inapplicable("a regression has no classes: there are no labels to spread")
        before: Stage = "baseline" if has_map(victim) else stage
        features, every = self.features(victim, before), victim.features(before, "train", self.precision)
        labelled, others = self._chosen(task)
        train = finite(every)[torch.cat([labelled, others]).to(every.device)]
        held_out, y = torch.cat([features.val, features.test]), task.train.y[labelled.to(task.train.y.device)]
        read = [torch.eye(train.shape[1]).to(train)]
        if has_map(victim):
            read += singled_out(victim.theta(stage, self.precision).to(train), task.outputs + MORE)[:2]
        outputs = [as_outputs(task, self.spread(train, y, held_out, basis, task.classes)) for basis in read]
        best = best_on_validation(task, (own[:, : len(task.val)] for own in outputs))
        predictions = torch.stack([outputs[place][setting] for setting, place in enumerate(best.tolist())])
        passed = victim.flops_per_row(stage) * len(train)
        solved = len(read) * (2.0 * len(train) ** 2 * train.shape[1] + len(self.settings) * len(train) ** 3)
        return self.curve(task, predictions, torch.tensor([[passed + solved]], dtype=torch.float64), passed + solved)

    def _chosen(self, task: Task) -> tuple[Tensor, Tensor]:
        """Training rows whose labels the attacker has, and others."""
        labelled = self.rows(task)
        if labelled is None:
            labelled = torch.arange(len(task.train))
        others = torch.ones(len(task.train), dtype=torch.bool)
        others[labelled] = False
        labelled, others = labelled[evenly(len(labelled), self.most)], others.nonzero()[:, 0]
        return labelled, others[evenly(len(others), self.most - len(labelled))]

    def spread(self, train: Tensor, y: Tensor, held_out: Tensor, basis: Tensor, classes: int) -> Tensor:
        """Scores [alphas, M, classes] of rows `held_out` [M, D]; `y` [n] are the labels of the first of `train` [N, D].

        `basis` [D, k] is what is looked at.
        """
        basis = whitened_by_neighbours(train, basis)
        mean = train.mean(0)
        units, asked = (unit_rows((x - mean) @ basis) for x in (train, held_out))
        labels = torch.zeros(len(train), classes).to(units)
        labels[: len(y)] = F.one_hot(y.to(units.device), classes).to(units)
        edges = torch.zeros(len(train), len(train)).to(units)
        cosines, places = nearest(units, self.neighbours)
        edges.scatter_(1, places, cosines.clamp(min=0) ** SHARPER)
        edges = edges + edges.T
        degree = edges.sum(1).clamp(min=torch.finfo(units.dtype).eps).rsqrt()
        graph = degree[:, None] * edges * degree
        cosines, places = (asked @ units.T).topk(min(self.neighbours, len(units)))
        near = (cosines.clamp(min=0) ** SHARPER)[:, :, None]
        found = []
        for alpha in self.settings:
            if alpha == 0:
                found.append(asked @ unit_rows(labels.T @ units).T)
                continue
            scores = torch.linalg.solve(torch.eye(len(train)).to(units) - alpha * graph, labels)
            scores = F.normalize(F.normalize(scores, p=1, dim=0), p=1)  # classes count alike, and rows do
            found.append((scores[places] * near).sum(1))
        return torch.stack(found)


def has_map(victim: Victim) -> bool:
    """Whether theta_I ends in a linear map that anybody finds in the weights."""
    return victim.model.last_map(victim.model.extractor) is not None


def finite(features: Tensor) -> Tensor:
    """`features` as they are. Raises Inapplicable where some are no numbers."""
    if not torch.isfinite(features).all():
        raise Inapplicable("the features hold NaN or infinite values")
    return features
