"""Loaders of the user's own: what they may give, and what is said of all else."""

import pytest
import torch

from immunization.data.loaders import LabeledBatches, rows_of_loader, shuffled_parts
from immunization.errors import ConfigError, DataError

X, Y = torch.randn(6, 3, 4, 4), torch.arange(6)


def read(loader):
    x, y = zip(*LabeledBatches("primary", loader), strict=True)
    return torch.cat(x), torch.cat(y)


@pytest.mark.parametrize(
    "item",
    [
        (X, Y),
        [X, Y],
        (X, Y, ["paths"]),
        (X, Y.tolist()),
        {"pixel_values": X, "labels": Y},
        {"image": X, "label": Y, "path": "a"},
        {"x": X, "y": Y},
    ],
    ids=["tuple", "list", "more", "labels_as_list", "transformers", "datasets", "x_y"],
)
def test_what_a_batch_may_be(item):
    for given, expected in zip(read([item]), (X, Y), strict=True):
        assert torch.equal(given, expected)


def test_the_first_batch_is_read_once():
    batches = LabeledBatches("primary", ((X + i, Y) for i in range(3)))
    assert torch.equal(batches.first(), X)
    assert torch.equal(batches.first(), X)
    assert len(list(batches)) == 3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (X, "gives one Tensor a batch; expected"),
        ((X,), "gives one tuple a batch; expected"),
        ({"pixel_values": X, "class": Y}, "gives one dict of pixel_values, class a batch; expected"),
        ((X, Y[:4]), r"inputs of shape \(6, 3, 4, 4\) and labels of shape \(4,\); expected \[n, ...\] and \[n\]"),
        ((X, torch.eye(6)), r"labels of shape \(6, 6\)"),
        ((X, Y.float()), "labels of torch.float32; class labels must be integers"),
        (((255 * X).byte(), Y), "inputs of torch.uint8; convert them to floats"),
        ((["a.png"], ["dog"]), "gives no tensors"),
    ],
)
def test_what_it_may_not_be(item, message):
    with pytest.raises(DataError, match=f"primary_loader .*{message}" if message[0] != "g" else message):
        read([item])


def test_other_mistakes():
    with pytest.raises(DataError, match="inputs of shapes"):
        read([(X, Y), (X[..., :2], Y)])
    with pytest.raises(DataError, match="primary_loader gives no batches"):
        LabeledBatches("primary", []).first()
    with pytest.raises(ConfigError, match="primary_loader must give batches of inputs and labels; int gives none"):
        LabeledBatches("primary", 3)
    rows = torch.utils.data.TensorDataset(X, Y)
    for given in (rows, {"train": [(X, Y)], "test": rows}):
        with pytest.raises(
            ConfigError, match=r"primary_loader: TensorDataset is a data set.*give torch\.utils\.data\.D"
        ):
            LabeledBatches("primary", given)


def test_rows_keep_their_epsilon_and_integers_are_classes():
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    assert rows_of_loader("harmful", [(x, y)]).eps == torch.finfo(torch.float32).eps
    assert rows_of_loader("harmful", [(x.double(), y)]).eps == torch.finfo(torch.float64).eps
    with pytest.raises(DataError, match="60 different integers as labels of 60 rows: give targets of a regression as"):
        rows_of_loader("harmful", [(x, torch.arange(60))])


@pytest.mark.parametrize("test", [None, 5])
def test_rows_are_held_out_of_every_class(test):
    y = torch.tensor([0] * 50 + [1] * 25 + [2] * 2)
    parts = shuffled_parts(y, 5, test)
    assert torch.equal(torch.cat([*parts.values()]).sort().values, torch.arange(len(y)))
    counts = {split: torch.bincount(y[rows], minlength=3).tolist() for split, rows in parts.items()}
    assert counts["val"][:2] == [10, 5]
    assert counts["test"][:2] == ([10, 5] if test else [0, 0])
    assert counts["train"][2] >= 1
    targets = torch.randn(40)
    assert len(shuffled_parts(targets, 5, 5)["test"]) == 8
