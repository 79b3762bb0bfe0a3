"""The paper's score of linear models against theta_0 in the place of the inputs."""

import torch

from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures, Role
from immunization.theory import spectrum


class StartRatio:
    """`ratio_harmful_theta0`, `ratio_primary_theta0`, `rir_theta0`, also under `authors/`: Eq. 17 for linear models.

    Eq. 15 divides by kappa of the inputs, Eq. 17 by that of theta_0; they differ where a linear model does not start at
    the identity. Nets have no such measures: their baseline is theta_0 already.
    """

    names = ("*_theta0",)

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        if comparison.start is None or comparison.model.deep:
            return measures
        aware, authors = {}, {}
        for role in ("harmful", "primary"):
            after = comparison.sigma(role, "train", "immunized")
            aware[f"kappa_{role}"] = spectrum.condition_number_of(after, len(after))
            authors[f"kappa_{role}"] = comparison.authors_condition_number(role, "immunized")
            aware[f"kappa_{role}_baseline"], authors[f"kappa_{role}_baseline"] = self._start(comparison, role)
        for prefix, kappa in {"": aware, "authors/": authors}.items():
            for name, value in spectrum.ratios(kappa).items():
                measures.put(f"{prefix}{name}_theta0", value)
        return measures

    @staticmethod
    def _start(comparison: Comparison, role: Role) -> tuple[float, float]:
        """kappa of theta_0's training features, rank-aware and the authors'; those of the inputs for the identity."""
        model, task = comparison.model, comparison.tasks[role]
        x = (task.train.x if model.linear_map() is None else task.root).double()
        features = model.training_features(x, {name: tensor.to(x) for name, tensor in comparison.start.items()})
        if torch.equal(features, x):
            sigma = comparison.sigma(role, "train", "baseline")
            return spectrum.condition_number_of(sigma, len(sigma)), comparison.authors_condition_number(
                role, "baseline"
            )
        sigma = spectrum.singular_values(features)
        return (
            spectrum.condition_number_of(sigma, task.rank),
            spectrum.authors_condition_number_of(sigma, features.shape[1]),
        )
