"""Tasks from loaders of the user's own."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from immunization.data.fields import MASK, POSITIONAL, is_field, names_of, pack, padded
from immunization.data.task import SPLITS, Split, Task
from immunization.errors import ConfigError, DataError
from immunization.theory.spectrum import eps_of

Item = tuple[Tensor, ...] | Mapping[str, Tensor]
Loader = Iterable[Item]
"""Tuples that begin with, or dicts of, preprocessed images [n, C, H, W] or rows [n, D], and labels [n] from 0 on.

Of texts, dicts of what a tokenizer gives, integers [n, T] each, or tuples of these, or of the ids alone, and labels.
"""
Loaders = Loader | Mapping[str, Loader]
"""A loader, or one each for `train`, `test` and, if there are such rows, `val`."""
INPUTS = ("image", "images", "pixel_values", "x")
LABELS = ("label", "labels", "y", "target")


class LabeledBatches:
    """(inputs, labels) of all loaders, empty batches left out, others checked: raises ConfigError and DataError.

    Named `fields` of texts are packed, int64 [n, K, T], and padded to the `length` of the longest batch, for which all
    are read once: ids by `pad`.
    """

    def __init__(
        self, role: str, loaders: Loaders, classes: bool = True, val: int = 5, test: int | None = 5, pad: int = 0
    ) -> None:
        """`val` and `test`: each row of so many of a single loader is for that split, as `shuffled_parts` has it."""
        self.name, self.classes, self.held_out, self.pad = f"{role}_loader", classes, (val, test), pad
        self.fields: tuple[str, ...] | None = None  # () for one tensor of floats; None: not known yet
        self.length = 0
        self.loaders = dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}
        if isinstance(loaders, Mapping) and not {"train", "test"} <= self.loaders.keys() <= set(SPLITS):
            given = ", ".join(map(str, loaders))
            raise ConfigError(
                f"{self.name}: give one loader each for train and test, and optionally for val, not for {given}"
            )
        for loader in self.loaders.values():
            if not isinstance(loader, Iterable):
                kind = type(loader).__name__
                if hasattr(loader, "__getitem__"):  # a Dataset, of which a loader makes batches
                    raise ConfigError(
                        f"{self.name}: {kind} is a data set, which gives one row at a time; give "
                        "torch.utils.data.DataLoader(it, batch_size=64)"
                    )
                raise ConfigError(f"{self.name} must give batches of inputs and labels; {kind} gives none")
        self._begun: Iterator[tuple[Tensor, Tensor]] | None = None
        self._rows = dict.fromkeys(self.loaders, 0)
        self.smallest = math.inf  # rows of a batch for training, of those that were read

    def __len__(self) -> int:
        return sum(map(len, self.loaders.values()))

    def loader(self, *_: object, is_training: bool = False, **__: object) -> "LabeledBatches":
        """Itself; `is_training`: only those for training, if there are loaders of several splits."""
        if "" in self.loaders or not is_training:
            return self
        made = LabeledBatches(self.name.removesuffix("_loader"), self.loaders["train"], self.classes, pad=self.pad)
        made.fields, made.length = self.fields, self.length
        return made

    def parts(self, y: Tensor) -> dict[str, Tensor]:
        """Rows of each split, once all were read: those of its loader, or else as `shuffled_parts` has it of labels."""
        if "" in self.loaders:
            return shuffled_parts(y, *self.held_out)
        rows = torch.arange(sum(self._rows.values())).split([*self._rows.values()])
        return {split: torch.zeros(0, dtype=torch.long) for split in SPLITS} | dict(zip(self._rows, rows, strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches, self._begun = self._begun or self._batches(), None
        return batches

    def first(self) -> Tensor:
        """Inputs of the first batch, which the next pass gives again without the loader being read twice."""
        batches = iter(self)
        batch = next(batches, None)
        if batch is None:
            raise DataError(f"{self.name} gives no batches")
        self._begun = chain([batch], batches)
        return batch[0]

    def widen(self, length: int) -> None:
        """Pad texts to `length` tokens from now on, also those of a pass that has begun."""
        self.length, begun = max(length, self.length), self._begun
        if begun is not None:
            self._begun = ((self._padded(x), y) for x, y in begun)

    def _padded(self, x: Tensor) -> Tensor:
        return padded(x, self.fields, self.length, self.pad) if self.fields else x

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._checked()
        if (first := next(batches, None)) is None:
            return
        batches = chain([first], batches)
        if self.fields and not self.length:
            batches = list(batches)
            lengths = {x.shape[2] for x, _ in batches}
            if len(lengths) > 1 and MASK not in self.fields:
                raise DataError(
                    f"{self.name} gives texts of {min(lengths)} to {max(lengths)} tokens without {MASK}, so padding "
                    f"would be read as text; give {MASK}, or texts of one length"
                )
            self.length = max(lengths)
        for x, y in batches:
            if self.fields and x.shape[2] > self.length:
                raise DataError(
                    f"{self.name} gives {x.shape[2]} tokens, but gave at most {self.length} when it was first read; "
                    "give the same texts in every pass"
                )
            yield self._padded(x), y

    def _checked(self) -> Iterator[tuple[Tensor, Tensor]]:
        shape, self._rows = None, dict.fromkeys(self.loaders, 0)
        for split, item in ((split, item) for split, loader in self.loaders.items() for item in loader):
            x, y, fields = self._pair(item)
            if self.fields not in (None, fields):
                before, now = (" and ".join(map(_called, names)) or "one tensor" for names in (self.fields, fields))
                raise DataError(
                    f"{self.name} gives {before}, and then {now}; the same fields are needed in all batches"
                )
            self.fields = fields
            if x.ndim < 2 or y.shape != x.shape[:1]:
                raise DataError(
                    f"{self.name} gives inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}; "
                    "expected [n, ...] and [n]"
                )
            if not fields and not x.is_floating_point():
                raise DataError(
                    f"{self.name} gives inputs of {x.dtype}; convert them to floats, as the model's preprocessing does"
                )
            if not x.isfinite().all():
                raise DataError(f"{self.name} gives inputs that hold NaN or infinity; clean or drop them")
            if self.classes and (y.is_floating_point() or y.is_complex()):
                raise DataError(f"{self.name} gives labels of {y.dtype}; class labels must be integers")
            if not fields and shape not in (None, x.shape[1:]):
                raise DataError(
                    f"{self.name} gives inputs of shapes {tuple(shape)} and {tuple(x.shape[1:])}; all inputs must "
                    "have one shape"
                )
            shape = x.shape[1:]
            self._rows[split] += len(x)
            if len(x):
                self.smallest = min(self.smallest, len(x) if split in ("", "train") else math.inf)
                yield x, y

    def _pair(self, item: Item) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Inputs, labels, and the names of the fields that are packed; () for inputs of floats."""
        if isinstance(item, Mapping):
            labels = next((item[key] for key in LABELS if key in item), None)
            pair = [{key: value for key, value in item.items() if key not in LABELS}, labels]
        else:
            pair = list(item[:2]) if isinstance(item, tuple | list) else [item]
        if len(pair) == 2 and isinstance(pair[0], Mapping):
            pair[0] = self._inputs(pair[0])
        if len(pair) != 2 or any(part is None for part in pair):
            content = f" of {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
            raise DataError(
                f"{self.name} gives one {type(item).__name__}{content} a batch; expected (inputs, labels), or a dict "
                f"with one of {', '.join(INPUTS)} or integers [n, T] such as input_ids, and one of {', '.join(LABELS)}"
            )
        try:
            x, y = (part if isinstance(part, dict) else torch.as_tensor(part) for part in pair)
            if isinstance(x, Tensor) and self.classes and is_field(x):
                x = {POSITIONAL: x}
            return (pack(x), y, names_of(x)) if isinstance(x, dict) else (x, y, ())
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{self.name} gives no tensors: {' '.join(str(error).split())}") from error

    def _inputs(self, named: Mapping[str, object]) -> object:
        """What a net reads of a dict: named integers [n, T], or else the images or rows; None where there are none."""
        tensors = {key: torch.as_tensor(x) for key, x in named.items() if hasattr(x, "ndim") and x.ndim > 1}
        fields = {key: x for key, x in tensors.items() if is_field(x)}
        floats = [key for key, x in tensors.items() if x.is_floating_point()]
        if fields and floats:
            raise DataError(
                f"{self.name} gives integers ({', '.join(fields)}) and floats ({', '.join(floats)}) together; a "
                "net reads one kind: leave the other out, or wrap the net with the layers that compute it"
            )
        if fields and self.classes and not fields.keys() & set(INPUTS):
            return fields
        alone = named[floats[0]] if len(floats) == 1 else None
        return next((named[key] for key in INPUTS if key in named), alone)


