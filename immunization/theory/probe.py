"""The attacker's linear probe, solved, and differentiated: gradient descent on 1/2 ||F w - Y||^2, and ridge regression.

Features F = U S V^T [N, D] of rank k, targets Y [N, C], no bias, w_0 = 0. With c = U^T Y, r_i = (sigma_i / sigma_1)^2,
t steps of size 1/lambda_1 lead exactly to w_t = V diag((1 - (1 - r)^t) / sigma) c, whatever t is.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum
from immunization.theory import spectrum

CLOSE = 1e-4
"""Relative step-weighted gap of two eigenvalues below which a derivative replaces their difference quotient."""

ENTRIES = 2**18
"""Entries of the difference quotients that are worked on at once: as many as caches hold."""


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
        norms = [_length(error)]
        for _ in range(steps):  # numpy: several times less overhead than torch for arrays this small
            gradient = curvature * error
            square = np.square(gradient)
            along = (curvature * square).sum()
            if along > 0:
                error = error - gradient * (square.sum() / along)
            norms.append(_length(error))
        ratio = torch.tensor(norms, dtype=torch.float64)
        return ratio / ratio[0]


def _length(x: np.ndarray) -> float:
    """The Frobenius norm, without what `np.linalg.norm` looks at first."""
    return math.sqrt(np.dot(flat := x.ravel(), flat))


class _Residuals(torch.autograd.Function):
    """With mu the eigenvalues of G = F F^T over the largest one, both results are functions (1 - mu)^t of G.

    The gradient in G of <g, (1 - G)^t c> is U (Phi * U^T c g^T U) U^T, Phi the difference quotients of (1 - mu)^t
    (Daleckii and Krein): one eigendecomposition whatever the number of steps, and no division by the gap of two
    eigenvalues that meet.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, coefficients: Tensor, steps: Tensor, eigenvalues: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        decay = 1 - (eigenvalues / eigenvalues[-1]).clamp(min=0)
        c = u.T @ coefficients
        ctx.save_for_backward(factor, eigenvalues[-1], u, decay, c, steps)
        powers = decay[:, None] ** steps
        decayed = powers[:, :, None] * c[:, None, :]
        return (u @ decayed.flatten(1)).unflatten(1, decayed.shape[1:]).transpose(0, 1), powers.square().mean(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_residual: Tensor, of_expected: Tensor) -> tuple[Tensor | None, ...]:
        factor, largest, u, decay, c, steps = ctx.saved_tensors
        gap = decay[:, None] - decay
        distance, smaller = gap.abs(), torch.minimum(decay[:, None], decay)
        gradient, weights, n = torch.zeros_like(gap), u.T @ of_residual, steps[:, None]
        at_once = max(1, ENTRIES // len(decay) ** 2)
        for t, weight in zip(n.split(at_once), weights.split(at_once), strict=True):
            power, half = decay**t, decay ** ((t - 1) / 2)
            tangents = (t * half)[:, :, None] * half[:, None, :]
            quotients = (power[:, :, None] - power[:, None, :]).div_(gap)
            quotients = torch.where(t[:, :, None] * distance <= CLOSE * smaller, tangents, quotients)
            gradient += quotients.mul_(weight @ c.T).sum(0)
        slopes = of_expected @ (2 * n * decay ** (2 * n - 1)) / len(decay)
        # the derivative in mu instead of in decay = 1 - mu has the opposite sign
        gradient = -(gradient + gradient.T) / 2
        gradient.diagonal().sub_(slopes)
        # mu = eigenvalues / largest, and the largest has the gradient u_1 u_1^T of its own
        gradient[-1, -1] -= gradient.diagonal() @ (1 - decay)
        return 2 / largest * u @ (gradient @ (u.T @ factor)), None, None, None, None


def residuals(probes: Sequence[tuple[Tensor, Tensor]], steps: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Residuals of l2 probes after `steps` [T] of gradient descent, exact and differentiable in their factors.

    Each probe is a factor F [m, D] and coefficients c [m, C], which stand for features and targets of any number of
    rows: e.g. R A and Q^T Y of features Q R behind a map A. Step size 1/lambda_1(F^T F), w_0 = 0, no bias. Returns
    c - F w_t [T, m, C] and the mean of its square over random c of unit length, 1/m sum_i (1 - lambda_i / lambda_1)^2t
    [T]. Both ignore the scale of F, and F^T F may be singular. The cost is one eigendecomposition of F F^T forward and
    a few products of m x m matrices backward.
    """
    scaled = [(f / spectrum.power_of_two(f), c) for f, c in probes]
    return [_Residuals.apply(f, c, steps.to(f), *torch.linalg.eigh(f.detach() @ f.detach().T)) for f, c in scaled]


def excess(residual: Tensor) -> Tensor:
    """||F w_t - c||^2 [T], summed over outputs: the excess loss, plus the part of c that no w reaches."""
    return residual.square().sum((1, 2))


def ridge_weights(sigma: Tensor, vectors: Tensor, coefficients: Tensor, ridges: Tensor) -> Tensor:
    """Ridge regression V diag(sigma / (sigma^2 + ridge)) c [..., R, D, C]; 0 along directions of sigma 0.

    For `sigma` [..., k], `vectors` V [..., D, k], `coefficients` c [..., k, C] and `ridges` [..., R].
    """
    scale = spectrum.power_of_two(sigma)  # so that squares do not leave the range of float64
    scaled = (sigma / scale).unsqueeze(-2)
    gain = torch.nan_to_num(scaled / (scaled.square() + ridges.unsqueeze(-1) / scale / scale)) / scale
    return vectors.unsqueeze(-3) @ (gain.unsqueeze(-1) * coefficients.unsqueeze(-3))


def leave_one_out(features: Tensor, targets: Tensor, ridges: Sequence[float]) -> Tensor:
    """Leave-one-out predictions [ridges, N, C] of centered targets, by one solve per ridge instead of N fits.

    With Z the centered `features` [N, D], Y the centered `targets` [N, C] and G = Z Z^T + lambda sigma_1^2 I, row i of

        Y - G^-1 Y / diag(G^-1)

    is z_i W for the W that minimizes ||Z W - Y||^2 + lambda sigma_1^2 ||W||^2 over all rows but i. This is exact for
    lambda > 0, with row i in both means and in sigma_1, the largest singular value of Z: rows without information are
    then predicted as 0, where means of only the others would predict the opposite of their class.

    float64, differentiable in `features` (sigma_1 included, so that their scale does not matter, however small or large
    it is); O(N D min(N, D)) per ridge. Equal features predict 0. Raises LinAlgError for features that are not finite.
    """
    features = features.double() / spectrum.power_of_two(features)  # of 1e-200, squares would be 0
    z, y = (part - part.mean(0) for part in (features, targets.double()))
    wide = len(z) <= z.shape[1]
    gram = z @ z.mT if wide else z.mT @ z
    near = gram.detach().cpu()
    if not near.isfinite().all():
        raise torch.linalg.LinAlgError("the features hold NaN, infinite or overflowing values")
    top = spectrum.extreme_eigenpair(near, -1)[1].to(gram)
    square = top @ gram @ top  # sigma_1^2, with the gradient of an eigenvalue
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    if not square > (len(z) * spectrum.EPS * features.detach().abs().max()) ** 2:  # the rounding of the mean
        return y.new_zeros(len(ridges), *y.shape) * features.sum()
    predictions = []
    for ridge in ridges:
        # positive definite, of finite features: without the check, for which a GPU would be waited for
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(gram / square + ridge * eye).L)
        if wide:
            errors, left = inverse @ y, inverse.diagonal()
        else:  # ridge G^-1 = I - Z (Z^T Z / sigma_1^2 + ridge I)^-1 Z^T / sigma_1^2
            solved = z @ inverse / square
            errors, left = y - solved @ (z.mT @ y), 1 - (solved * z).sum(1)
        predictions.append(y - errors / left[:, None])
    return torch.stack(predictions)
