"""An attacker who reads in the released weights along which directions the task lies."""

from collections.abc import Sequence

import torch

from immunization.attacks.base import AttackCurve, Predictor
from immunization.attacks.victim import Victim
from immunization.checks import Positive
from immunization.evaluation.leak import MORE, bases, readings
from immunization.runs.records import Stage


class ReadWeights(Predictor, group="attack.read_weights"):
    """Ridge regression on features before the map, projected on what the map singles out.

    The map is theta of a linear model, or the one folded behind a net. Subspaces are those of `evaluation.leak.bases`:
    the smallest and the largest singular directions of theta, and those among them along which all training rows vary
    most, which takes no label. Validation rows choose the subspace, for every ridge of `ridges`, relative to lambda_1.
    The baseline has no map, so that there principal directions of features are all that can be chosen.
    """

    setting_name, tries = "ridge", "ridges"

    steps = 1
    ridges: Sequence[Positive]

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        victim.theta("immunized", self.precision)  # Inapplicable without a map
        task, rows = victim.task, self.features(victim, "baseline")  # what the map of every stage reads
        theta = None if stage == "baseline" else victim.theta(stage, self.precision).to(rows.train)
        unlabelled = victim.features("baseline", "train", self.precision)
        read = bases(theta, unlabelled, task.outputs + MORE)
        held_out = torch.cat([rows.val, rows.test])
        predictions = readings(task, rows.train, rows.y, held_out, read, self.settings)
        widths = sum(unlabelled.shape[1] if basis is None else basis.shape[1] for basis in read)
        flops = rows.flops + 2.0 * widths * len(rows.train) * (unlabelled.shape[1] + task.outputs)
        return self.curve(task, predictions, torch.tensor([[flops]], dtype=torch.float64), flops)
