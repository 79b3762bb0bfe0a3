"""Classifiers of transformers and torchvision as they are: immunized, audited, saved, and back of their own class."""

import json
import os

import pytest
import torch
from helpers import hub
from helpers.images import draw_folder
from helpers.texts import WORDS, tokenizer, write

import immunization
from immunization import ConfigError, DataError
from immunization.data.fields import MASK, names_of, pack
from immunization.models import libraries
from immunization.models.adapted import Adapted
from immunization.models.blocks import Operations
from immunization.models.chain import features_of, take_apart
from immunization.models.libraries import described, made
from immunization.models.named import Named
from immunization.runs import files

pytest.importorskip("transformers", "4.50")
pytestmark = [pytest.mark.trains, pytest.mark.filterwarnings("ignore::UserWarning")]

FAST = ("bert", "gpt2", "vit")
ALL = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in (*hub.TEXTS, *hub.IMAGES, *hub.TORCHVISION)
]


def immunized(name, method, net):
    options = {"ridge": 1e-2} if method == "closed_form" else {"epochs": 1, "batch_size": 24}
    return immunization.immunize(net, hub.batches(name, 4, 0), hub.batches(name, 3, 1), method, **options)


@pytest.mark.parametrize("name", ALL)
def test_a_folded_net_keeps_its_class_and_outputs_and_is_loaded_without_the_callers_net(name, tmp_path):
    net, batch = hub.net(name), hub.batches(name, 4, 2)[0]
    model = immunized(name, "closed_form", net)
    assert type(model) is type(net)
    outputs, expected = hub.logits(model, batch), hub.logits(net, batch)
    assert (outputs - expected).abs().max() < 1e-4 * expected.abs().max()
    immunization.save(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"immunized.safetensors", "config.json", "model_card.md"}
    loaded = immunization.load(tmp_path)
    assert type(loaded) is type(net)
    assert torch.equal(hub.logits(loaded, batch), outputs)
    assert loaded.immunized_by["method"] == "closed_form"
    if name not in hub.TORCHVISION:
        assert "has no place for the folded map" in (tmp_path / "model_card.md").read_text()
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(net).__name__]
        with pytest.raises(OSError, match=r"model\.safetensors"):
            type(net).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_a_trained_net_is_what_its_library_reads(name, tmp_path):
    net, batch = hub.net(name), hub.batches(name, 4, 2)[0]
    model = immunized(name, "condition_number", net)
    assert type(model) is type(net)
    outputs = hub.logits(model, batch)
    assert not torch.allclose(outputs, hub.logits(net, batch))
    immunization.save(model, tmp_path)
    loaded = [immunization.load(tmp_path)]
    if name in hub.TORCHVISION:
        tensors, facts = files.read_weights(tmp_path / "immunized.safetensors")
        assert facts["architecture"] == name
        hub.net(name).load_state_dict(tensors)
    else:
        assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json", "model_card.md"}
        assert f"transformers.{type(net).__name__}.from_pretrained" in (tmp_path / "model_card.md").read_text()
        loaded.append(type(net).from_pretrained(tmp_path).eval())
    for other in loaded:
        assert type(other) is type(net)
        assert torch.equal(hub.logits(other, batch), outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*hub.TEXTS, *hub.IMAGES, *hub.TORCHVISION])
def test_audits_read_blocks_before_the_last(name):
    net = hub.net(name)
    model = immunized(name, "condition_number", net)
    data = hub.batches(name, 4, 0), hub.batches(name, 3, 1)
    result = immunization.audit(model, *data, net, budget="quick")
    assert result.metrics["attack/block_probe/final_baseline"] > 0.5  # of three classes
    assert len(result.about["blocks"]["depth"]) >= 3
    assert result.about["blocks"]["before"]


