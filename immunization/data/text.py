"""Text tasks of tables or folders, and what a net's tokenizer makes of them: packed integers [n, fields, tokens]."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from immunization.checks import AtLeastOne, Fraction, NonNegative, Seed, checked
from immunization.compute import keys
from immunization.data.class_folders import Classes, Order, chosen, class_folders, images_below, in_order, read_outputs
from immunization.data.fields import names_of, pack
from immunization.data.image_folders import kept_of, refuse_shared, tasks_of
from immunization.data.images import ImagePair, ImageSplit, ImageTask, description
from immunization.data.preparation import check_training_rows, split_rows
from immunization.data.tables import Dialect, dialect_of, read_table, require_columns
from immunization.errors import ConfigError, DataError

log = logging.getLogger(__name__)

TABLES = (".csv", ".csv.gz", ".parquet")
SYNONYMS = {"train": ("training",), "val": ("validation", "valid", "dev"), "test": ("testing",)}


class Texts(Dataset):
    """All texts of a table or folder, in its order, and the label [N] of each, -1 for those of no chosen class.

    `encode` packs some of them: int64 [n, fields, tokens].
    """

    def __init__(self, texts: list[str], labels: Tensor, encode: Callable[[Sequence[str]], Tensor] | None = None):
        self.texts, self.labels, self.encode = texts, labels, encode

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> tuple[str, int]:
        return self.texts[i], int(self.labels[i])


@dataclass(frozen=True)
class TextSplit(ImageSplit):
    """Texts of one split, the shortest first: those of a batch then need about as many tokens."""

    dataset: Texts
    rows: Tensor
    kind = "texts"

    def loader(
        self, pair: ImagePair, config: Mapping[str, Any], loaders: int = 1, is_training: bool = False, **options: Any
    ) -> Iterable:
        """Batches (packed integers [n, fields, tokens], labels [n], none, none) of what `tokenized` gives."""

        def packed(items: list[tuple[str, int]]) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
            texts, labels = zip(*items, strict=True)
            return self.dataset.encode(texts), torch.tensor(labels), [], []

        own, size = Subset(self.dataset, self.rows.tolist()), options.get("batch_size", pair.batch_size)
        return DataLoader(own, size, shuffle=is_training, drop_last=is_training, collate_fn=packed)

    @property
    def labels(self) -> Tensor:
        return self.dataset.labels[self.rows]

    @property
    def texts(self) -> list[str]:
        return [self.dataset.texts[row] for row in self.rows.tolist()]


@dataclass(frozen=True)
class TextPair(ImagePair):
    """Text tasks by role. `tokens` are the most of a text that are read; None: as many as the net can."""

    tokens: int | None = None

    def check_channels(self, net: str, channels: int) -> None:
        """Raise ConfigError for texts that no tokenizer has read: those of a net that reads images."""
        if self.tasks["harmful"].splits["train"].dataset.encode is None:
            raise ConfigError(
                f"{net} reads images, and dataset={self.name} holds texts: choose model=transformers "
                "model.name=<folder of a text model>, or dataset=image_folders"
            )


@checked("dataset/text")
def text(
    primary_root: str | None,
    harmful_root: str | Sequence[str] | None,
    benign_root: str | Sequence[str] | None,
    unseen_root: str | Sequence[str] | None,
    keep_root: str | Sequence[str] | None,
    primary: Mapping[str, Any] | None,
    harmful: Mapping[str, Any] | None,
    benign: Mapping[str, Any] | None,
    unseen: Mapping[str, Any] | None,
    keep: Mapping[str, Any] | None,
    val_fraction: Fraction,
    test_fraction: Fraction,
    split_seed: Seed,
    on_bad_text: Literal["error", "skip"],
    tokens: AtLeastOne | None,
    csv: Mapping[str, Any] | None,
    batch_size: AtLeastOne,
    cache: str | None,
    cache_limit: NonNegative,
    name: str,
) -> ImagePair:
    """Texts of tables or folders, by conf/dataset/text.yaml; raises ConfigError, DataError."""
    check_training_rows(val_fraction, test_fraction)
    reading = Reading(dialect_of(csv), on_bad_text == "skip", val_fraction, test_fraction, split_seed)
    given = (primary_root, primary), (harmful_root, harmful), (benign_root, benign), (unseen_root, unseen)
    tasks = tasks_of(given, open_text, [reading], "a table with a text and a label column, or a folder")
    kept = kept_of(keep_root, keep or {}, open_kept, [reading])
    refuse_shared(tasks, kept, "class")
    about = {"keep": {own.name: len(own.splits["train"]) for own in kept}} if kept else {}
    options = {"batch_size": batch_size, "cache": cache, "cache_limit": cache_limit, "tokens": tokens}
    return TextPair(name, tasks, about=description(tasks, "texts") | about, keep=kept, **options)


class Reading(NamedTuple):
    """How texts are read and split; `skip`: rows without a text or a label are left out."""

    dialect: Dialect
    skip: bool
    val_fraction: float
    test_fraction: float
    split_seed: int


class Part(NamedTuple):
    """All texts of a table or folder and their labels as text; `whole` are the rows [n] that have both."""

    texts: list[str]
    labels: list[str]
    whole: Tensor
    left_out: dict[str, int]

    def split(self, place: Path, names: Sequence[str] = ()) -> TextSplit:
        """Its whole rows, or those of the classes `names`, with the places of these as labels."""
        numbers = {name: number for number, name in enumerate(names)}
        labels = torch.tensor([numbers.get(own, -1) for own in self.labels])
        rows = self.whole[labels[self.whole] >= 0] if names else self.whole
        identity = f"texts {keys.key(texts=self.texts, labels=labels)}"
        return TextSplit(Texts(self.texts, labels), rows, identity, f"rows of {place.name}, from 0 on")


def open_text(
    kind: str,
    root: str,
    reading: Reading,
    text: str = "text",
    label: str = "label",
    train: str = "train",
    val: str = "val",
    test: str = "test",
    classes: Classes = None,
    outputs: str | None = None,
    order: Order | None = None,
) -> ImageTask:
    """The task of one root: a table, a folder of class folders, or a folder with one of these for each split."""
    key = f"dataset.{kind}"
    if outputs is not None and kind != "primary":
        raise ConfigError(f"{key}.outputs: only the primary task has outputs of the model's head; leave it out")
    places = _places(key, Path(root).expanduser(), {"train": train, "val": val, "test": test})
    parts = {split: _read(key, place, text, label, reading) for split, place in places.items()}
    known = {split: {part.labels[i] for i in part.whole.tolist()} for split, part in parts.items()}
    for split in known.keys() - {"train"}:
        if unknown := sorted(known[split] - known["train"]):
            raise DataError(
                f"{places[split]}: label {unknown[0]} is not in {places['train']}; both need the same labels, or "
                f"{key}.{split}=none holds out texts of {places['train'].name} instead"
            )
        if lacking := sorted(known["train"] - known[split]):
            log.warning("%s has no text of %d labels, such as %s", places[split], len(lacking), lacking[0])
    order = order or ("natural" if all(map(str.isdecimal, known["train"])) else None)
    names = chosen(f"{key}.classes", classes, in_order(known["train"], order), order)
    whole = {split: part.split(places[split], names) for split, part in parts.items()}
    shares = (0.0 if s in whole else getattr(reading, f"{s}_fraction") for s in ("val", "test"))
    drawn = split_rows(whole["train"].labels, *shares, torch.Generator().manual_seed(reading.split_seed))
    held_out = {split: own for split, own in whole.items() if split != "train"}
    splits = {split: whole["train"].take(rows) for split, rows in drawn.items()} | held_out
    named = None if outputs is None else read_outputs(Path(outputs).expanduser(), names)
    about = f"{places['train']}" + ("" if classes is None else f", {len(names)} classes")
    held = tuple(places["train"] / name for name in names)
    lost = {split: part.left_out for split, part in parts.items() if part.left_out}
    return ImageTask(about, names, {s: _sorted(own) for s, own in splits.items()}, None, named, held, order, lost)


def open_kept(
    root: str, reading: Reading, text: str = "text", label: str = "label", classes: Classes = None
) -> ImageTask:
    """All texts of a table or below a folder, or those of some classes, without labels."""
    place = Path(root).expanduser()
    part = _read("dataset.keep", place, text, None if classes is None else label, reading)
    known = tuple(sorted({part.labels[i] for i in part.whole.tolist()}))
    names = () if classes is None else chosen("dataset.keep.classes", classes, known, None, least=1)
    about = f"{place}" + (f", {len(names)} classes" if names else "")
    held = tuple(place / name for name in names) or (place,)
    lost = {"train": part.left_out} if part.left_out else {}
    return ImageTask(about, (), {"train": _sorted(part.split(place, names))}, None, None, held, None, lost)


def _sorted(split: TextSplit) -> TextSplit:
    lengths = torch.tensor([len(own) for own in split.texts], dtype=torch.long)
    return split.take(lengths.argsort(stable=True))


def _places(key: str, root: Path, names: Mapping[str, str]) -> dict[str, Path]:
    """The table or folder of each split that has one; the endings of their names may be left out."""
    if root.is_file():
        return {"train": root}
    if not root.is_dir():
        raise DataError(
            f"{key}_root: {root.absolute()} not found; it must be a table with a text and a label column, or a folder. "
            "docs/install.md says where to get the data of an experiment; set data_root to the folder that holds them"
        )
    places = {}
    for split, name in names.items():
        found = [root / f"{own}{end}" for own in (name, *SYNONYMS[split]) for end in ("", *TABLES)]
        if place := next(filter(Path.exists, found), None):
            places[split] = place
    if len({place.resolve() for place in places.values()}) < len(places):
        raise ConfigError(f"{key}: train, val and test must be different texts, not {', '.join(names.values())}")
    held = sorted(path.name for path in root.iterdir())
    if "train" not in places and (places or not any((root / name).is_dir() for name in held)):
        raise DataError(f"{root} has no texts called {names['train']}; set {key}.train to one of {', '.join(held)}")
    return places or {"train": root}


def _read(key: str, place: Path, text: str, label: str | None, reading: Reading) -> Part:
    """The texts of a table, or of the .txt files below a folder with a folder per class; no labels without a `label`.

    Raises DataError for rows that have no text or label, unless these are left out.
    """
    if place.is_dir():
        names = class_folders(place) if label else None
        found, _, left = images_below(key.removeprefix("dataset."), place, names, (".txt",), "text")
        rows = [path for path, _ in found.samples]
        texts, labels = [_content(path) for path in rows], [names[i] if names else "" for _, i in found.samples]
    elif place.name.endswith(TABLES):
        as_text = {} if place.suffix == ".parquet" else {"dtype": str, "keep_default_na": False}
        frame, left = read_table(place, reading.dialect, **as_text), {}
        columns = [text, *filter(None, [label])]
        remedy = f"; of its columns {', '.join(map(str, frame.columns))} set {key}.text and {key}.label"
        require_columns(frame, columns, place, remedy)
        texts, *more = (frame[name].astype("string").fillna("").tolist() for name in columns)
        rows, labels = [f"row {i}, counted from 0" for i in range(len(texts))], more[0] if more else [""] * len(texts)
    else:
        raise DataError(
            f"{place} is no table, {', '.join(TABLES)}, and no folder of folders of .txt files: set {key}_root"
        )
    empty = [
        i for i, row in enumerate(zip(texts, labels, strict=True)) if not all(map(str.strip, row[: 1 + bool(label)]))
    ]
    if empty and not reading.skip:
        raise DataError(
            f"{place}: {len(empty)} of {len(texts)} rows have no text or no label, the first is {rows[empty[0]]}; "
            "fill or remove them, or set dataset.on_bad_text=skip"
        )
    if empty:
        log.warning(
            "%s: %d rows without a text or a label are left out, the first is %s", place, len(empty), rows[empty[0]]
        )
        left = {**left, "without a text or a label": len(empty)}
    whole = torch.ones(len(texts), dtype=torch.bool)
    whole[empty] = False
    if not whole.any():
        raise DataError(f"{place}: no row has a text and a label, so that none is left")
    return Part(texts, labels, whole.nonzero()[:, 0], left)


def _content(path: str) -> str:
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}); save it as UTF-8, or remove it") from error


def tokenized(
    pair: TextPair, folder: str, takes: Collection[str], most: int, words: int
) -> tuple[TextPair, dict[str, Any]]:
    """`pair` as a net reads it that has its tokenizer in `folder`, and takes the fields `takes` of `most` tokens.

    Texts are padded to the longest one of all tasks, or cut off at `dataset.tokens` or `most`; a warning says how many.
    The second is the net's data config: the size of an input, and the names of its fields in their order. Raises
    ConfigError for a folder without a tokenizer or with one of more than the net's `words`, and for more tokens than
    the net takes, or so few that no word is read.
    """
    tokenizer = tokenizer_in(folder)
    most = min(most, tokenizer.model_max_length)
    if pair.tokens and pair.tokens > most:
        raise ConfigError(f"dataset.tokens={pair.tokens}: the model in {folder} reads at most {most} of a text")
    if pair.tokens and pair.tokens <= (added := tokenizer.num_special_tokens_to_add()):
        raise ConfigError(f"dataset.tokens={pair.tokens}: {added} of each text mark its ends, so that no word is read")
    tasks = {**pair.tasks, **{f"keep {i}": task for i, task in enumerate(pair.keep)}}
    ids = {
        (role, split): tokenizer(own.texts)["input_ids"] if len(own) else []
        for role, task in tasks.items()
        for split, own in task.splits.items()
    }
    if (largest := max(max(own, default=0) for texts in ids.values() for own in texts)) >= words:
        raise ConfigError(f"model.name={folder}: its tokenizer gives a text token {largest}, the model knows {words}")
    longest = max(len(own) for texts in ids.values() for own in texts)
    length = min(longest, pair.tokens or most)
    cut = {f"{role}/{split}": sum(len(own) > length for own in texts) for (role, split), texts in ids.items()}
    if cut := {place: count for place, count in cut.items() if count}:
        told = "texts of up to %d tokens are cut off behind %d: %s; dataset.tokens says how many are read"
        log.warning(told, longest, length, ", ".join(f"{count} of {place}" for place, count in cut.items()))
    names = names_of({name: None for name in tokenizer.model_input_names if name in takes})
    encode = partial(_packed, tokenizer, names, length)
    for role, task in tasks.items():
        splits = {}
        for split, own in task.splits.items():
            identity = f"{own.identity} {keys.key(ids=map(torch.tensor, ids[role, split]), length=length)}"
            dataset = Texts(own.dataset.texts, own.dataset.labels, encode)
            splits[split] = replace(own, dataset=dataset, identity=identity)
        tasks[role] = replace(task, splits=splits)
    about = pair.about | {"tokens": {"read": length, "longest": longest, **({"cut_off": cut} if cut else {})}}
    kept = tuple(tasks.pop(f"keep {i}") for i in range(len(pair.keep)))
    return replace(pair, tasks=tasks, keep=kept, about=about), {"input_size": (len(names), length), "fields": names}


def _packed(tokenizer: Any, names: Sequence[str], length: int, texts: Sequence[str]) -> Tensor:
    how = {"padding": "max_length", "padding_side": "right", "truncation": True, "max_length": length}
    found = tokenizer(list(texts), **how, return_tensors="pt")
    return pack({name: found[name] for name in names})


def tokenizer_in(folder: str) -> Any:
    """The tokenizer of a model's folder, or of its name on the hub; raises ConfigError where there is none."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("texts need transformers; install it with pip install 'immunization[text]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without one
            raise ValueError("its vocabulary is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        said = " ".join(str(error).split())[:150]
        raise ConfigError(
            f"model.name={folder} has no tokenizer ({said}): save the model's there, tokenizer.save_pretrained(folder)"
        ) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigError(f"model.name={folder}: its tokenizer has no pad_token; set one and save the tokenizer")
    if tokenizer.pad_token is None:
        log.info("the tokenizer in %s pads with nothing of its own, and here with %s", folder, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
