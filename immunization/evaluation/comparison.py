"""The features of every task before and after immunization, which every evaluation reads."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from immunization.compute.machine import room
from immunization.data.task import Once, Split, TaskPair
from immunization.errors import ConfigError
from immunization.evaluation.measures import Measures
from immunization.models.activations import take
from immunization.models.base import Model
from immunization.runs.records import STAGES, Role, Stage
from immunization.theory import spectrum
from immunization.theory.probe import Probe

ROWS = 256
"""Rows of a net's features folded into a factor at a time."""
KEPT = 2**31
"""Features of one split are kept up to this many bytes; larger ones are recomputed for every measure."""


class Comparison:
    """The features of every task before and after immunization of `model`, each spectrum computed once and kept.

    Where features are X theta, or the inputs themselves (the baseline of linear models, Eq. 15), spectra come from the
    k rows of `Task.root`, and their rank is that of the inputs. Others are folded batch by batch into one triangular
    factor of [F | Y] (TSQR), in float64. `start`, where it was kept, is the extractor's state dict at theta_0.
    """

    def __init__(self, pair: TaskPair, model: Model, start: Mapping[str, Tensor] | None = None) -> None:
        self.pair, self.tasks, self.model, self.start = pair, pair.tasks, model, start
        self._once = Once()

    def once(self, role: Role, stage: Stage) -> Once:
        """Values of a stage that are computed once: in this comparison, or, of inputs as they are, for their task."""
        inputs = stage == "baseline" and type(self.model).baseline_features is Model.baseline_features
        return self.tasks[role].known if inputs else self._once

    @torch.no_grad()
    def features(self, role: Role, split: str, stage: Stage) -> Tensor:
        """Features [N, D] of one split, in float64."""
        device = self._split(role, split).y.device
        stored = self._stored(role, split, stage)
        if stored is not None:
            return stored.to(device, torch.float64)
        return torch.cat([part.to(device, torch.float64) for part in self.batches(role, split, stage)])

    def batches(self, role: Role, split: str, stage: Stage) -> Iterable[Tensor]:
        """Features [n_i, D] of one split batch by batch, in the model's dtype."""
        stored = self._stored(role, split, stage)
        if stored is None:
            return self.model.feature_batches(self._split(role, split).x)
        return stored.split(ROWS) if self.model.trains_layers else (stored,)

    @torch.no_grad()
    def sampled(self, role: Role, stage: Stage, rows: Tensor) -> Tensor:
        """Features [n, D] of some training rows, in float64."""
        stored = self._stored(role, "train", stage)
        if stored is None:
            return self.model.features(take(self.tasks[role].train.x, rows)).double()
        return stored[rows.to(stored.device)].double()

    @torch.no_grad()
    def probe(self, role: Role, stage: Stage) -> Probe:
        """The probe of the training split; its rank is that of the inputs where the map is linear."""
        with spectrum.features_of(f"{role} task, {'baseline' if stage == 'baseline' else 'model'}"):
            return self.once(role, stage)(("probe", role, stage), lambda: self._probe(role, stage))

    @torch.no_grad()
    def sigma(self, role: Role, split: str, stage: Stage) -> Tensor:
        """Singular values [k], descending, of one split's features; k as in `probe`."""
        if split == "train":
            return self.probe(role, stage).sigma
        return self.once(role, stage)(("sigma", role, split, stage), lambda: self._sigma(role, split, stage))

    @torch.no_grad()
    def condition_number(self, role: Role, split: str, stage: Stage) -> float:
        """kappa of one split's features, over at least as many directions as the baseline has.

        Directions that a net lost count as being at the rank tolerance, a lower bound: rounding would decide beyond.
        Infinite where sigma_k of a linear map's features underflowed to 0.
        """
        sigma = self.sigma(role, split, stage)
        if len(sigma) < len(self.sigma(role, split, "baseline")):
            return self.tasks[role].tolerance(len(self._split(role, split))) ** -2
        return spectrum.condition_number_of(sigma, len(sigma))

    @torch.no_grad()
    def authors_condition_number(self, role: Role, stage: Stage) -> float:
        """kappa of the training features by the released code's convention (`spectrum.authors_condition_number`)."""

        def compute() -> float:
            # the root of coarse inputs leaves out directions that the released code sees
            root = None if self.tasks[role].eps > spectrum.EPS else self._root(role, "train", stage)
            return spectrum.authors_condition_number(self.batches(role, "train", stage) if root is None else root)

        return self.once(role, stage)(("authors", role, stage), compute)

    def no_test(self, role: Role) -> str | None:
        """Why a task has no held-out measure; None if it has one."""
        task = self.tasks[role]
        if not len(task.test):
            return f"the {role} task has no test split"
        if not task.classes and bool((task.test.y == task.test.y[0]).all()):
            return f"R^2 does not exist: all test targets of the {role} task are equal"
        return None

    def _split(self, role: Role, split: str) -> Split:
        return getattr(self.tasks[role], split)

    def _stored(self, role: Role, split: str, stage: Stage) -> Tensor | None:
        """Features [N, D] of one split that are stored or small enough to keep; None for others."""
        assert stage in STAGES, f"the stage must be one of {', '.join(STAGES)}, not {stage}"
        x = self._split(role, split).x
        if stage == "baseline":
            features = self.model.baseline_features(role, split)
            return x if features is None else features
        size = len(x) * self.tasks[role].dim * self.model.dtype.itemsize
        if size > self._once(("room", role, split), lambda: room(self._split(role, split).y.device, KEPT)):
            return None
        return self._once(("features", role, split), lambda: self.model.features(x))

    def _probe(self, role: Role, stage: Stage) -> Probe:
        task, root = self.tasks[role], self._root(role, "train", stage)
        if root is not None:
            inputs = self.once(role, "baseline")(("inputs", role), lambda: self._probe_of_inputs(role))
            noise = max(task.train.x.shape) * spectrum.EPS
            return inputs if stage == "baseline" else Probe.fit(root, inputs.coefficients, noise, rank=task.rank)
        return Probe.of(self.batches(role, "train", stage), task.targets(task.train.y), task.eps)

    def _sigma(self, role: Role, split: str, stage: Stage) -> Tensor:
        task, root = self.tasks[role], self._root(role, split, stage)
        if root is not None:
            return spectrum.row_norms(root) if stage == "baseline" else torch.linalg.svdvals(root)
        factor, rows = spectrum.triangular_factor(self.batches(role, split, stage))
        sigma = torch.linalg.svdvals(factor)
        return sigma[: spectrum.numerical_rank(sigma, (rows, factor.shape[1]), task.eps)]

    def _root(self, role: Role, split: str, stage: Stage) -> Tensor | None:
        """[k, D] with the Gram matrix of the features, where it follows from the inputs, of rank k; None elsewhere."""
        assert stage in STAGES, f"the stage must be one of {', '.join(STAGES)}, not {stage}"
        if stage == "immunized" and self.model.linear_map() is None:
            return None
        if stage == "baseline" and self.model.baseline_features(role, split) is not None:
            return None
        root = self._input_root(role, split)
        return root if stage == "baseline" else self.model.features(root).double()

    def _input_root(self, role: Role, split: str) -> Tensor:
        """[k, D] with the Gram matrix of one split's inputs."""
        task = self.tasks[role]
        if split == "train":
            return task.root.double()
        once, x = self.once(role, "baseline"), self._split(role, split).x
        return once(("root", role, split), lambda: spectrum.compress(x, eps=task.eps))

    def _probe_of_inputs(self, role: Role) -> Probe:
        """The probe on the raw training inputs; c solves min ||U c - Y|| by corrected semi-normal equations."""
        task = self.tasks[role]
        x, y, root = task.train.x.double(), task.targets(task.train.y), self._input_root(role, "train")
        sigma = spectrum.row_norms(root)  # the rows of a compressed root are sigma_i v_i
        vectors = (root / sigma[:, None]).T
        inverse = vectors / sigma  # U = X V / sigma
        c = inverse.T @ (x.T @ y)
        c = c + inverse.T @ (x.T @ (y - x @ (inverse @ c)))
        return Probe(sigma, vectors, c, task.rank, max(task.sigma[task.rank :].tolist(), default=0.0))


def evaluate(evaluations: Mapping[str, Callable[[Comparison], Measures]], comparison: Comparison) -> Measures:
    """What all evaluations measure; raises ConfigError for one of the user's own that gives no or others' measures."""
    measures, own = Measures(), dict[str, float | None]()
    for name, evaluation in evaluations.items():
        measured = evaluation(comparison)
        ours = type(evaluation).__module__.startswith("immunization.")
        if not isinstance(measured, Measures):
            raise ConfigError(f"evaluation.{name} must return Measures, not {type(measured).__name__}")
        if both := (own if ours else measures.metrics).keys() & measured.metrics.keys():
            raise ConfigError(f"evaluation.{name} measures {min(both)}, as another evaluation does: rename one")
        measures.merge(measured)
        own |= {} if ours else measured.metrics
    if own:
        measures.about["own_measures"] = list(own)
    return measures
