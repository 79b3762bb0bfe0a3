"""Nets of timm: splitting, freezing, heads, checkpoints."""

import pytest
import timm
import torch
from helpers.nets import build, open_pair

from immunization.compute import machine
from immunization.data import digits_deep, image_folders
from immunization.errors import ConfigError, DataError
from immunization.methods import ConditionNumber
from immunization.models import FittedNet, Linear
from immunization.models.timm import Timm
from immunization.training.batches import PairedBatches

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"])
def test_trunk_and_tail_are_the_net(name, folders):
    model = build(open_pair(folders), name)
    net = timm.create_model(name, pretrained=False, **model.arguments).double().eval()
    net.load_state_dict(model.export())
    images = torch.randn(3, *model.config["input_size"], dtype=torch.float64)
    with torch.no_grad():
        features = model.extractor(model.trunk(images))
        torch.testing.assert_close(features, net.forward_head(net.forward_features(images), pre_logits=True))
        torch.testing.assert_close(model.head(features), net(images))
    assert model._trunk
    assert (bool(model._trunk), model.trains_layers) == (True, True)
    assert not any(
        p.requires_grad for unit in model._trunk if isinstance(unit, torch.nn.Module) for p in unit.parameters()
    )


def test_trainable_names_and_patterns(folders):
    pair = open_pair(folders)
    assert build(pair, "test_vit", "blocks.1").trainable == ["blocks.1"]
    assert len(build(pair, "test_resnet", ["layer3", "layer4.*"]).trainable) > 2
    with pytest.raises(ConfigError, match=r"model\.trainable=stage9: test_resnet has no module .*layer4"):
        build(pair, "test_resnet", "stage9")


def test_a_net_that_is_no_chain_runs_whole(folders, monkeypatch):
    monkeypatch.setattr("immunization.models.chain._chain", lambda name, module: [])
    model = build(open_pair(folders))
    assert not model._trunk
    assert (model._trunk, model.trains_layers) == ([], True)
    images = torch.randn(2, *model.config["input_size"], dtype=torch.float64)
    assert model.extractor(model.trunk(images)).shape == (2, 96)


def test_frozen_batchnorm_does_not_drift(folders):
    model = build(open_pair(folders))
    before = {name: tensor.clone() for name, tensor in model.net.state_dict().items()}
    model.train()
    images = torch.randn(4, *model.config["input_size"], dtype=torch.float64)
    model.extractor(model.trunk(images))
    after = model.net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(model.trainable[0]) for name in changed)
    model.eval()
    assert not any(module.training for module in model.modules())


def test_head_and_classes(folders, tmp_path):
    pair = open_pair(folders)
    model = Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 7})
    found = (
        r"has 7 outputs, the primary task .* 4 classes.*dataset\.primary\.outputs.*\(\+model\.arguments\.num_classes=4 "
    )
    with pytest.raises(ConfigError, match=found):
        model.read(pair, True)
    table = tmp_path / "outputs.csv"
    table.write_text("index,dir\n6,class0\n2,class1\n0,class2\n4,class3\n")
    pair = open_pair(folders, primary={"outputs": str(table)})
    _, tasks = Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 7}).read(pair, True)
    assert tasks.primary.head.tolist() == [0, 2, 4, 6]
    logits = torch.full((len(tasks.primary.test), 7), -1.0)
    logits[:, 6] = 1.0
    share = pair.tasks["primary"].splits["test"].dataset.samples
    assert tasks.primary.measure(logits, tasks.primary.test.y) == pytest.approx(6 / len(share))
    for index in (7, -1, 2):
        table.write_text(f"index,dir\n{index},class0\n2,class1\n0,class2\n4,class3\n")
        pair = open_pair(folders, primary={"outputs": str(table)})
        with pytest.raises(ConfigError, match="outputs must differ and be from 0 to 6, those of test_resnet"):
            Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 7}).read(pair, True)
    table.write_text("index,dir\n6,class0\n")
    with pytest.raises(DataError, match="no column names all 4"):
        open_pair(folders, primary={"outputs": str(table)})


