"""What ridge regression predicts of rows that it was not fitted to: the PRESS residuals of Allen (1974)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from immunization.theory.spectrum import EPS, extreme_eigenpair, power_of_two


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
    features = features.double() / power_of_two(features)  # of 1e-200, squares would be 0
    z, y = (part - part.mean(0) for part in (features, targets.double()))
    wide = len(z) <= z.shape[1]
    gram = z @ z.mT if wide else z.mT @ z
    near = gram.detach().cpu()
    if not near.isfinite().all():
        raise torch.linalg.LinAlgError("the features hold NaN, infinite or overflowing values")
    top = extreme_eigenpair(near, -1)[1].to(gram)
    square = top @ gram @ top  # sigma_1^2, with the gradient of an eigenvalue
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    if not square > (len(z) * EPS * features.detach().abs().max()) ** 2:  # the rounding of the mean
        return y.new_zeros(len(ridges), *y.shape) * features.sum()
    found = []
    for ridge in ridges:
        # positive definite, of finite features: without the check, for which a GPU would be waited for
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(gram / square + ridge * eye).L)
        if wide:
            residuals, left = inverse @ y, inverse.diagonal()
        else:  # ridge G^-1 = I - Z (Z^T Z / sigma_1^2 + ridge I)^-1 Z^T / sigma_1^2
            solved = z @ inverse / square
            residuals, left = y - solved @ (z.mT @ y), 1 - (solved * z).sum(1)
        found.append(y - residuals / left[:, None])
    return torch.stack(found)
