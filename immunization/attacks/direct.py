"""Attacks on frozen features that take no steps: ridge regression in closed form, and logistic regression."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.least_squares import LeastSquares, ProbeAttack, ProbeCurves
from immunization.attacks.probes import WhitenedProbe, decomposition_flops
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.checks import Positive
from immunization.theory.probe import ridge_weights


class ClosedFormProbe(ProbeAttack):
    """Ridge regression by one SVD, w = V S / (S^2 + ridge) c, for `ridges` relative to lambda_1, as one step."""

    setting_name, tries = "ridge", "ridges"
    order = None
    natural_ends = True

    steps = 1
    ridges: Sequence[float]

    def problem(self, victim: Victim, stage: Stage, features: Mapping[str, Tensor]) -> LeastSquares:
        problem = super().problem(victim, stage, features)
        problem.flops += decomposition_flops(problem)  # once for all ridges
        return problem

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        ridges = torch.tensor(self.settings, dtype=torch.float64).to(problem.sigma)
        curves.record(1, ridge_weights(problem.sigma, problem.vectors, problem.target, ridges), passes=0)


class LogisticProbe(Attack):
    """scikit-learn's logistic regression on whitened features, for every C of `strengths`; a step is an iteration."""

    setting_name, tries = "C", "strengths"

    strengths: Sequence[Positive]

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        task = victim.task
        if not task.classes:
            raise Inapplicable("a regression has no classes: logistic regression does not apply")
        whitening = WhitenedProbe(samples=self.samples, precision=self.precision, seed=self.seed)
        features = whitening.features(victim, stage)
        problem = whitening.problem(victim, stage, features)
        basis = problem.vectors / problem.sigma
        rows, y = self.rows(task), task.train.y.cpu()
        train = features["train"]
        rows = torch.arange(len(train)) if rows is None else rows
        train = (train[rows.to(train.device)] * problem.scale) @ basis
        hits, steps = {"val": [], "test": []}, []
        for strength in self.settings:
            model = LogisticRegression(C=strength, max_iter=self.steps)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                warnings.filterwarnings("ignore", message="The number of unique classes")  # few images of many
                model.fit(train.cpu().numpy(), y[rows].numpy())
            for split, found in hits.items():
                guessed = torch.from_numpy(model.predict((getattr(problem, split) @ basis).cpu().numpy()))
                found.append((guessed == getattr(task, split).y.cpu()).double()[None])
            steps.append(int(model.n_iter_.max()))
        val, test = (torch.stack(found) for found in hits.values())
        curve = self.choose([1], torch.zeros(1), val.mean(2), test.mean(2), task.chance, scores=test)
        taken = steps[self.settings.index(curve.setting)]
        curve.steps = torch.tensor([taken])
        curve.flops = torch.tensor([problem.flops + problem.per_pass * taken], dtype=torch.float64)
        curve.others = problem.per_pass * (sum(steps) - taken)
        return curve
