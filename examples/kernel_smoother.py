"""An attack: one that fits no head, and so has nothing to descend."""

from collections.abc import Sequence

import torch
from torch import Tensor

from immunization.attacks import Attack, AttackCurve, Stage, Victim, require_held_out


class KernelSmoother(Attack):
    """Nadaraya-Watson regression: a weighted mean of the training targets, in which near features count more.

    A row at distance d weighs exp(-d^2 / 2h^2). `bandwidths` h are relative to the standard deviation of the features;
    the best on the validation split is used. It counts as one step.
    """

    setting_name, tries = "bandwidth", "bandwidths"
    natural_ends = True  # a smaller one gives the nearest row, a larger one the mean of all

    steps = 1
    bandwidths: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        task = victim.task
        require_held_out(task)
        train, val, test = (victim.features(stage, split, self.precision) for split in ("train", "val", "test"))
        targets = task.targets(task.train.y)
        if (rows := self.rows(task)) is not None:
            train, targets = train[rows.to(train.device)], targets[rows.to(train.device)]
        variance = (train - train.mean(0)).square().sum(1).mean()

        def reached(features: Tensor, y: Tensor) -> Tensor:
            near = -torch.cdist(features, train).square() / (2 * variance)
            return torch.stack([task.measure((near / h**2).softmax(1) @ targets, y)[None] for h in self.settings])

        flops = len(train) * (victim.flops_per_row(stage) + 3.0 * len(val) * train.shape[1])
        curves = reached(val, task.val.y), reached(test, task.test.y)
        return self.choose([1], torch.tensor([flops], dtype=torch.float64), *curves, task.chance)
