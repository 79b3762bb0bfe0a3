"""What tests of data sets ask of a pair of tasks, and of a refusal."""

import pytest
import torch

from immunization.data.task import SPLITS


def fails(error, *parts, call, **options):
    """Assert that `call(**options)` raises `error` with a one-line message that holds every one of `parts`."""
    with pytest.raises(error) as caught:
        call(**options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def rows_of(task):
    """Every input row of a task as bytes, in all splits."""
    return [row.numpy().tobytes() for split in SPLITS for row in getattr(task, split).x]


def same(a, b):
    return all(
        torch.equal(getattr(a.tasks[role], s).x, getattr(b.tasks[role], s).x)
        and torch.equal(getattr(a.tasks[role], s).y, getattr(b.tasks[role], s).y)
        for role in a.tasks
        for s in SPLITS
    )
