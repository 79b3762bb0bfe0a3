"""Tasks and pairs of tasks: what every data set of the project resolves to.

A task's role is its kind (`primary`, `harmful`, `benign`, `unseen`), and from the second task of a kind on
`<kind>_<name>`. No method is shown benign or unseen tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from immunization.errors import DataError
from immunization.roles import kind_of
from immunization.theory import spectrum
from immunization.theory.regularizers import by_hand

T = TypeVar("T")
SPLITS = ("train", "val", "test")
LEARNED, MARGIN = 0.9, 0.05
"""A task is learned at this share of the way from chance to the baseline's best measure; within this margin of chance
nothing is."""
CONSTANT = "all labels of the {} task are equal (dataset.protocol=authors): there is nothing to learn"
"""Why a role's task is not attacked or probed."""
USUAL = ("primary", "harmful", "benign")  # roles of the tasks that a pair usually has


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities [N, C] of classes; one column of logits stands for two classes."""
    return F.log_softmax(logits if logits.shape[1] > 1 else F.pad(logits, (1, 0)), 1)


def first_shared(held: Mapping[str, Iterable[Hashable]]) -> tuple[str, str, Hashable] | None:
    """Two roles and something that both hold, of what tasks hold by role; None for none."""
    owner: dict[Hashable, str] = {}
    for role, things in held.items():
        for thing in things:
            other = owner.setdefault(thing, role)
            if other != role:
                return other, role, thing
    return None


class Origin(NamedTuple):
    """Where a split was taken from: its row i is row `rows[i]` (int64 [N], counted from 0) of what `source` names."""

    source: str
    rows: Tensor


@dataclass(frozen=True)
class Split:
    """Rows of one task: `x` [N, D] float64; `y` [N], float64 (regression) or int64 class labels.

    For deep nets, `x` [N, ...] is the input of the trainable part, in the net's dtype: a tensor, or anything with
    `shape` and `split(n)`, which stays where it is stored and whose rows follow `y` to the device as they are used.
    """

    x: Tensor
    y: Tensor
    origin: Origin | None = None

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> Split:
        """Some of the rows, of inputs that are stored."""
        origin = self.origin and Origin(self.origin.source, self.origin.rows[rows.cpu()])
        return Split(self.x[rows.to(self.x.device)], self.y[rows.to(self.y.device)], origin)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Split:
        x = self.x.to(device, dtype) if len(self.x.shape) == 2 else self.x
        y = self.y.to(device, dtype if self.y.is_floating_point() else None)
        return self if x is self.x and y is self.y else Split(x, y, self.origin)


def _are_classes(y: Tensor, classes: int) -> bool:
    return y.dtype == torch.long and 0 <= int(y.min()) <= int(y.max()) < classes


class Once(dict[Hashable, Any]):
    """Values by key; `once(key, compute)` computes a value the first time."""

    def __call__(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self:
            self[key] = compute()
        return cast(T, self[key])


@dataclass(frozen=True)
class Task:
    """One supervised task.

    `classes` is 0 for a regression, whose targets are standardized by the training split. `constant` marks the
    authors' MNIST protocol, in which every label of a task is the same. `eps`, by the dtype that the inputs were
    stored in (`spectrum.eps_of`), sets the rank tolerance (`spectrum.rank_tolerance`). `width` is the number of
    features a deep net makes of an input, which need not be a row of a matrix. `head` [classes] says which output of a
    model's own head means which class, where they differ. `names` are those of the classes, where they have some.
    """

    name: str
    train: Split
    val: Split
    test: Split
    classes: int = 0
    eps: float = 2.0**-52
    constant: bool = False
    width: int | None = None
    head: Tensor | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, split in self.splits.items():
            matrix = len(split.x.shape) == 2
            if not (matrix or self.width) or len(split.y) != len(split.x):
                raise DataError(
                    f"task '{self.name}', {name} split: inputs of shape {tuple(split.x.shape)} and "
                    f"{len(split.y)} targets; expected [rows, features] and one target a row"
                )
            if split.origin is not None and len(split.origin.rows) != len(split.x):
                raise DataError(
                    f"task '{self.name}', {name} split: {len(split.origin.rows)} rows of '{split.origin.source}' for "
                    f"{len(split.x)} inputs; expected one an input"
                )
            rows = [split.y, *([split.x] if matrix and isinstance(split.x, Tensor) else [])]
            if not all(torch.isfinite(part).all() for part in rows):
                raise DataError(
                    f"task '{self.name}', {name} split holds NaN or infinite values; clean, rescale or drop those rows"
                )
            if self.classes and len(split.y) and not _are_classes(split.y, self.classes):
                raise DataError(
                    f"task '{self.name}', {name} split: labels are {split.y.dtype} from {split.y.min()} to "
                    f"{split.y.max()}; expected int64 from 0 to {self.classes - 1}"
                )
        if not len(self.train):
            raise DataError(f"task '{self.name}' has no training rows")

    @property
    def splits(self) -> dict[str, Split]:
        return {name: getattr(self, name) for name in SPLITS}

    @property
    def dim(self) -> int:
        """Number of features D."""
        return self.width or self.train.x.shape[1]

    @property
    def rows_of_classes(self) -> dict[str, dict[str, int]]:
        """For each class with a name, in the order of the labels, the output that means it and its rows by split."""
        if not self.names:
            return {}
        outputs = range(self.classes) if self.head is None else self.head.tolist()
        counts = {name: split.y.bincount(minlength=self.classes).tolist() for name, split in self.splits.items()}
        return {
            name: {"output": outputs[label]} | {split: own[label] for split, own in counts.items()}
            for label, name in enumerate(self.names)
        }

    @property
    def outputs(self) -> int:
        """Columns of a head for this task: 1 for a regression or two classes, else one a class."""
        return self.classes if self.classes > 2 else 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 1/classes; 0 for R^2."""
        return 1 / self.classes if self.classes else 0.0

    @property
    def majority(self) -> float:
        """The most frequent class's share of the test rows; 0 without classes or rows."""
        return self.test.y.bincount().max().item() / len(self.test) if self.classes and len(self.test) else 0.0

    def passed_by_majority(self, bar: float) -> str | None:
        """Why an accuracy of `bar` shows nothing: the most frequent class alone has it on test rows; None elsewhere."""
        share = self.majority
        if share < bar:
            return None
        return f"the most frequent class has {share:.3f} of the test rows, and who guesses it passes the bar, {bar:.3f}"

    @property
    def measure_name(self) -> str:
        """`accuracy` for classes, `r2` for a regression."""
        return "accuracy" if self.classes else "r2"

    def targets(self, y: Tensor) -> Tensor:
        """Least-squares targets [N, outputs] in float64: y itself, -1/+1 for two classes, else one-hot."""
        if not self.classes:
            return y.double()[:, None]
        if self.classes == 2:
            return (2.0 * y - 1.0).double()[:, None]
        return F.one_hot(y, self.classes).double()

    def loss(self, logits: Tensor, y: Tensor, smoothing: float = 0.0, twice: bool = False) -> Tensor:
        """Mean training loss: squared error, binary cross-entropy, or, for more classes, smoothed cross-entropy.

        Of logits [N, outputs] and labels or targets [N]; [J] for stacks [J, N, outputs] and [J, N] of J jobs.
        `twice`: gradients of stacks can be differentiated again, as those of one job always can.
        """
        if logits.ndim > 2 and self.outputs == 1 and self.classes:
            return _stacked_loss(logits, y.to(logits.dtype), twice)
        if logits.ndim > 2:
            return torch.stack([self.loss(*own, smoothing, twice) for own in zip(logits, y, strict=True)])
        if not self.classes:
            return F.mse_loss(logits[:, 0], y)
        if logits.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits.dtype))
        return F.cross_entropy(logits, self._labels(logits, y), label_smoothing=smoothing)

    def measure(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Accuracy (sign or argmax) or R^2 of predictions [..., N, outputs]; leading dimensions are kept."""
        if self.classes:
            return self.scores(predictions, y).mean(-1)
        residual = ((predictions[..., 0] - y) ** 2).sum(-1)
        return 1 - residual / ((y - y.mean()) ** 2).sum()

    def scores(self, predictions: Tensor, y: Tensor) -> Tensor:
        """The share of each row, [..., N]: the measure is their mean. For classes it is 1 for a hit, else 0."""
        if predictions.shape[-1] > 1:
            return (predictions.argmax(-1) == self._labels(predictions, y)).double()
        if self.classes:
            return ((predictions[..., 0] > 0) == (y > 0)).double()
        return 1 - (predictions[..., 0] - y) ** 2 / (y - y.mean()).square().mean()

    def _labels(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Labels as the columns of `predictions` count them: those of a model's own head, or of a probe."""
        own = self.head is None or predictions.shape[-1] == self.outputs
        return y if own else self.head.to(y.device)[y]

    @cached_property
    def known(self) -> Once:
        """What was measured of the inputs as they are, which all runs on them have in common."""
        return Once()

    @cached_property
    def root(self) -> Tensor:
        """K^1/2 up to a rotation: [k, D] with root^T root = K = X^T X of the training inputs, k = rank(X)."""
        root = self._compressed[0]
        if not len(root):
            raise DataError(
                f"task '{self.name}': every input feature is constant or zero (rank 0), there is nothing to condition"
            )
        return root

    @cached_property
    def _compressed(self) -> tuple[Tensor, Tensor]:
        return spectrum.compressed(self.train.x, eps=self.eps)

    @property
    def sigma(self) -> Tensor:
        """All singular values [min(N, D)] of the training inputs, descending."""
        return self._compressed[1]

    @cached_property
    def triangle(self) -> Tensor:
        """`root` as an upper trapezoidal matrix [k, D]."""
        return torch.linalg.qr(self.root, mode="r").R

    @property
    def rank(self) -> int:
        """Numerical rank k of the training inputs, which an invertible theta does not change; for a net, min(N, D)."""
        return min(len(self.train), self.width) if self.width else len(self.root)

    def tolerance(self, rows: int) -> float:
        """Singular values of `rows` features of a net are noise up to this, relative to the largest."""
        return spectrum.rank_tolerance((rows, self.dim), self.eps)

    @property
    def kappa_bound(self) -> float:
        """The lower bound that `condition_number` gives where a net lost directions; infinite without a net."""
        return self.tolerance(len(self.train)) ** -2 if self.width else math.inf

    def rank_of(self, factor: Tensor) -> int:
        """Rank of training features with the Gram matrix of `factor` [m, D]: a net's own, else that of the inputs."""
        if not self.width:
            return self.rank
        return spectrum.numerical_rank(torch.linalg.svdvals(factor), (len(self.train), self.width), self.eps)

    def condition_number(self, factor: Tensor, rank: int) -> float:
        """kappa of such features, over the `rank` directions of the baseline or more; raises DegenerateSpectrum."""
        sigma = torch.linalg.svdvals(factor)
        if not self.width:
            return spectrum.condition_number_of(sigma, rank)
        return spectrum.condition_number_down_to(sigma, rank, self.tolerance(len(self.train)))

    def few(self, samples: int, seed: int) -> Tensor:
        """At most `samples` training rows of each class (of all, for a regression), drawn by `seed`, in their order."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        if not self.classes:
            return order[:samples].sort().values
        y = self.train.y.cpu()[order]
        return torch.cat([order[y == label][:samples] for label in range(self.classes)]).sort().values

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Task:
        eps = max(self.eps, torch.finfo(dtype).eps)
        moved = {name: split.to(device, dtype) for name, split in self.splits.items()}
        if eps == self.eps and all(moved[name] is split for name, split in self.splits.items()):
            return self  # with what it has computed
        return replace(self, **moved, eps=eps)


def _stacked_loss(logits: Tensor, y: Tensor, twice: bool) -> Tensor:
    """Binary cross-entropy [J] of logits [J, N, 1] and labels [J, N], with the gradients that each job has alone.

    `twice`: they can be differentiated again, and are those up to rounding.
    """
    if twice:
        return F.binary_cross_entropy_with_logits(logits[..., 0], y, reduction="none").mean(-1)
    z, rows = logits.detach()[..., 0], y.shape[1]
    # one by one: with several threads, a mean over [J, N] may sum in another order, and a number among the last few of
    # a tensor has a sigmoid with other last bits
    value = torch.stack([F.binary_cross_entropy_with_logits(*own) for own in zip(z, y, strict=True)])
    predicted = torch.stack([own.sigmoid() for own in z])
    return by_hand(value, lambda g: [((predicted - y) * g[:, None] / rows)[..., None]], logits)


def evenly(count: int, most: int) -> Tensor:
    """Places [n] of at most `most` of `count` rows, evenly spaced."""
    return torch.linspace(0, count - 1, min(most, count)).round().long()


def _sketch(values: Tensor) -> tuple[float, float, float]:
    """How many, their norm, and the share of it along a fixed direction, which tells rows in another order."""
    values = values.detach().cpu().double().flatten()
    direction = torch.randn(len(values), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = torch.linalg.vector_norm(values).item()
    return float(len(values)), norm, (values @ direction).item() / (norm or 1.0)


def _floats(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.double()  # of token ids


@dataclass(frozen=True)
class TaskPair:
    """Primary, harmful and (optionally) benign task over the same D input features, and any `more` by role.

    `about` states the preparation; `tensors` are for recomputing the inputs: `mean`, `std` and, where used, `basis`.
    """

    name: str
    primary: Task
    harmful: Task
    benign: Task | None = None
    more: dict[str, Task] = field(default_factory=dict)
    about: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dims = {role: task.dim for role, task in self.tasks.items()}
        if len(set(dims.values())) > 1:
            raise DataError(f"the tasks of '{self.name}' have different numbers of input features: {dims}")

    @classmethod
    def of(cls, name: str, tasks: Mapping[str, Task], about: Mapping[str, object] | None = None) -> TaskPair:
        """The pair of tasks by role; `about` says their names where there are more than the usual three."""
        usual = {role: task for role, task in tasks.items() if role in USUAL}
        more = {role: task for role, task in tasks.items() if role not in usual}
        names = {"tasks": {role: task.name for role, task in tasks.items()}} if more else {}
        return cls(name, **usual, more=more, about={**(about or {}), **names})

    def with_tasks(self, tasks: Mapping[str, Task]) -> TaskPair:
        """The pair with these tasks in the place of those of the same roles."""
        return replace(TaskPair.of(self.name, self.tasks | tasks), about=self.about, tensors=self.tensors)

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks that exist, by role."""
        roles = {"primary": self.primary, "harmful": self.harmful, "benign": self.benign} | self.more
        return {role: task for role, task in roles.items() if task is not None}

    @property
    def harmful_tasks(self) -> dict[str, Task]:
        """The harmful tasks that methods are shown, by role; `harmful` is the first."""
        return self._of("harmful")

    @property
    def attacked(self) -> dict[str, Task]:
        """Tasks that immunization is to hold against, by role: the harmful and the unseen ones."""
        return self._of("harmful", "unseen")

    @property
    def benign_tasks(self) -> dict[str, Task]:
        """Tasks that immunization should leave as easy as they were, by role."""
        return self._of("benign")

    @property
    def shown(self) -> dict[str, Task]:
        """The tasks that methods are shown, by role."""
        return self._of("primary", "harmful")

    def _of(self, *kinds: str) -> dict[str, Task]:
        return {role: task for kind in kinds for role, task in self.tasks.items() if kind_of(role) == kind}

    @property
    def origins(self) -> dict[str, Origin]:
        """Where the rows of `<role>/<split>` come from, as far as it is known."""
        splits = {f"{role}/{name}": split for role, task in self.tasks.items() for name, split in task.splits.items()}
        return {name: split.origin for name, split in splits.items() if split.origin is not None}

    @property
    def content(self) -> dict[str, list[float]]:
        """Numbers that tell the rows and labels of each split, `<role>/<split>`, from others.

        They agree, but for rounding, also where the preparation turned the rows or was rounded in another way.
        """
        splits = {f"{role}/{name}": split for role, task in self.tasks.items() for name, split in task.splits.items()}
        return {
            name: [*_sketch(torch.linalg.vector_norm(_floats(split.x).flatten(1), dim=1)), *_sketch(split.y)]
            for name, split in splits.items()
            if isinstance(split.x, Tensor)
        }

    @property
    def dim(self) -> int:
        return self.primary.dim

    @property
    def tolerance(self) -> tuple[int, float]:
        """Rows and epsilon that set the rank tolerance of the training inputs of D_P and all D_H together."""
        shown = self.shown.values()
        return sum(len(task.train) for task in shown), max(task.eps for task in shown)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TaskPair:
        return self.with_tasks({role: task.to(device, dtype) for role, task in self.tasks.items()})
