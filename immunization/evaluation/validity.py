"""Flags for numbers of a run that say less than they seem to."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from immunization.checks import Component, NonNegative
from immunization.data.task import Task
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.evaluation.primary import primary_change
from immunization.models.chain import BATCH_NORMS
from immunization.runs.records import Role
from immunization.theory.spectrum import AUTHORS_RIDGE, EPS32

SAME = 1e-6
"""Largest relative difference of singular values, or of features, that counts as none."""

LOOKED_AT = 200
"""Rows of a split that are looked for among those of another."""

SHARED = 0.1
"""Share of the training rows of two tasks from which on they are more than a few that are alike."""


class Validity(Component, group="evaluation.validity"):
    """Flags where the scores of a run say less than they seem to.

    `unchanged`: theta_I is the baseline. `few_samples_<role>`: fewer training rows than features, so that H is singular
    whatever the model is. `ridge_limited_<role>`: the released code's kappa is set by its ridge of 1e-6.
    `shared_rows_<role>`: harmful training rows are primary training rows, too. `primary_dropped`: the retrained primary
    head lost more than `tolerance` (points of accuracy, or relative for R^2). `train_mode`: a batch norm or dropout
    layer is in train mode while features are taken. And those of `doubts_of`.
    """

    names = ()

    tolerance: NonNegative

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        after, before = (comparison.probe("harmful", stage).sigma for stage in ("immunized", "baseline"))
        noise = 100 * min(comparison.tasks["harmful"].eps, EPS32) * before[0].item()
        if after.shape == before.shape and torch.allclose(after, before, rtol=SAME, atol=noise):
            measures.flag(
                "unchanged",
                "the harmful features have the same spectrum as on the baseline: nothing was immunized, or (audits "
                "of nets) model.reference is missing",
            )
        for role in (roles := ("primary", *comparison.pair.attacked)):
            self._role(comparison, role, measures)
        measures.merge(doubts_of(comparison, roles))
        for role in comparison.pair.attacked:
            same = _found(comparison, (role, "train"), ("primary", "train"))[0]
            if SHARED * len(same) < same.sum():
                measures.flag(
                    f"shared_rows_{role}",
                    f"{int(same.sum())} of {len(same)} {role} training rows have the features of a primary one: what "
                    "changes these features changes those of the primary task as much",
                )
        if comparison.no_test("primary") is None:
            now, then, change = primary_change(comparison)
            measure = comparison.tasks["primary"].measure_name
            if change < -self.tolerance - 1e-9:  # 0.97 - 0.96 counts as one point
                measures.flag(
                    "primary_dropped",
                    f"the primary {measure}, with a retrained head, fell from {then:.3f} to {now:.3f}, by more than "
                    f"{self.tolerance}: the model is worse at its own task",
                )
        if names := in_train_mode(comparison.model):
            measures.flag("train_mode", f"{', '.join(names[:3])} in train mode: features change from batch to batch")
        return measures

    @staticmethod
    def _role(comparison: Comparison, role: str, measures: Measures) -> None:
        task, probe = comparison.tasks[role], comparison.probe(role, "immunized")
        rows, width = len(task.train), probe.vectors.shape[0]
        if rows < width:
            measures.flag(f"few_samples_{role}", few_rows(rows, width))
        if len(probe.sigma) == width and probe.sigma[-1].square() < 10 * AUTHORS_RIDGE:
            measures.flag(
                f"ridge_limited_{role}",
                f"the smallest eigenvalue of H, {probe.sigma[-1].square().item():.1e}, is below or near the 1e-6 of "
                "the released code's kappa, which cannot see it; read the rank-aware numbers",
            )


@torch.no_grad()
def doubts_of(comparison: Comparison, roles: Iterable[Role]) -> Measures:
    """Flags on what all held-out numbers of these tasks are of, also those of attacks.

    `other_reference`: the baseline may be another net. `test_rows_seen_<role>`: most test rows are training rows, too.
    `untested_classes_<role>`: some classes that are trained on have no test rows.
    """
    measures = Measures()
    if comparison.model.unlike:
        measures.flag("other_reference", comparison.model.unlike)
    for role in roles:
        if comparison.no_test(role) is None:
            _seen(comparison, role, measures)
            _untested(comparison.tasks[role], role, measures)
    return measures


def _untested(task: Task, role: Role, measures: Measures) -> None:
    if not task.classes:
        return
    trained, tested = (split.y.bincount(minlength=task.classes) > 0 for split in (task.train, task.test))
    if lacking := (trained & ~tested).nonzero()[:, 0].tolist():
        which = ", ".join(map(str, lacking[:5])) + ", ..." * (len(lacking) > 5)
        measures.flag(
            f"untested_classes_{role}",
            f"{len(lacking)} of {task.classes} classes ({which}) have no test rows; held-out numbers do not "
            "include them",
        )


def _seen(comparison: Comparison, role: Role, measures: Measures) -> None:
    task = comparison.tasks[role]
    same, rows, near = _found(comparison, (role, "test"), (role, "train"))
    same &= task.test.y[rows] == task.train.y[near]
    if 2 * same.sum() > len(same):
        measures.flag(
            f"test_rows_seen_{role}",
            f"{int(same.sum())} of {len(same)} test rows have features and label of a training row: where rows are "
            "repeated or splits share them, no number is held-out",
        )


def _found(comparison: Comparison, of: tuple[Role, str], among: tuple[Role, str]) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each of some rows [n] of a split has the baseline's features of a row of another; both row numbers."""
    sought, others = (comparison.features(*split, "baseline") for split in (of, among))
    rows = torch.linspace(0, len(sought) - 1, min(LOOKED_AT, len(sought))).long()
    distances, near = torch.cdist(sought[rows], others).min(1)
    spread = others.std(0).norm()  # which one row may make as large as it likes
    within = torch.minimum(100 * SAME * spread, 10 * SAME * (sought[rows].norm(dim=1) + others[near].norm(dim=1)))
    return (distances <= within) & (spread > 0), rows, near


def few_rows(rows: int, width: int) -> str:
    return f"{rows} training rows for {width} features: the rank and kappa describe these rows only"


def in_train_mode(module: nn.Module) -> list[str]:
    """Names of a module's layers in train mode that behave differently there."""
    layers = (*BATCH_NORMS, nn.modules.dropout._DropoutNd)
    return [name for name, part in module.named_modules() if isinstance(part, layers) and part.training]
