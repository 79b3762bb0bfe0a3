"""Texts of tables and folders: splits, classes and their order, what is refused, and what a tokenizer makes of them."""

import logging
from itertools import chain

import pandas as pd
import pytest
import torch
from helpers.texts import WORDS, tokenizer, write

from immunization.data import text
from immunization.data.fields import MASK
from immunization.data.task import SPLITS
from immunization.data.text import tokenized
from immunization.errors import ConfigError, DataError

TAKES = ("input_ids", "attention_mask", "token_type_ids")


@pytest.fixture
def roots(tmp_path):
    """Folders of a primary task of three classes, with all splits, and a harmful one of two, with train and test."""
    for name, classes, splits in (("p", 3, SPLITS), ("h", 3, ("train", "test"))):
        for split in splits:
            write(
                tmp_path / name / f"{split}.csv",
                [(WORDS[i % 7 : i % 7 + 1 + i % 3], f"{name}{i % classes}") for i in range(30)],
            )
    return tmp_path / "p", tmp_path / "h"


def opened(roots, **options):
    return text(*map(str, roots), cache=None, **options)


def test_splits_are_those_of_the_tables_and_the_rest_is_drawn(roots):
    tasks = opened(roots, val_fraction=0.2).tasks
    assert {s: len(own) for s, own in tasks["primary"].splits.items()} == {"train": 30, "val": 30, "test": 30}
    assert {s: len(own) for s, own in tasks["harmful"].splits.items()} == {"train": 24, "val": 6, "test": 30}
    assert tasks["primary"].classes == ("p0", "p1", "p2")
    train = tasks["harmful"].splits["train"]
    table = pd.read_csv(roots[1] / "train.csv")
    assert train.texts == table.text[train.origin.rows.numpy()].tolist()
    assert [f"h{label}" for label in train.labels.tolist()] == table.label[train.origin.rows.numpy()].tolist()
    assert [*map(len, train.texts)] == sorted(map(len, train.texts))
    both = torch.cat([train.origin.rows, tasks["harmful"].splits["val"].origin.rows])
    assert both.sort().values.tolist() == [*range(30)]


