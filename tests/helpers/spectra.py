"""Spectra: many random ones, their condition numbers, and the ceiling of two Gram matrices."""

from functools import cache

import torch

SAMPLES = 100_000  # random spectra of every statement that is checked by arithmetic on the spectrum alone


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def kappa(gram):
    """Ratio of the extreme eigenvalues of a positive definite matrix."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    return (eigenvalues[-1] / eigenvalues[0]).item()


def inverse_root(gram):
    eigenvalues, vectors = torch.linalg.eigh(gram)
    return vectors * eigenvalues.rsqrt() @ vectors.T


@cache
def random_spectra(size):
    """[SAMPLES, size] descending, over up to eight decades, with nearly flat ones among them."""
    generator = torch.Generator().manual_seed(size)
    spread = 8 * torch.rand(SAMPLES, 1, generator=generator, dtype=torch.float64) ** 3 + 1e-3
    logs = spread * (torch.rand(SAMPLES, size, generator=generator, dtype=torch.float64) - 0.5)
    return 10 ** logs.sort(-1, descending=True).values


def random_fractions(size):
    return torch.rand(SAMPLES, generator=torch.Generator().manual_seed(size + 1), dtype=torch.float64).clamp(min=1e-3)


def ratio(sigma):
    """kappa of each row; infinite where a step took a value exactly to zero."""
    sigma = sigma.abs()
    return sigma.max(-1).values / sigma.min(-1).values


def denominator_of(sigma):
    """1 / R_ill of full-rank spectra: half of (mean square minus smallest square)."""
    return (sigma.square().mean(-1) - sigma[..., -1] ** 2) / 2


def ceiling(k_p, k_h):
    """kappa(M) kappa(K_P) / kappa(K_H), M = K_P^-1/2 K_H K_P^-1/2, over the non-zero eigenvalues."""
    root = inverse_root(k_p)
    rank = torch.linalg.matrix_rank(k_h, hermitian=True)
    of_m, of_h = (torch.linalg.eigvalsh(m).flip(0)[:rank] for m in (root @ k_h @ root, k_h))
    return (of_m[0] / of_m[-1]).item() * kappa(k_p) / (of_h[0] / of_h[-1]).item()
