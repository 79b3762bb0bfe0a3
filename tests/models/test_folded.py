"""Maps folded behind the features of a net."""

import pytest
import timm
import torch
from helpers.nets import build, open_pair

from immunization.evaluation import Comparison, OwnHead
from immunization.methods import ClosedForm
from immunization.models.fold import fold_into, fold_place, weight_of
from immunization.theory import spectrum

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_folded_map_keeps_the_logits_and_exports(name, folders):
    pair = open_pair(folders)
    net, tasks = build(pair, name).read(pair, True)
    assert (net.deep, net.trains_layers) == (True, False)
    method = ClosedForm(ridge=1e-5)
    method.setup(net, tasks)
    method.finish(net)
    measures = OwnHead()(Comparison(tasks, net))
    assert measures.metrics["primary/changed_predictions"] == 0
    assert measures.metrics["primary/head_loss"] == pytest.approx(
        measures.metrics["primary/head_loss_baseline"], rel=1e-8
    )

    base = net.base
    exported = timm.create_model(name, pretrained=False, **base.arguments)
    place = fold_place(exported.eval(), base.config["input_size"])
    fold_into(exported, place.name, weight_of(net.extractor.theta, place))
    exported.double().load_state_dict(net.export())
    images = torch.randn(3, *base.config["input_size"], dtype=torch.float64)
    with torch.no_grad():
        plain = base.extractor(base.trunk(images))
        features = exported.forward_head(exported.forward_features(images), pre_logits=True)
        torch.testing.assert_close(features, plain @ net.extractor.theta)
        torch.testing.assert_close(exported(images), base.head(plain), rtol=1e-6, atol=1e-6)


def test_fold_raises_rir_on_features(folders):
    pair = open_pair(folders)
    net, tasks = build(pair).read(pair, True)
    method = ClosedForm(ridge=1e-5)
    method.setup(net, tasks)
    after = {role: net.features(task.train.x) for role, task in tasks.tasks.items()}
    before = {role: task.train.x for role, task in tasks.tasks.items()}
    values = spectrum.rir(after["harmful"], before["harmful"], after["primary"], before["primary"])
    assert values["rir"] > 1
