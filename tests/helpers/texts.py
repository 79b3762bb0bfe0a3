"""Small tables of texts, and a tokenizer that knows their words."""

from pathlib import Path

import pandas as pd
import pytest

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write(path: Path, rows: list[tuple[str | list[str], str]]) -> None:
    """A CSV with texts, perhaps as lists of words, and labels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [(text if isinstance(text, str) else " ".join(text), label) for text, label in rows]
    pd.DataFrame(texts, columns=["text", "label"]).to_csv(path, index=False)


def tokenizer(folder: Path, **options: str | None) -> None:
    """Save a BERT tokenizer of `WORDS` and letters in a folder."""
    transformers = pytest.importorskip("transformers", "4.50")
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    known = {word: i for i, word in enumerate(words)}
    transformers.BertTokenizerFast(vocab=known, **options).save_pretrained(folder)
