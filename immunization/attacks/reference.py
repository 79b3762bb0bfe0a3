"""Lines of reference for the costs of attacks: what the harmful task costs without the model, or with a part of it."""

from collections.abc import Container, Mapping

from immunization.attacks.base import AttackCurve
from immunization.attacks.outcome import cost, never_finite, put_final
from immunization.evaluation.measures import Measures
from immunization.runs.records import STAGES, WORST, Role, of_role


def measure(
    references: Mapping[str, AttackCurve],
    without: Container[str],
    threshold: float | None,
    role: Role,
    measure_name: str,
    measures: Measures,
) -> None:
    """Put what every reference reaches and costs, and the cheapest success as a multiple of the cheapest `without`.

    References `without` use nothing of the model. `threshold` is the test measure that counts as having learned the
    task `role`, the same for all attacks; None where no attack learns it.
    """
    costs = []
    for name, curve in references.items():
        prefix, flops = f"{of_role('reference', role)}/{name}", curve.flops.tolist()
        of = {"task": role, "stage": "reference", "attack": name}
        measures.curves[f"{prefix}/compute"] = {"x": flops, "y": curve.test.tolist()}
        measures.curves[f"{prefix}/{measure_name}"] = {"x": curve.steps.tolist(), "y": curve.test.tolist()}
        measures.put("setting", curve.setting, **of)
        if never_finite(curve):
            measures.miss("diverged with every setting tried", "final", "cost", **of)
            continue
        put_final(curve, measures, **of)
        if threshold is None:
            measures.miss("there is no bar: no attack learns the task with the baseline", "cost", **of)
        elif (spent := cost(curve, threshold)) is None:
            measures.miss(f"never came to {threshold:.3f} within {flops[-1]:.2g} operations", "cost", **of)
        else:
            costs += [spent] if name in without else []
            measures.put("cost", spent, **of)
    for stage in STAGES if any(name in without for name in references) else ():
        of = {"task": role, "stage": stage, "attack": WORST}
        cheapest = measures.records.value("flops", **of)
        if cheapest is None or not costs:
            reason = "no attack learns the task" if costs else "no reference learns the task"
            measures.miss(reason, "cost_over_scratch", **of)
        else:
            measures.put("cost_over_scratch", cheapest / min(costs), **of)
