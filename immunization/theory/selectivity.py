"""How well one layer of a net can treat harmful inputs unlike others, whatever its weights become."""

import torch
from torch import Tensor

STEPS, SMALLEST, LARGEST = 60, 1e-6, 1e12
"""Of the bisection for a strength, relative to tr(K) / tr(H)."""


def lost(weight: Tensor, kept: Tensor, harmful: Tensor, share: float, held_out: tuple[Tensor, Tensor]) -> float:
    """Share of the variance of kept outputs that is lost where a `share` of that of harmful outputs is left.

    K and H [D, D], `kept` and `harmful`, are covariances of a layer's inputs in float64, K positive definite. The
    weights W' = W K (K + strength H)^-1 have the least tr((W' - W) K (W' - W)^T) + strength tr(W' H W'^T), for W
    [out, D]; the strength is that which leaves this share. With H V = K V diag(m) and V^T K V = I, W' is
    W K V diag(g) V^T with gains g = 1 / (1 + strength m): variances of outputs are quadratic forms of g.

    Both shares are those of `held_out` covariances of kept and harmful inputs. Weights times 1 - s leave (1 - s)^2 and
    lose s^2, of any inputs: they lose (1 - sqrt(share))^2. NaN where no strength leaves so little of held-out rows: too
    few rows for so many inputs say what the weights should be.
    """
    from scipy.linalg import eigh

    ratios, vectors = (torch.from_numpy(x) for x in eigh(harmful.numpy(), kept.numpy()))
    own = weight @ kept @ vectors
    of_kept, of_harmful = ((own.mT @ own) * (vectors.mT @ x @ vectors) for x in held_out)
    scale, low, high = kept.trace() / harmful.trace(), SMALLEST, LARGEST
    for _ in range(STEPS):
        strength = (low * high) ** 0.5
        gains = 1 / (1 + strength * scale * ratios.clamp(min=0))
        enough = gains @ of_harmful @ gains <= share * of_harmful.sum()
        low, high = (low, strength) if enough else (strength, high)
    if high == LARGEST:
        return torch.nan
    return ((1 - gains) @ of_kept @ (1 - gains) / of_kept.sum()).item()


def switched(kept: Tensor, harmful: Tensor, covariances: tuple[Tensor, Tensor], share: float, ridge: float) -> float:
    """Share of `kept` inputs [2, N, D] beyond the threshold that a `share` of `harmful` ones [2, M, D] is beyond.

    Along Fisher's linear discriminant of the first rows of both, whose `covariances` are given, with a ridge relative
    to the mean variance; counted in the second ones. A ReLU behind this direction would switch them off with the
    harmful ones.
    """
    n, m = kept.shape[1], harmful.shape[1]
    within = (covariances[0] * n + covariances[1] * m) / (n + m)
    within.diagonal().add_(ridge * within.diagonal().mean())
    direction = torch.linalg.solve(within, harmful[0].mean(0) - kept[0].mean(0))
    threshold = (harmful[1] @ direction).quantile(1 - share)
    return (kept[1] @ direction >= threshold).double().mean().item()


def covariance(x: Tensor) -> Tensor:
    """That of rows [N, D] around their mean."""
    x = x - x.mean(0)
    return x.mT @ x / len(x)