def test_a_table_alone_one_in_other_words_and_a_folder_per_class_hold_the_same_texts(roots, tmp_path):
    frame = pd.read_csv(roots[1] / "train.csv")
    frame.rename(columns={"text": "said", "label": "what"}).to_csv(tmp_path / "other.csv", sep=";", index=False)
    for i, row in frame.iterrows():
        (tmp_path / "folders" / row.label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folders" / row.label / f"{i}.txt").write_text(row.text)
    (tmp_path / "p.csv").write_text((roots[0] / "train.csv").read_text().replace(",", ";"))
    found = [
        opened((roots[0], roots[1] / "train.csv")),
        opened((roots[0], tmp_path / "folders")),
        opened(
            (tmp_path / "p.csv", tmp_path / "other.csv"), harmful={"text": "said", "label": "what"}, csv={"sep": ";"}
        ),
    ]
    sizes = [{s: len(own) for s, own in pair.tasks["harmful"].splits.items()} for pair in found]
    assert sizes == [{"train": 21, "val": 3, "test": 6}] * 3
    texts = [{s: own.texts for s, own in pair.tasks["harmful"].splits.items()} for pair in found]
    assert texts[0] == texts[2]
    assert sorted(chain(*texts[0].values())) == sorted(chain(*texts[1].values()))


def test_classes_are_in_the_order_that_is_stated(tmp_path):
    write(tmp_path / "p.csv", [(f"a {i}", str(i % 12)) for i in range(60)])
    write(tmp_path / "h.csv", [(f"b {i}", f"c{i % 12}") for i in range(60)])
    whole = opened((tmp_path / "p.csv", tmp_path / "h.csv")).tasks
    assert whole["primary"].classes == tuple(map(str, range(12)))  # by their value
    assert whole["harmful"].classes[:4] == ("c0", "c1", "c10", "c11")
    pair = opened((tmp_path / "p.csv", tmp_path / "h.csv"), harmful={"classes": "1:3", "order": "natural"},
                  unseen_root=str(tmp_path / "h.csv"), unseen={"classes": ["c7", "c5"]})  # fmt: skip
    assert pair.tasks["harmful"].classes == ("c1", "c2")
    assert pair.tasks["unseen"].classes == ("c5", "c7")
    assert {t.split()[0] for s in SPLITS for t in pair.tasks["unseen"].splits[s].texts} == {"b"}
    assert all(
        int(t.split()[1]) % 12 == 7
        for s in SPLITS
        for t, label in zip(pair.tasks["unseen"].splits[s].texts, pair.tasks["unseen"].splits[s].labels, strict=True)
        if label
    )
    with pytest.raises(ConfigError, match=r"class .*h\.csv/c1 belongs to the harmful task and to the unseen task"):
        opened(
            (tmp_path / "p.csv", tmp_path / "h.csv"),
            unseen_root=str(tmp_path / "h.csv"),
            unseen={"classes": ["c1", "c2"]},
        )


def test_kept_texts_need_no_label(roots, tmp_path):
    write(tmp_path / "k.csv", [("one two", ""), ("three", "")])
    pair = opened(roots, keep_root=str(tmp_path / "k.csv"))
    assert pair.keep[0].splits["train"].texts == ["three", "one two"]
    pair = opened(
        roots, keep_root=str(roots[1] / "train.csv"), keep={"classes": ["h1"]}, harmful={"classes": ["h0", "h2"]}
    )
    assert len(pair.keep[0].splits["train"]) == 10


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "h/train.csv",
            [("", "h0"), ("one", "h1"), ("two", "h0")],
            r"train\.csv: 1 of 3 rows have no text or no label, the first is row 0, .*dataset\.on_bad_text=skip",
        ),
        ("h/train.csv", [("one", "h0"), ("two", "")], r"train\.csv: 1 of 2 rows .* the first is row 1"),
        (
            "h/test.csv",
            [("one", "other"), ("two", "h1")],
            r"test\.csv: label other is not in .*train\.csv; .*dataset\.harmful\.test=none holds out",
        ),
        ("h/train.csv", [("one", "h1"), ("two", "h1")], r"test\.csv: label h0 is not in"),
    ],
)
def test_rows_without_a_text_or_a_label_and_labels_of_one_split_are_named(roots, name, rows, message):
    write(roots[0].parent / name, rows)
    with pytest.raises(DataError, match=message):
        opened(roots)


