"""What every evaluation reads, a `Comparison` of features before and after, and what it returns, `Measures`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from immunization.data.task import Split, Task, TaskPair
from immunization.runs.result import Curve
from immunization.theory import spectrum
from immunization.theory.probe import Probe

Role = Literal["primary", "harmful", "benign"]
State = Literal["after", "before"]
SUFFIX: dict[State, str] = {"after": "", "before": "_baseline"}
"""What the name of a metric ends in; curves of the baseline end in `/baseline`."""

CONDITIONING = ("rir", "ratio_harmful", "ratio_primary", "kappa_harmful", "kappa_primary")
"""Measures of the spectra after immunization, on training inputs."""


@dataclass
class Measures:
    """Flat numbers, curves, flags and arrays; whatever is missing (None) or flagged has its reason under its name."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    arrays: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, value: float) -> None:
        """Record a metric; None with a reason where it is not finite."""
        if math.isfinite(value):
            self.metrics[name] = float(value)
        else:
            self.miss(f"the value is not finite ({value})", name)

    def miss(self, reason: str, *names: str) -> None:
        """Record metrics that do not exist, and why."""
        for name in names:
            self.metrics[name], self.reasons[name] = None, reason

    def flag(self, name: str, reason: str) -> None:
        """Raise a flag, to be shown beside every score of the run."""
        self.reasons[name] = reason
        if name not in self.flags:
            self.flags.append(name)

    def withhold(self, flag: str, reason: str) -> None:
        """Flag condition numbers and their ratios as undetermined, and move them to `undetermined/<name>`."""
        self.flag(flag, reason)
        for name in (f"{split}{name}" for split in ("", "test/", "authors/") for name in CONDITIONING):
            if self.metrics.get(name) is not None:
                self.metrics[f"undetermined/{name}"] = self.metrics[name]
                self.miss(reason, name)

    def curve(self, name: str, x: Iterable[float], y: Tensor, state: State = "after") -> None:
        """Record a curve y [T] against x; that of the baseline under `<name>/baseline`."""
        self.curves[name + ("/baseline" if state == "before" else "")] = {"x": list(x), "y": y.tolist()}

    def merge(self, other: Measures) -> None:
        """Take over everything that `other` holds."""
        for mine, theirs in (
            (self.metrics, other.metrics),
            (self.reasons, other.reasons),
            (self.curves, other.curves),
            (self.arrays, other.arrays),
        ):
            mine.update(theirs)
        self.flags.extend(flag for flag in other.flags if flag not in self.flags)


