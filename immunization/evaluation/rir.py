"""The paper's score: condition numbers of both Hessians and the relative immunization ratio (Eq. 15, 17)."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from immunization.checks import AtLeastOne, AtLeastTwo, Component, Seed
from immunization.errors import DegenerateSpectrum
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import Measures
from immunization.runs.records import STAGES, Record, Records, Role, Stage
from immunization.theory import spectrum

AUTHORS = ("authors/rir", "authors/ratio_harmful", "authors/ratio_primary")
"""Names of ratios by the released code's convention of kappa."""
LOST = "the features lost directions of the primary task: kappa_primary is only known to be large"


def ratios(
    kappa: Mapping[tuple[Role, Stage], float], harmful: Role = "harmful", convention: str = "", **of: str
) -> list[Record]:
    """RIR and the ratios of both tasks (Eq. 15), of kappa by role and stage; `of` is a stage or split of the records.

    `convention` begins the names of the measures, unless kappa is the rank-aware one.
    """
    own, primary = (kappa[role, "immunized"] / kappa[role, "baseline"] for role in (harmful, "primary"))
    return [
        Record(f"{convention}rir", own / primary, harmful, **of),
        Record(f"{convention}ratio", own, harmful, **of),
        Record(f"{convention}ratio", primary, "primary", **of),
    ]


def condition_ratios(comparison: Comparison, split: str = "train", harmful: Role = "harmful") -> Records:
    """Rank-aware `rir`, and `ratio`, `kappa` and `rank` of the task `harmful` and of the primary one, on one split.

    A kappa is infinite where sigma_k underflowed to 0, and then so is its ratio. `rir` is NaN where a net lost
    directions of the primary task.
    """
    roles = (harmful, "primary")
    kappa = {(role, stage): comparison.condition_number(role, split, stage) for role in roles for stage in STAGES}
    records = Records(ratios(kappa, harmful, split=split))
    for role in roles:
        for stage in STAGES:
            records.add(Record("kappa", kappa[role, stage], role, stage, split))
        records.add(Record("rank", len(comparison.sigma(role, split, "immunized")), role, split=split))
    if records.value("rank", task="primary") < len(comparison.sigma("primary", split, "baseline")):
        rir = records.get("rir", task=harmful)
        records.add(replace(rir, value=math.nan))  # kappa_primary is only known to be large: RIR may be anything below
    return Records(replace(r, reason=LOST) if math.isnan(r.value) else r for r in records.values())


class RelativeRatio:
    """RIR and its parts, rank-aware on training and test inputs, and by the released code's convention; spectra.

    A further harmful or an unseen task has `ratio_<role>`, `rir_<role>` and so on of its own, on training inputs. With
    several harmful tasks, `worst/ratio_harmful` and `worst/rir` are the smallest of them.
    """

    names = ("rir", "ratio_*", "kappa_*", "rir_*", "rank_*", "test/*", *AUTHORS, "worst/r*")

    def __call__(self, comparison: Comparison) -> Measures:
        measures, further = Measures(), list(comparison.pair.attacked)[1:]
        measures.add(*condition_ratios(comparison).values())
        for role in further:
            records = condition_ratios(comparison, harmful=role)
            measures.add(*records.where(task=role))
        if len(harmful := comparison.pair.harmful_tasks) > 1:
            for measure in ("rir", "ratio"):
                measures.worst(measure, harmful)
        roles = ("harmful", "primary")
        kappa = {(role, stage): comparison.authors_condition_number(role, stage) for role in roles for stage in STAGES}
        measures.add(*ratios(kappa, convention="authors/", split="train"))
        self._test(comparison, measures)
        for role in ("primary", *comparison.pair.attacked):
            for stage in STAGES:
                sigma = comparison.sigma(role, "train", stage)
                measures.curve(f"spectrum/{role}", range(1, len(sigma) + 1), sigma**2, stage)
            self._flags(comparison, role, measures)
        return measures

    @staticmethod
    def _test(comparison: Comparison, measures: Measures) -> None:
        reason = ""
        if empty := [role for role in ("primary", "harmful") if not len(comparison.tasks[role].test)]:
            reason = f"no test split: {', '.join(empty)}"
        else:
            try:
                measures.add(*condition_ratios(comparison, "test").values())
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
                f"H has rank {k} of {width}: the authors' kappa is then sigma_1^2 / 1e-6, which measures the scale of "
                "the features and no conditioning; read the rank-aware figures",
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
                f"{before - probe.resolved} of the {before} directions of the features before are below rounding "
                f"errors now: kappa_{role} is not resolved, only known to be large",
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
                    f"largest, by the rounding of the stored numbers: kappa_{role} hangs on whether it counts",
                )


class SampledRatio(Component, group="evaluation.sampled"):
    """RIR as the paper takes it for deep nets: groups of samples, in the released code's convention, under `authors/`.

    kappa is the mean over `groups` disjoint groups of `samples` training rows each, the same before and after. Where a
    task has rows for fewer groups, these are used and flagged. Linear models have no such measures.
    """

    names = AUTHORS

    groups: AtLeastOne = 20
    samples: AtLeastTwo = 100
    seed: Seed = 0

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
        measures.add(*ratios(kappa, convention="authors/", split="train"))
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
        aware, authors = {}, {}
        for role in ("harmful", "primary"):
            aware[role, "immunized"] = comparison.condition_number(role, "train", "immunized")
            authors[role, "immunized"] = comparison.authors_condition_number(role, "immunized")
            aware[role, "baseline"], authors[role, "baseline"] = self._start(comparison, role)
        for convention, kappa in {"": aware, "authors/": authors}.items():
            measures.add(*ratios(kappa, convention=convention, stage="start", split="train"))
        return measures

    @staticmethod
    def _start(comparison: Comparison, role: Role) -> tuple[float, float]:
        """kappa of theta_0's training features, rank-aware and the authors'; those of the inputs for the identity."""
        model, task = comparison.model, comparison.tasks[role]
        x = (task.train.x if model.linear_map() is None else task.root).double()
        features = model.training_features(x, {name: tensor.to(x) for name, tensor in comparison.start.items()})
        if torch.equal(features, x):
            authors = comparison.authors_condition_number(role, "baseline")
            return comparison.condition_number(role, "train", "baseline"), authors
        sigma = spectrum.singular_values(features)
        authors = spectrum.authors_condition_number_of(sigma, features.shape[1])
        return spectrum.condition_number_of(sigma, task.rank), authors
