"""Measures of deep nets: features batch by batch, theta_0 as the baseline, the paper's sampled protocol, own heads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from immunization.checks import AtLeastOne, AtLeastTwo, checked
from immunization.data.task import TaskPair
from immunization.evaluation.base import SUFFIX, Comparison, Measures, Role, State
from immunization.models.activations import take
from immunization.models.base import Model
from immunization.models.folded import Folded
from immunization.models.timm import Timm
from immunization.theory import spectrum
from immunization.theory.probe import Probe

ROWS = 256
KEPT = 2**31
"""Bytes of one split's features up to which they are kept; larger ones are computed again for every measure."""


def compare(pair: TaskPair, model: Model) -> Comparison:
    """What the evaluations read: for a deep net its features and those of theta_0, for a linear model the inputs'."""
    if isinstance(model, Timm):
        return DeepComparison(pair, model)
    if isinstance(model, Folded):
        return FoldedComparison(pair, model)
    return Comparison(pair, after=model.features, logits=model)


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


class SampledRatio:
    """RIR as the paper takes it for deep nets: groups of samples, in the released code's convention, under `authors/`.

    Only deep nets are measured so.

    kappa is the mean over `groups` disjoint groups of `samples` training rows each, the same before and after. Where a
    task has rows for fewer groups, these are used and flagged.
    """

    @checked("evaluation.sampled")
    def __init__(self, groups: AtLeastOne = 20, samples: AtLeastTwo = 100, seed: int = 0) -> None:
        self.groups, self.samples, self.seed = groups, samples, seed

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, kappa = Measures(), {}
        if not isinstance(comparison, DeepComparison | FoldedComparison):
            return measures
        for role in ("harmful", "primary"):
            rows = len(comparison.tasks[role].train)
            groups = min(self.groups, rows // self.samples)
            if not groups:
                reason = (
                    f"the {role} task has {rows} training rows, fewer than one group of "
                    f"evaluation.sampled.samples={self.samples}"
                )
                measures.miss(reason, *(f"authors/{name}" for name in ("rir", "ratio_harmful", "ratio_primary")))
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
            for state, suffix in SUFFIX.items():
                parts = comparison.sampled(role, state, chosen).split(self.samples)
                kappa[role + suffix] = sum(map(spectrum.authors_condition_number, parts)) / groups
        harmful, primary = (kappa[role] / kappa[f"{role}_baseline"] for role in ("harmful", "primary"))
        values = {"rir": harmful / primary, "ratio_harmful": harmful, "ratio_primary": primary}
        for name, value in values.items():
            measures.put(f"authors/{name}", value)
        return measures


class OwnHead:
    """Held-out accuracy and loss of the net's own primary head, before and after, and the predictions that changed.

    `primary/head_accuracy`, `primary/head_loss` (cross-entropy), the same with `_baseline`, and
    `primary/changed_predictions`, a number of test images. Linear models have no such head.
    """

    @torch.no_grad()
    def __call__(self, comparison: Comparison) -> Measures:
        measures, task = Measures(), comparison.tasks["primary"]
        if not isinstance(comparison, DeepComparison | FoldedComparison):
            return measures
        names = [f"primary/head_{name}{suffix}" for name in ("accuracy", "loss") for suffix in SUFFIX.values()]
        if reason := comparison.no_test("primary"):
            measures.miss(reason, *names, "primary/changed_predictions")
            return measures
        logits = {"after": comparison.logits(task.test.x), "before": comparison.baseline_logits()}
        for state, suffix in SUFFIX.items():
            measures.put(f"primary/head_accuracy{suffix}", task.measure(logits[state], task.test.y).item())
            measures.put(f"primary/head_loss{suffix}", task.loss(logits[state], task.test.y).item())
        decisions = [x.argmax(1) if x.shape[1] > 1 else x[:, 0] > 0 for x in logits.values()]
        measures.put("primary/changed_predictions", (decisions[0] != decisions[1]).sum().item())
        return measures
