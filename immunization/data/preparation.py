"""What data sets share: options, random splits, standardization, and the common range of two tasks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from immunization.data.task import SPLITS, Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.roles import roles_of
from immunization.theory import spectrum

log = logging.getLogger(__name__)

Normalize = Literal["shared", "each", "none"]
T = TypeVar("T")


def check_training_rows(val_fraction: float, test_fraction: float) -> None:
    """Raise ConfigError unless both shares of `dataset` leave rows to train on."""
    if val_fraction + test_fraction >= 1:
        raise ConfigError(
            f"dataset.val_fraction={val_fraction} and dataset.test_fraction={test_fraction} leave no training rows: "
            "their sum must be under 1"
        )


def fetched(fetch: Callable[[], T], missing: object, remedy: str, download: bool) -> T:
    """What `fetch` downloads of files that are `missing`; DataError where that fails or may not be."""
    if not download:
        raise DataError(f"{missing} does not exist: {remedy}, or set dataset.download=true")
    try:
        return fetch()
    except (
        RuntimeError,
        OSError,
        ValueError,
    ) as error:  # URLError is an OSError, scikit-learn's OpenMLError a ValueError
        reason = " ".join(str(error).split())
        raise DataError(f"{missing} does not exist and the download failed ({reason}): {remedy}") from error


def classes_of_roles(least: int, **given: int | Sequence[int] | Sequence[Sequence[int]] | None) -> dict[str, list[int]]:
    """The classes, of 0 to 9, of each role, from those of each kind; raises ConfigError unless they are different.

    A number is the class of one task. A list holds, where `least` is 1, the classes of as many tasks, else the classes
    of one task, `least` or more, or a list for each of several tasks.
    """
    given = {kind: classes for kind, classes in given.items() if classes is not None}
    roles: dict[str, list[int]] = {}
    for kind, classes in given.items():
        if isinstance(classes, int):
            groups = [[classes]]
        elif least == 1:
            groups = [[number] for number in classes]
        else:
            groups = [list(own) for own in (classes if classes and isinstance(classes[0], Sequence) else [classes])]
            if wrong := [own for own in groups if len(set(own)) < max(least, len(own)) or not {*own} <= {*range(10)}]:
                raise ConfigError(f"dataset.{kind}={wrong[0]}: at least two different classes of 0 to 9 are needed")
        if not groups:
            remedy = "at least one" if kind == "harmful" else "at least one, or null for no such task"
            raise ConfigError(f"dataset.{kind} is an empty list; give {remedy}")
        roles |= dict(zip(roles_of(kind, ["-".join(map(str, own)) for own in groups]), groups, strict=True))
    if sum(map(len, roles.values())) > len(set().union(*roles.values())):
        shown = ", ".join(f"dataset.{kind}={classes}" for kind, classes in given.items())
        raise ConfigError(f"{shown}: every task needs its own classes; choose different ones from 0 to 9")
    return roles


def split_rows(
    strata: Tensor, val_fraction: float, test_fraction: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Row numbers of each split, ascending, drawn within every stratum of `strata` [N] (int); fractions round down.

    Raises DataError for strata that are no finite [N], and for those of one row each, as regression targets are, which
    would leave rows to no other split. Warns where all strata are too small for a split that N rows are enough for.
    """
    if strata.ndim != 1 or not torch.isfinite(strata).all():
        raise DataError(f"split_rows: strata are {strata.dtype} {list(strata.shape)}; expected finite numbers [rows]")
    parts: dict[str, list[Tensor]] = {name: [] for name in SPLITS}
    for value in strata.unique():
        rows = torch.nonzero(strata == value)[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        n_test, n_val = int(test_fraction * len(rows)), int(val_fraction * len(rows))
        sizes = [len(rows) - n_val - n_test, n_val, n_test]
        for name, part in zip(SPLITS, rows.split(sizes), strict=True):
            parts[name].append(part)
    for name, fraction in (("val", val_fraction), ("test", test_fraction)):
        if not int(fraction * len(strata)) or any(map(len, parts[name])):
            continue
        told = (
            f"{len(parts[name])} strata in {len(strata)} rows leave no {name} rows: {fraction} of each is under one row"
        )
        if len(parts[name]) == len(strata):
            raise DataError(f"split_rows: {told}; give class labels, or torch.zeros(N) for a regression")
        log.warning("%s", told)
    return {name: torch.cat(part).sort().values for name, part in parts.items()}


def map_inputs(pair: TaskPair, transform: Callable[[str, Tensor], Tensor], **tensors: Tensor) -> TaskPair:
    """The pair with `transform(role, x)` for the inputs of every split; `tensors` join those of the pair."""
    tasks = {}
    for role, task in pair.tasks.items():
        mapped = {name: replace(split, x=transform(role, split.x)) for name, split in task.splits.items()}
        tasks[role] = replace(task, **mapped)
    return replace(pair.with_tasks(tasks), tensors=pair.tensors | tensors)


def moments(x: Tensor, what: str = "the inputs") -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (ddof = 1) [D] of the columns of x [N, D].

    A constant column gets its own value and 1, exactly: it must become 0, not a quotient of two rounding errors.
    Raises DataError for one whose deviation underflows or overflows.
    """
    constant = (x == x[0]).all(0)
    mean, std = torch.where(constant, x[0], x.mean(0)), torch.where(constant, 1.0, x.std(0))
    for wrong, size in ((std == 0, "small"), (~torch.isfinite(std), "large")):
        if wrong.any():
            raise DataError(
                f"{what}: the values of column {int(wrong.int().argmax())} are so {size} that their squares leave the "
                "range of float64; rescale the data"
            )
    return mean, std


def standardize(pair: TaskPair, normalize: Normalize) -> TaskPair:
    """Columns of the inputs to mean 0, standard deviation 1, on training rows.

    `shared`: statistics of primary and harmful tasks together, which keeps one coordinate system (tensors `mean`,
    `std`); `each`: every task by its own (tensors `<role>/mean`, `<role>/std`); `none`: as they are.
    """
    if normalize == "none":
        return pair
    if normalize == "shared":
        mean, std = moments(torch.cat([task.train.x for task in pair.shown.values()]))
        used = dict.fromkeys(pair.tasks, (mean, std))
        tensors = {"mean": mean, "std": std}
    else:
        used = {role: moments(task.train.x, f"the inputs of {role}") for role, task in pair.tasks.items()}
        tensors = {
            f"{role}/{name}": x for role, both in used.items() for name, x in zip(("mean", "std"), both, strict=True)
        }
    pair = pair.with_tasks(
        {role: replace(task, eps=_eps_after(task, *used[role])) for role, task in pair.tasks.items()}
    )
    return map_inputs(pair, lambda role, x: (x - used[role][0]) / used[role][1], **tensors)


def _eps_after(task: Task, mean: Tensor, std: Tensor) -> float:
    """`Task.eps` of the standardized inputs: what was rounded relative to a large mean is coarser without it.

    Constant columns and those of integers have no rounding of their own.
    """
    x = task.train.x
    if task.eps == spectrum.EPS:
        return task.eps
    exact = (x == x[0]).all(0) | spectrum.are_integers(x, task.eps).all(0)
    before, after = (torch.linalg.vector_norm(z / std, dim=0) for z in (x, x - mean))
    grown = (before.where(~exact, 0.0).amax() / after.amax()).item()
    return task.eps * max(1.0, grown)


def standardize_targets(pair: TaskPair) -> TaskPair:
    """Regression targets to mean 0, standard deviation 1 on training rows (tensors `<role>/target_mean`, `_std`)."""
    tasks, tensors = {}, {}
    for role, task in pair.tasks.items():
        if task.classes:
            continue
        mean, std = (value[0] for value in moments(task.train.y[:, None], f"the targets of {role}"))
        splits = {name: replace(split, y=(split.y - mean) / std) for name, split in task.splits.items()}
        tasks[role] = replace(task, **splits)
        tensors |= {f"{role}/target_mean": mean, f"{role}/target_std": std}
    return replace(pair.with_tasks(tasks), tensors=pair.tensors | tensors)


def common_basis(primary: Task, harmful: Task, *further: Task) -> Tensor:
    """Orthonormal basis [D, d] of range(K_P) and range(K_H) intersected, K = X^T X of the training inputs.

    The principal vectors of the two ranges (SVD of V_P^T V_H) whose cosine is 1 within the square root of the inputs'
    machine epsilon, i.e. angles under about 2e-4 for float64; with several harmful tasks, what is common to the first
    two is intersected with the next. Raises DataError where the ranges meet only in 0.
    """
    common = spectrum.svd(primary.root)[2]
    for task in (harmful, *further):
        own = spectrum.svd(task.root)[2]
        vectors, cosines, _ = spectrum.svd(common @ own.T)
        shared = cosines > 1 - max(primary.eps, task.eps) ** 0.5
        if not shared.any():
            raise DataError(
                f"the inputs of '{primary.name}' and '{task.name}' have no direction in common; "
                "set dataset.common_range=false"
            )
        basis = common.T @ vectors[:, shared]
        common = basis.T
    return basis


def check_learnable(task: Task) -> None:
    """Raise DataError where the training rows are all alike, or lack a class."""
    x, y = task.train.x, task.train.y
    if (x == x[0]).all():
        raise DataError(
            f"task '{task.name}': every input feature is constant over its {len(x)} training rows (rank 0); "
            "give it features that vary"
        )
    if task.constant:
        return
    if not task.classes and (y == y[0]).all():
        raise DataError(f"task '{task.name}': its target is constant over the training rows; give one that varies")
    if task.classes and not (counts := torch.bincount(y, minlength=task.classes)).all():
        raise DataError(f"task '{task.name}': class {int(counts.argmin())} is empty, it has no training rows")


def finish(pair: TaskPair, common_range: bool) -> TaskPair:
    """Raise DataError for a task that cannot be learned; go to coordinates in `common_basis` with `common_range`."""
    for task in pair.tasks.values():
        check_learnable(task)
    about = {"inputs": pair.dim}
    if common_range:
        basis = common_basis(*pair.shown.values())
        pair = map_inputs(pair, lambda _, x: x @ basis, basis=basis)
        about["common_range"] = f"inputs projected onto the {pair.dim} dimensions range(K_P) and range(K_H) share"
    about["rows"] = {role: {s: len(split) for s, split in task.splits.items()} for role, task in pair.tasks.items()}
    return replace(pair, about=pair.about | about)
