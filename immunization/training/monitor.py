"""What a training logs: the terms of a step, and the condition numbers of both Hessians."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from immunization.data.task import TaskPair
from immunization.errors import Diverged
from immunization.models import Model
from immunization.runs.records import Record, from_flat
from immunization.runs.result import Result
from immunization.runs.tracker import Recorder, Tracker
from immunization.theory.spectrum import features_of


class Monitor:
    """Sends the terms of a step and all condition numbers, of a net those of every `period` steps, to every tracker."""

    def __init__(self, model: Model, pair: TaskPair, result: Result, trackers: Sequence[Tracker] = ()) -> None:
        self.model, self.result, self.trackers = model, result, trackers
        self.tasks = pair.shown
        factors = {role: model.baseline_factor(role, task) for role, task in self.tasks.items()}
        self.ranks = {role: task.rank_of(factors[role]) for role, task in self.tasks.items()}
        self.baseline = self._kappas(factors, "baseline")
        self.labels = {role: zlib.crc32(task.train.y.cpu().numpy()) for role, task in self.tasks.items()}
        self.kappa, self.period = self.baseline, 1

    def _kappas(self, factors: Mapping[str, Tensor], state: str) -> dict[str, float]:
        kappas = {}
        for role, factor in factors.items():
            with features_of(f"{role} task, {state}"):
                kappas[role] = self.tasks[role].condition_number(factor, self.ranks[role])
        return kappas

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self.baseline, "labels": self.labels, "kappa": self.kappa, "metrics": self.result.metrics}

    def places(self) -> dict[str, Any]:
        """Where the log and a tracker's own run stand, for checkpoints."""
        recorder = next((tracker for tracker in self.trackers if isinstance(tracker, Recorder)), None)
        return {
            "recorder": recorder and recorder.state_dict(),
            "tracker": next((tracker.run_id for tracker in self.trackers if tracker.run_id), None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the data, as far as their spectra and labels show it, are not those of `state`."""
        before, now = state["baseline"], self.baseline
        if state["labels"] != self.labels or not all(math.isclose(before[r], now[r], rel_tol=1e-6) for r in now):
            raise ValueError("the inputs, features or labels are others than before")
        self.kappa = state["kappa"]
        self.result.records.add(*from_flat(state["metrics"], {}).values())

    def __call__(self, step: int, terms: Mapping[str, Tensor]) -> dict[str, float]:
        """Log one line and return its numbers; raises Diverged where theta overflows."""
        if step % self.period == 0 and (step or self.period == 1):
            factors = {role: self.model.factor(task) for role, task in self.tasks.items()}
            if not all(torch.isfinite(factor.square().sum()) for factor in factors.values()):
                raise Diverged(f"theta overflows at step {step}; lower optimizer.lr or the weights in method.*")
            self.kappa = self._kappas(factors, f"model at step {step}")
        ratio = {role: kappa / self.baseline[role] for role, kappa in self.kappa.items()}
        lost = self.tasks["primary"].kappa_bound <= self.kappa["primary"] < math.inf  # RIR may be anything below
        rir = math.nan if lost else ratio["harmful"] / ratio["primary"]
        records = [Record(name, term.item()) for name, term in terms.items()]
        for measure, of in (("kappa", self.kappa), ("ratio", ratio), ("rir", {"harmful": rir})):
            records += [Record(measure, value, role, split="train") for role, value in of.items()]
        self.result.records.add(*records)
        values = {record.of.name: record.value for record in records}
        for tracker in self.trackers:
            tracker.log(step, values)
        return values
