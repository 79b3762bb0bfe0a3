"""Attackers with few images: the nearest training images, or the nearest mean of a class, in the features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.victim import Inapplicable, Stage, Victim, require_held_out
from immunization.checks import Count
from immunization.data.task import SPLITS
from immunization.theory.spectrum import power_of_two


class Neighbours(Attack, group="attack.neighbours"):
    """A vote of the k nearest training rows, of centered features of length 1; k = 0 is the nearest mean of a class.

    The best k on the validation split is used. Classes only.
    """

    setting_name, tries = "k", "neighbours"
    natural_ends = True

    steps = 1
    neighbours: Sequence[Count]

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        task, rows = victim.task, self.rows(victim.task)
        require_held_out(task)
        if not task.classes:
            raise Inapplicable("a regression has no classes: neighbours have nothing to vote on")
        found = {split: victim.features(stage, split, self.precision) for split in SPLITS}
        train, y = (x if rows is None else x[rows.to(x.device)] for x in (found["train"], task.train.y))
        mean = train.mean(0)
        train, val, test = (_unit(x - mean) for x in (train, found["val"], found["test"]))
        one_hot = torch.nn.functional.one_hot(y, task.classes).to(train)
        means = _unit(one_hot.T @ train)
        likeness = torch.cat([val, test]) @ train.T
        votes = []
        for k in self.settings:
            near = likeness.topk(min(int(k), len(train))).indices if k else None
            votes.append(torch.cat([val, test]) @ means.T if near is None else one_hot[near].sum(1))
        hits = (torch.stack(votes).argmax(-1) == torch.cat([task.val.y, task.test.y])).double().cpu()
        val, test = hits[:, None, : len(val)], hits[:, None, len(val) :]
        flops = victim.flops_per_row(stage) * len(train) + 2.0 * likeness.numel() * train.shape[1]
        spent = torch.tensor([flops], dtype=torch.float64)
        return self.choose([1], spent, val.mean(-1), test.mean(-1), task.chance, shared=flops, scores=test)


def _unit(x: Tensor) -> Tensor:
    """Rows [N, D] of length 1, however short they were; rows of 0 stay."""
    return torch.nn.functional.normalize(x / power_of_two(x), eps=torch.finfo(x.dtype).tiny)
