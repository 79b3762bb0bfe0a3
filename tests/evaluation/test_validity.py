"""The flags of `Validity`, on both sides of each threshold."""

import pytest
import torch
from helpers.comparisons import regression
from helpers.matrices import gaussian, orthonormal
from torch import Tensor, nn

from immunization.data.pixels import digits
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison, Validity
from immunization.models import Linear, Model

D = 4
INPUTS = orthonormal(200, D, seed=0)


def flags(theta: Tensor, inputs: Tensor = INPUTS, **options: float) -> list[str]:
    """Flags of a map on a regression with given inputs, rows being those of every split."""
    y = inputs.sum(1)
    task = Task("known", *(Split(inputs, y) for _ in range(3)))
    pair = TaskPair("known", task, task)
    model = Linear(pair)
    model.extractor.theta.data.copy_(theta)
    return Validity(**options)(Comparison(pair, model)).flags


def diagonal(*last: float) -> Tensor:
    return torch.diag(torch.tensor([1.0] * (D - len(last)) + list(last), dtype=torch.float64))


@pytest.mark.parametrize(("change", "unchanged"), [(3e-7, True), (3e-6, False)])
def test_unchanged_up_to_a_millionth_of_each_singular_value(change, unchanged):
    assert ("unchanged" in flags(diagonal(1 - change))) is unchanged


@pytest.mark.parametrize(("change", "unchanged"), [(30, True), (300, False)])
def test_unchanged_up_to_rounding_of_the_largest_one(change, unchanged):
    """A direction of sigma 1e-12 may move by 100 epsilon of sigma_1, which is 2 % of it."""
    small = INPUTS * torch.tensor([1.0, 1.0, 1.0, 1e-12], dtype=torch.float64)
    theta = diagonal(1 + change * 2.0**-52 / 1e-12)
    assert ("unchanged" in flags(theta, small)) is unchanged


@pytest.mark.parametrize(("eigenvalue", "limited"), [(0.9e-5, True), (1.1e-5, False)])
def test_the_released_codes_ridge_sets_kappa_below_ten_times_itself(eigenvalue, limited):
    found = flags(diagonal(eigenvalue**0.5))
    assert ("ridge_limited_harmful" in found) is ("ridge_limited_primary" in found) is limited


@pytest.mark.parametrize(("lost", "dropped"), [(1, False), (2, True)])
def test_a_primary_accuracy_may_fall_by_one_point(lost, dropped):
    """Theta drops the only feature by which `lost` of 100 rows are told from class 0."""
    y = torch.tensor([0] * 50 + [1] * (50 - lost) + [2] * lost)
    task = Task("known", *(Split(torch.nn.functional.one_hot(y, 3).double(), y) for _ in range(3)), classes=3)
    pair = TaskPair("known", task, task)
    model = Linear(pair)
    model.extractor.theta.data[2, 2] = 0
    assert ("primary_dropped" in Validity()(Comparison(pair, model)).flags) is dropped


@pytest.mark.parametrize(("tolerance", "dropped"), [(0.2, True), (0.3, False)])
def test_r_squared_may_fall_by_a_share_of_itself(tolerance, dropped):
    """Without one of four equal directions R^2 falls by a quarter."""
    assert ("primary_dropped" in flags(diagonal(0.0), tolerance=tolerance)) is dropped


def test_as_many_rows_as_features_are_enough():
    eye = torch.eye(D, dtype=torch.float64)
    assert not any(name.startswith("few_samples") for name in flags(eye, INPUTS[:D]))
    assert {"few_samples_primary", "few_samples_harmful"} <= set(flags(eye, INPUTS[: D - 1]))


def test_classes_without_test_rows_are_named():
    x = gaussian(300, D, seed=1)
    labels = [torch.arange(100) % classes for classes in (3, 3, 2)]
    task = Task("known", *(Split(x[i::3], y) for i, y in enumerate(labels)), classes=3)
    found = Validity()(Comparison(pair := TaskPair("known", task, task), Linear(pair)))
    assert {"untested_classes_primary", "untested_classes_harmful"} <= set(found.flags)
    assert "1 of 3 classes (2) have no test rows" in found.reasons["untested_classes_harmful"]
    equal = Task("equal", *(Split(x[i::3], torch.ones(100).long()) for i in range(3)), classes=2, constant=True)
    found = Validity()(Comparison(pair := TaskPair("equal", equal, equal), Linear(pair)))
    assert not any(name.startswith("untested_classes") for name in found.flags)  # nor any training rows


@pytest.mark.parametrize(("repeated", "seen"), [(50, False), (52, True)])
def test_test_rows_that_are_training_rows_are_named(repeated, seen):
    train, others = gaussian(300, D, seed=1), gaussian(100, D, seed=2)
    test = torch.cat([train[:repeated], others[repeated:]])
    task = Task("known", *(Split(x, (x.sum(1) > 0).long()) for x in (train, others, test)), classes=2)
    pair = TaskPair("known", task, task)
    found = Validity()(Comparison(pair, Linear(pair))).flags
    assert ("test_rows_seen_harmful" in found) is ("test_rows_seen_primary" in found) is seen


@pytest.mark.parametrize(("shared", "told"), [(10, False), (12, True)])
def test_harmful_rows_that_are_primary_rows_are_counted(shared, told):
    rows, others = gaussian(100, D, seed=1), gaussian(100, D, seed=2)
    harmful = torch.cat([others[shared:], rows.flip(0)[:shared]])
    tasks = [Task("known", *(Split(x, (x[:, 0] > 0).long()) for _ in range(3)), classes=2) for x in (rows, harmful)]
    found = Validity()(Comparison(pair := TaskPair("known", *tasks), Linear(pair)))
    assert ("shared_rows_harmful" in found.flags) is told
    assert not told or found.reasons["shared_rows_harmful"].startswith("12 of 100 harmful training rows have")


def test_rows_of_built_in_tasks_are_their_own():
    pair = digits(primary=0, harmful=[1, 8])
    assert not any(name.startswith("shared_rows") for name in Validity()(Comparison(pair, Linear(pair))).flags)


class Layered(Model):
    """A linear layer and another one behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.extractor, self.head = nn.Sequential(nn.Linear(5, 5), layer), nn.Linear(5, 1, bias=False)
        self.double()


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5)])
@pytest.mark.parametrize("training", [True, False])
def test_layers_in_train_mode_are_flagged(layer, training):
    model = Layered(layer).train(training)
    measures = Validity()(Comparison(TaskPair("pair", regression(0), regression(10)), model))
    assert ("train_mode" in measures.flags) is training
    assert not training or measures.reasons["train_mode"].startswith("extractor.1 in train mode")
