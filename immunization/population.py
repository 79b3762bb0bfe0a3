"""Many linear runs trained as one: matrices of equal shape in stacks, every member with the numbers it has alone.

Only the training is shared. What comes before it is `runner.prepare`, and what comes after is `runner.run`, which takes
a member's `Trained` in place of a training; so a member writes, logs and fails like any run. A product of a stack has
the bits of single products where each matrix is whole and its size does not differ from member to member; all others
(of a member's own rows, and matrices by vectors) are done one by one into the rows of a stack.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from immunization import checkpoint, randomness
from immunization.config import build, check, check_trust
from immunization.data.task import SPLITS, Task
from immunization.errors import UserError
from immunization.methods import Method, PairedBatches
from immunization.methods.base import diverged, loss_limit
from immunization.models import Linear
from immunization.models.base import Batch
from immunization.result import Result
from immunization.resume import completed
from immunization.runner import (
    Monitor,
    Parts,
    Trained,
    log_interval,
    optimizer_of,
    prepare,
    set_threads,
)

log = logging.getLogger("immunization")

STACK = 32
"""Members of a stack: of more, the matrices of D = 64 are no longer in a core's cache from one product to the next."""

CACHE_LINE = 64
"""Bytes."""

ALIGNED = 8
"""Rows of a stacked matrix come in multiples of it, so that every member's begins as a matrix of its own would."""


# --- Members ----------------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A run that can be trained in a stack, prepared as far as its first step; those of equal `key` may form one."""

    config: DictConfig
    trained: Trained | None
    monitor: Monitor
    batches: tuple[Batch, Batch]
    every: int
    threads: int
    key: str
    limit: float = math.inf

    @property
    def method(self) -> Method:
        return self.trained.parts.method

    @property
    def model(self) -> Linear:
        return self.trained.parts.model

    @property
    def bytes(self) -> int:
        """Memory it takes until its run is over: its data, and what a step holds of D x D matrices."""
        pairs = self.trained.parts.pair, self.trained.parts.training
        tasks = [task for pair in pairs for task in pair.tasks.values()]
        inputs = {x.data_ptr(): x.nbytes for x in (getattr(task, split).x for task in tasks for split in SPLITS)}
        return sum(inputs.values()) + 8 * 16 * pairs[0].dim ** 2


def member(config: DictConfig, folder: Path, overrides: Iterable[str] = ()) -> Member | None:
    """The run of `config` as a member of a population; None where it has to be run alone, or needs no training.

    A member's method takes stacks (`Method.per_member`) and full batches, its model is linear without a bias, with a
    head of one output. Rows of D numbers fill cache lines, that is D a multiple of 8 in float64 and of 16 in float32:
    others begin anywhere in a stack, which rounds products otherwise. A run that cannot be prepared is none either: run
    alone, it says why.
    """
    try:
        check_trust(config, overrides)
        check(config)
        if (
            not _stackable(config)
            or completed(config, folder)
            or (config.resume and (folder / checkpoint.FILE).exists())
        ):
            return None
        parts = prepare(config)
        method, model, pair, training, _ = parts
        if training.primary.outputs > 1 or training.primary.train.x[0].nbytes % CACHE_LINE:
            return None
        started = time.perf_counter()
        monitor = Monitor(model, training, Result(config.seed, pair.name, model.name, method.name), [])
        method.setup(model, training)
        batches = next(PairedBatches(training, None, torch.Generator()).epoch())
        lines = [(0, monitor.measure(0, {}))]
        trained = Trained(parts, randomness.states(), lines, time.perf_counter() - started)
        every = log_interval(config, training, method.epochs)
        return Member(config, trained, monitor, batches, every, torch.get_num_threads(), _key(config, parts))
    except Exception as error:
        log.debug("%s is run alone: %s", folder.name, error)
        return None


def _stackable(config: DictConfig) -> bool:
    package, _, optimizer = config.optimizer._target_.rpartition(".")
    if (
        config.deterministic
        or not config.immunize
        or config.model._target_ != "immunization.models.Linear"
        or config.model.bias
    ):
        return False
    method: Method = build(config, "method")
    if method.per_member is None or method.epochs == 0 or method.batch_size is not None:
        return False
    # a class of the user's own that takes other steps must bring its own closed form
    sources = {next(kind for kind in type(method).__mro__ if name in vars(kind)) for name in ("step", "closed_form")}
    return len(sources) == 1 and package == "torch.optim" and optimizer != "LBFGS"


