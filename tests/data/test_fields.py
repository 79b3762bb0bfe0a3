"""Texts as a tokenizer gives them, packed into one tensor."""

from collections import UserDict

import pytest
import torch

from immunization.data.fields import pack, padded, unpack
from immunization.data.loaders import LabeledBatches, rows_of_loader
from immunization.errors import DataError

IDS = torch.arange(12).view(3, 4) + 10
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
Y = torch.tensor([0, 1, 2])
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def test_fields_are_packed_in_one_order_and_unpacked_again():
    fields = {"token_type_ids": torch.zeros_like(IDS), "attention_mask": MASK.bool(), "input_ids": IDS.int()}
    x = pack(fields)
    assert x.dtype == torch.int64
    assert x.shape == (3, 3, 4)
    assert torch.equal(x, pack(dict(reversed(fields.items()))))
    assert all(torch.equal(x, fields[name].long()) for name, x in unpack(x, NAMES).items())
    with pytest.raises(ValueError, match=r"input_ids \(3, 4\), attention_mask \(3, 3\)"):
        pack({"input_ids": IDS, "attention_mask": MASK[:, :3]})


def test_padding_stands_to_the_right_and_the_mask_leaves_it_out():
    x = padded(pack({"input_ids": IDS, "attention_mask": MASK}), NAMES[:2], 6, pad=7)
    assert torch.equal(x[:, 0], torch.cat([IDS, torch.full((3, 2), 7)], 1))
    assert torch.equal(x[:, 1], torch.cat([MASK, torch.zeros(3, 2, dtype=torch.long)], 1))


@pytest.mark.parametrize(
    "item",
    [
        {"labels": Y, "attention_mask": MASK, "input_ids": IDS},
        UserDict({"input_ids": IDS, "attention_mask": MASK, "labels": Y, "text": ["a", "b", "c"], "idx": Y}),
        ({"input_ids": IDS.numpy(), "attention_mask": MASK}, Y),
    ],
    ids=["dict", "mapping", "tuple"],
)
def test_batches_of_texts(item):
    batches = LabeledBatches("primary", [item])
    ((x, y),) = batches
    assert batches.fields == NAMES[:2]
    assert torch.equal(x, torch.stack([IDS, MASK], 1))
    assert torch.equal(y, Y)


def test_ids_alone_have_no_name():
    batches = LabeledBatches("primary", [(IDS, Y)])
    assert torch.equal(batches.first(), IDS[:, None])
    assert batches.fields == ("",)


def test_one_field_of_floats_is_the_input_whatever_it_is_called():
    rows = torch.randn(3, 5)
    ((x, _),) = LabeledBatches("primary", [{"embedding": rows, "idx": Y, "label": Y}])
    assert torch.equal(x, rows)


def test_batches_are_padded_to_the_longest_of_a_loader_and_of_others():
    given = [{"input_ids": IDS[:, :t], "attention_mask": MASK[:, :t], "labels": Y} for t in (2, 4, 3)]
    batches = LabeledBatches("primary", given, pad=9)
    assert batches.first().shape == (3, 2, 4)
    batches.widen(5)
    for x in [x for x, _ in batches] + [x for x, _ in batches]:
        assert x.shape == (3, 2, 5)
    assert x[0].tolist() == [[10, 11, 12, 9, 9], [1, 1, 1, 0, 0]]
    training = LabeledBatches("primary", {"train": given[:1], "test": given[1:]})
    training.first()
    assert next(iter(training.loader(is_training=True)))[0].shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"pixel_values": torch.randn(3, 3, 4, 4), "input_ids": IDS, "labels": Y}], "integers .input_ids. and floats"),
        ([(IDS, Y), (IDS[:, :3], Y)], "texts of 3 to 4 tokens without attention_mask"),
        ([{"input_ids": IDS, "labels": Y}, {"input_ids": IDS, "attention_mask": MASK, "labels": Y}], "same fields"),
        ([{"input_ids": IDS, "attention_mask": MASK[:, :3], "labels": Y}], r"attention_mask \(3, 3\)"),
        ([{"text": ["a", "b", "c"], "labels": Y}], "gives one dict of text, labels a batch; expected .* input_ids"),
    ],
)
def test_what_texts_may_not_be(items, message):
    with pytest.raises(DataError, match=message):
        list(LabeledBatches("primary", items))


def test_a_linear_map_reads_no_ids():
    with pytest.raises(DataError, match=r"inputs of torch\.int64; convert them to floats"):
        rows_of_loader("harmful", [(IDS, Y)])


def test_longer_texts_than_at_first_are_refused():
    given = [{"input_ids": IDS[:, :3], "attention_mask": MASK[:, :3], "labels": Y}]
    batches = LabeledBatches("primary", given)
    list(batches)
    given[0] = {"input_ids": IDS, "attention_mask": MASK, "labels": Y}
    with pytest.raises(DataError, match="gives 4 tokens, but gave at most 3 when it was first read"):
        list(batches)
