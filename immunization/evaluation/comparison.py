"""What every evaluation reads: the features of every task before and after immunization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation.measures import Role, State
from immunization.models.activations import take
from immunization.models.base import Model
from immunization.models.folded import Folded
from immunization.models.timm import Timm
from immunization.theory import spectrum
from immunization.theory.probe import Probe

ROWS = 256
KEPT = 2**31
"""Bytes of one split's features up to which they are kept; larger ones are computed again for every measure."""


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
        features = self.features(role, "train", state)
        width = features.shape[1]
        joint = torch.cat([features, task.targets(task.train.y)], 1)
        blocks = spectrum.triangular_factor(joint)[0][:width]
        return Probe.fit(blocks[:, :width], blocks[:, width:], max(features.shape) * task.eps)

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


class FoldedComparison(Comparison):
    """A linear map behind the features of a net: the inputs are those features, the baseline is the map I."""

    def __init__(self, pair: TaskPair, model: Folded) -> None:
        super().__init__(pair, after=model.features, logits=model)
        self.model = model

    def baseline_logits(self) -> Tensor:
        """Outputs [N, C] of the primary head on the test split of D_P, before."""
        return self.model.original_logits(self.tasks["primary"].test.x)

    def sampled(self, role: Role, state: State, rows: Tensor) -> Tensor:
        """Features [n, D] of some training rows."""
        return self.features(role, "train", state)[rows.to(self.tasks[role].train.y.device)]


class DeepComparison(Comparison):
    """The features of a net before and after its training.

    Spectra and probes of the training rows are folded batch by batch into one triangular factor of [F | Y] (TSQR), in
    float64 and in O((D + C)^2) memory; features are what the net computes in its own dtype, kept where they are few
    (`KEPT`). The baseline is what the frozen theta_0 made of the same inputs.
    """

    def __init__(self, pair: TaskPair, model: Timm) -> None:
        super().__init__(pair, after=model.features, before=None, logits=model.logits)
        self.model, self._kept = model, {}

    def baseline_logits(self) -> Tensor:
        """Outputs [N, C] of the primary head on the test split of D_P, before."""
        return self.model.original_logits(self.model.reference["primary", "test"])

    def sampled(self, role: Role, state: State, rows: Tensor) -> Tensor:
        """Features [n, D] of some training rows."""
        if state == "before":
            return self.model.reference[role, "train"][rows].double()
        if (kept := self._keep(role, "train")) is not None:
            return kept[rows.to(kept.device)].double()
        return self.model.features(take(self.tasks[role].train.x, rows)).double()

    def batches(self, role: Role, split: str, state: State) -> Iterable[Tensor]:
        """Features [n, D] of one split, batch by batch."""
        if state == "before":
            return self.model.reference[role, split].split(ROWS)
        if (kept := self._keep(role, split)) is not None:
            return kept.split(ROWS)
        return self.model.feature_batches(self._split(role, split).x)

    def _keep(self, role: Role, split: str) -> Tensor | None:
        """Features [N, D] of one split after training, computed once; None where they are too many to be kept."""
        x, dim = self._split(role, split).x, self.tasks[role].dim
        if len(x) * dim * self.model.dtype.itemsize > KEPT:
            return None
        if (role, split) not in self._kept:
            self._kept[role, split] = self.model.features(x)
        return self._kept[role, split]

    @torch.no_grad()
    def features(self, role: Role, split: str, state: State) -> Tensor:
        device = self._split(role, split).y.device
        return torch.cat([part.to(device, torch.float64) for part in self.batches(role, split, state)])

    @torch.no_grad()
    def probe(self, role: Role, state: State) -> Probe:
        task, width = self.tasks[role], self.tasks[role].dim
        targets = task.targets(task.train.y)

        def joint() -> Iterable[Tensor]:
            start = 0
            for features in self.batches(role, "train", state):
                y = targets[start : start + len(features)]
                yield torch.cat([features.to(y), y], 1)
                start += len(features)

        blocks = spectrum.triangular_factor(joint())[0][:width]
        return Probe.fit(blocks[:, :width], blocks[:, width:], max(len(task.train), width) * task.eps)

    @torch.no_grad()
    def sigma(self, role: Role, split: str, state: State) -> Tensor:
        if split == "train":
            return self.probe(role, state).sigma
        task = self.tasks[role]
        sigma = spectrum.singular_values(self.batches(role, split, state))
        return sigma[: spectrum.numerical_rank(sigma, (len(self._split(role, split)), task.dim), task.eps)]

    def authors_condition_number(self, role: Role, state: State) -> float:
        return spectrum.authors_condition_number(self.batches(role, "train", state))


def compare(pair: TaskPair, model: Model) -> Comparison:
    """What the evaluations read: for a deep net its features and those of theta_0, for a linear model the inputs'."""
    if isinstance(model, Timm):
        return DeepComparison(pair, model)
    if isinstance(model, Folded):
        return FoldedComparison(pair, model)
    return Comparison(pair, after=model.features, logits=model)


def held_out(task: Task, predictions: Tensor) -> dict[str, float]:
    """The task's measure on its test split and the loss 1/2 ||.||^2 a row, of predictions [N, C]."""
    residual = predictions - task.targets(task.test.y)
    return {
        task.measure_name: task.measure(predictions, task.test.y).item(),
        "loss": residual.square().sum(1).mean().item() / 2,
    }
