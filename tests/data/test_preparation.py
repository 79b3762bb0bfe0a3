"""What every data set shares: its YAML, splits, scaling and the common range."""

import hydra
import pytest
import torch
from helpers.pairs import fails, same
from helpers.repository import ROOT
from omegaconf import OmegaConf

from immunization import data
from immunization.data.preparation import common_basis, moments, split_rows
from immunization.data.task import Split, Task
from immunization.errors import DataError


def test_hydra_instantiates_a_pair():
    config = OmegaConf.create({"seed": 3, "dataset": OmegaConf.load(ROOT / "conf" / "dataset" / "digits.yaml")})
    del config.dataset.defaults
    assert same(hydra.utils.instantiate(config.dataset, seed=config.seed), data.digits(seed=3))


@pytest.mark.parametrize("labels", [torch.tensor([5, 6]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])])
def test_labels_that_are_not_those_of_the_classes_are_refused(labels):
    split = Split(torch.eye(2, dtype=torch.float64), labels)
    with pytest.raises(DataError, match=r"task 'mine', train split: labels are torch.*; expected int64 from 0 to 1"):
        Task("mine", split, split, split, classes=2)


def test_split_rows_is_stratified_disjoint_and_keeps_a_training_row():
    strata = torch.tensor([0] * 50 + [1] * 7 + [2])
    rows = split_rows(strata, 0.3, 0.5, torch.Generator().manual_seed(0))
    assert torch.cat(list(rows.values())).sort().values.equal(torch.arange(58))
    assert {name: torch.bincount(strata[index], minlength=3).tolist() for name, index in rows.items()} == {
        "train": [10, 2, 1],
        "val": [15, 2, 0],
        "test": [25, 3, 0],
    }


@pytest.mark.parametrize(("val", "test", "split"), [(0.0, 0.2, "test"), (0.2, 0.0, "val"), (0.2, 0.2, "val")])
def test_targets_of_a_regression_are_no_strata(val, test, split):
    options = {"strata": torch.rand(60), "val_fraction": val, "test_fraction": test, "generator": torch.Generator()}
    told = f"60 strata in 60 rows leave no {split} rows"
    fails(DataError, told, "torch.zeros(N) for a regression", call=split_rows, **options)


def test_classes_too_small_for_a_split_are_told(caplog):
    rows = split_rows(torch.arange(60) // 4, 0.0, 0.2, torch.Generator().manual_seed(0))
    assert [len(part) for part in rows.values()] == [60, 0, 0]
    assert "15 strata in 60 rows leave no test rows: 0.2 of each is under one row" in caplog.text


@pytest.mark.parametrize("strata", [torch.zeros(6, 2), torch.tensor([0.0, float("nan")])])
def test_strata_that_are_none_are_refused(strata):
    options = {"val_fraction": 0.2, "test_fraction": 0.2, "generator": torch.Generator()}
    fails(DataError, str(list(strata.shape)), call=split_rows, strata=strata, **options)


def test_a_task_of_few_rows_needs_no_test_rows(caplog):
    rows = split_rows(torch.arange(4.0), 0.1, 0.2, torch.Generator().manual_seed(0))
    assert [len(part) for part in rows.values()] == [4, 0, 0]
    assert not caplog.text


def test_constant_columns_become_exactly_zero():
    x = torch.full((300, 2), 0.1, dtype=torch.float64)  # its mean is not 0.1 in floating point
    x[:, 1] = torch.randn(300, dtype=torch.float64)
    mean, std = moments(x)
    z = (x - mean) / std
    assert (z[:, 0] == 0).all()
    assert z[:, 1].std().item() == pytest.approx(1)


def test_common_basis_of_known_subspaces():
    frame = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64)).Q
    spans = {"primary": frame[:, :6], "harmful": frame[:, 4:9] @ torch.randn(5, 5, dtype=torch.float64)}
    primary, harmful = (_task(torch.randn(40, span.shape[1], dtype=torch.float64) @ span.T) for span in spans.values())
    basis = common_basis(primary, harmful)
    torch.testing.assert_close(basis @ basis.T, frame[:, 4:6] @ frame[:, 4:6].T)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    apart = _task(torch.randn(40, 2, dtype=torch.float64) @ frame[:, 8:].T)
    fails(
        DataError,
        "no direction in common",
        "dataset.common_range=false",
        call=common_basis,
        primary=primary,
        harmful=apart,
    )


def _task(x):
    split = Split(x, torch.zeros(len(x), dtype=torch.float64))
    return Task("t", split, split, split)
