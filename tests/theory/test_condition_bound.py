"""Matrices of bounded condition number."""

import pytest
import torch

from immunization.theory.optimal_map import nearest_bounded


def test_nearest_matrix_has_the_bound_and_no_other_clipping_is_nearer():
    a = torch.randn(20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nearest = nearest_bounded(a, 5.0)
    sigma = torch.linalg.svdvals(nearest)
    assert (sigma[0] / sigma[-1]).item() == pytest.approx(5.0)
    u, s, vh = torch.linalg.svd(a)
    distance = (nearest - a).norm()
    for floor in torch.linspace(s[-1], s[0] / 5, 200):
        assert distance <= (u * s.clamp(floor, 5 * floor) @ vh - a).norm() + 1e-12


def test_matrix_within_the_bound_stays():
    a = torch.eye(3, dtype=torch.float64) + 0.1
    assert nearest_bounded(a, 5.0) is a