def test_bad_rows_are_left_out_where_asked_and_labels_without_test_texts_are_said(roots, caplog):
    write(roots[1] / "train.csv", [(" ", "h0"), ("one", ""), *[("two", f"h{i % 2}") for i in range(10)]])
    write(roots[1] / "test.csv", [("one", "h1")] * 4)
    pair = opened(roots, on_bad_text="skip", val_fraction=0.0)
    assert len(pair.tasks["harmful"].splits["train"]) == 10
    assert pair.about["left_out"] == {"harmful": {"train": {"without a text or a label": 2}}}
    assert "2 rows without a text or a label are left out, the first is row 0" in caplog.text
    assert "test.csv has no text of 1 labels, such as h0" in caplog.text
    write(roots[1] / "train.csv", [(" ", "h0"), ("one", "")])
    with pytest.raises(DataError, match=r"train\.csv: no row has a text and a label"):
        opened(roots, on_bad_text="skip")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"harmful": {"text": "utterance"}}, r"train\.csv lacks the column utterance; of its columns text, label set"),
        ({"harmful": {"label": "intent"}}, r"lacks the column intent; of its columns text, label set"),
        ({"harmful": {"train": "nothing"}}, r"no texts called nothing; set dataset\.harmful\.train to one of"),
        ({"harmful": {"test": "train"}}, r"dataset\.harmful: train, val and test must be different texts"),
        ({"harmful": {"texts": "x"}}, r"there is no key dataset\.harmful\.texts; allowed here are text, label, train"),
        ({"harmful": {"classes": ["h0", "h7"]}}, r"h7 is neither one of"),
        ({"harmful_root": "nowhere"}, r"dataset\.harmful_root: .*nowhere not found; it must be a table with a text"),
        ({"harmful_root": None}, r"dataset\.harmful_root is not set: give a table with a text and a label column"),
        ({"harmful_root": __file__}, r"text\.py is no table, \.csv, \.csv\.gz, \.parquet, .*set dataset\.harmful_root"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_a_line(roots, options, message):
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        text(**{"primary_root": str(roots[0]), "harmful_root": str(roots[1]), "cache": None, **options})
    assert "\n" not in str(caught.value)


def test_tokens_are_packed_padded_and_cut_off_and_that_is_said(roots, tmp_path, caplog):
    tokenizer(tmp_path / "net")
    write(roots[1] / "test.csv", [(" ".join(WORDS * 3), "h0"), ("one two", "h1")])
    pair, config = tokenized(opened(roots), str(tmp_path / "net"), TAKES, 16, 64)
    assert config == {"input_size": (3, 16), "fields": TAKES}
    assert pair.about["tokens"] == {"read": 16, "longest": 3 * len(WORDS) + 2, "cut_off": {"harmful/test": 1}}
    assert "are cut off behind 16: 1 of harmful/test; dataset.tokens" in caplog.text
    split = pair.tasks["harmful"].splits["test"]
    ((x, y, *rest),) = split.loader(pair, config)
    assert (x.dtype, x.shape, y.tolist(), rest) == (torch.int64, (2, 3, 16), [1, 0], [[], []])
    assert x[:, TAKES.index(MASK)].sum(1).tolist() == [4, 16]  # [CLS] one two [SEP], and all of it
    batches = list(pair.tasks["primary"].splits["train"].loader(pair, config, batch_size=8, is_training=True))
    assert [len(x) for x, *_ in batches] == [8, 8, 8]
    shorter, config = tokenized(opened(roots, tokens=6), str(tmp_path / "net"), ("input_ids",), 16, 64)
    assert config["input_size"] == (1, 6)
    identities = {own.tasks["harmful"].splits["test"].identity for own in (pair, shorter, opened(roots))}
    assert len(identities) == 3


def test_a_folder_without_a_tokenizer_and_too_many_tokens_are_refused(roots, tmp_path, caplog):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "bert"}')
    for folder in ("bare", "nowhere"):
        with pytest.raises(ConfigError, match=rf"model\.name=.*{folder} has no tokenizer .*save_pretrained\(folder\)"):
            tokenized(opened(roots), str(tmp_path / folder), TAKES, 16, 64)
    tokenizer(tmp_path / "net")
    with pytest.raises(ConfigError, match=r"dataset\.tokens=2: 2 of each text mark its ends, so that no word is read"):
        tokenized(opened(roots, tokens=2), str(tmp_path / "net"), TAKES, 16, 64)
    with pytest.raises(ConfigError, match=r"its tokenizer gives a text token \d+, the model knows 8"):
        tokenized(opened(roots), str(tmp_path / "net"), TAKES, 16, 8)
    tokenizer(tmp_path / "mute", pad_token=None)
    with pytest.raises(ConfigError, match=r"its tokenizer has no pad_token; set one and save the tokenizer"):
        tokenized(opened(roots), str(tmp_path / "mute"), TAKES, 16, 64)
    with pytest.raises(ConfigError, match=r"dataset\.tokens=99: the model in .*net reads at most 16"):
        tokenized(opened(roots, tokens=99), str(tmp_path / "net"), TAKES, 16, 64)
    caplog.set_level(logging.INFO)
    tokenizer(tmp_path / "gpt", pad_token=None, eos_token="[SEP]")
    tokenized(opened(roots), str(tmp_path / "gpt"), TAKES, 16, 64)
    assert "pads with nothing of its own, and here with [SEP]" in caplog.text


def test_padding_stands_behind_the_text_whatever_the_tokenizer_says(roots, tmp_path):
    """A net counts positions from the first token on, which is to be the text's own."""
    tokenizer(tmp_path / "net", padding_side="left")
    pair, config = tokenized(opened(roots), str(tmp_path / "net"), TAKES, 16, 64)
    for x, *_ in pair.tasks["harmful"].splits["train"].loader(pair, config):
        mask = x[:, TAKES.index(MASK)]
        assert mask[:, 0].all()
        assert torch.equal(mask, mask.sort(1, descending=True).values)


def test_a_net_of_images_refuses_texts(roots):
    with pytest.raises(ConfigError, match=r"resnet18 reads images, and dataset=text holds texts: .*model=transformers"):
        opened(roots).check_channels("resnet18", 3)
