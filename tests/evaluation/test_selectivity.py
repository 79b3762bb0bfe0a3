"""What layers of nets lose of other images where they forget harmful ones, and what no weights can do."""

import math

import pytest
import torch
from helpers.nets import build, open_pair
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from immunization.evaluation import Comparison, Selectivity
from immunization.evaluation.selectivity import covariance, lost, switched


def layer(seed: int, harmful_like_kept: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [3, 5] and covariances of kept and of harmful inputs."""
    generator = torch.Generator().manual_seed(seed)

    def some() -> Tensor:
        return covariance(torch.randn(40, 5, generator=generator, dtype=torch.float64) @ mixing())

    def mixing() -> Tensor:
        return torch.randn(5, 5, generator=generator, dtype=torch.float64)

    kept = some()
    harmful = 3 * kept if harmful_like_kept else some()
    return torch.randn(3, 5, generator=generator, dtype=torch.float64), kept, harmful


def size(weight: Tensor, inputs: Tensor) -> float:
    return torch.trace(weight @ inputs @ weight.T).item()


def forgetting(weight: Tensor, kept: Tensor, harmful: Tensor, strength: float) -> Tensor:
    return weight @ kept @ torch.linalg.inv(kept + strength * harmful)


@given(seed=st.integers(0, 2**31), strength=st.floats(0.01, 100))
def test_the_weights_minimize_their_objective(seed: int, strength: float) -> None:
    weight, kept, harmful = layer(seed)
    found = forgetting(weight, kept, harmful, strength).requires_grad_(True)
    moved = found - weight
    objective = torch.trace(moved @ kept @ moved.T) + strength * torch.trace(found @ harmful @ found.T)
    (gradient,) = torch.autograd.grad(objective, found)
    assert gradient.norm() <= 1e-8 * (weight @ kept).norm()


@given(seed=st.integers(0, 2**31), strength=st.floats(0.1, 10))
def test_what_is_lost_is_what_these_weights_lose(seed: int, strength: float) -> None:
    weight, kept, harmful = layer(seed)
    _, others, _ = layer(seed + 1)
    found = forgetting(weight, kept, harmful, strength)
    share = size(found, harmful) / size(weight, harmful)
    expected = size(found - weight, others) / size(weight, others)
    assert lost(weight, kept, harmful, share, (others, harmful)) == pytest.approx(expected, rel=1e-6)


@given(seed=st.integers(0, 2**31), other=st.integers(0, 2**31), share=st.floats(0, 1.5))
def test_no_weights_lose_less_than_the_largest_generalized_eigenvalue_admits(
    seed: int, other: int, share: float
) -> None:
    """sqrt(left) + c sqrt(lost) >= 1 with c^2 = lambda_max(K^-1 H) tr(W K W^T) / tr(W H W^T)."""
    weight, kept, harmful = layer(seed)
    generator = torch.Generator().manual_seed(other)
    random = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    best = forgetting(weight, kept, harmful, 10**share)
    top = torch.linalg.eigvals(torch.linalg.solve(kept, harmful)).real.max().item()
    c = math.sqrt(top * size(weight, kept) / size(weight, harmful))
    for tried in (best, (1 - share) * weight, weight + share * random):
        left = size(tried, harmful) / size(weight, harmful)
        gone = size(tried - weight, kept) / size(weight, kept)
        assert math.sqrt(left) + c * math.sqrt(gone) >= 1 - 1e-9


@given(seed=st.integers(0, 2**31), share=st.floats(0.05, 0.9))
def test_inputs_that_are_alike_are_only_shrunk(seed: int, share: float) -> None:
    weight, kept, harmful = layer(seed, harmful_like_kept=True)
    expected = (1 - math.sqrt(share)) ** 2
    assert lost(weight, kept, harmful, share, (kept, harmful)) == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_directions_of_harmful_inputs_alone_are_forgotten_at_no_loss() -> None:
    weight = torch.eye(2, dtype=torch.float64)
    kept, harmful = (torch.diag(torch.tensor(x, dtype=torch.float64)) for x in ((1.0, 1e-6), (1e-6, 1.0)))
    assert lost(weight, kept, harmful, 0.25, (kept, harmful)) < 1e-5


@pytest.mark.parametrize(("distance", "expected"), [(0.0, 0.9), (8.0, 0.0)])
def test_what_a_unit_switches_off(distance: float, expected: float) -> None:
    generator = torch.Generator().manual_seed(0)
    kept, harmful = (torch.randn(2, 4000, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    harmful[..., 0] += distance
    covariances = covariance(kept[0]), covariance(harmful[0])
    assert switched(kept, harmful, covariances, 0.9, 1e-3) == pytest.approx(expected, abs=0.02)


def test_too_few_rows_for_so_many_inputs_give_no_figure():
    rows = torch.randn(4, 20, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept, harmful, *held_out = map(covariance, rows)
    kept.diagonal().add_(1e-3)
    assert math.isnan(lost(torch.eye(60).double(), kept, harmful, 0.25, tuple(held_out)))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_every_trained_layer_is_measured_the_same_every_time(folders, name: str) -> None:
    pair = open_pair(folders)
    trainable, layers = {
        "test_resnet": ("layer1.0.conv2", ["layer1.0.conv2"]),
        "test_vit": ("blocks.5", [f"blocks.5.{part}" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]),
    }[name]
    found = []
    for _ in range(2):
        model, tasks = build(pair, name, trainable=trainable).read(pair, False)
        found.append(Selectivity(places=64)(Comparison(tasks, model)).metrics)
    expected = {f"selectivity/{layer}/{what}" for layer in layers for what in ("lost", "switched")}
    assert set(found[0]) == expected
    assert all(0 <= value <= 1 for value in found[0].values())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_without_trained_layers_there_is_nothing_to_measure(folders) -> None:
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, True)
    assert not Selectivity()(Comparison(tasks, model)).metrics


def test_a_dead_layer_has_none(folders) -> None:
    pair = open_pair(folders)
    model, tasks = build(pair, trainable="layer1.0.conv2").read(pair, False)
    for parameter in model.net.layer1[0].bn1.parameters():
        parameter.zero_()
    measures = Selectivity(places=4)(Comparison(tasks, model))
    assert measures.metrics["selectivity/layer1.0.conv2/lost"] is None
    assert "does not vary" in measures.reasons["selectivity/layer1.0.conv2/switched"]
