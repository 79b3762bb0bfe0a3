"""Linear models trained side by side: one step for a stack of jobs, which costs little more than that of one."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from immunization.compute import randomness
from immunization.compute.machine import SMALL
from immunization.data.task import Task
from immunization.errors import UserError
from immunization.methods.base import Callback, Method, checked_step
from immunization.models import Linear
from immunization.models.base import Batch
from immunization.runs.folder import aside
from immunization.terminal import doing, progress_bar
from immunization.training.assembly import Parts
from immunization.training.loop import Watch, end_epoch
from immunization.training.session import TrainingSession

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that step every number for itself, so that those of a stack are those of its jobs."""


def kind_of(parts: Parts, make: Callable[..., torch.optim.Optimizer]) -> tuple[Any, ...] | None:
    """What trainings must agree in to take place side by side; None for one that takes place alone.

    That is a linear map without a bias in float64 on the CPU, in full batches, by a method whose steps take stacks. It
    has up to `SMALL` features, as products of larger ones take most of a step, and a multiple of 8, with which every
    matrix of a stack begins where BLAS rounds as it does for one alone.
    """
    method, model, pair = parts.method, parts.model, parts.trained_on
    varied = vars(type(method)).get("side_by_side")  # a subclass has to say it anew
    if varied is None or method.batch_size is not None or not method.epochs or len(pair.shown) != 2:
        return None
    if type(model) is not Linear or model.linear_map() is None or model.dtype != torch.float64:
        return None
    if pair.dim > SMALL or pair.dim % 8 or pair.primary.train.x.device.type != "cpu":
        return None
    if method.options.get("precondition", "none") not in ("cancelled", "none"):  # K^-1 is not applied to stacks
        return None
    if getattr(make, "func", None) not in ELEMENTWISE:
        return None

    def shape(task: Task) -> tuple[Any, ...]:
        x, y = task.train.x, task.train.y
        return x.shape, x.dtype, x.device, y.shape, y.dtype, task.classes, task.head is None, task.rank

    options = {name: value for name, value in method.options.items() if name not in varied}
    return type(method), repr(options), repr(make), *map(shape, pair.shown.values())


def fit(sessions: Sequence[TrainingSession]) -> list[TrainingSession]:
    """Train sessions of one `kind_of` with one optimizer; returns those that went well.

    Each has its own monitor, callbacks and end. A session that diverges or raises is left out of what is returned: made
    anew and trained alone, it says why. What the others learn does not depend on it.
    """
    started = time.perf_counter()
    stack = _Stack([session for session in sessions if _prepared(session)])
    named = f"{len(sessions)} jobs side by side"
    with doing(lambda: f"{named}: step {stack.steps:,}"), progress_bar(desc=named, unit="step") as bar:
        while stack.running:
            stack.step()
            bar.update()
    share = (time.perf_counter() - started) / len(sessions)
    for session in stack.ended:
        session.took = share
    return stack.ended


class _Stack:
    """Sessions whose parameters are slices of stacked ones."""

    def __init__(self, sessions: Sequence[TrainingSession]) -> None:
        self.ended: list[TrainingSession] = []
        self.steps = 0
        batches = [next(session.batches.epoch()) for session in sessions]
        able = [place for place, own in enumerate(batches) if _first_terms(sessions[place], own)]
        self.running = dict(enumerate(sessions[place] for place in able))
        if not able:
            return
        jobs = [sessions[place] for place in able]
        self.primary, self.harmful = (_stacked([batches[place][role] for place in able]) for role in (0, 1))
        self.model, self.method = copy.deepcopy(jobs[0].model), _method([job.method for job in jobs], jobs[0])
        self.bounds = [getattr(job.method, "bound", None) for job in jobs]
        for name, _ in jobs[0].model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            own = [job.model.get_parameter(name) for job in jobs]
            stacked = nn.Parameter(torch.stack([parameter.data for parameter in own]))
            setattr(self.model.get_submodule(owner), leaf, stacked)
            for parameter, part in zip(own, stacked.data, strict=True):
                parameter.data = part
        make, scheduler = jobs[0].make
        self.method.join(self.model, [job.method for job in jobs])
        self.optimizer = make(self.model.groups())
        self.scheduler = scheduler and scheduler(self.optimizer, jobs[0].steps)
        self.watches = [Watch(type(job.method).__name__, job.progress) for job in jobs]

    def step(self) -> None:
        """One step of all jobs."""
        self.steps += 1
        if all(self.bounds):
            self.method.bound.factor = self.primary.x.new_tensor([bound.factor for bound in self.bounds])
        terms = self.method.step(self.model, self.primary, self.harmful)
        for place, loss in enumerate(terms["loss"].detach()):
            if place in self.running:
                self._guarded(place, self.watches[place].see, loss, False)
        self.optimizer.zero_grad()
        terms["loss"].sum().backward()
        self.optimizer.step()
        if self.scheduler is not None:
            terms["lr"] = terms["loss"].new_full((len(self.bounds),), self.optimizer.param_groups[0]["lr"])
            self.scheduler.step()
        for place, session in list(self.running.items()):
            self._guarded(place, self._after, place, session, terms)

    def _after(self, place: int, session: TrainingSession, terms: Mapping[str, Tensor]) -> None:
        """What follows a step of one job; `terms` are those of all [J]."""
        at, method = session.progress, session.method
        at.step += 1
        session.note(at.step, terms, place)
        end_epoch(method, session.model, at)
        if at.epoch >= method.epochs:
            del self.running[place]
            for parameter in session.model.parameters():
                parameter.data = parameter.data.clone()
            method.finish(session.model)
            self.ended.append(session)

    def _guarded(self, place: int, call: Any, *arguments: Any) -> None:
        """Call for one job, which leaves the stack where that raises."""
        try:
            call(*arguments)
        except (UserError, torch.linalg.LinAlgError):
            self.running.pop(place, None)


def _prepared(session: TrainingSession) -> bool:
    """Whether a session is ready for a stack, without callbacks that add to the loss; it draws its own numbers."""
    if session.random:
        randomness.restore(session.random)
    try:
        with aside(session.said):
            session.prepare()
        session.random = randomness.states()
    except UserError:
        return False
    return all(type(callback).add is Callback.add for callback in session.method.callbacks)


def _first_terms(session: TrainingSession, batches: Sequence[Batch]) -> bool:
    """Take the terms of the first step, where a method remembers something of it; whether there are any."""
    if not session.method.remembers:
        return True
    try:
        checked_step(session.method, session.model, *batches)
    except (UserError, torch.linalg.LinAlgError):
        return False
    return True


def _method(methods: Sequence[Method], like: TrainingSession) -> Method:
    """One method for all jobs: the numbers in which they differ are tensors [J]."""
    one = copy.copy(methods[0])
    for name in (*(one.side_by_side or ()), *one.remembers):
        values = [getattr(method, name) for method in methods]
        if any(value != values[0] for value in values):
            vars(one)[name] = like.pair.primary.train.x.new_tensor(values)
    if getattr(one, "bound", None):
        vars(one)["bound"] = SimpleNamespace(factor=1.0)
    return one


def _stacked(batches: Sequence[Batch]) -> Batch:
    """Full batches of as many rows and one rank, with a leading dimension."""
    x, y, root = (torch.stack([getattr(batch, name) for batch in batches]) for name in ("x", "y", "root"))
    return Batch(x, y, batches[0].rank, root, batches[0].first)
