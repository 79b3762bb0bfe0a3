"""RIR of deep nets by the paper's protocol: groups of sampled rows."""

import torch

from immunization.checks import AtLeastOne, AtLeastTwo, Seed, checked
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import AUTHORS, SUFFIX, Measures
from immunization.theory import spectrum


class SampledRatio:
    """RIR as the paper takes it for deep nets: groups of samples, in the released code's convention, under `authors/`.

    kappa is the mean over `groups` disjoint groups of `samples` training rows each, the same before and after. Where a
    task has rows for fewer groups, these are used and flagged. Linear models have no such measures.
    """

    names = AUTHORS

    @checked("evaluation.sampled")
    def __init__(self, groups: AtLeastOne = 20, samples: AtLeastTwo = 100, seed: Seed = 0) -> None:
        self.groups, self.samples, self.seed = groups, samples, seed

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, kappa = Measures(), {}
        if not comparison.model.deep:
            return measures
        for role in ("harmful", "primary"):
            rows = len(comparison.tasks[role].train)
            groups = min(self.groups, rows // self.samples)
            if not groups:
                reason = (
                    f"the {role} task has {rows} training rows, fewer than one group of "
                    f"evaluation.sampled.samples={self.samples}"
                )
                measures.miss(reason, *AUTHORS)
                measures.flag("too_few_samples", reason)
                return measures
            if groups < self.groups:
                measures.flag(
                    f"fewer_groups_{role}",
                    f"the {role} task has {rows} training rows: authors/ takes {groups} groups of {self.samples}, not "
                    f"{self.groups}",
                )
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed))
            chosen = order[: groups * self.samples]
            for stage, suffix in SUFFIX.items():
                parts = comparison.sampled(role, stage, chosen).split(self.samples)
                kappa[f"kappa_{role}{suffix}"] = sum(map(spectrum.authors_condition_number, parts)) / groups
        for name, value in spectrum.ratios(kappa).items():
            measures.put(f"authors/{name}", value)
        return measures
