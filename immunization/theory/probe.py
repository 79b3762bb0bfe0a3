"""The attacker's linear probe, solved: gradient descent on 1/2 ||F w - Y||^2 in the eigenbasis of its Hessian.

Features F = U S V^T [N, D] of rank k, targets Y [N, C], no bias, w_0 = 0. With c = U^T Y, r_i = (sigma_i / sigma_1)^2,
t steps of size 1/lambda_1 lead exactly to w_t = V diag((1 - (1 - r)^t) / sigma) c, whatever t is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from immunization.errors import DegenerateSpectrum
from immunization.theory import spectrum


@dataclass(frozen=True)
class Probe:
    """Linear probing of one set of features; every tensor is float64.

    `sigma` [k] descending, `vectors` V [D, k], `coefficients` c = U^T Y [k, C]. The first `resolved` <= k directions
    stand above the rounding errors of float64; minimum-norm solutions use only these. `dropped` is the largest singular
    value that was left out as noise.
    """

    sigma: Tensor
    vectors: Tensor
    coefficients: Tensor
    resolved: int
    dropped: float = 0.0

    @classmethod
    def of(
        cls, features: Tensor | Iterable[Tensor], targets: Tensor, eps: float = spectrum.EPS, rank: int | None = None
    ) -> "Probe":
        """The probe of features F and targets Y [N, C] by one triangular factor of [F | Y], in O((D + C)^2) memory.

        `features` is one matrix [N, D] or any iterable of batches [n_i, D] in the order of the targets. Directions
        within `spectrum.rank_tolerance` are noise, `eps` being the machine epsilon of the features' first dtype; `rank`
        as in `fit`. Raises DegenerateSpectrum for features that are all zero or not finite, ValueError where F and Y
        differ in rows.
        """
        width = 0

        def joint() -> Iterator[Tensor]:
            nonlocal width
            start = 0
            for batch in (features,) if isinstance(features, Tensor) else features:
                y = targets[start : start + len(batch)].double()
                width, start = batch.shape[1], start + len(batch)
                if len(y) < len(batch):
                    raise ValueError(f"there are only {len(targets)} targets for at least {start} rows of features")
                yield torch.cat([batch.to(y), y], 1)

        factor, rows = spectrum.triangular_factor(joint())
        if rows < len(targets):
            raise ValueError(f"there are {len(targets)} targets for {rows} rows of features")
        factor = factor[:width]  # the rows below are what no probe can fit
        return cls.fit(factor[:, :width], factor[:, width:], spectrum.rank_tolerance((rows, width), eps), rank)

    @classmethod
    def fit(cls, factor: Tensor, targets: Tensor, tolerance: float, rank: int | None = None) -> "Probe":
        """The probe of features and targets, or of any [m, D], [m, C] that these were rotated into, as R and Q^T Y are.

        `tolerance` is the noise floor relative to sigma_1; `rank` is the number of directions to keep where it is known
        beforehand. Raises DegenerateSpectrum for features that are all zero or not finite.
        """
        if not torch.isfinite(factor).all():
            raise DegenerateSpectrum("the features hold NaN or infinite values; their spectrum does not exist")
        u, sigma, vh = spectrum.svd(factor)
        if not sigma[0] > 0:
            raise DegenerateSpectrum("the features are all zero (rank 0): there is nothing to probe")
        resolved = int((sigma > sigma[0] * tolerance).sum())
        k = min(rank or resolved, len(sigma))
        return cls(sigma[:k], vh[:k].T, u[:, :k].T @ targets, min(k, resolved), max(sigma[k:].tolist(), default=0.0))

    @property
    def root(self) -> Tensor:
        """S V^T [k, D]: with c in the place of Y it is all that any probe behind a linear map depends on."""
        return self.sigma[:, None] * self.vectors.T

    def _decay(self, t: Tensor) -> Tensor:
        """log (1 - r_i)^t for steps t [T]: [T, k]. Small r keep their digits; r = 1 gives a large negative number."""
        log = torch.log1p(-((self.sigma / self.sigma[0]) ** 2)).clamp(min=-torch.finfo(self.sigma.dtype).max)
        return t.to(log)[:, None] * log

    def weights(self, t: Tensor) -> Tensor:
        """w_t [T, D, C] after t [T] steps of gradient descent with step 1/lambda_1 from 0."""
        # a sigma that underflowed to 0 is never moved: 0 / tiny = 0
        gain = self.learned(t) / self.sigma.clamp(min=torch.finfo(self.sigma.dtype).tiny)
        return self.vectors @ (gain[:, :, None] * self.coefficients)

    def learned(self, t: Tensor) -> Tensor:
        """Share 1 - (1 - r_i)^t [T, k] of each coefficient that t [T] steps have learned."""
        return -torch.expm1(self._decay(t))

    def residuals(self, t: Tensor) -> Tensor:
        """What is left of the coefficients c after t [T] steps: U^T (Y - F w_t) [T, k, C]."""
        return torch.exp(self._decay(t))[:, :, None] * self.coefficients

    def excess(self, t: Tensor) -> Tensor:
        """||F w_t - Y||^2 - min_w ||F w - Y||^2 [T], twice the excess training loss; at t = 0 it is ||c||^2."""
        return torch.exp(2 * self._decay(t)) @ self.coefficients.square().sum(1)

    def optimum(self) -> Tensor:
        """Minimum-norm least squares w* [D, C]."""
        r = self.resolved
        return self.vectors[:, :r] @ (self.coefficients[:r] / self.sigma[:r, None])

    def norm_ratio(self, steps: int) -> Tensor:
        """||w_t - w*|| / ||w_0 - w*|| on range(H), t = 0..steps: steepest descent with exact line search (Eq. 16).

        Several outputs share one step size, that of the Frobenius norm. NaN where w* = 0.
        """
        r = self.resolved
        curvature = ((self.sigma[:r] / self.sigma[0]) ** 2)[:, None].cpu().numpy()
        # squares of 1/sigma may leave the range of float64
        scaled = self.sigma[:r, None] / spectrum.power_of_two(self.sigma)
        error = (self.coefficients[:r] / scaled).cpu().numpy()
        norms = [np.linalg.norm(error)]
        for _ in range(steps):  # numpy: several times less overhead than torch for arrays this small
            gradient = curvature * error
            square = np.square(gradient)
            along = (curvature * square).sum()
            if along > 0:
                error = error - gradient * (square.sum() / along)
            norms.append(np.linalg.norm(error))
        ratio = torch.tensor(norms, dtype=torch.float64)
        return ratio / ratio[0]


def ridge_weights(sigma: Tensor, vectors: Tensor, coefficients: Tensor, ridges: Tensor) -> Tensor:
    """Ridge regression V diag(sigma / (sigma^2 + ridge)) c [R, D, C], for ridges [R]; 0 along directions of sigma 0."""
    scale = spectrum.power_of_two(sigma)  # so that squares do not leave the range of float64
    scaled = sigma / scale
    gain = torch.nan_to_num(scaled / (scaled.square() + ridges[:, None] / scale / scale)) / scale
    return vectors @ (gain[:, :, None] * coefficients)