def _called(name: str) -> str:
    return name or "token ids"


def rows_of_loader(role: str, loaders: Loaders) -> Task:
    """The task of rows [n, D] and labels; of a single loader a fifth is for validation, another one for test."""
    labeled = LabeledBatches(role, loaders, classes=False)
    batches = list(labeled)
    if not batches:
        raise DataError(f"{role}_loader gives no batches")
    eps = max(eps_of(x) for x, _ in batches)
    x, y = (torch.cat(parts) for parts in zip(*((x.double(), y) for x, y in batches), strict=True))
    classes = 0 if y.is_floating_point() else len(y.unique())
    if 2 * classes > len(y) and classes > 2:
        raise DataError(
            f"{role}_loader gives {classes} different integers as labels of {len(y)} rows: give targets of a "
            "regression as floats"
        )
    if classes == 1:
        raise DataError(f"{role}_loader holds only one class; at least two are needed")
    y = y.double() if not classes else y.unique(return_inverse=True)[1]
    parts = labeled.parts(y)
    return Task(role, **{split: Split(x[rows], y[rows]) for split, rows in parts.items()}, classes=classes, eps=eps)


def shuffled_parts(y: Tensor, val: int, test: int | None) -> dict[str, Tensor]:
    """Rows of each split, in random order within each class of `y`: each `val`-th for validation, `test`-th for test.

    None for `test`: none. Of each class at least one row is for training. Targets of a regression are no classes.
    """
    y = y.cpu()  # where the order is drawn
    place, order = torch.arange(len(y)), torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    classes = not y.is_floating_point()
    if classes:
        order = order[y[order].argsort(stable=True)]
    held_out = place % val == val - 1
    tested = torch.zeros_like(held_out) if test is None else (place % test == test // 2)
    if classes:
        labels = y[order]
        first = labels.diff(prepend=labels[:1] - 1) != 0
        taken = first & torch.isin(labels, labels[~held_out & ~tested], invert=True)
        held_out, tested = held_out & ~taken, tested & ~taken
    return {"train": order[~held_out & ~tested], "val": order[held_out], "test": order[tested]}
