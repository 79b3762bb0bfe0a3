"""Random matrices with a spectrum of one's choice, and hypothesis strategies that draw such spectra."""

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """[rows, columns] with orthonormal columns."""
    return torch.linalg.qr(gaussian(rows, columns, seed=seed)).Q


def with_spectrum(sigma: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    """U diag(sigma) V^T of shape [rows, columns] with random singular vectors; `sigma` may be shorter than both."""
    return orthonormal(rows, len(sigma), seed) * sigma @ orthonormal(columns, len(sigma), seed + 1).T


def spectra(smallest: int = 2, largest: int = 8, decades: float = 3.0) -> st.SearchStrategy[Tensor]:
    """Descending singular values over up to `decades` decades, neighbours at least 0.1 % apart."""
    logs = st.lists(st.floats(0, decades), min_size=smallest, max_size=largest)
    return logs.map(lambda x: 10 ** (torch.tensor(sorted(x, reverse=True), dtype=torch.float64) - decades / 2)).map(
        lambda sigma: sigma * 1.001 ** torch.arange(len(sigma) - 1, -1, -1, dtype=torch.float64)
    )
