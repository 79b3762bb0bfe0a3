"""Nets that are fitted to the images of D_P and kept: one for each choice of images."""

import sys
from dataclasses import replace

import pytest
import torch

from immunization.data import digits_deep
from immunization.data.pixels import sklearn_digits
from immunization.models import FittedNet, fitted_net

pytestmark = pytest.mark.trains


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


def test_a_net_is_fitted_for_one_number_of_threads_and_one_content(tmp_path, monkeypatch):
    """Whoever fills the cache decides no number of others: how the sums of the fit are rounded hangs on the threads."""

    def fit(*arguments):
        raise Fitted(arguments[-1])

    def path_of(pair, threads: int):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with pytest.raises(Fitted) as fitted:
                FittedNet(pair, channels=1, cache=str(tmp_path))
        finally:
            torch.set_num_threads(before)
        return fitted.value.args[0]

    monkeypatch.setattr(fitted_net, "_fit", fit)
    pair = digits_deep(range(5), [5, 6], [7, 8])
    assert path_of(pair, 1) == path_of(pair, 1) != path_of(pair, 2)
    pixels, labels = sklearn_digits()
    monkeypatch.setattr(sys.modules["immunization.data.small_images"], "sklearn_digits", lambda: (16 - pixels, labels))
    assert path_of(digits_deep(range(5), [5, 6], [7, 8]), 1) != path_of(pair, 1)


def test_a_net_that_cannot_be_kept_is_used_all_the_same(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    net = FittedNet(digits_deep(), channels=1, fit_epochs=1, shift=0, cache=str(tmp_path / "cache"))
    assert net.head.out_features == 4
    assert "the fitted net is not kept" in caplog.text