def test_checkpoints(folders, tmp_path):
    from safetensors.torch import save_file

    pair = open_pair(folders)
    net = timm.create_model("test_resnet", pretrained=False, num_classes=4)
    for path, write in ((tmp_path / "a.safetensors", save_file), (tmp_path / "b.pt", torch.save)):
        write(net.state_dict(), path)
        model = build(pair, checkpoint=str(path))
        torch.testing.assert_close(model.export()["fc.weight"].float(), net.fc.weight.detach())
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "conv1.0.weight"}
    state["fc.weight"] = torch.zeros(9, 96)
    save_file(state | {"extra": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ConfigError) as caught:
        build(pair, checkpoint=str(tmp_path / "c.safetensors"))
    for words in (
        "3 tensors",
        "conv1.0.weight is missing",
        "extra is unknown",
        "fc.weight has shape (9, 96), not (4, 96)",
        "+model.arguments.<argument>=<value>",
    ):
        assert words in str(caught.value)
    spoilt = net.state_dict() | {"conv1.1.running_mean": torch.full((16,), torch.nan)}
    torch.save(spoilt, tmp_path / "nan.pt")
    with pytest.raises(ConfigError, match=r"nan\.pt: conv1\.1\.running_mean holds NaN or infinite values"):
        build(pair, checkpoint=str(tmp_path / "nan.pt"))
    with pytest.raises(
        ConfigError, match=r"model\.checkpoint: .*e\.safetensors not found; .* null for those of the Hugging Face hub"
    ):
        build(pair, checkpoint=str(tmp_path / "e.safetensors"))
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match="not found"):
        build(pair, checkpoint=str(tmp_path / "circle"))


def test_a_head_has_as_many_outputs_as_its_checkpoint(folders, tmp_path):
    net = timm.create_model("test_resnet", pretrained=False, num_classes=5)
    torch.save(net.state_dict(), tmp_path / "five.pt")
    model = Timm(open_pair(folders), "test_resnet", checkpoint=str(tmp_path / "five.pt"))
    assert (model.head.out_features, model.arguments) == (5, {"num_classes": 5})


def test_images_of_another_number_of_channels(folders, tmp_path):
    one = {"in_chans": 1, "num_classes": 4}
    net = timm.create_model("test_resnet", pretrained=False, **one)
    torch.save(net.state_dict(), tmp_path / "one.pt")
    remedy = r"\+model\.arguments\.in_chans="
    digits = digits_deep()
    with pytest.raises(ConfigError, match=rf"test_resnet reads images of 3 .* have 1: .*{remedy}1.*model=digits_net"):
        build(digits)
    with pytest.raises(ConfigError, match=rf"test_resnet reads images of 3 .* have 1: .*{remedy}1.*model=digits_net"):
        FittedNet(digits, cache=str(tmp_path))
    with pytest.raises(ConfigError, match=r"choose model=digits_net for it"):
        Linear(digits)
    with pytest.raises(ConfigError, match=r"choose model=resnet18, vit_b16_clip or timm for it"):
        Linear(open_pair(folders))
    with pytest.raises(ConfigError, match=rf"test_resnet reads images of 1 .* have 3: .*{remedy}3"):
        Timm(open_pair(folders), "test_resnet", checkpoint=str(tmp_path / "one.pt"), arguments=one)
    assert Timm(digits, "test_resnet", pretrained=False, arguments=one).config["input_size"][0] == 1


def test_unknown_models_and_options(folders):
    pair = open_pair(folders)
    with pytest.raises(ConfigError, match=r"model\.name=resnet19: timm has no such model"):
        Timm(pair, "resnet19", pretrained=False)
    with pytest.raises(ConfigError, match=r"model\.arguments must be options of timm\.create_model, .*, not 5"):
        Timm(pair, "test_resnet", pretrained=False, arguments=5)
    with pytest.raises(ConfigError, match="no linear classifier"):
        Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 0})
    with pytest.raises(ConfigError, match=r"dataset\.on_bad_image"):
        open_pair(folders, on_bad_image="ignore")
    with pytest.raises(ConfigError, match=r"dataset\.harmful\.crop"):
        open_pair(folders, harmful={"crop": "zoom"})


@pytest.mark.parametrize(
    ("instructions", "dtype", "rounded"), [(True, "float32", True), (False, "float32", False), (True, "float64", False)]
)
def test_amp_auto_needs_a_device_with_instructions_for_it(folders, monkeypatch, instructions, dtype, rounded):
    monkeypatch.setattr(machine, "has_bfloat16", lambda _device: instructions)
    pair = image_folders(*map(str, folders), cache=None, size=64).to("cpu", getattr(torch, dtype))
    model, _ = build(pair, amp="auto").read(pair, False)
    assert model.amp == rounded


def test_faster_steps_are_in_effect_in_training_alone(folders):
    """In another layout the weights need not end elsewhere, not even by rounding: what the layers see tells."""
    pair = image_folders(*map(str, folders), cache=None, size=64).to("cpu", torch.float32)
    model, tasks = build(pair, channels_last=True, amp="bfloat16").read(pair, False)
    seen = []
    layer = next(module for module in model.extractor.modules() if isinstance(module, torch.nn.Conv2d))
    layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output))
    method = ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, batch_size=16, precondition="none", balance=False)
    method.setup(model, tasks)
    method.step(model, *next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch())))
    trained = len(seen)
    model.features(tasks.primary.test.x)
    assert 0 < trained < len(seen)
    for index, output in enumerate(seen):
        assert output.dtype == (torch.bfloat16 if index < trained else torch.float32)
        assert output.is_contiguous(memory_format=torch.channels_last) == (index < trained)
