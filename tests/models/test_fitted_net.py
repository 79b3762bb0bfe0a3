"""Nets that are fitted to the images of D_P and kept: one for each choice of images."""

from dataclasses import replace

import pytest
import torch

from immunization.data import digits_deep
from immunization.models import FittedNet, fitted_net


class Fitted(Exception):
    """The net is about to be fitted; its argument is the file that it is kept in."""


def test_images_that_differ_in_the_middle_have_a_net_of_their_own(tmp_path, monkeypatch):
    def fit(*arguments):
        raise Fitted(arguments[-1])

    monkeypatch.setattr(fitted_net, "_fit", fit)
    pair, paths = digits_deep(range(5), [5, 6], [7, 8]), []
    primary = pair.tasks["primary"]
    rows = torch.arange(1200) % 300
    for middle in (600, 601):
        split = replace(primary.splits["train"], rows=rows.where(torch.arange(1200) != middle, 0), identity="the same")
        tasks = pair.tasks | {"primary": replace(primary, splits=primary.splits | {"train": split})}
        with pytest.raises(Fitted) as fitted:
            FittedNet(replace(pair, tasks=tasks), channels=1, cache=str(tmp_path))
        paths.append(fitted.value.args[0])
    assert paths[0] != paths[1]
