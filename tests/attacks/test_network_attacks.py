"""Attacks that train the net."""

import pytest
import timm
import torch
from helpers.images import loader
from helpers.victims import classes, colors_behind_a_map, victim_of

import immunization
from immunization.attacks import (
    FineTune,
    LoRA,
    Undo,
    Victim,
    finetune,
    run_attacks,
)
from immunization.evaluation import Comparison
from immunization.models import Timm
from immunization.models.fold import folded_map
from immunization.runs.files import write_weights

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return colors_behind_a_map(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize(
    "attack",
    [
        FineTune(scope="full", optimizer="adamw", rates=[3e-3], steps=16, batch_size=24),
        FineTune(scope="last", optimizer="adamw", rates=[1e-2], steps=32, batch_size=24),
        LoRA(optimizer="adamw", rates=[1e-2], rank=4, steps=12, batch_size=24),
    ],
    ids=["full", "last", "lora"],
)
def test_training_the_net_learns_colors_behind_any_map(attack, net):
    measures = run_attacks({"it": attack}, net)
    assert measures.metrics["attack/worst/fine_tuned"] == float(type(attack) is FineTune)
    values = {key.rpartition("/")[2]: value for key, value in measures.metrics.items() if "/it/" in key}
    assert values["final_baseline"] > 0.9
    assert values["final"] > 0.9
    assert values["flops"] > values["steps"] * 24 * net.flops_per_row("immunized")
    assert "kappa" not in values


def test_the_net_under_attack_is_the_net(net):
    images, labels = net.images("test")
    for stage in ("immunized", "baseline"):
        with torch.no_grad():
            features = net.network(stage)(images).double()
        torch.testing.assert_close(features, net.features(stage, "test"), rtol=1e-4, atol=1e-5)
    assert torch.equal(labels, net.task.test.y)
    few, _ = net.images("train", tuple(LoRA(samples=2).rows(net.task).tolist()))
    assert len(few) == 6
    assert not torch.equal(net.network("baseline", "int8")(images), net.network("baseline")(images))


def test_a_trained_net_starts_again_from_its_own_weights(net):
    images = net.model.base.images
    torch.manual_seed(0)
    base = Timm(images, "test_resnet", trainable="layer4", pretrained=False, arguments={"num_classes": 4})
    model, tasks = base.read(images, False)
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    for parameter in model.groups()[0]["params"]:
        parameter.data.mul_(1.1)
    victim = Victim(model, Comparison(tasks, model), start)
    x, _ = victim.images("test")
    with torch.no_grad():
        for stage in victim.stages:
            torch.testing.assert_close(victim.network(stage)(x).double(), victim.features(stage, "test"))
    assert not torch.allclose(victim.features("immunized", "test"), victim.features("baseline", "test"))
    measures = run_attacks({"undo": Undo(steps=64), "strip": Undo(how="strip", steps=64)}, victim)
    assert "no linear map" in measures.reasons["attack/strip/final"]
    assert measures.metrics["attack/undo/final"] is not None


def test_nets_are_needed_for_fine_tuning():
    measures = run_attacks({"lora": LoRA()}, victim_of(classes(), torch.eye(6, dtype=torch.float64)))
    assert "needs a deep net" in measures.reasons["attack/lora/final"]


def test_a_folded_checkpoint_is_compared_with_the_net_without_its_map(net, tmp_path):
    """Any checkpoint with its reference is; `net` has a map of kappa 1e8 in front of every probe."""
    folded, base = net.model, net.model.base
    write_weights(tmp_path / "folded.safetensors", folded.export(), folded.facts())
    write_weights(tmp_path / "plain.safetensors", base.export(), base.facts())
    images, four = base.images.to("cpu", torch.float64), {"num_classes": 4}
    checkpoint = str(tmp_path / "folded.safetensors")
    stripped, referred = (
        Timm(images, "test_resnet", checkpoint=checkpoint, arguments=four, **more)
        for more in ({}, {"reference": str(tmp_path / "plain.safetensors")})
    )
    for model in (stripped, referred):
        _, pair = model.read(images, False)
        assert torch.equal(folded_map(model.net), folded.extractor.theta)
        comparison = Comparison(pair, model)
        victim = Victim(model, comparison, model.extractor.state_dict())
        for stage in ("immunized", "baseline"):
            torch.testing.assert_close(
                victim.features(stage, "test"), net.features(stage, "test"), rtol=1e-4, atol=1e-5
            )
            x, _ = victim.images("test")
            with torch.no_grad():
                torch.testing.assert_close(victim.network(stage)(x), victim.features(stage, "test"))
        logits = model.logits(pair.primary.test.x)
        torch.testing.assert_close(logits, model.baseline_logits(pair.primary), rtol=1e-6, atol=1e-6)


def test_a_rate_that_cannot_win_any_more_is_stopped(net, monkeypatch):
    """The chosen curve is that of whoever trains all rates to the end; what was not trained is not paid for."""
    attack = FineTune(scope="last", optimizer="adamw", rates=[1e-8, 1e-2, 1e-7], steps=16, batch_size=24)
    attack.settings = [1e-8, 1e-2, 1e-7]
    stopped = attack.run(net, "baseline")
    monkeypatch.setattr(finetune, "_hopeless", lambda *_: lambda val: False)
    whole = attack.run(net, "baseline")
    assert whole.setting == stopped.setting == 1e-2
    assert torch.equal(whole.val, stopped.val)
    assert torch.equal(whole.scores, stopped.scores)
    assert 0 < stopped.others < whole.others


def test_a_net_that_gives_a_token_to_its_blocks_can_be_fine_tuned():
    """A view of a trained parameter enters a module of cait without a graph, at which torch's own counter ends."""
    net = timm.create_model("cait_xxs24_224", depth=1, img_size=16, patch_size=8, num_classes=4)
    options = {"attacks": ["full_finetune"], "full_finetune__steps": 1, "full_finetune__rates": [1e-3]}
    result = immunization.audit(net, harmful_loader=loader(3, 1, 30), reference=net, **options)
    assert result.metrics["attack/full_finetune/final"] == result.metrics["attack/full_finetune/final_baseline"]
