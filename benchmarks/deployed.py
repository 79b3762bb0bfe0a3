"""What deployment tools make of a net, and how the features in it are read: the tensor before its last linear layer.

Each entry of `OPTIONS` is one way in which people ship a net. It takes a `Net` and gives what reads images [n, C, H, W]
as (logits, features). Tools are those of the extra `formats`; one that is not installed is an error of its own entries.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from immunization.models.fold import FOLD
from immunization.models.formats import FORMATS, Format, in_format

Artefact = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images to logits and features."""
FEW = 64
"""Images at a time, where a tool fixes their number."""


@dataclass(frozen=True)
class Net:
    """A net of timm in float32, and batches of training images that tools calibrate on."""

    module: nn.Module
    images: Sequence[Tensor]

    @property
    def head(self) -> str:
        classifier = self.module.get_classifier()
        return next(name for name, module in self.module.named_modules() if module is classifier)

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.module)


@dataclass(frozen=True)
class Option:
    """A way to ship a net: its `tool` (a package), what is chosen of it, and the `Format` that we take it for.

    `fed`: what enters the last layer is read after rounding. `then`: a second format, of what the first leaves.
    `gemm`: linear layers that read one row for an image, as the map and the last one, are rounded, too.
    """

    tool: str
    name: str
    make: Callable[[Net], Artefact]
    form: Format
    fed: bool = False
    then: Format | None = None
    gemm: bool = True

    @property
    def version(self) -> str:
        return version(self.tool)

    def predicted(self, net: Net) -> Artefact:
        """The same by `in_format`."""
        rounded = in_format(net.module, self.form, net.images)
        rounded = in_format(rounded, self.then) if self.then else rounded
        for name, layer in () if self.gemm else net.module.named_modules():
            if name == net.head or name.endswith(FOLD):
                rounded.get_submodule(name).load_state_dict(layer.state_dict())
        return hooked(rounded, net.head, first=not self.fed)


