"""How different two tasks are: the ceiling of RIR (docs/theory.md) and the alignment of K_P and K_H.

Both look at the training features before immunization, for linear models the inputs: K = V S^2 V^T.
"""

import math

import torch
from torch import Tensor

from immunization.checks import Component, Share
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.evaluation.rir import condition_ratios
from immunization.theory import spectrum
from immunization.theory.optimal_map import relative_condition_number
from immunization.theory.probe import Probe


def bounded_condition_number(comparison: Comparison) -> tuple[float, str]:
    """kappa(M), and the reason and remedy if it is infinite, so that RIR has no ceiling; otherwise ''."""
    primary, harmful = (comparison.probe(role, "baseline") for role in ("primary", "harmful"))
    rank = len(harmful.sigma)
    if rank == 1:
        return 1.0, ""  # kappa(H_H) is 1 whatever theta is, also outside of range(K_P)
    if outside := spectrum.dimensions_outside(primary.root, harmful.root, *comparison.pair.tolerance):
        return math.inf, (
            f"RIR has no largest value: {outside} of the {rank} dimensions of range(K_H) are outside of range(K_P), "
            "where theta can stretch harmful features at no cost to the primary task; dataset.common_range=true leaves "
            "them out"
        )
    return relative_condition_number(primary, harmful), ""


LOW = 2.0
"""A ceiling of RIR below which tasks are too alike for any linear map."""


class Ceiling:
    """RIR* = kappa(M) kappa(K_P) / kappa(K_H), which no invertible theta exceeds, and log RIR / log RIR*.

    By Ostrowski's theorem kappa(H_H) <= kappa(M) kappa(H_P). For training inputs; None where the supremum is infinite.
    Flag `ceiling_low`: it is below `LOW`.
    """

    names = ("ceiling/rir", "ceiling/attained")

    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        kappa, reason = bounded_condition_number(comparison)
        if reason:
            measures.miss(reason, *self.names)
            return measures
        ratios = condition_ratios(comparison)
        primary, harmful = (ratios.kappa[role, "baseline"] for role in ("primary", "harmful"))
        ceiling, rir = kappa * primary / harmful, ratios.rir
        measures.put("ceiling/rir", ceiling)
        if ceiling < LOW and comparison.model.linear_map() is not None:
            measures.flag(
                "ceiling_low",
                f"no linear map reaches an RIR above {ceiling:.3g} on these tasks: their inputs are too alike for any "
                "method to tell them apart",
            )
        if abs(math.log(ceiling)) < 1e-9:
            measures.miss("the ceiling is 1: no theta can tell the two tasks' spectra apart", "ceiling/attained")
        elif not 0 < rir < math.inf:
            measures.miss(f"rir is {rir}", "ceiling/attained")
        else:
            measures.put("ceiling/attained", math.log(rir) / math.log(ceiling))
        return measures


class Alignment(Component, group="evaluation.alignment"):
    """Alignment of K_P and K_H (paper, Sec. 3.1).

    `alignment/score` in [0, 1]: (1 + rho) / 2, with rho the correlation of log K_P and log K_H in the trace inner
    product, sum_ij p_i h_j cos^2(v_i, v_j) / (||p|| ||h||) for log-eigenvalues p, h centered on each matrix's range.
    The score is 1 where log K_H = a log K_P + b (a > 0), 1/2 where they are unrelated, 0 where the order of eigenvalues
    is reversed (log-Euclidean geometry, Arsigny et al. 2006). `alignment/benign_primary` and `alignment/benign_harmful`
    are those of the third task, where there is one. `alignment/kernel`: the kernel alignment
    tr(K_P K_H) / (||K_P|| ||K_H||) (Cristianini et al. 2001).
    `alignment/principal_angle_max|mean` (radians) and the curve `alignment/principal_angles`: between the spans of the
    leading singular vectors that hold the share `energy` of each trace. `alignment/kappa_M` as in `Ceiling`.
    Array `alignment/cosines` [rank K_P, rank K_H], float32: |cos| between singular vectors.
    """

    names = ("alignment/*",)

    energy: Share

    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        primary, harmful = (comparison.probe(role, "baseline") for role in ("primary", "harmful"))
        cosines = (primary.vectors.T @ harmful.vectors).abs().clamp(max=1)
        measures.arrays["alignment/cosines"] = cosines.float()

        kappa, reason = bounded_condition_number(comparison)
        if reason:
            measures.miss(reason, "alignment/kappa_M")
        else:
            measures.put("alignment/kappa_M", kappa)
        self._score("alignment/score", primary, harmful, measures)
        if "benign" in comparison.tasks:
            third = comparison.probe("benign", "baseline")
            self._score("alignment/benign_primary", third, primary, measures)
            self._score("alignment/benign_harmful", third, harmful, measures)
        measures.put("alignment/kernel", _correlation(cosines, *(probe.sigma**2 for probe in (primary, harmful))))

        shares = [(probe.sigma**2).cumsum(0) / (probe.sigma**2).sum() for probe in (primary, harmful)]
        counts = [int((share < self.energy - 1e-12).sum()) + 1 for share in shares]
        leading = [probe.vectors[:, :count] for probe, count in zip((primary, harmful), counts, strict=True)]
        angles = torch.linalg.svdvals(leading[0].T @ leading[1]).clamp(max=1).acos()
        measures.curve("alignment/principal_angles", range(1, len(angles) + 1), angles)
        measures.put("alignment/principal_angle_max", angles.max().item())
        measures.put("alignment/principal_angle_mean", angles.mean().item())
        return measures

    @staticmethod
    def _score(name: str, p: Probe, h: Probe, measures: Measures) -> None:
        logs = [2 * (probe.sigma.log() - probe.sigma.log().mean()) for probe in (p, h)]
        if all(log.norm() > 1e-9 for log in logs):
            measures.put(name, (1 + _correlation(p.vectors.T @ h.vectors, *logs)) / 2)
        else:
            measures.miss("all eigenvalues of one task are equal: it has no leading directions", name)


def _correlation(cosines: Tensor, p: Tensor, h: Tensor) -> float:
    """<V_P diag(p) V_P^T, V_H diag(h) V_H^T> over the product of the norms."""
    return (p @ cosines.square() @ h / (p.norm() * h.norm())).item()
