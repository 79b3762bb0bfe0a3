"""The linear model's terms of a Hessian."""

import pytest
from helpers.matrices import gaussian
from helpers.methods import make_pair

from immunization.errors import DegenerateSpectrum
from immunization.models import Linear
from immunization.models.base import Batch
from immunization.theory.regularizers import r_well_of_features

pytestmark = pytest.mark.trains


def test_a_ridge_that_is_too_small_is_named():
    pair = make_pair()
    model, x = Linear(pair, "random"), gaussian(30, 1, seed=1) @ gaussian(1, 4, seed=2)
    batch = Batch(x, pair.primary.train.y, 1)
    with pytest.raises(DegenerateSpectrum, match=r"ridge=0 too small"):
        model.hessian_term(r_well_of_features, batch, "ridge", 0.0)
