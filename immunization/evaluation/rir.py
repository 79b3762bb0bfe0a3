"""The paper's score: condition numbers of both Hessians and the relative immunization ratio (Eq. 15, 17)."""

import math

import torch

from immunization.checks import AtLeastOne, AtLeastTwo, Component, Seed
from immunization.errors import DegenerateSpectrum
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import AUTHORS, CONDITIONING, SUFFIX, Measures, Role
from immunization.theory import spectrum


def condition_ratios(comparison: Comparison, split: str = "train", harmful: Role = "harmful") -> dict[str, float]:
    """Rank-aware `rir`, `ratio_<role>`, `kappa_<role>`, `kappa_<role>_baseline` and `rank_<role>` of one split.

    Roles are `harmful` and `primary`; the first stands for the task of the role `harmful`. A kappa is infinite where
    sigma_k underflowed to 0, and then so is its ratio. `rir` is NaN where a net lost directions of the primary task.
    """
    values: dict[str, float] = {}
    for name, role in {"harmful": harmful, "primary": "primary"}.items():
        for stage, suffix in SUFFIX.items():
            values[f"kappa_{name}{suffix}"] = comparison.condition_number(role, split, stage)
        values[f"rank_{name}"] = len(comparison.sigma(role, split, "immunized"))
    found = spectrum.ratios(values) | values
    if values["rank_primary"] < len(comparison.sigma("primary", split, "baseline")):
        found["rir"] = math.nan  # kappa_primary is only known to be large: RIR may be anything below
    return found


def put(measures: Measures, name: str, value: float) -> None:
    """`Measures.put`, with the reason for a NaN."""
    if math.isnan(value):
        measures.miss("the features lost directions of the primary task: kappa_primary is only known to be large", name)
    else:
        measures.put(name, value)


class RelativeRatio:
    """RIR and its parts, rank-aware on training and test inputs, and by the released code's convention; spectra.

    A further harmful or an unseen task has `ratio_<role>`, `rir_<role>` and so on of its own, on training inputs. With
    several harmful tasks, `worst/ratio_harmful` and `worst/rir` are the smallest of them.
    """

    names = (*CONDITIONING, "kappa_*", "ratio_*", "rir_*", "rank_*", "test/*", *AUTHORS, "worst/r*")

    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        for name, value in condition_ratios(comparison).items():
            put(measures, name, value)
        self._further(comparison, measures)
        self._authors(comparison, measures)
        self._test(comparison, measures)
        for role in ("primary", *comparison.pair.attacked):
            for stage in SUFFIX:
                sigma = comparison.sigma(role, "train", stage)
                measures.curve(f"spectrum/{role}", range(1, len(sigma) + 1), sigma**2, stage)
            self._flags(comparison, role, measures)
        return measures

    @staticmethod
    def _further(comparison: Comparison, measures: Measures) -> None:
        """The same measures for every further attacked task."""
        pair = comparison.pair
        for role in list(pair.attacked)[1:]:
            for name, value in condition_ratios(comparison, harmful=role).items():
                if "primary" not in name:
                    put(measures, f"rir_{role}" if name == "rir" else name.replace("harmful", role), value)
        if len(pair.harmful_tasks) > 1:
            measures.worst("worst/rir", ("rir" if role == "harmful" else f"rir_{role}" for role in pair.harmful_tasks))
            measures.worst("worst/ratio_harmful", (f"ratio_{role}" for role in pair.harmful_tasks))

    @staticmethod
    def _authors(comparison: Comparison, measures: Measures) -> None:
        kappa = {
            f"kappa_{role}{suffix}": comparison.authors_condition_number(role, stage)
            for role in ("harmful", "primary")
            for stage, suffix in SUFFIX.items()
        }
        for name, value in spectrum.ratios(kappa).items():
            measures.put(f"authors/{name}", value)

    @staticmethod
    def _test(comparison: Comparison, measures: Measures) -> None:
        names = ("test/rir", "test/ratio_harmful", "test/ratio_primary")
        if empty := [role for role in ("primary", "harmful") if not len(comparison.tasks[role].test)]:
            measures.miss(f"no test split: {', '.join(empty)}", *names)
            return
        try:
            for name, value in condition_ratios(comparison, "test").items():
                put(measures, f"test/{name}", value)
        except DegenerateSpectrum as error:
            measures.miss(f"test split: {error}", *names)

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
            aware[f"kappa_{role}"] = comparison.condition_number(role, "train", "immunized")
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
            authors = comparison.authors_condition_number(role, "baseline")
            return comparison.condition_number(role, "train", "baseline"), authors
        sigma = spectrum.singular_values(features)
        authors = spectrum.authors_condition_number_of(sigma, features.shape[1])
        return spectrum.condition_number_of(sigma, task.rank), authors