class Comparison:
    """The features of every task before and after immunization, each spectrum computed once and kept.

    `after` and `before` map inputs [N, D_in] to features [N, D_out] in float64; `before=None` is the baseline of linear
    models, the raw inputs (Eq. 15). `logits` maps inputs to the outputs [N, C] of the primary head that the method
    trained, where it trained one. A linear map is applied to the k rows of `Task.root` instead of all N, and keeps the
    rank of the inputs; any other map (a bias, say) costs one QR of its features. A deep net overrides `features`,
    `probe` and `sigma`.
    """

    def __init__(
        self,
        pair: TaskPair,
        after: Callable[[Tensor], Tensor],
        before: Callable[[Tensor], Tensor] | None = None,
        logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.pair, self.logits = pair, logits
        self.tasks = pair.tasks
        self._maps = {"after": after, "before": before}
        # one cache for each comparison, so that its features die with it
        self.features, self.probe, self.sigma = cache(self.features), cache(self.probe), cache(self.sigma)
        self._root, self._inputs, self._linear = cache(self._root), cache(self._inputs), cache(self._linear)

    @torch.no_grad()
    def features(self, role: Role, split: str, state: State) -> Tensor:
        """Features [N, D_out] of one split, in float64."""
        x = self._split(role, split).x.double()
        extract = self._maps[state]
        return x if extract is None else extract(x).double()

    @torch.no_grad()
    def probe(self, role: Role, state: State) -> Probe:
        """The probe of the training split; its rank is that of the inputs where the map is linear."""
        task, extract = self.tasks[role], self._maps[state]
        if extract is None:
            return self._inputs(role)
        if self._linear(state):
            factor = extract(self._root(role, "train")).double()
            noise = max(task.train.x.shape) * spectrum.EPS
            return Probe.fit(factor, self._inputs(role).coefficients, noise, rank=task.rank)
        return Probe.of(self.features(role, "train", state), task.targets(task.train.y), task.eps)

    @torch.no_grad()
    def sigma(self, role: Role, split: str, state: State) -> Tensor:
        """Singular values [k], descending, of one split's features; k as in `probe`, from that split's own inputs."""
        if split == "train":
            return self.probe(role, state).sigma
        task, extract = self.tasks[role], self._maps[state]
        if extract is None or self._linear(state):
            root = self._root(role, split)
            return root.norm(dim=1) if extract is None else torch.linalg.svdvals(extract(root).double())
        features = self.features(role, split, state)
        sigma = spectrum.singular_values(features)
        return sigma[: spectrum.numerical_rank(sigma, tuple(features.shape), task.eps)]

    @torch.no_grad()
    def authors_condition_number(self, role: Role, state: State) -> float:
        """kappa of the training features by the released code's convention (`spectrum.authors_condition_number`)."""
        task, extract = self.tasks[role], self._maps[state]
        if task.eps > spectrum.EPS or not (extract is None or self._linear(state)):
            # the root of coarse inputs leaves out directions that the released code sees
            return spectrum.authors_condition_number(self.features(role, "train", state))
        root = self._root(role, "train")
        return spectrum.authors_condition_number(root if extract is None else extract(root))

    def no_test(self, role: Role) -> str | None:
        """Why there is no held-out measure of a task; None where there is one."""
        task = self.tasks[role]
        if not len(task.test):
            return f"the {role} task has no test split"
        if not task.classes and bool((task.test.y == task.test.y[0]).all()):
            return f"R^2 does not exist: all test targets of the {role} task are equal"
        return None

    def _split(self, role: Role, split: str) -> Split:
        return getattr(self.tasks[role], split)

    def _root(self, role: Role, split: str) -> Tensor:
        """[k, D] with the Gram matrix of the split's inputs, k their rank."""
        task = self.tasks[role]
        return task.root.double() if split == "train" else spectrum.compress(self._split(role, split).x, eps=task.eps)

    def _inputs(self, role: Role) -> Probe:
        """The probe on the raw training inputs; c solves min ||U c - Y|| by corrected semi-normal equations."""
        task = self.tasks[role]
        x, y, root = task.train.x.double(), task.targets(task.train.y), self._root(role, "train")
        sigma = root.norm(dim=1)  # the rows of a compressed root are sigma_i v_i
        vectors = (root / sigma[:, None]).T
        inverse = vectors / sigma  # U = X V / sigma
        c = inverse.T @ (x.T @ y)
        c = c + inverse.T @ (x.T @ (y - x @ (inverse @ c)))
        return Probe(sigma, vectors, c, task.rank)

    def _linear(self, state: State) -> bool:
        """Whether a map sends -2 x to -2 f(x) exactly, as a matrix does and neither a bias nor a network."""
        extract, row = self._maps[state], self.tasks["primary"].root[:1].double()
        return torch.equal(extract(-2 * row), -2 * extract(row))


def held_out(task: Task, predictions: Tensor) -> dict[str, float]:
    """The task's measure on its test split and the loss 1/2 ||.||^2 a row, of predictions [N, C]."""
    residual = predictions - task.targets(task.test.y)
    return {
        task.measure_name: task.measure(predictions, task.test.y).item(),
        "loss": residual.square().sum(1).mean().item() / 2,
    }
