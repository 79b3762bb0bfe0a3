"""The paper's score of linear models against theta_0 in the place of the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures, Role
from immunization.theory import spectrum


class StartRatio:
    """`ratio_harmful_theta0`, `ratio_primary_theta0`, `rir_theta0`, and the same under `authors/`: Eq. 17 for Eq. 15.

    Eq. 15 divides by kappa of the inputs, Eq. 17, for nets, by that of theta_0; the two differ where a linear model
    starts elsewhere than at the identity. The baseline of nets is theta_0 already, they are left out.
    """

    names = ("*_theta0",)

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        if comparison.start is None or comparison.model.deep:
            return measures
        ratios: dict[str, float] = {}
        for role in ("harmful", "primary"):
            before, after = self._start(comparison, role), comparison.sigma(role, "train", "after")
            rank = comparison.tasks[role].rank
            kappa = spectrum.condition_number_of(torch.linalg.svdvals(before), rank)
            ratios[f"ratio_{role}"] = spectrum.condition_number_of(after, len(after)) / kappa
            authors = comparison.authors_condition_number(role, "after")
            ratios[f"authors/ratio_{role}"] = authors / spectrum.authors_condition_number(before)
        for prefix in ("", "authors/"):
            ratios[f"{prefix}rir"] = ratios[f"{prefix}ratio_harmful"] / ratios[f"{prefix}ratio_primary"]
        for name, value in ratios.items():
            measures.put(f"{name}_theta0", value)
        return measures

    @staticmethod
    def _start(comparison: Comparison, role: Role) -> Tensor:
        """A matrix with the Gram of theta_0's training features, in float64."""
        model, task = comparison.model, comparison.tasks[role]
        x = (task.train.x if model.linear_map() is None else task.root).double()
        start = {name: tensor.to(x) for name, tensor in comparison.start.items()}
        return spectrum.triangular_factor(model.training_features(x, start))[0]
