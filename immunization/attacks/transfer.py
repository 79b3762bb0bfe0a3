"""What immunization costs honest users: benign tasks, learned by those who attack the harmful one."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from immunization.attacks.base import Attack
from immunization.attacks.kept import KeptCurves
from immunization.attacks.suite import run_attacks
from immunization.attacks.victim import Victim
from immunization.attacks.worth import Suite
from immunization.evaluation.measures import Measures

TRANSFERRED = {f"worth/{key}": f"transfer/{key}" for key in ("before", "after", "without", "lost")}
"""What of the worth of a model is measured of a benign task, and its name there."""


def run_transfer(attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None, suite: Suite) -> Measures:
    """Learn the victim's benign task by those of `attacks` that `suite.benign` names, and by references.

    `transfer_<role>/before`, `/after` and `/without` are the best accuracies with theta_0, with theta_I and without the
    model, `/lost` is before less after, with its interval; `_<n>` stands for n images of each class. Who has a model
    may do without it, but nobody has theta_0 in place of theta_I. None, with the reason, where nothing is measured.
    """
    suite = copy.copy(suite)
    suite.theta_0 = "secret"
    own = {n: attack for n, attack in attacks.items() if n in suite.benign or (attack.reference and not attack.partial)}
    measured, measures = run_attacks(own, victim, kept, suite), Measures()
    for record in measured.records.where(task=victim.role):
        if (measure := TRANSFERRED.get(record.measure)) is not None:
            measures.add(replace(record, measure=measure))
    if not measures.records:
        measures.miss("nobody learns the task without the model", "transfer/lost", task=victim.role)
    return measures
