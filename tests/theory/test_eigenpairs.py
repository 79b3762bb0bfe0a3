"""Extreme eigenpairs of small and large matrices."""

import pytest
import torch
from helpers.matrices import with_spectrum
from torch.testing import assert_close

from immunization.theory import eigenpairs


def test_extreme_eigenpairs():
    gram = with_spectrum(torch.tensor([3.0, 2.0, 0.5], dtype=torch.float64), 9, 4, seed=3)
    gram = gram.T @ gram
    for index, expected in ((-1, 9.0), (-3, 0.25), (-4, 0.0)):
        value, vector = eigenpairs.extreme_eigenpair(gram, index)
        assert value >= 0
        assert_close(value, expected, rtol=1e-12, atol=1e-14)
        assert_close(gram @ vector, expected * vector, rtol=0, atol=1e-13)
        assert_close(vector.norm().item(), 1.0)


@pytest.mark.parametrize("second", [0.5, 0.999, 1 - 1e-9, 1.0, 0.0], ids="second={}".format)
def test_the_largest_eigenpair_of_a_large_matrix(second):
    """By Lanczos iterations, also where the next eigenvalues are close (as R_well makes them) or all others are 0."""
    size = eigenpairs.LANCZOS + 44
    sigma = (
        torch.cat([torch.ones(1), torch.full((20,), second), second * torch.linspace(0, 0.1, size - 21)])
        .double()
        .sqrt()
    )
    gram = with_spectrum(sigma, size, size, seed=5)
    gram = gram.T @ gram
    value, vector = eigenpairs.extreme_eigenpair(gram, -1)
    assert_close(value, 1.0, rtol=1e-12, atol=0)
    assert_close(gram @ vector, vector, rtol=0, atol=1e-12)
    assert_close(vector.norm().item(), 1.0)


def test_an_eigenpair_of_a_large_zero_matrix():
    value, vector = eigenpairs.extreme_eigenpair(torch.zeros(300, 300, dtype=torch.float64), -1)
    assert value == 0
    assert_close(vector.norm().item(), 1.0)


def test_the_smallest_pair_of_a_large_matrix_keeps_its_digits():
    """Cholesky and Lanczos on the inverse; a singular matrix is left to LAPACK's eigensolver."""
    sigma = torch.logspace(0, -5, 300, dtype=torch.float64)
    f = with_spectrum(sigma, 300, 300, seed=1)
    value, v = eigenpairs.extreme_eigenpair(f.T @ f, -300)
    assert value == pytest.approx(1e-10, rel=1e-5)
    assert (f @ v).norm().item() == pytest.approx(1e-5, rel=1e-5)
    value, v = eigenpairs.extreme_eigenpair(f[:290].T @ f[:290], -300)
    assert value < 1e-15
    assert v.norm().item() == pytest.approx(1)
