"""The paper's score: condition numbers of both Hessians and the relative immunization ratio (Eq. 15, 17)."""

from immunization.errors import DegenerateSpectrum
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.measures import AUTHORS, CONDITIONING, SUFFIX, Measures, Role
from immunization.theory import spectrum


def condition_ratios(comparison: Comparison, split: str = "train", harmful: Role = "harmful") -> dict[str, float]:
    """Rank-aware `rir`, `ratio_<role>`, `kappa_<role>`, `kappa_<role>_baseline` and `rank_<role>` of one split.

    Roles are `harmful` and `primary`; the first stands for the task of the role `harmful`. A kappa is infinite where
    sigma_k underflowed to 0, and then so is its ratio.
    """
    values: dict[str, float] = {}
    for name, role in {"harmful": harmful, "primary": "primary"}.items():
        for stage, suffix in SUFFIX.items():
            sigma = comparison.sigma(role, split, stage)
            values[f"kappa_{name}{suffix}"] = spectrum.condition_number_of(sigma, len(sigma))
        values[f"rank_{name}"] = len(comparison.sigma(role, split, "immunized"))
    return spectrum.ratios(values) | values


class RelativeRatio:
    """RIR and its parts, rank-aware on training and test inputs, and by the released code's convention; spectra.

    A further harmful or an unseen task has `ratio_<role>`, `rir_<role>` and so on of its own, on training inputs. With
    several harmful tasks, `worst/ratio_harmful` and `worst/rir` are the smallest of them.
    """

    names = (*CONDITIONING, "kappa_*", "ratio_*", "rir_*", "rank_*", "test/*", *AUTHORS, "worst/r*")

    def __call__(self, comparison: Comparison) -> Measures:
        measures = Measures()
        for name, value in condition_ratios(comparison).items():
            measures.put(name, value)
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
        """The measures of every further attacked task, in the place of the first harmful one."""
        pair = comparison.pair
        for role in list(pair.attacked)[1:]:
            for name, value in condition_ratios(comparison, harmful=role).items():
                if "primary" not in name:
                    measures.put(f"rir_{role}" if name == "rir" else name.replace("harmful", role), value)
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
                measures.put(f"test/{name}", value)
        except DegenerateSpectrum as error:
            measures.miss(f"test split: {error}", *names)

    @staticmethod
    def _flags(comparison: Comparison, role: str, measures: Measures) -> None:
        probe = comparison.probe(role, "immunized")
        (width, k), lowest = probe.vectors.shape, (probe.sigma[-1] / probe.sigma[0]).item()
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
        if probe.resolved < k:
            measures.flag(
                f"noise_floor_{role}",
                f"sigma_{k} / sigma_1 = {lowest:.1e} is below the rounding errors of float64, max(N, D) eps: "
                f"kappa_{role} is not resolved, only known to be large",
            )
