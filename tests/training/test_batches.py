"""Batches of both tasks."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
import torch
from helpers.matrices import gaussian
from helpers.methods import make_pair, task
from torch import Tensor
from torch.testing import assert_close

from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.training.batches import PairedBatches

pytestmark = pytest.mark.trains


def numbered(rows: int) -> Task:
    """Inputs whose first column is the row number, which is the target too."""
    number = torch.arange(rows, dtype=torch.float64)
    return task(torch.stack([number, number**2, torch.ones_like(number)], 1), number)


def test_full_batches_carry_everything():
    pair = make_pair()
    batches = PairedBatches(pair, None, torch.Generator())
    assert batches.steps_per_epoch == 1
    ((primary, harmful),) = batches.epoch()
    for batch, one in ((primary, pair.primary), (harmful, pair.harmful)):
        assert batch.x is one.train.x
        assert batch.y is one.train.y
        assert batch.rank == len(batch.root) == 4
        assert_close(batch.root.T @ batch.root, one.train.x.T @ one.train.x)


def test_an_epoch_is_one_pass_over_the_harmful_task():
    """Harmful: 6 of 7 rows, another order each epoch. Primary: goes on where it was, 9 of 10 rows before it repeats."""
    batches = PairedBatches(TaskPair("pair", numbered(10), numbered(7)), 3, torch.Generator().manual_seed(0))
    assert batches.steps_per_epoch == 2
    epochs = [list(batches.epoch()) for _ in range(6)]
    assert {len(epoch) for epoch in epochs} == {2}
    for batch in (batch for epoch in epochs for pair in epoch for batch in pair):
        assert batch.x.shape == (3, 3)
        assert batch.rank == 3
        assert batch.root is None
        assert torch.equal(batch.x[:, 0], batch.y)
    harmful = [torch.cat([h.y for _, h in epoch]).tolist() for epoch in epochs]
    assert all(len(set(rows)) == 6 for rows in harmful)
    assert len({tuple(rows) for rows in harmful}) == 6
    primary = torch.cat([p.y for epoch in epochs for p, _ in epoch]).reshape(4, 9).tolist()
    assert all(len(set(rows)) == 9 for rows in primary)
    assert len({tuple(rows) for rows in primary}) == 4


def test_harmful_rows_of_a_class_stand_side_by_side():
    """Every row once in a pass, in groups of three of a class; 2 of 8 are left over. The primary task has none."""
    y = torch.arange(24) % 3
    pair = TaskPair("pair", *[task(gaussian(24, 3, seed=seed), y, classes=3) for seed in (0, 1)])
    batches = PairedBatches(pair, 6, torch.Generator().manual_seed(0), shots=3)
    epochs = [list(batches.epoch()) for _ in range(3)]
    harmful = [torch.cat([h.y for _, h in epoch]).tolist() for epoch in epochs]
    for epoch, labels in zip(epochs, harmful, strict=True):
        rows = torch.cat([h.x for _, h in epoch])
        assert len(rows) == len(rows.unique(dim=0)) == 24
        runs = [len(list(same)) for _, same in groupby(labels)]
        assert sum(run // 3 for run in runs) >= 5
    assert len({tuple(labels) for labels in harmful}) == 3
    primary = torch.cat([p.y for epoch in epochs for p, _ in epoch]).tolist()
    assert sum(a == b for a, b in pairwise(primary)) < 40
    targets = replace(pair, harmful=numbered(24))
    order = torch.cat([h.y for _, h in PairedBatches(targets, 6, torch.Generator().manual_seed(0), shots=3).epoch()])
    assert sorted(order.tolist()) == list(range(24))


def test_batches_follow_the_seed():
    pair = make_pair()

    def order(seed: int) -> Tensor:
        batches = PairedBatches(pair, 5, torch.Generator().manual_seed(seed))
        return torch.cat([batch.y for _ in range(2) for both in batches.epoch() for batch in both])

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_the_rank_of_a_batch_is_bounded_by_that_of_its_task():
    x = gaussian(30, 2, seed=0) @ gaussian(2, 5, seed=1)
    one = task(x, x[:, 0])
    assert {
        b.rank for both in PairedBatches(TaskPair("pair", one, one), 4, torch.Generator()).epoch() for b in both
    } == {2}


@pytest.mark.parametrize(
    ("rows", "name"), [((5, 20), "5 training rows of the primary"), ((20, 5), "5 .* of the harmful")]
)
def test_batches_larger_than_a_task(rows, name):
    with pytest.raises(ConfigError, match=rf"method\.batch_size=6 is above the {name} task; lower it"):
        PairedBatches(make_pair(rows), 6, torch.Generator())
