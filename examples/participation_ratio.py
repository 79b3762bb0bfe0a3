"""An evaluation: a measure of the spectrum that depends on all eigenvalues."""

from immunization.evaluation import Comparison, Measures


class ParticipationRatio:
    """`participation/<role>`: tr(H)^2 / ||H||^2, the number of directions that carry the features, from 1 to rank(H).

    kappa depends on the largest and the smallest eigenvalue. This measure depends on all, and hardly on the smallest.
    """

    names = ("participation/*",)

    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        for role in comparison.tasks:
            for stage in ("immunized", "baseline"):
                eigenvalues = comparison.sigma(role, "train", stage).square()
                ratio = eigenvalues.sum().square() / eigenvalues.square().sum()
                measures.put("participation", ratio.item(), task=role, stage=stage)
        return measures
