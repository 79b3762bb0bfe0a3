"""Nets as people deploy them: what is read of each is what the net that it was made from gives, and it is audited."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.images import draw_folder, loader
from torch import Tensor, nn

import immunization
from immunization import ConfigError
from immunization.models.adapted import adapted
from immunization.models.blocks import Operations
from immunization.models.chain import Network, take_apart
from immunization.models.deployed import Deployed, deployed, kind_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.jit and torch.ao, which are called old

IMAGES = next(iter(loader(4, 2)))[0][:16]
WIDTH = 16


class Small(nn.Module):
    """A stem, residual blocks, the mean over places and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, 1, 1) for _ in range(4))
        self.fc = nn.Linear(WIDTH, 4)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = (x + block(x)).relu()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.hidden(x).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


def onnx_of(net: Small, path: Path, rows: int | str = "batch") -> Path:
    """The net as a file of ONNX, written by hand: torch's exporter takes ten seconds to come up."""
    onnx = pytest.importorskip("onnx")
    make = onnx.helper.make_node
    nodes = [make("Conv", ["images", "stem.weight", "stem.bias"], ["c"], strides=[2, 2], pads=[1] * 4)]
    nodes.append(make("Relu", ["c"], ["x0"]))
    for k in range(len(net.blocks)):
        nodes.append(make("Conv", [f"x{k}", f"blocks.{k}.weight", f"blocks.{k}.bias"], [f"c{k}"], pads=[1] * 4))
        nodes.append(make("Add", [f"x{k}", f"c{k}"], [f"s{k}"]))
        nodes.append(make("Relu", [f"s{k}"], [f"x{k + 1}"]))
    nodes.append(make("GlobalAveragePool", [f"x{len(net.blocks)}"], ["pooled"]))
    nodes.append(make("Flatten", ["pooled"], ["features"]))
    nodes.append(make("Gemm", ["features", "fc.weight", "fc.bias"], ["logits"], transB=1))
    floats, side = onnx.TensorProto.FLOAT, IMAGES.shape[2]
    inputs = [onnx.helper.make_tensor_value_info("images", floats, [rows, 3, side, side])]
    outputs = [onnx.helper.make_tensor_value_info("logits", floats, [rows, 4])]
    weights = [onnx.numpy_helper.from_array(x.numpy(), name) for name, x in net.state_dict().items()]
    graph = onnx.helper.make_graph(nodes, "small", inputs, outputs, weights)
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def onnx_files(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    pytest.importorskip("onnxruntime")
    folder, made = tmp_path_factory.mktemp("onnx"), dict[str, Path]()

    def file(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(kind, folder / f"{kind}.onnx")
        return made[kind]

    def make(kind: str, path: Path) -> Path:
        if kind in ("float32", "one row"):
            return onnx_of(net, path, 1 if kind == "one row" else "batch")
        from onnxruntime import quantization as ort

        class Rows(ort.CalibrationDataReader):
            def __init__(self) -> None:
                self.rows = iter([{"images": IMAGES.numpy()}])

            def get_next(self) -> Any:
                return next(self.rows, None)

        if kind == "dynamic":
            ort.quantize_dynamic(file("float32"), path, weight_type=ort.QuantType.QUInt8)
        else:
            ort.quantize_static(file("float32"), path, Rows(), quant_format=ort.QuantFormat[kind])
        return path

    return file


def scripted(net: nn.Module) -> Any:
    return torch.jit.trace(net, IMAGES)


def exported(net: nn.Module, rows: int | None = None) -> Any:
    if rows:
        return torch.export.export(net, (IMAGES[:rows],))
    return torch.export.export(net, (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def dynamic(net: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(net), {nn.Linear}, torch.qint8)


def through_fx(net: nn.Module) -> nn.Module:
    fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    prepared = fx.prepare_fx(copy.deepcopy(net), mapping, (IMAGES,))
    prepared(IMAGES)
    return fx.convert_fx(prepared)


def by_torchao(net: nn.Module, config: str) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(made := copy.deepcopy(net), getattr(torchao, config)())
    return made


def by_quanto(net: nn.Module, weights: str) -> nn.Module:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(made := copy.deepcopy(net), weights=getattr(quanto, weights))
    quanto.freeze(made)
    return made


FORMS: dict[str, tuple[Callable[[nn.Module], Any], float]] = {
    "TorchScript": (scripted, 1e-5),
    "frozen": (lambda net: torch.jit.freeze(scripted(net)), 1e-5),
    "exported": (exported, 1e-5),
    "exported for eight": (lambda net: exported(net, 8).module(), 1e-5),
    "exported for one": (lambda net: exported(net, 1), 1e-5),
    "unflattened": (lambda net: torch.export.unflatten(exported(net)), 1e-5),
    "quantize_dynamic": (dynamic, 0.02),
    "FX": (through_fx, 0.05),
    "torchao, weights": (lambda net: by_torchao(net, "Int8WeightOnlyConfig"), 0.02),
    "torchao, both": (lambda net: by_torchao(net, "Int8DynamicActivationInt8WeightConfig"), 0.02),
    "quanto, 8 bits": (lambda net: by_quanto(net, "qint8"), 0.02),
    "quanto, 4 bits": (lambda net: by_quanto(net, "qint4"), 0.3),
}
FILES = {"float32": 1e-5, "one row": 1e-5, "dynamic": 0.05, "QDQ": 0.05, "QOperator": 0.05}


def read(net: Deployed) -> dict[str, Tensor]:
    """Features of IMAGES, what the last step gave, and the logits of its head."""
    found = {}
    *_, (_, last) = net.steps.named_children()
    with last.register_forward_hook(lambda _m, _i, output: found.update(last=output)):
        found["logits"] = net(IMAGES)
    return found | {"features": net._values([IMAGES], [net._features])[net._features]}


@torch.no_grad()
def check(made: Deployed, net: nn.Module, off: float) -> None:
    hidden = net.hidden(IMAGES)
    expected = {"logits": net(IMAGES), "features": hidden.mean((2, 3)), "last": hidden}
    for name, x in read(made).items():
        wanted = expected[name].view_as(x)
        assert (x - wanted).abs().max() <= off * wanted.abs().max(), name
    assert len(list(made.steps.children())) == 5  # the stem and four blocks


@pytest.mark.parametrize("form", FORMS)
def test_blocks_features_and_head_are_those_of_the_net(net, form):
    make, off = FORMS[form]
    check(deployed(make(net), IMAGES), net, off)


@pytest.mark.parametrize("kind", FILES)
def test_an_onnx_file_has_blocks_features_and_head_of_the_net(net, onnx_files, kind):
    made = deployed(onnx_files(kind), IMAGES)
    check(made, net, FILES[kind])
    assert made.title == f"{kind}.onnx"


@torch.no_grad()
def test_operations_are_those_that_torch_counts(net):
    with Operations() as whole:
        net(IMAGES[:1])
    made = take_apart(adapted(deployed(scripted(net), IMAGES), IMAGES))
    network = Network(made)
    with Operations() as counted:
        network(IMAGES[:1])
    head = 2 * made.head.weight.numel()
    assert abs(counted.total + head - whole.total) < 0.05 * whole.total
    shares = [network.found.outputs[name].end.share for name in network.found.blocks]
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert shares[-1] == 1


@torch.no_grad()
def test_a_softmax_at_the_end_is_left_out_and_features_may_be_named(net):
    made = deployed(scripted(nn.Sequential(net, nn.Softmax(1))), IMAGES)
    torch.testing.assert_close(made(IMAGES), net(IMAGES))
    again = deployed(scripted(net), IMAGES, features=made._features)
    torch.testing.assert_close(again(IMAGES), net(IMAGES))


class Waves(Small):
    """A net that does not end in a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return (1000 * super().forward(x)).sin()


class Words(nn.Module):
    """A text classifier with what transformers do: residual blocks, and a mask that all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=attention_mask == 0)
        return self.head(x[:, 0])


@torch.no_grad()
def test_texts_with_a_mask_have_blocks_and_features():
    torch.manual_seed(0)
    texts = torch.stack([torch.randint(1, 50, (12, 9)), torch.ones(12, 9, dtype=torch.long)], 1)
    texts[::2, :, 6:] = 0
    whole, fields = Words().eval(), ("input_ids", "attention_mask")
    program = torch.jit.trace(whole, (texts[:, 0], texts[:, 1]))
    made = deployed(program, texts, fields)
    given = dict(zip(fields, texts.unbind(1), strict=True))
    torch.testing.assert_close(made(**given), whole(**given))
    assert len(list(made.steps.children())) == 3  # the embedding and two blocks


def test_an_audit_of_a_script_finds_what_one_of_the_net_does(net):
    nets = net, scripted(net), torch.compile(net, backend="eager")
    tasks = None, loader(3, 1), net
    own, script, compiled = (immunization.audit(given, *tasks, attacks="closed_form_probe") for given in nets)
    assert script.model == "TorchScript"
    assert compiled.metrics == own.metrics
    for name in ("attack/closed_form_probe/final", "attack/closed_form_probe/final_baseline"):
        assert script.metrics[name] == own.metrics[name] > 0.5


@torch.no_grad()
def test_the_order_of_numbers_in_memory_changes_nothing(net):
    pooled = nn.Sequential(net.stem, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.fc)  # then not of one kind
    made, other = deployed(scripted(pooled), IMAGES), IMAGES.to(memory_format=torch.channels_last)
    torch.testing.assert_close(made(other), pooled(IMAGES))


def test_the_command_line_audits_a_file(net, onnx_files, tmp_path):
    roots = [draw_folder(tmp_path / name, classes, 8, 4, seed) for name, classes, seed in (("p", 4, 0), ("h", 3, 1))]
    options = ["dataset=image_folders", "model=timm", "model.name=test_resnet", "dataset.size=16", "tracker=none"]
    options += [
        f"dataset.primary_root={roots[0]}",
        f"dataset.harmful_root={roots[1]}",
        "figures=false",
        "evaluation=[]",
    ]
    options += [f"model.checkpoint={onnx_files('float32')}", "attack=[closed_form_probe,finetune_trained]"]
    result = immunization.run(["experiment=audit", *options], tmp_path / "audit")
    assert result.reasons["only_run"].endswith("Left out: finetune_trained")
    assert result.metrics["attack/closed_form_probe/final"] is not None
    with pytest.raises(ConfigError, match=r"method=condition_number changes a net, and float32\.onnx is run as it is"):
        immunization.run(["method=condition_number", *options], tmp_path / "run")


def test_who_would_change_it_is_left_out_and_it_is_said(net, onnx_files):
    attacks = ["closed_form_probe", "block_probe", "finetune_trained", "weights_int8", "block_probe_renewed"]
    tasks = loader(4, 0, 60), loader(3, 1, 60)
    options = {"block_probe__mirrored": False, "raw_inputs__mirrored": False}
    result = immunization.audit(onnx_files("QDQ"), *tasks, net, attacks=[*attacks, "raw_inputs"], **options)
    for name in attacks[:2]:
        assert result.metrics[f"attack/{name}/final"] > 0.6
    for name in attacks[2:]:
        assert result.metrics[f"attack/{name}/final"] is None
        assert f"attack/{name}/final_baseline" not in result.metrics
    told = "QDQ.onnx is run as it is: no attacker trains its layers or changes its weights; its head is known to "
    assert result.reasons["attack/finetune_trained/final"].startswith(told)
    assert re.search(r"Left out: finetune_trained, weights_int8, block_probe_renewed", result.reasons["only_run"])
    assert any(sentence.startswith(f"Note: {told}") for sentence in result.verdict)
    assert result.reasons["deployment/accuracy_float16"].startswith(told)
    assert result.metrics["primary/head_accuracy"] is not None
    assert result.metrics["worth/theta_0"] is not None


def test_two_files_are_told_apart_where_they_differ(net, onnx_files, tmp_path):
    """Of what was exported alike it is known what immunization changed."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[3].bias.mul_(1.5)
    files = onnx_files("float32"), onnx_of(other, tmp_path / "other.onnx")
    before, after = (deployed(file, IMAGES).steps.state_dict() for file in files)
    assert before.keys() == after.keys()
    changed = [name for name, x in before.items() if not torch.equal(x, after[name])]
    assert changed == list(before)[-1:]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda net: "net.pt2", r"net\.pt2: only ONNX files, <name>\.onnx, are read from a path.*torch\.export\.load"),
        (lambda net: "missing.onnx", r"missing\.onnx cannot be read as an ONNX file: .*No such file"),
        (lambda net: torch.jit.optimize_for_inference(scripted(net)), "TorchScript hides what it computes"),
        (lambda net: dynamic(net).train(), r"a quantized Small is in train mode; give net\.eval\(\)"),
        (lambda net: scripted(Waves().eval()), "the layers after the features are not linear"),
        (lambda net: exported(net, 2).module(), r"an exported program cannot read inputs of shape \(3, 32, 32\)"),
    ],
    ids=["file", "missing", "hidden", "training", "not linear", "size"],
)
def test_what_cannot_be_read_is_said(net, made, message):
    pytest.importorskip("onnx")
    side = 32 if "32, 32" in message else 16
    with pytest.raises(ConfigError, match=message):
        deployed(made(net), torch.randn(16, 3, side, side))


def test_unknown_features_and_other_fields_are_said(net, onnx_files):
    with pytest.raises(ConfigError, match=r"features=zz: float32\.onnx has no such tensor; it has .*features"):
        immunization.audit(onnx_files("float32"), harmful_loader=loader(3, 1), reference=net, features="zz")
    with pytest.raises(ConfigError, match=r"float32\.onnx reads images, and the loaders give input_ids"):
        deployed(onnx_files("float32"), torch.zeros(4, 1, 8, dtype=torch.long), ("input_ids",))


def test_what_is_only_run_is_not_immunized(net, tmp_path):
    for given in (scripted(net), dynamic(net), exported(net).module()):
        assert kind_of(given)
        for call in (
            lambda given=given: immunization.immunize(given, loader(4, 0), loader(3, 1)),
            lambda given=given: immunization.save(given, tmp_path),
        ):
            with pytest.raises(ConfigError, match=r"which can be audited and not changed: give the nn\.Module"):
                call()
    assert kind_of(net) is None


def test_a_parameter_of_another_class_of_tensor_makes_no_quantized_net():
    class Marked(torch.Tensor):
        pass

    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Marked))
    assert type(net.weight) is Marked
    assert kind_of(net) is None
