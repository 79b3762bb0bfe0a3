"""What layers of a net lose of other images where they forget harmful ones."""

import pytest
from helpers.nets import build, open_pair

from immunization.evaluation import Comparison, Selectivity


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_every_trained_layer_is_measured_the_same_every_time(folders, name: str) -> None:
    pair = open_pair(folders)
    trainable, layers = {
        "test_resnet": ("layer1.0.conv2", ["layer1.0.conv2"]),
        "test_vit": ("blocks.5", [f"blocks.5.{part}" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]),
    }[name]
    found = []
    for _ in range(2):
        model, tasks = build(pair, name, trainable=trainable).read_tasks(pair, False)
        found.append(Selectivity(places=64)(Comparison(tasks, model)).metrics)
    expected = {f"selectivity/{layer}/{what}" for layer in layers for what in ("lost", "switched")}
    assert set(found[0]) == expected
    assert all(0 <= value <= 1 for value in found[0].values())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_without_trained_layers_there_is_nothing_to_measure(folders) -> None:
    pair = open_pair(folders)
    model, tasks = build(pair).read_tasks(pair, True)
    assert not Selectivity()(Comparison(tasks, model)).metrics


def test_a_dead_layer_has_none(folders) -> None:
    pair = open_pair(folders)
    model, tasks = build(pair, trainable="layer1.0.conv2").read_tasks(pair, False)
    for parameter in model.net.layer1[0].bn1.parameters():
        parameter.zero_()
    measures = Selectivity(places=4)(Comparison(tasks, model))
    assert measures.metrics["selectivity/layer1.0.conv2/lost"] is None
    assert "does not vary" in measures.reasons["selectivity/layer1.0.conv2/switched"]
