"""Attackers who predict from frozen features without gradients: nearest rows, and logistic regression."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from immunization.attacks.base import AttackCurve, Predictor, Rows
from immunization.attacks.probes import WhitenedProbe
from immunization.attacks.victim import Victim
from immunization.checks import Count, Positive
from immunization.data.task import Task
from immunization.errors import Inapplicable
from immunization.runs.records import Stage
from immunization.theory.singled_out import unit_rows


class Neighbours(Predictor, group="attack.neighbours"):
    """A vote of the k nearest training rows, of centered features of length 1; k = 0 is the nearest mean of a class.

    The best k on the validation split is used. Classes only.
    """

    setting_name, tries = "k", "neighbours"

    steps = 1
    neighbours: Sequence[Count]

    def predict(self, task: Task, rows: Rows) -> tuple[Tensor, float]:
        if not task.classes:
            raise Inapplicable("a regression has no classes: neighbours have nothing to vote on")
        mean = rows.train.mean(0)
        train, held_out = unit_rows(rows.train - mean), unit_rows(torch.cat([rows.val, rows.test]) - mean)
        one_hot = F.one_hot(rows.y, task.classes).to(train)
        means = unit_rows(one_hot.T @ train)
        likeness = held_out @ train.T
        votes = [
            one_hot[likeness.topk(min(int(k), len(train))).indices].sum(1) if k else held_out @ means.T
            for k in self.settings
        ]
        return torch.stack(votes), 2.0 * likeness.numel() * train.shape[1]


class LogisticProbe(Predictor):
    """scikit-learn's logistic regression, with a bias, on whitened features, for every C of `strengths`.

    A step is an iteration.
    """

    setting_name, tries = "C", "strengths"
    natural_ends = False

    strengths: Sequence[Positive]

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        task = victim.task
        if not task.classes:
            raise Inapplicable("a regression has no classes: logistic regression does not apply")
        rows = self.features(victim, stage)
        problem = WhitenedProbe(samples=self.samples, precision=self.precision, seed=self.seed).problem(victim, stage)
        basis = problem.vectors / problem.sigma
        train, held_out = (rows.train * problem.scale) @ basis, torch.cat([problem.val, problem.test]) @ basis
        predicted, steps = [], []
        for strength in self.settings:
            model = logistic_regression(train.cpu().numpy(), rows.y.cpu().numpy(), strength, self.steps)
            predicted.append(torch.from_numpy(model.predict(held_out.cpu().numpy())))
            steps.append([int(model.n_iter_.max())])
        votes, taken = F.one_hot(torch.stack(predicted), task.classes).to(rows.y.device), torch.tensor(steps)
        flops = problem.flops + problem.per_pass * taken.double()
        return self.curve(task, votes, flops, problem.flops, taken)


def logistic_regression(train: Any, labels: Any, strength: float, steps: int) -> Any:
    """sklearn's model of C = `strength` after at most `steps` iterations, fitted to rows [N, D] with labels [N]."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="The number of unique classes")  # few rows of many
        return LogisticRegression(C=strength, max_iter=steps).fit(train, labels)