class Both(nn.Module):
    """A net of timm that gives its features beside its logits, for tools whose files cannot be asked for more."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net.forward_head(self.net.forward_features(images), pre_logits=True)
        return self.net.get_classifier()(features), features


def hooked(net: nn.Module, head: str, first: bool = False, dtype: torch.dtype = torch.float32) -> Artefact:
    """A module whose layer `head` is watched; `first`: before its other hooks."""
    seen: list[Tensor] = []
    keep = net.get_submodule(head).register_forward_pre_hook
    keep(lambda _m, inputs: seen.append(plain(inputs[0])), prepend=first)

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        seen.clear()
        return plain(net(images.to(dtype))), seen[0]

    return run


def plain(x: Tensor) -> Tensor:
    """float32 of a tensor of any kind, quantized ones too."""
    return (x.dequantize() if x.is_quantized or hasattr(x, "qtype") else x).float()


def a_few(run: Artefact) -> Artefact:
    """What reads `FEW` images at a time, for any number of them."""

    def all_of(images: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat([images, images[:1].expand(-len(images) % FEW, *images.shape[1:])])
        parts = [run(part.contiguous()) for part in padded.split(FEW)]
        return tuple(torch.cat([part[i] for part in parts])[: len(images)] for i in (0, 1))

    return all_of


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_dtype(net: Net, dtype: torch.dtype) -> Artefact:
    return hooked(net.copy().to(dtype), net.head, dtype=dtype)


def torch_autocast(net: Net, dtype: torch.dtype) -> Artefact:
    run = hooked(net.copy(), net.head)

    def under(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype):
            return run(images)

    return under


def torch_dynamic(net: Net) -> Artefact:
    return hooked(torch.ao.quantization.quantize_dynamic(net.copy(), {nn.Linear}, torch.qint8), net.head)


def torch_fx(net: Net) -> Artefact:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    observed = prepare_fx(net.copy(), get_default_qconfig_mapping("x86"), (net.images[0],))
    for batch in net.images:
        observed(batch)
    return hooked(convert_fx(observed), net.head)


def torch_program(net: Net) -> Artefact:
    return read_graph(torch.export.export(net.copy(), (net.images[0],), dynamic_shapes=({0: batch_size()},)).module())


def batch_size() -> Any:
    return torch.export.Dim("batch")


def read_graph(program: torch.fx.GraphModule) -> Artefact:
    """A graph of torch.export that gives what its last linear layer reads, too."""
    last = [n for n in program.graph.nodes if "linear" in str(n.target) or "addmm" in str(n.target)][-1]
    output = next(n for n in program.graph.nodes if n.op == "output")
    logits = output.args[0][0] if isinstance(output.args[0], tuple | list) else output.args[0]
    program.graph.set_codegen(torch.fx.graph.CodeGen())
    output.args = ((logits, last.args[1 if "addmm" in str(last.target) else 0]),)
    program.graph.lint()
    program.recompile()
    return lambda x: tuple(map(plain, program.forward(x)))


# --- torchao, optimum-quanto ------------------------------------------------------------------------------------------


def torchao(net: Net, config: str, **options: Any) -> Artefact:
    from torchao import quantization

    converted = net.copy()
    quantization.quantize_(converted, getattr(quantization, config)(**options))
    return hooked(converted, net.head)


def torchao_intx(net: Net, bits: int, group: int | None) -> Artefact:
    from torchao.quantization import PerAxis, PerGroup

    granularity = PerAxis(0) if group is None else PerGroup(group)
    return torchao(net, "IntxWeightOnlyConfig", weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity)


def torchao_pt2e(net: Net, dynamic: bool = False) -> Artefact:
    from torchao.quantization.pt2e import quantize_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    return read_graph(pt2e(net, quantizer, quantize_pt2e))


def pt2e(net: Net, quantizer: Any, by: Any) -> torch.fx.GraphModule:
    program = torch.export.export(net.copy(), (net.images[0],), dynamic_shapes=({0: batch_size()},)).module()
    observed = by.prepare_pt2e(program, quantizer)
    for batch in net.images:
        observed(batch)
    return by.convert_pt2e(observed)


def quanto(net: Net, weights: str, activations: str | None = None) -> Artefact:
    from optimum import quanto as tool

    converted = net.copy()
    tool.quantize(converted, weights=weights, activations=activations)
    if activations:
        with tool.Calibration():
            for batch in net.images:
                converted(batch)
    tool.freeze(converted)
    return hooked(converted, net.head)


# --- ONNX -------------------------------------------------------------------------------------------------------------


def onnx_file(net: Net, folder: str, prepared: bool = False) -> str:
    """The net as an ONNX file; `prepared` by onnxruntime's own step before quantization."""
    path = f"{folder}/net.onnx"
    shapes = {"dynamic_shapes": ({0: batch_size()},), "input_names": ["images"]}
    options = {"dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(net.copy(), (net.images[0],), path, **shapes, **options)
    if prepared:
        from onnxruntime.quantization.shape_inference import quant_pre_process

        quant_pre_process(path, f"{folder}/prepared.onnx")
        return f"{folder}/prepared.onnx"
    return path


def onnx(net: Net, convert: Callable[[str, str, Net], Any], prepared: bool = False) -> Artefact:
    """onnxruntime runs what `convert` makes of a file: another file, or a model."""
    import onnx as files

    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/converted.onnx"
        model = convert(onnx_file(net, folder, prepared), target, net)
        return read_onnx(files.load(target) if model is None else model)


def read_onnx(model: Any) -> Artefact:
    """Runs a model, of which what its last linear layer reads becomes an output."""
    import onnxruntime
    from onnx import TensorProto, helper

    nodes = {output: node for node in model.graph.node for output in node.output}
    node = nodes[model.graph.output[0].name]
    while not ("MatMul" in node.op_type or "Gemm" in node.op_type):
        node = next(nodes[name] for name in node.input if name in nodes)
    name = node.input[0]
    while nodes[name].op_type == "DynamicQuantizeLinear":
        name = nodes[name].input[0]
    half = any(x.data_type == TensorProto.FLOAT16 for x in model.graph.initializer)
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    dtype = np.float16 if "float16" in entry.type else np.float32

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = session.run(None, {entry.name: images.numpy().astype(dtype)})
        return torch.from_numpy(logits).float(), torch.from_numpy(features).float()

    return run


def onnx_same(path: str, _target: str, _net: Net) -> Any:
    import onnx as files

    return files.load(path)


def ort_dynamic(path: str, target: str, _net: Net, per_channel: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, target, weight_type=QuantType.QInt8, per_channel=per_channel)


def ort_static(path: str, target: str, net: Net, **options: Any) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter([{"images": batch.numpy()} for batch in net.images])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    quantize_static(path, target, Reader(), **options)


def ort_bits(path: str, _target: str, _net: Net, bits: int, block: int, symmetric: bool) -> Any:
    import onnx as files
    from onnxruntime.quantization import matmul_nbits_quantizer as by

    quantizer = by.MatMulNBitsQuantizer(files.load(path), block_size=block, is_symmetric=symmetric, bits=bits)
    quantizer.process()
    return quantizer.model.model


def onnx_half(path: str, _target: str, _net: Net, keep_io: bool) -> Any:
    import onnx as files
    from onnxconverter_common import float16

    return float16.convert_float_to_float16(files.load(path), keep_io_types=keep_io)


def ort_half(path: str, _target: str, _net: Net) -> Any:
    import onnx as files
    from onnxruntime.transformers import float16

    return float16.convert_float_to_float16(files.load(path), keep_io_types=True)


# --- OpenVINO, NNCF ---------------------------------------------------------------------------------------------------


def openvino(
    net: Net, change: Callable[[Any, Net], Any] | None = None, half: bool | None = None, **hints: str
) -> Artefact:
    """OpenVINO runs the net; `half`: it is saved and read again, with compress_to_fp16."""
    import openvino as ov

    model = ov.convert_model(net.copy(), example_input=net.images[0])
    model = change(model, net) if change else model
    with tempfile.TemporaryDirectory() as folder:
        if half is not None:
            ov.save_model(model, f"{folder}/net.xml", compress_to_fp16=half)
            model = ov.Core().read_model(f"{folder}/net.xml").clone()
        last = [op for op in model.get_ordered_ops() if op.get_type_name() == "MatMul"][-1]
        model.add_outputs(last.input_value(0))
        compiled = ov.Core().compile_model(model, "CPU", hints)

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        found = compiled(images.numpy())
        return torch.from_numpy(found[0].copy()).float(), torch.from_numpy(found[1].copy()).float()

    return run


def nncf_quantize(model: Any, net: Net, **options: str) -> Any:
    import nncf

    kinds = {"preset": "QuantizationPreset", "model_type": "ModelType"}
    chosen = {name: getattr(getattr(nncf, kinds[name]), value) for name, value in options.items()}
    return nncf.quantize(model, nncf.Dataset([batch.numpy() for batch in net.images]), **chosen)


def nncf_compress(model: Any, _net: Net, mode: str, **options: Any) -> Any:
    import nncf

    return nncf.compress_weights(model, mode=getattr(nncf.CompressWeightsMode, mode), **options)


# --- LiteRT, ExecuTorch -----------------------------------------------------------------------------------------------


def litert(net: Net, recipe: str | None = None) -> Artefact:
    import litert_torch
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer
    from ai_edge_quantizer import recipe as recipes

    with tempfile.TemporaryDirectory() as folder:
        litert_torch.convert(net.copy(), (net.images[0][:FEW],)).export(path := f"{folder}/net.tflite")
        if recipe:
            tool, known = quantizer.Quantizer(path), None
            tool.load_quantization_recipe(getattr(recipes, recipe)())
            if tool.need_calibration:
                parts = [part.numpy() for batch in net.images for part in batch.split(FEW) if len(part) == FEW]
                (entry,) = Interpreter(path).get_signature_runner().get_input_details()
                known = tool.calibrate({"serving_default": [{entry: part} for part in parts]})
            tool.quantize(known).export_model(path := f"{folder}/quantized.tflite")
        interpreter = Interpreter(path, experimental_preserve_all_tensors=True, num_threads=1)
    interpreter.allocate_tensors()
    entry, exit_ = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
    last = [op for op in interpreter._get_ops_details() if op["op_name"] == "FULLY_CONNECTED"][-1]
    features = next(x for x in interpreter.get_tensor_details() if x["index"] == last["inputs"][0])

    def value(details: dict[str, Any]) -> Tensor:
        x, (scale, zero) = torch.from_numpy(interpreter.get_tensor(details["index"])), details["quantization"]
        return (x.float() - zero) * scale if scale else x.float()

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = entry["quantization"]
        given = (images / scale + zero).round().clamp(-128, 127).to(torch.int8) if scale else images
        interpreter.set_tensor(entry["index"], given.numpy())
        interpreter.invoke()
        return value(exit_), value(features).view(len(images), -1)

    return a_few(run)


def executorch(net: Net, quantized: bool = False, dynamic: bool = False) -> Artefact:
    """By XNNPACK; the net gives its features beside its logits."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime
    from torchao.quantization.pt2e import quantize_pt2e

    both, few = Both(net.copy()), (net.images[0][:FEW],)
    if quantized:
        quantizer = xnnpack.XNNPACKQuantizer()
        quantizer.set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic))
        observed = quantize_pt2e.prepare_pt2e(torch.export.export(both, few).module(), quantizer)
        for part in (part for batch in net.images for part in batch.split(FEW) if len(part) == FEW):
            observed(part)
        both = quantize_pt2e.convert_pt2e(observed)
    lowered = to_edge_transform_and_lower(torch.export.export(both, few), partitioner=[XnnpackPartitioner()])
    held = file, program = (file := lowered.to_executorch().buffer), Runtime.get().load_program(file)
    method = program.load_method("forward")
    return a_few(lambda images: held and tuple(x.clone() for x in method.execute([images])))  # a method owns neither


# --- what is tried ----------------------------------------------------------------------------------------------------


FLOAT, HALF, BRAIN = (FORMATS[name] for name in ("float32", "float16", "bfloat16"))
WEIGHTS, STATIC, TENSOR, FOUR = (FORMATS[name] for name in ("int8_weights", "int8", "int8_per_tensor", "int4"))
BY_CALL, BY_ROW, MEAN = (replace(STATIC, range=kind) for kind in ("call", "row", "mean"))
LINEAR, SIGNED, UNSIGNED = {"convolutions": False}, {"integers": "signed"}, {"integers": "unsigned"}


def at_onnx(convert: Callable[..., Any], prepared: bool = False, **options: Any) -> Callable[[Net], Artefact]:
    return partial(onnx, convert=partial(convert, **options), prepared=prepared)


def at_openvino(change: Callable[..., Any], **options: Any) -> Callable[[Net], Artefact]:
    return partial(openvino, change=partial(change, **options))


FOUR_BITS = {"group_size": 32, "ratio": 1.0, "all_layers": True}
OPTIONS = [
    Option("torch", "float16", partial(torch_dtype, dtype=torch.float16), HALF),
    Option("torch", "bfloat16", partial(torch_dtype, dtype=torch.bfloat16), BRAIN),
    Option("torch", "autocast bfloat16", partial(torch_autocast, dtype=torch.bfloat16), BRAIN),
    Option("torch", "torch.export", torch_program, FLOAT),
    Option(
        "torch", "quantize_dynamic", torch_dynamic, replace(TENSOR, activations=7, range="call", **SIGNED, **LINEAR)
    ),
    Option("torch", "FX, x86", torch_fx, replace(STATIC, activations=7, **SIGNED), fed=True),
    Option(
        "torchao",
        "Int8WeightOnly",
        partial(torchao, config="Int8WeightOnlyConfig"),
        replace(WEIGHTS, **SIGNED, **LINEAR),
    ),
    Option(
        "torchao",
        "Int8Dynamic...",
        partial(torchao, config="Int8DynamicActivationInt8WeightConfig"),
        replace(BY_ROW, **SIGNED, **LINEAR),
    ),
    Option(
        "torchao",
        "IntxWeightOnly, 4 bits, channels",
        partial(torchao_intx, bits=4, group=None),
        replace(FOUR, **SIGNED, **LINEAR),
    ),
    Option(
        "torchao",
        "IntxWeightOnly, 4 bits, groups of 32",
        partial(torchao_intx, bits=4, group=32),
        replace(FOUR, per=32, **SIGNED, **LINEAR),
    ),
    Option("torchao", "PT2E, X86Inductor", torchao_pt2e, replace(STATIC, **SIGNED), fed=True),
    Option("torchao", "PT2E, X86Inductor, dynamic", partial(torchao_pt2e, dynamic=True), replace(BY_CALL, **SIGNED)),
    Option("optimum-quanto", "qint8", partial(quanto, weights="qint8"), WEIGHTS),
    Option("optimum-quanto", "qint8, activations", partial(quanto, weights="qint8", activations="qint8"), STATIC),
    Option("optimum-quanto", "qint4", partial(quanto, weights="qint4"), replace(FOUR, per=128, **UNSIGNED)),
    Option("optimum-quanto", "qfloat8", partial(quanto, weights="qfloat8"), Format(torch.float8_e4m3fn)),
    Option("onnxruntime", "float32", at_onnx(onnx_same), FLOAT),
    Option("onnxruntime", "float16 (transformers)", at_onnx(ort_half), HALF),
    Option("onnxruntime", "dynamic", at_onnx(ort_dynamic, True, per_channel=False), replace(TENSOR, range="call")),
    Option("onnxruntime", "dynamic, per_channel", at_onnx(ort_dynamic, True, per_channel=True), BY_CALL),
    Option("onnxruntime", "static", at_onnx(ort_static, True), TENSOR, fed=True),
    Option("onnxruntime", "static, per_channel", at_onnx(ort_static, True, per_channel=True), STATIC, fed=True),
    Option(
        "onnxruntime",
        "MatMulNBits, 4 bits",
        at_onnx(ort_bits, bits=4, block=128, symmetric=False),
        replace(FOUR, per=128, **UNSIGNED, **LINEAR),
        gemm=False,
    ),
    Option(
        "onnxruntime",
        "MatMulNBits, 4 bits, symmetric, 32",
        at_onnx(ort_bits, bits=4, block=32, symmetric=True),
        replace(FOUR, per=32, **LINEAR),
        gemm=False,
    ),
    Option("onnxconverter-common", "float16", at_onnx(onnx_half, keep_io=True), HALF),
    Option("openvino", "defaults", openvino, FLOAT),
    Option("openvino", "save_model", partial(openvino, half=True), HALF),
    Option(
        "openvino",
        "save_model, compress_to_fp16=False, f32",
        partial(openvino, half=False, INFERENCE_PRECISION_HINT="f32"),
        FLOAT,
    ),
    Option("openvino", "INFERENCE_PRECISION_HINT=bf16", partial(openvino, INFERENCE_PRECISION_HINT="bf16"), FLOAT),
    Option("nncf", "quantize", at_openvino(nncf_quantize), MEAN, fed=True),
    Option("nncf", "quantize, MIXED", at_openvino(nncf_quantize, preset="MIXED"), MEAN, fed=True),
    Option("nncf", "compress_weights", at_openvino(nncf_compress, mode="INT8_ASYM"), replace(WEIGHTS, **UNSIGNED)),
    Option(
        "nncf",
        "compress_weights, INT4_SYM",
        at_openvino(nncf_compress, mode="INT4_SYM", **FOUR_BITS),
        replace(FOUR, per=32, **LINEAR),
        then=replace(WEIGHTS, **UNSIGNED),
    ),
    Option(
        "nncf",
        "compress_weights, INT4_ASYM",
        at_openvino(nncf_compress, mode="INT4_ASYM", **FOUR_BITS | {"group_size": -1}),
        replace(FOUR, **UNSIGNED, **LINEAR),
        then=replace(WEIGHTS, **UNSIGNED),
    ),
    Option("litert-torch", "float32", litert, FLOAT),
    Option("litert-torch", "weight_only_wi8", partial(litert, recipe="weight_only_wi8_afp32"), WEIGHTS),
    Option("litert-torch", "dynamic_wi8", partial(litert, recipe="dynamic_wi8_afp32"), BY_ROW),
    Option("litert-torch", "static_wi8_ai8", partial(litert, recipe="static_wi8_ai8"), STATIC, fed=True),
    Option("litert-torch", "weight_only_wi4", partial(litert, recipe="weight_only_wi4_afp32"), FOUR),
    Option("litert-torch", "dynamic_wi4", partial(litert, recipe="dynamic_wi4_afp32"), replace(BY_ROW, weights=4)),
    Option("executorch", "XNNPACK, float32", executorch, FLOAT),
    Option("executorch", "XNNPACK, int8", partial(executorch, quantized=True), STATIC, fed=True),
    Option(
        "executorch",
        "XNNPACK, int8, dynamic",
        partial(executorch, quantized=True, dynamic=True),
        BY_CALL,
    ),
]
