"""The linear model's terms of a Hessian."""

from functools import partial

import pytest
import torch
from helpers.matrices import gaussian
from helpers.methods import make_pair
from torch.testing import assert_close

from immunization.errors import DegenerateSpectrum
from immunization.models import Linear
from immunization.models.base import Batch
from immunization.theory.regularizers import r_well_of_features
from immunization.theory.together import completed

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("mode", ["none", "ridge", "pinv", "cancelled"])
def test_a_term_that_is_completed_with_others_is_the_one_at_once(mode):
    pair = make_pair()
    model, task = Linear(pair, "random"), pair.primary
    batch = Batch(task.train.x, task.train.y, task.rank)
    at_once = model.hessian_term(partial(r_well_of_features, power=4), batch, mode)
    (later,) = completed(model.hessian_term(partial(r_well_of_features.later, power=4), batch, mode))
    gradients = [torch.autograd.grad(term, model.extractor.theta)[0] for term in (at_once, later)]
    assert_close(at_once, later, rtol=0, atol=0)
    assert_close(*gradients, rtol=0, atol=0)
    assert gradients[0].norm() > 0


def test_a_ridge_that_is_too_small_is_named_also_of_a_term_at_once():
    pair = make_pair()
    model, x = Linear(pair, "random"), gaussian(30, 1, seed=1) @ gaussian(1, 4, seed=2)
    batch = Batch(x, pair.primary.train.y, 1)
    for regularizer in (r_well_of_features, r_well_of_features.later):
        with pytest.raises(DegenerateSpectrum, match=r"method\.ridge=0 too small"):
            completed(model.hessian_term(regularizer, batch, "ridge", 0.0))
