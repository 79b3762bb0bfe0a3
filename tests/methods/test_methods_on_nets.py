"""Methods on nets: batches of images, one pass of the trainable part, and nothing else that moves."""

import pytest
import torch
from helpers.nets import build, open_pair

from immunization.errors import ConfigError
from immunization.methods import (
    IMMA,
    NTL,
    TAR,
    ConditionNumber,
    Encoderlock,
    LearningCurveNet,
    OptKappa,
    ReleasedConditionNumber,
    RIllOnly,
    Sophon,
)
from immunization.methods.probing import mmd
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


@pytest.mark.parametrize(
    "method",
    [
        ConditionNumber(
            lambda_P=1.0, lambda_H=1.0, epochs=1, batch_size=16, precondition="none", smoothing=0.1, balance=False
        ),
        OptKappa(epochs=1, batch_size=16, form="log"),
        LearningCurveNet(epochs=1, batch_size=16),
    ],
    ids=lambda method: method.name,
)
def test_one_pass_of_the_trainable_part_a_batch(folders, method):
    """Primary features are computed once for the loss and the term of their Hessian."""
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, False)
    method.setup(model, tasks)
    primary, harmful = next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch()))
    calls = []
    model.extractor.register_forward_hook(lambda *_: calls.append(1))
    method.step(model, primary, harmful)
    assert len(calls) == 2


def test_training_moves_only_the_trainable_part(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, False)
    before = {name: tensor.clone() for name, tensor in model.export().items()}
    method = ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, batch_size=16, precondition="none", balance=True)
    method.setup(model, tasks)
    optimizer = torch.optim.SGD(model.groups(), lr=1e-3, momentum=0.9, nesterov=True)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 2e-5]
    train(method, model, PairedBatches(tasks, 16, torch.Generator()), optimizer)
    changed = {name for name, tensor in model.export().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith((model.trainable[0], "fc")) for name in changed)


def test_ntls_distance_is_of_the_block_that_it_is_told(folders):
    pair = open_pair(folders)
    model, tasks = build(pair, trainable=["layer3", "layer4"]).read(pair, False)
    primary, harmful = next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch()))
    method = NTL(epochs=1, batch_size=16, block="layer3.0")
    method.setup(model, tasks)
    found = method.step(model, primary, harmful)["mmd"]
    with model.extractor.watched(lambda x, *_: x) as seen:
        model.training_features(torch.cat([primary.x, harmful.x]))
    maps = seen["layer3.0"]
    assert maps.ndim == 4
    torch.testing.assert_close(found, mmd(*maps.flatten(1).split([len(primary.x), len(harmful.x)])))
    with pytest.raises(
        ConfigError, match=r"method\.block=layer2\.0 is not a trained block; test_resnet trains layer3\.0"
    ):
        NTL(epochs=1, batch_size=16, block="layer2.0").setup(model, tasks)


def test_the_papers_regularizers_count_the_features_of_a_net(folders):
    """Not the channels of what the trained layers read."""
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, False)
    primary, harmful = next(iter(PairedBatches(tasks, 64, torch.Generator()).epoch()))
    assert primary.x.shape[1] != tasks.dim == model.head.in_features
    method = ReleasedConditionNumber(lambda_P=1.0, lambda_H=1.0, precondition="none", side="input")
    method.setup(model, tasks)
    terms = method.step(model, primary, harmful)
    features = model.training_features(primary.x).double()
    sigma2 = torch.linalg.eigvalsh(features.T @ features)
    expected = (sigma2[-1] ** 2 - sigma2.square().mean()) / 2
    torch.testing.assert_close(terms["r_well"].double(), expected, rtol=1e-3, atol=0)
    assert method.rank_of_r_ill(harmful) == tasks.dim
    only = RIllOnly(rank="full")
    only.setup(model, tasks)
    torch.testing.assert_close(only.step(model, primary, harmful)["r_ill"], terms["r_ill"])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (IMMA(epochs=1, batch_size=16), "folded map"),
        (NTL(epochs=1, batch_size=16, block="layer4"), "trains none: set null"),
        (ConditionNumber(lambda_P=1.0, lambda_H=1.0, keep=1.0), r"set method\.keep=0"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_folded_map_cannot_take_is_refused(folders, method, message):
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, True)
    with pytest.raises(ConfigError, match=message):
        method.setup(model, tasks)


def test_the_loss_of_a_folded_map_does_not_move_it(folders):
    """The head undoes the map: the gradient is 0, not that of one of both."""
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, True)
    method = OptKappa(epochs=1, form="log", hold_primary=None)
    method.setup(model, tasks)
    primary, harmful = next(iter(PairedBatches(tasks, None, torch.Generator()).epoch()))
    method.step(model, primary, harmful)["loss"].backward()
    assert not model.linear_map().grad.any()


@pytest.mark.parametrize(
    "method",
    [Sophon(epochs=1, batch_size=16), TAR(epochs=1, batch_size=16), Encoderlock(epochs=1, batch_size=16)],
    ids=lambda method: method.name,
)
def test_methods_that_draw_images_refuse_those_that_are_not_kept(folders, method):
    pair = open_pair(folders, augment=True)
    model, tasks = build(pair).read(pair, False)
    with pytest.raises(ConfigError, match=r"set dataset\.augment=false"):
        method.setup(model, tasks)


def test_dead_units_add_nothing_to_the_rank(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).read(pair, False)
    silence = torch.arange(tasks.dim) % 8 == 0
    model.extractor.register_forward_hook(lambda module, inputs, features: features * silence)
    method = OptKappa(epochs=1, batch_size=16)
    method.setup(model, tasks)
    batch, harmful = next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch()))
    assert batch.rank > silence.sum()
    terms = method.step(model, batch, harmful)
    features = model.features(batch.x)
    sigma = torch.linalg.svdvals(features[:, features.any(0)].double())
    assert terms["log_kappa_primary"].item() == pytest.approx(2 * (sigma[0] / sigma[-1]).log().item(), rel=1e-3)
