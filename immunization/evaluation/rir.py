"""The paper's score: condition numbers of both Hessians and the relative immunization ratio (Eq. 15, 17)."""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from immunization.checks import AtLeastOne, AtLeastTwo, Component, Seed
from immunization.errors import DegenerateSpectrum
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.runs.records import STAGES, Record, Role, Stage
from immunization.theory import spectrum

AUTHORS = ("authors/rir", "authors/ratio_harmful", "authors/ratio_primary")
"""Names of ratios by the released code's convention of kappa."""
LOST = "the features lost directions of the primary task: kappa_primary is only known to be large"


@dataclass(frozen=True)
class Ratios:
    """RIR and the ratios of both tasks (Eq. 15), of kappa by role and stage; `role` is the harmful task.

    A kappa is infinite where sigma_k underflowed to 0, and then so is its ratio. `lost`: a net lost directions of the
    primary task, and RIR may be anything below the ratio of these kappas: it is NaN.
    """

    kappa: Mapping[tuple[Role, Stage], float]
    role: Role = "harmful"
    lost: bool = False

    def of(self, role: Role) -> float:
        return self.kappa[role, "immunized"] / self.kappa[role, "baseline"]

    @property
    def rir(self) -> float:
        return math.nan if self.lost else self.of(self.role) / self.of("primary")

    def records(self, convention: str = "", **of: Any) -> list[Record]:
        """`rir` and both `ratio`; `of` is a stage or split, `convention` begins the names of another kappa."""
        values = {("rir", self.role): self.rir} | {("ratio", role): self.of(role) for role in (self.role, "primary")}
        return [
            Record(f"{convention}{measure}", value, role, reason=LOST * math.isnan(value), **of)
            for (measure, role), value in values.items()
        ]


def condition_ratios(comparison: Comparison, split: str = "train", role: Role = "harmful") -> Ratios:
    """The rank-aware ratios of a harmful task and of the primary one, on one split."""
    kappa = {
        (task, stage): comparison.condition_number(task, split, stage) for task in (role, "primary") for stage in STAGES
    }
    ranks = (len(comparison.sigma("primary", split, stage)) for stage in STAGES)
    return Ratios(kappa, role, lost=operator.lt(*ranks))