def _key(config: DictConfig, parts: Parts) -> str:
    """What members of one stack have in common."""
    method, optimizer = (OmegaConf.to_container(config[name], resolve=True) for name in ("method", "optimizer"))
    method = {name: value for name, value in method.items() if name not in parts.method.per_member}
    task = parts.training.primary
    shape = [task.dim, task.classes, str(task.train.x.dtype), str(task.train.x.device)]
    return json.dumps([method, optimizer, shape, config.threads])


# --- Stacks -----------------------------------------------------------------------------------------------------------


class _Rows:
    """A stack of matrices [n_i, D] of different heights, in products with other stacks, one member after the other."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows, self.height = rows, max(map(len, rows))

    def __matmul__(self, other: Tensor) -> Tensor:
        """With [B, D, C]: [B, n, C], zeros below a member's own rows."""
        out = other.new_zeros(len(other), self.height + -self.height % ALIGNED, other.shape[2])
        for one, factor, product in zip(self.rows, other, out, strict=True):
            torch.mm(one, factor, out=product[: len(one)])
        return out

    @property
    def mT(self) -> _Columns:
        return _Columns(self.rows)


class _Columns:
    """The transposes of `_Rows`."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows = rows

    def __matmul__(self, other: Tensor) -> Tensor:
        """With [B, n, C], of which a member's own rows count: [B, D, C]."""
        return torch.stack([one.T @ factor[: len(one)] for one, factor in zip(self.rows, other, strict=True)])