@pytest.mark.parametrize("name", hub.TEXTS)
def test_what_the_last_block_of_a_text_model_reads_can_be_kept(name):
    fields = {key: x for key, x in hub.batches(name, 4, 0)[0].items() if key != "labels"}
    x = pack(fields)
    x = torch.nn.functional.pad(x, (0, 3))  # as in a batch of longer texts
    x[:, 0, -3:] = int(name == "roberta")
    config = hub.net(name).config
    config.num_hidden_layers = 7
    net = type(hub.net(name))(config).eval()
    parts = take_apart(Adapted(Named(net, names_of(fields)), x))
    (_, before), (block, behind) = parts.units
    assert block == parts.last_block()
    weights = list(parts.net.get_submodule(block).requires_grad_(True).parameters())
    assert not {*weights} & {*before.parameters()}
    assert {*weights} <= {*behind.parameters()}
    with Operations() as all_of_it:
        expected = features_of(parts.net, x)
    kept = before(x).detach()
    assert kept.shape == (len(x), x.shape[2], 32 + x.shape[1])
    with Operations() as half:
        found = parts.net.forward_head(behind(kept), pre_logits=True)
    assert half.total < 0.25 * all_of_it.total  # of seven blocks
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(features.sum(), weights[0]) for features in (expected, found)]
    torch.testing.assert_close(*gradients)
    x[:-1, names_of(fields).index(MASK), 2:] = 0  # one text is longer than all others, which are passed without it
    x[:-1, 0, 2:] = int(name == "roberta")
    kept = before(x).detach()
    with Operations() as parted:
        found = behind(kept)
    with torch.no_grad(), Operations() as together:
        expected = behind._passed(kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    if name == "gpt2":  # of others the last block reads one token
        assert parted.total < 0.6 * together.total


def test_a_folder_that_was_saved_into_before_holds_the_last_net_alone(tmp_path):
    net = hub.net("bert")
    model = immunized("bert", "closed_form", net)
    immunization.save(net, tmp_path)
    immunization.save(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    immunization.save(net, tmp_path)
    assert torch.equal(immunization.load(tmp_path).classifier.weight, net.classifier.weight)


def test_a_builder_of_torchvision_is_found_by_its_tensors_and_outputs():
    net = hub.net("resnet18")
    assert described(net) == {"library": "torchvision", "architecture": "resnet18", "arguments": {"num_classes": 4}}
    net.layer4[0].conv1.stride = (1, 1)
    net.layer4[0].downsample[0].stride = (1, 1)
    assert described(net) == {}  # a net of the caller's own
    net = hub.net("bert")
    net.classifier = torch.nn.Linear(32, 7)
    assert described(net) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "GPT2LMHeadModel"}, "a file may name classifiers of transformers alone"),
        ({"architecture": "pipeline"}, "a file may name classifiers of transformers alone"),
        ({"config": {"model_type": "bert", "attn_implementation": "x/y"}}, "sets attn_implementation, which may load"),
        (
            {"config": {"model_type": "dpt", "backbone_config": {"backbone": "a"}}},
            "sets backbone_config, which may load",
        ),
        ({"config": {}}, "no model_type of transformers"),
        ({"library": "os"}, "the library 'os'; expected torchvision or transformers"),
        ({"library": "torchvision", "architecture": "os"}, "names the model 'os'"),
        (
            {"library": "torchvision", "architecture": "resnet18", "arguments": {"weights": "DEFAULT"}},
            "sets weights of resnet18: a file may set num_classes and image_size alone",
        ),
    ],
)
def test_a_file_chooses_no_code(changes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        made(tmp_path, described(hub.net("bert")) | changes)


@pytest.fixture
def texts(tmp_path):
    for name in ("p", "h"):
        rows = [
            ([WORDS[3 * (i % 3) + i // 3 % 3], WORDS[i % 9], WORDS[i // 7 % 9]], f"{name}{i % 3}") for i in range(90)
        ]
        write(tmp_path / name / "train.csv", rows)
    return ["dataset=text", f"dataset.primary_root={tmp_path / 'p'}", f"dataset.harmful_root={tmp_path / 'h'}"]


RUN = ["dataset.cache=null", "tracker=none", "figures=false", "evaluation=[own_head]"]
OWN = "primary/head_accuracy"


def test_an_encoder_gets_a_head_for_two_classes(texts, tmp_path):
    hub.net("bert").bert.save_pretrained(tmp_path / "encoder")
    tokenizer(tmp_path / "encoder")
    model = ["model=transformers", f"model.name={tmp_path / 'encoder'}", "dataset.primary.classes=[p0,p1]"]
    result = immunization.run([*texts, *model, *RUN, "method=identity", f"dataset.cache={tmp_path}"], tmp_path / "run")
    assert result.metrics[OWN] > 0.8


def test_a_sentence_encoder_from_a_folder_gets_a_head_and_a_run_of_it_is_audited(texts, tmp_path):
    net = hub.net("bert")
    net.bert.save_pretrained(tmp_path / "encoder")
    tokenizer(tmp_path / "encoder")
    model = [*texts, "model=transformers", f"model.name={tmp_path / 'encoder'}", *RUN]
    result = immunization.run([*model, "method=closed_form", "method.ridge=1e-2"], tmp_path / "run")
    assert result.metrics[OWN] == result.metrics[f"{OWN}_baseline"] > 0.5  # of three classes
    loaded = immunization.load(tmp_path / "run")
    assert isinstance(loaded, libraries.Encoder)
    ids, mask = torch.randint(5, 14, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    longer = torch.nn.functional.pad(ids, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    with torch.no_grad():
        outputs = [loaded(input_ids=i, attention_mask=m) for i, m in ((ids, mask), longer)]
    torch.testing.assert_close(*outputs)  # padding is not read
    audit = [*model, "experiment=audit", f"model.checkpoint={tmp_path / 'run'}", "attack=[closed_form_probe]"]
    for name, reference in (("own", []), ("named", ["model.reference=hub"])):  # this one's head is fitted anew
        audited = immunization.run([*audit, *reference], tmp_path / name)
        assert audited.metrics[OWN] == audited.metrics[f"{OWN}_baseline"] == result.metrics[OWN]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "clip", "resnet18"])
def test_image_models_from_the_command_line(name, tmp_path):
    roots = [draw_folder(tmp_path / "p", 4, 20, 6, 0), draw_folder(tmp_path / "h", 3, 20, 6, 1)]
    run = ["dataset=image_folders", f"dataset.primary_root={roots[0]}", f"dataset.harmful_root={roots[1]}"]
    if name == "resnet18":
        run += ["model=torchvision", "model.name=resnet18", "model.pretrained=false", "dataset.size=32"]
        run += ["model.arguments={num_classes: 4}"]
    else:
        import transformers

        kind = transformers.ViTImageProcessor
        kind(size={"height": 32, "width": 32}, image_mean=[0.2] * 3).save_pretrained(tmp_path / name)
        if name == "vit":
            hub.net("vit").save_pretrained(tmp_path / name)
        else:
            vision = transformers.CLIPVisionConfig(**hub.SMALL, **hub.PIXELS).to_dict()
            text = transformers.CLIPTextConfig(**hub.SMALL, vocab_size=64).to_dict()
            config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=16)
            transformers.CLIPModel(config).save_pretrained(tmp_path / name)
        run += ["model=transformers", f"model.name={tmp_path / name}"]
    result = immunization.run(
        [*run, *RUN, "method=condition_number", "method.epochs=1", "method.batch_size=32"], tmp_path / "run"
    )
    if name != "resnet18":
        config = files.read_weights(tmp_path / "run/immunized.safetensors")[1]["data_config"]
        assert (config["input_size"], config["mean"]) == ([3, 32, 32], [0.2] * 3)
    if name == "clip":
        assert result.metrics[f"{OWN}_baseline"] > 0.9
    immunization.load(tmp_path / "run")


def test_mistakes_are_named(texts, tmp_path, monkeypatch):
    hub.net("vit").save_pretrained(tmp_path / "vit")
    model = [*texts, "model=transformers", "method=identity"]
    with pytest.raises(ConfigError, match="is a ViTForImageClassification, and the data set has texts"):
        immunization.run([*model, f"model.name={tmp_path / 'vit'}"], tmp_path / "a")
    hub.net("bert").save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        immunization.run([*model, f"model.name={tmp_path / 'bert'}"], tmp_path / "b")
    (tmp_path / "bert/model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"the model could not be loaded \(Error while deserializing header"):
        immunization.run([*model, f"model.name={tmp_path / 'bert'}"], tmp_path / "f")
    os.remove(tmp_path / "bert/model.safetensors")
    torch.save({}, tmp_path / "bert/pytorch_model.bin")
    with pytest.raises(
        ConfigError, match=r"the model could not be loaded .* give a folder with config\.json and weights in"
    ):
        immunization.run([*model, f"model.name={tmp_path / 'bert'}"], tmp_path / "c")
    with pytest.raises(ConfigError, match=r"model\.name=nobody/nothing: the model could not be loaded"):
        immunization.run([*model, "model.name=nobody/nothing"], tmp_path / "d")
    import transformers

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    transformers.T5Model(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    tokenizer(tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"Encoder cannot read inputs of shape .*: You .* specify"):
        immunization.run([*model, f"model.name={tmp_path / 't5'}"], tmp_path / "g")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"need transformers; install it with pip install 'immunization\[text\]'"):
        immunization.run([*model, "model.name=a"], tmp_path / "e")