class RelativeRatio:
    """RIR and its parts, rank-aware on training and test inputs, and by the released code's convention; spectra.

    A further harmful or an unseen task has `ratio_<role>`, `rir_<role>` and so on of its own, on training inputs. With
    several harmful tasks, `worst/ratio_harmful` and `worst/rir` are the smallest of them.
    """

    names = ("rir", "ratio_*", "kappa_*", "rir_*", "rank_*", "test/*", *AUTHORS, "worst/r*")

    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        for role in comparison.pair.attacked:
            self._put(comparison, "train", role, measures)
        if len(harmful := comparison.pair.harmful_tasks) > 1:
            for measure in ("rir", "ratio"):
                measures.worst(measure, harmful)
        roles = ("harmful", "primary")
        kappa = {(role, stage): comparison.authors_condition_number(role, stage) for role in roles for stage in STAGES}
        measures.add(*Ratios(kappa).records("authors/", split="train"))
        self._test(comparison, measures)
        for role in ("primary", *comparison.pair.attacked):
            for stage in STAGES:
                sigma = comparison.sigma(role, "train", stage)
                measures.curve(f"spectrum/{role}", range(1, len(sigma) + 1), sigma**2, stage)
            self._flags(comparison, role, measures)
        return measures

    @staticmethod
    def _put(comparison: Comparison, split: str, harmful: Role, measures: Measures) -> None:
        """The ratios, kappas and ranks of a harmful task, and with the first one those of the primary task."""
        ratios = condition_ratios(comparison, split, harmful)
        roles = (harmful, "primary") if harmful == "harmful" else (harmful,)
        measures.add(*(record for record in ratios.records(split=split) if record.task in roles))
        for role in roles:
            measures.add(*(Record("kappa", ratios.kappa[role, stage], role, stage, split) for stage in STAGES))
            measures.put("rank", len(comparison.sigma(role, split, "immunized")), task=role, split=split)

    def _test(self, comparison: Comparison, measures: Measures) -> None:
        reason = ""
        if empty := [role for role in ("primary", "harmful") if not len(comparison.tasks[role].test)]:
            reason = f"no test split: {', '.join(empty)}"
        else:
            try:
                self._put(comparison, "test", "harmful", measures)
            except DegenerateSpectrum as error:
                reason = f"test split: {error}"
        if reason:
            measures.miss(reason, "rir", "ratio", task="harmful", split="test")
            measures.miss(reason, "ratio", task="primary", split="test")

    @staticmethod
    def _flags(comparison: Comparison, role: str, measures: Measures) -> None:
        probe = comparison.probe(role, "immunized")
        width, k = probe.vectors.shape
        if k < width:
            measures.flag(
                f"rank_deficient_{role}",
                f"H has rank {k} of {width}: the authors' kappa is then sigma_1^2 / 1e-6, which measures the scale "
                "of the features and not their conditioning; read the rank-aware numbers",
            )
        smallest, rounding = probe.sigma[-1].square().item(), width * spectrum.EPS * probe.sigma[0].square().item()
        if k == width and smallest < rounding:
            measures.flag(
                f"ridge_rounding_{role}",
                f"the smallest eigenvalue of H, {smallest:.1e}, is within the rounding of F^T F, {rounding:.1e}, "
                "which decides whether the released code finds it above 1e-6 and counts it; under authors/ it counts",
            )
        before = len(comparison.sigma(role, "train", "baseline"))
        if probe.resolved < before:
            measures.flag(
                f"noise_floor_{role}",
                f"{before - probe.resolved} of the {before} directions of the features are now below rounding "
                f"errors: kappa_{role} is large, and rounding decides its digits",
            )
        task = comparison.tasks[role]
        tolerance = task.tolerance(len(task.train))
        for stage in ("baseline", "immunized") if comparison.model.linear_map() is None else ("baseline",):
            probe = comparison.probe(role, stage)
            sigma = torch.cat([probe.sigma, probe.sigma.new_tensor([probe.dropped])])
            if task.eps > spectrum.EPS and spectrum.is_near(sigma, tolerance):
                measures.flag(
                    f"rank_uncertain_{role}",
                    f"a singular value of the {stage} features is near the rank tolerance, {tolerance:.1e} of the "
                    f"largest, by the rounding of the stored numbers: kappa_{role} depends on whether it counts",
                )


class SampledRatio(Component, group="evaluation.sampled"):
    """RIR as the paper takes it for deep nets: groups of rows, in the released code's convention, under `authors/`.

    kappa is the mean over `groups` disjoint groups of `samples` training rows each, the same before and after. Where a
    task has rows for fewer groups, these are used and flagged. Linear models have no such measures.
    """

    names = AUTHORS

    groups: AtLeastOne
    samples: AtLeastTwo
    seed: Seed

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
                measures.miss(reason, "authors/rir", "authors/ratio", task="harmful", split="train")
                measures.miss(reason, "authors/ratio", task="primary", split="train")
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
            for stage in STAGES:
                parts = comparison.sampled(role, stage, chosen).split(self.samples)
                kappa[role, stage] = sum(map(spectrum.authors_condition_number, parts)) / groups
        measures.add(*Ratios(kappa).records("authors/", split="train"))
        return measures


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
        aware: dict[tuple[Role, Stage], float] = {}
        authors: dict[tuple[Role, Stage], float] = {}
        for role in ("harmful", "primary"):
            aware[role, "immunized"] = comparison.condition_number(role, "train", "immunized")
            authors[role, "immunized"] = comparison.authors_condition_number(role, "immunized")
            aware[role, "baseline"], authors[role, "baseline"] = self._start(comparison, role, comparison.start)
        for convention, kappa in {"": aware, "authors/": authors}.items():
            measures.add(*Ratios(kappa).records(convention, stage="start", split="train"))
        return measures

    @staticmethod
    def _start(comparison: Comparison, role: Role, start: Mapping[str, Tensor]) -> tuple[float, float]:
        """kappa of theta_0's training features, rank-aware and the authors'; those of the inputs for the identity."""
        model, task = comparison.model, comparison.tasks[role]
        x = (task.train.x if model.linear_map() is None else task.root).double()
        features = model.training_features(x, {name: tensor.to(x) for name, tensor in start.items()})
        if torch.equal(features, x):
            authors = comparison.authors_condition_number(role, "baseline")
            return comparison.condition_number(role, "train", "baseline"), authors
        authors = spectrum.authors_condition_number(features)
        return spectrum.condition_number(features, rank=task.rank), authors