class _Losses(torch.autograd.Function):
    """`Task.loss` of logits [B, n] and y [B, n], each member's over its first rows only, and its very gradient: [B].

    The sigmoid is taken member by member, as kernels take the last rows of a vector otherwise than the others.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, y: Tensor, rows: list[int], binary: bool) -> Tensor:
        counts = torch.tensor(rows, dtype=logits.dtype, device=logits.device)[:, None]
        inside = torch.arange(y.shape[1], device=y.device) < counts
        if binary:
            losses = nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
            gradient = torch.zeros_like(logits)
            for one, out, n in zip(logits, gradient, rows, strict=True):
                torch.sigmoid(one[:n], out=out[:n])
            gradient = (gradient - y) / counts
        else:
            losses, gradient = (logits - y).square(), 2 / counts * (logits - y)
        ctx.save_for_backward(gradient)
        return (losses * inside).sum(1) / counts[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.saved_tensors[0] * upstream[:, None], None, None, None


class _Tasks:
    """The primary tasks of a stack."""

    def __init__(self, tasks: list[Task]) -> None:
        self.rows, self.binary = [len(task.train) for task in tasks], bool(tasks[0].classes)

    def loss(self, logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
        return _Losses.apply(logits[..., 0], y.to(logits.dtype), self.rows, self.binary)


class Stack:
    """Members of one key: parameters [B, D, D] and [B, C, D], which the members' own models are views of.

    To the method's `closed_form` it is the model.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.theta = nn.Parameter(torch.stack([one.model.extractor.theta.data for one in members]))
        self.omega = nn.Parameter(torch.stack([one.model.head.weight.data for one in members]))
        self.extractor, self.head = SimpleNamespace(theta=self.theta), SimpleNamespace(weight=self.omega)
        parameters = [parameter for one in members for parameter in one.model.groups()]
        self.optimizer = optimizer_of(members[0].config, parameters)  # which treats each as if it were alone
        self._arrange()

    def __call__(self, x: _Rows) -> Tensor:
        return x @ (_Rows(self.theta) @ self.omega.mT)[:, : self.theta.shape[1]]

    def _arrange(self) -> None:
        """Everything that depends on who is a member."""
        members = self.members
        for one, theta, omega in zip(members, self.theta.data, self.omega.data, strict=True):
            one.model.extractor.theta.data, one.model.head.weight.data = theta, omega
        self.batches = tuple(map(self._batch, zip(*(one.batches for one in members), strict=True)))
        self.method = copy.copy(members[0].method)
        for name in self.method.per_member:
            values = [getattr(one.method, name) for one in members]
            if None not in values:  # known from the first step on
                setattr(self.method, name, torch.tensor(values, dtype=torch.float64, device=self.theta.device))
        tasks = _Tasks([one.trained.parts.training.primary for one in members])
        self.method.pair = SimpleNamespace(primary=tasks)

    def _batch(self, batches: tuple[Batch, ...]) -> Batch:
        """`x` and `root` hold a matrix a member, `rank` a number, `y` [B, n] its labels and zeros."""
        y = pad_sequence([batch.y for batch in batches], batch_first=True)
        y = nn.functional.pad(y, (0, -y.shape[1] % ALIGNED))
        x, rank, root = ([getattr(batch, name) for batch in batches] for name in ("x", "rank", "root"))
        return Batch(_Rows(x), y, rank, _Rows(root))

    def _leave(self, gone: Collection[int]) -> None:
        """Members (by place) take their parameters with them; the others close up."""
        for place in gone:
            for parameter in self.members[place].model.parameters():
                parameter.data, parameter.grad = parameter.data.clone(), None
        stay = [place for place in range(len(self.members)) if place not in gone]
        self.members = [self.members[place] for place in stay]
        if stay:
            self.theta.data, self.omega.data = self.theta.data[stay], self.omega.data[stay]
            self._arrange()

    def train(self, on_step: Callable[[int], object]) -> None:
        """Train until all members have left; `on_step` hears how many there are. Errors stay with their members."""
        for step in range(1, self.method.epochs + 1):
            rows = self._first() if step == 1 else self._gradients(step)
            if not rows:
                break
            self.optimizer.step()
            on_step(len(rows))
            ended = {place for place, row in enumerate(rows) if self._ended(self.members[place], step, row)}
            if ended or step == 1:
                self._leave(ended)
        self._leave(range(len(self.members)))

    def _first(self) -> list[dict[str, float]]:
        """The first step, which each member takes alone, as methods take numbers from it, such as scales."""
        rows = {place: row for place, one in enumerate(self.members) if (row := self._alone(one, 1))}
        self._leave(set(range(len(self.members))) - set(rows))
        return list(rows.values())

    def _gradients(self, step: int) -> list[dict[str, float]]:
        """Give the members the gradients of the method's step and return their terms; who has none leaves."""
        while self.members:
            try:
                terms = self.method.closed_form(self, *self.batches, self.batches[1].rank)
            except (UserError, torch.linalg.LinAlgError):
                failed = {place for place, one in enumerate(self.members) if not self._alone(one, step)}
                if not failed:
                    raise
                self._leave(failed)
                continue
            gradients = torch.autograd.grad(terms["loss"].sum(), (self.theta, self.omega))
            for one, theta, omega in zip(self.members, *gradients, strict=True):
                one.model.extractor.theta.grad, one.model.head.weight.grad = theta, omega
            columns = (term.tolist() for term in terms.values())
            return [dict(zip(terms, row, strict=True)) for row in zip(*columns, strict=True)]
        return []

    @staticmethod
    def _alone(one: Member, step: int) -> dict[str, float] | None:
        """The terms of a member's own step, which leaves its gradients; None where that ends its training."""
        try:
            terms = one.method.step(one.model, *one.batches)
            terms["loss"].backward()
            return {name: term.item() for name, term in terms.items()}
        except torch.linalg.LinAlgError:  # a decomposition of non-finite features
            one.trained.error = diverged(one.method, step, math.nan)
        except UserError as error:
            one.trained.error = error
        return None

    @staticmethod
    def _ended(one: Member, step: int, terms: dict[str, float]) -> bool:
        """What the loop of `methods.train` does after a step: whether a member has diverged, its log, its own end."""
        loss = terms["loss"]
        if step == 1:
            one.limit = loss_limit(loss)
        try:
            if not (math.isfinite(loss) and loss <= one.limit):
                raise diverged(one.method, step, loss)
            if step % one.every == 0 or step == one.method.epochs:
                one.trained.lines.append((step, one.monitor.measure(step, terms)))
            return one.method.epoch_end(one.model, step - 1)
        except UserError as error:
            one.trained.error = error
            return True


# --- Populations ------------------------------------------------------------------------------------------------------


def train(members: Iterable[Member]) -> None:
    """Train members in stacks, with a bar on a terminal.

    A member whose stack fails as a whole is left without `trained`, to be run alone.
    """
    groups: dict[str, list[Member]] = {}
    for one in members:
        groups.setdefault(one.key, []).append(one)
    stacks = [group[at : at + STACK] for group in groups.values() for at in range(0, len(group), STACK)]
    steps = [len(stack) * stack[0].method.epochs for stack in stacks]
    bar = tqdm(total=sum(steps), desc="population", unit="step", disable=None)
    with checkpoint.Stop().listening(), bar:
        for stack, most in zip(stacks, steps, strict=True):
            set_threads(stack[0].threads)
            started, before = time.perf_counter(), bar.n
            _train(stack, bar)
            bar.total -= most - (bar.n - before)  # of members that left early
            for one in stack:
                if one.trained:
                    one.trained.seconds += (time.perf_counter() - started) / len(stack)


def _train(members: list[Member], bar: tqdm) -> None:
    try:
        Stack(members).train(bar.update)
    except Exception as error:
        log.warning("%d runs are trained one by one (%s: %s)", len(members), type(error).__name__, error)
        for one in members:
            one.trained = None
