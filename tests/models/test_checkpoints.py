"""Checkpoints as trainers write them, and what a file may choose of the net that it is read into."""

import argparse
import collections
import inspect
import json
import logging
import socket
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.data_files import Trap
from helpers.images import draw_folder
from helpers.nets import open_pair
from omegaconf import OmegaConf
from timm.data import resolve_model_data_config
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import immunization
from immunization import ConfigError, DataError, run
from immunization.config import compose
from immunization.models.timm import Timm
from immunization.models.weights import read_checkpoint
from immunization.runs import files
from immunization.runs.filenames import MODEL_CARD, WEIGHTS
from immunization.runs.net_facts import ARGUMENTS
from immunization.runs.resume import read_config

MEAN, STD = (0.25, 0.5, 0.75), (0.1, 0.2, 0.3)


def net(seed: int = 0, **arguments: object) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("test_resnet", pretrained=False, num_classes=4, **arguments).eval()


def same(found: dict[str, Tensor], model: nn.Module) -> bool:
    expected = model.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def under(prefix: str, model: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.fixture
def said(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="immunization")
    return caplog


def test_of_what_timms_trainer_writes_the_averaged_weights_are_taken_as_by_timm(tmp_path, said):
    model, options = net(), argparse.Namespace(model="test_resnet", lr=np.float64(0.1), output=tmp_path, opt=["sgd"])
    averaged = ModelEmaV3(model, decay=0.5)
    averaged.module.load_state_dict(net(1).state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saver = CheckpointSaver(model, optimizer, options, averaged, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=np.float32(0.5))
    path = tmp_path / "model_best.pth.tar"
    content = torch.load(path, weights_only=False)
    content["rng"], content["counts"] = np.random.default_rng(0).normal(size=3), collections.defaultdict(list, a=[1])
    torch.save(content, path)

    found = read_checkpoint(str(path))
    assert same(found.tensors, averaged.module)
    assert not same(found.tensors, model)
    assert found.key == "state_dict_ema"
    assert f"{path}: its weights are taken from state_dict_ema, not from state_dict" in said.text
    torch.save(content | {"state_dict_ema": None}, path)
    assert same(read_checkpoint(str(path)).tensors, model)
    timms = content | {"rng": None, "counts": None, "metric": 0.5, "args": None, "saver": None}
    torch.save(timms, path)
    assert same(timm.models.load_state_dict(str(path)), averaged.module)


def swa(model: nn.Module) -> dict[str, Tensor]:
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    return averaged.state_dict()


def one_block_compiled(model: nn.Module) -> dict[str, Tensor]:
    names = {name: name.replace("layer4.", "layer4._orig_mod.") for name in model.state_dict()}
    return {names[name]: tensor for name, tensor in model.state_dict().items()}


LAYOUTS = {
    "torch.compile": lambda model: torch.compile(model).state_dict(),
    "one block compiled": one_block_compiled,
    "DataParallel": lambda model: nn.DataParallel(model).state_dict(),
    "compiled, then parallel": lambda model: {"state_dict": under("module._orig_mod.", model)},
    "parallel, then compiled": lambda model: {"model": under("_orig_mod.module.", model)},
    "FSDP": lambda model: under("_fsdp_wrapped_module.", model),
    "AveragedModel": swa,
    "torchvision's reference": lambda model: {"model": net(5).state_dict(), "model_ema": swa(model), "epoch": 3},
    "torch's example": lambda model: {
        "epoch": 3,
        "arch": "test_resnet",
        "state_dict": under("module.", model),
        "best_acc1": torch.tensor(0.5),
    },
    "model_state_dict": lambda model: {"model_state_dict": model.state_dict(), "optimizer_state_dict": {}},
    "net": lambda model: {"net": under("module.", model), "acc": 93.1},
    "DeepSpeed": lambda model: {"module": model.state_dict(), "ds_config": {}},
    "twice": lambda model: {"model": {"state_dict": model.state_dict(), "step": 3}},
    "Lightning": lambda model: {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": under("model.", model),
        "hyper_parameters": {"lr": np.float64(0.1), "root": Path("data")},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
    },
    "Lightning with a loss": lambda model: {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": under("net.", model) | {"loss.weight": torch.ones(4), "accuracy.tp": torch.ones(4)},
    },
    "Lightning with an average": lambda model: {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": under("model.", net(5)) | under("model_ema.module.", model),
    },
    "a number beside": lambda model: {**model.state_dict(), "epoch": 3},
}
SAID = {
    "torchvision's reference": "taken from model_ema, not from model",
    "Lightning with a loss": "the weights of net are used; left out are loss.weight, accuracy.tp",
    "Lightning with an average": "the weights of model_ema are used; left out are model.conv1.0.weight",
    "a number beside": "no tensors and left out: epoch",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "of old"])
def test_a_net_is_found_in_every_usual_layout(layout, zipped, tmp_path, said):
    model = net()
    torch.save(LAYOUTS[layout](model), tmp_path / "net.ckpt", _use_new_zipfile_serialization=zipped)
    assert same(read_checkpoint(str(tmp_path / "net.ckpt")).tensors, model)
    assert SAID.get(layout, "") in said.text
    assert bool(said.text) == (layout in SAID)


def test_safetensors_of_a_wrapped_net(tmp_path):
    files.write_tensors(tmp_path / "net.safetensors", under("_orig_mod.module.", net()))
    assert same(read_checkpoint(str(tmp_path / "net.safetensors")).tensors, net())


def test_averaged_weights_without_names_are_told(tmp_path, said):
    shadow = {"decay": 0.9, "shadow_params": list(net(1).parameters())}
    torch.save({"model": net().state_dict(), "ema": shadow}, tmp_path / "net.pt")
    assert same(read_checkpoint(str(tmp_path / "net.pt")).tensors, net())
    assert "averaged weights in ema have no names" in said.text


class OfMyOwn:
    """Stands for any class that a trainer may store."""


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (
            lambda path: torch.save(net(), path),
            r"it holds objects of .*timm.*, and making these would run code",
        ),
        (
            lambda path: torch.save({"state_dict": net().state_dict(), "x": OfMyOwn()}, path),
            r"it holds objects of \S*OfMyOwn,",
        ),
        (scripted, "it is a TorchScript archive, which is code with weights"),
        (lambda path: path.write_bytes(b"no weights"), "it is damaged, cut off, or not a file of torch.save"),
        (lambda path: torch.save({"epoch": 3, "lr": 0.1}, path), "no state dict with names and tensors .*epoch, lr"),
        (lambda path: torch.save(torch.zeros(2), path), "it holds a Tensor, no state dict"),
        (lambda path: torch.save({1: torch.ones(2)}, path), "no state dict with names and tensors"),
    ],
    ids=["whole net", "own class", "TorchScript", "damaged", "no weights", "tensor", "numbers"],
)
def test_what_is_refused_is_told_with_the_true_reason(write, reason, tmp_path):
    write(tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=rf"net\.pt cannot be read as weights alone: {reason}.*; save the weights"):
        read_checkpoint(str(tmp_path / "net.pt"))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_among_the_options_of_a_trainer_does_not_run(zipped, tmp_path):
    options = argparse.Namespace(trap=Trap(tmp_path / "ran"))
    content = {"state_dict": net().state_dict(), "args": options}
    torch.save(content, tmp_path / "net.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError, match=r"it holds objects of .*, and making these would run code"):
        read_checkpoint(str(tmp_path / "net.pt"))
    assert not (tmp_path / "ran").exists()
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("safe", [False, True, "both"])
def test_the_config_that_timm_writes_beside_its_weights_is_read(safe, folders, tmp_path):
    model = net(in_chans=3)
    model.pretrained_cfg = dict(model.pretrained_cfg) | {"mean": MEAN, "std": STD, "crop_pct": 1.0}
    timm.models.save_for_hf(model, tmp_path, safe_serialization=safe)
    loaded = immunization.load(tmp_path)
    assert same(loaded.state_dict(), model)
    assert resolve_model_data_config(loaded)["mean"] == MEAN
    names = [path.name for path in tmp_path.iterdir() if path.name != "config.json"]
    for place in ("", *names):
        wants = Timm(open_pair(folders), "test_resnet", checkpoint=str(tmp_path / place)).config
        assert (wants["mean"], wants["std"], wants["crop_pct"]) == (MEAN, STD, 1.0)
    (tmp_path / "config.json").write_text('{"architectures": ["ResNetForImageClassification"]}')
    with pytest.raises(DataError, match=r"no config\.json of timm lies beside it"):
        immunization.load(tmp_path)
    assert Timm(open_pair(folders), "test_resnet", checkpoint=str(tmp_path)).config["mean"] != MEAN


def test_how_a_net_wants_its_images_is_saved_and_loaded(folders, tmp_path):
    model = net()
    model.pretrained_cfg = dict(model.pretrained_cfg) | {"mean": MEAN, "std": STD}
    immunization.save(model, tmp_path)
    assert resolve_model_data_config(immunization.load(tmp_path))["mean"] == MEAN
    assert Timm(open_pair(folders), "test_resnet", checkpoint=str(tmp_path)).config["std"] == STD


def test_another_name_than_that_of_the_file_is_told(folders, tmp_path, said):
    """Nets of two architectures may have the same tensors, and still differ."""
    files.write_weights(tmp_path / WEIGHTS, net().state_dict(), FACTS | {"architecture": "resnet18"})
    Timm(open_pair(folders), "test_resnet", checkpoint=str(tmp_path))
    assert "says that it is a resnet18; its tensors are put into a test_resnet, as model.name says" in said.text


@pytest.fixture
def untouched(monkeypatch, tmp_path):
    """A file that nobody may read; neither may anybody ask the network."""
    second, touched = tmp_path / "second.pt", []
    torch.save(net(7).state_dict(), second)
    read, connect = torch.load, socket.socket.connect

    def load(path, *rest, **options):
        touched.append(str(path))
        return read(path, *rest, **options)

    def connected(self, address):
        touched.append(address)
        return connect(self, address)

    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(socket.socket, "connect", connected)
    yield second
    assert not touched


FACTS = {"architecture": "test_resnet", "arguments": {"num_classes": 4}, "computed_in": "float64", "dtype": "float32"}
CHOSEN = [
    ({"arguments": {"num_classes": 4, "checkpoint_path": "SECOND"}}, "sets checkpoint_path of timm.create_model"),
    ({"arguments": {"num_classes": 4, "pretrained_cfg": {"file": "SECOND"}}}, "sets pretrained_cfg of"),
    ({"arguments": {"num_classes": 4, "features_only": True}}, "sets features_only of"),
    ({"arguments": {"num_classes": {"a": 1}}}, "sets num_classes of"),
    ({"arguments": [4]}, r"arguments of timm.create_model are \[4\]"),
    ({"architecture": "hf-hub:nobody/nothing"}, "names the architecture 'hf-hub:nobody/nothing'"),
    ({"architecture": "local-dir:FOLDER"}, "names the architecture 'local-dir:"),
    ({"architecture": ["test_resnet"]}, "a file may name models of timm alone"),
    ({"data_config": {"mean": "0.5"}}, "mean of its data_config is '0.5'"),
    ({"data_config": {"interpolation": {"a": 1}}}, "interpolation of its data_config"),
    ({"dtype": "load"}, "names the dtype 'load'"),
]


@pytest.mark.parametrize(
    ("place", "choice", "words"),
    [("header", *chosen) for chosen in CHOSEN]
    + [("config.json", *chosen) for chosen in CHOSEN if "dtype" not in chosen[0]],
)
def test_a_file_may_not_choose_more_than_the_shape_of_a_net(place, choice, words, folders, tmp_path, untouched):
    text = json.dumps(FACTS | choice).replace("SECOND", str(untouched)).replace("FOLDER", str(tmp_path))
    facts, folder = json.loads(text), tmp_path / "given"
    if place == "header":
        files.write_weights(folder_made(folder) / WEIGHTS, net().state_dict(), facts)
    else:
        files.write_tensors(folder_made(folder) / "model.safetensors", net().state_dict())
        config = {"architecture": facts["architecture"], "model_args": facts["arguments"]}
        (folder / "config.json").write_text(json.dumps(config | {"pretrained_cfg": facts.get("data_config", {})}))
    with pytest.raises(DataError, match=words):
        immunization.load(folder)
    if "dtype" not in choice:
        with pytest.raises(DataError, match=words):
            Timm(open_pair(folders), "test_resnet", checkpoint=str(folder))


def folder_made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("header", ["[1]", "{", "[" * 10**5])
def test_a_header_that_is_no_object_is_refused(header, tmp_path):
    files.write_tensors(tmp_path / WEIGHTS, net().state_dict(), {"immunization": header})
    with pytest.raises(DataError, match="the description of the net in its header is not a JSON object"):
        immunization.load(tmp_path)


def test_arguments_that_a_file_may_set_are_not_timms_own():
    own = set(inspect.signature(timm.create_model).parameters)
    assert not ARGUMENTS & (own | {"features_only", "out_indices", "pruned", "kwargs", "device", "dtype"})
    assert not [name for name in ARGUMENTS if name.startswith(("pretrained", "cache", "hf"))]


ELSEWHERE = (
    *("dataset=image_folders", "dataset.cache=null", "dataset.size=32", "model=timm", "tracker=none"),
    *("method=condition_number", "method.epochs=1", "method.batch_size=8", "figures=false", "evaluation=[rir]"),
)
AUDIT = ("experiment=audit", "tracker=none", "figures=false", "evaluation=[rir]", "attack=[closed_form_probe]")


@pytest.mark.trains
@pytest.mark.parametrize("source", ["local-dir", "hf-hub"])
def test_a_net_named_by_a_folder_or_a_repository_is_loaded_elsewhere(source, tmp_path, monkeypatch):
    """Both are gone when the run folder is used."""
    given, folder = tmp_path / "given", tmp_path / "run"
    model = net(stem_type="deep") if source == "local-dir" else net()
    model.pretrained_cfg = dict(model.pretrained_cfg) | {"mean": MEAN, "std": STD}
    timm.models.save_for_hf(model, given, safe_serialization=True)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", lambda repo_id, filename, **_: str(given / filename))
    name = f"local-dir:{given}" if source == "local-dir" else "hf-hub:somebody/a-net"
    data = [draw_folder(tmp_path / role, 4, 12, 6, seed) for seed, role in enumerate(("p", "h"))]
    roots = [f"dataset.primary_root={data[0]}", f"dataset.harmful_root={data[1]}"]
    first = run([*ELSEWHERE, *roots, f"model.name={name}"], folder=folder)
    assert first.model == "test_resnet"
    given.rename(tmp_path / "gone")
    monkeypatch.undo()
    card = (folder / MODEL_CARD).read_text()
    assert str(tmp_path) not in card
    assert ("local-dir:given" if source == "local-dir" else name) in card
    assert resolve_model_data_config(immunization.load(folder))["mean"] == MEAN
    facts = files.read_weights(folder / WEIGHTS)[1]
    assert (facts["architecture"], facts["arguments"]["num_classes"]) == ("test_resnet", 4)
    again = run([*AUDIT, f"model.checkpoint={folder}"], folder=tmp_path / "audit")
    for metric in ("kappa_harmful", "kappa_harmful_baseline"):
        assert again.metrics[metric] == pytest.approx(first.metrics[metric], rel=1e-3)
    assert read_config(tmp_path / "audit")["model"]["name"] == "test_resnet"


@pytest.mark.trains
@pytest.mark.parametrize("key", ["name", "arguments"])
def test_the_configuration_beside_a_checkpoint_may_not_choose_more_either(key, tmp_path, untouched):
    data = [draw_folder(tmp_path / role, 4, 12, 6, seed) for seed, role in enumerate(("p", "h"))]
    roots = [f"dataset.primary_root={data[0]}", f"dataset.harmful_root={data[1]}"]
    made = ["model.name=test_resnet", "model.pretrained=false", "model.arguments={num_classes: 4}"]
    folder = tmp_path / "run"
    immunization.save(net(), folder)
    (folder / "model_card.md").unlink()
    files.write_tensors(folder / WEIGHTS, net().state_dict())
    config = compose([*ELSEWHERE, *roots, *made])
    choice = {"name": "hf-hub:nobody/nothing", "arguments": {"checkpoint_path": str(untouched)}}[key]
    OmegaConf.update(config, f"model.{key}", choice, force_add=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    with pytest.raises(DataError, match="hf-hub:nobody/nothing" if key == "name" else "sets checkpoint_path"):
        run([*AUDIT, f"model.checkpoint={folder}"], folder=tmp_path / "audit")
