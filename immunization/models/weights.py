"""Weights on disk: written once in the net's own dtype, with facts in the header, and read as tensors only.

The facts of a net: `architecture` and `arguments` for timm.create_model (`timm` false: of another library, see
models/libraries.py, or a class of the caller's own), `data_config`, `weights` and their `license`; `dtype` of the
tensors and `computed_in`; `head_bias`, false where the classifier has none. A net with a folded map also has `fold`,
the module it is behind, or `before` true (a list of them for several classifiers), its `layer`, `stripped_by` and
`rounding`; `immunized_by` is the recipe of a net that was saved from Python. A linear map has none.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.errors import ConfigError, DataError
from immunization.models.adapted import check_net, is_of_timm, logits_of
from immunization.models.chain import data_config, noise
from immunization.models.checkpoints import config_beside, state_in, unwrapped
from immunization.models.fold import FOLD, ORIGINAL, LinearMap, fold_into
from immunization.models.libraries import described, from_saved, made
from immunization.runs import files
from immunization.runs.filenames import CONFIG_OF_NET, OF_HUB, WEIGHTS, weights_of
from immunization.runs.net_facts import images_of, net_of

if TYPE_CHECKING:
    from immunization.data.images import ImagePair
    from immunization.data.task import Task, TaskPair
    from immunization.models.base import Model

log = logging.getLogger(__name__)

Facts = dict[str, Any]

TOLERANCE = 1e-3  # largest change of an output by rounding, relative to the largest output, that passes without a word
ROWS = 4096
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SECONDS = 5.0  # how long the Hugging Face hub has to answer


def load(path: str | Path, net: nn.Module | None = None) -> nn.Module:
    """The immunized model of a run folder, of what `save` wrote, or of a download from the Hub, in eval mode.

    `path` is the folder or its immunized.safetensors. A timm model, in the dtype it was immunized in, for deep nets:
    `forward_features`, `forward_head(..., pre_logits=True)` (the immunized features) and the classifier work as ever. A
    net of torchvision or transformers is of its own class. Any other is put into a copy of `net`, the one that was
    immunized; so is any where `net` is given. For linear models the map theta, which takes prepared inputs [N, D_in] to
    features. Raises DataError for a file that is not there, was not written by this project, or was altered since;
    ConfigError for a net that does not fit.
    """
    path = weights_of(Path(path))
    if not path.exists():
        raise DataError(f"load: {path} does not exist; give a run folder that holds a sound {WEIGHTS}")
    if path.is_file() and path.suffix != ".safetensors" and path.name not in OF_HUB:
        raise DataError(f"{path}: only weights in safetensors are read; immunization.save(model, folder) writes them")
    try:
        _, tensors, facts, _ = read(path)
    except DataError as error:
        raise DataError(f"{error}; give a run folder that holds a sound {WEIGHTS}") from error
    if not facts:
        if "theta" not in tensors:
            beside = f", and no {CONFIG_OF_NET} of timm lies beside it" if path.name in OF_HUB else ""
            raise DataError(f"{path} holds neither a linear map nor a net of this project{beside}")
        return LinearMap(tensors["theta"], tensors.get("bias")).eval()
    if net is not None:
        check_net("load: the net", net)
        net = copy.deepcopy(net)
    elif facts.get("library"):
        if path.name in OF_HUB:
            return _immunized(from_saved(path, tensors, facts), facts)
        net = made(path, facts)
    elif facts.get("timm", True):
        name, arguments = net_of(path, facts)
        net = prepared_as(create(name, None, False, arguments), images_of(path, facts))
    else:
        raise ConfigError(
            f"{path} holds a {facts.get('architecture')}, which is not a net of timm; give your net, load(path, net)"
        )
    try:
        model = restore(net, tensors, facts)
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"load: the weights are of a {facts.get('architecture')} and do not fit the {type(net).__name__} in "
            f"{misfits(net, tensors)}. Give the net as it was before immunization, with the same head"
        ) from error
    return _immunized(model, facts)


def _immunized(net: nn.Module, facts: Facts) -> nn.Module:
    """`net`, which then says how it was immunized, if that is known."""
    if recipe := facts.get("immunized_by"):
        net.immunized_by = recipe
    return net


@contextmanager
def one_try() -> Iterator[bool]:
    """Whether the hub answers, asked once; if not, inside is only its cache: its client would try on for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline, answers = constants.HF_HUB_OFFLINE, True
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of its HTTP library, which is another one from version to version
        answers = False
    constants.HF_HUB_OFFLINE = offline or not answers  # the environment variable is read when the hub is imported
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = offline


class Checkpoint(NamedTuple):
    """Weights that were read; `key`: under which the file had them, "" where it holds nothing else."""

    path: Path
    tensors: dict[str, Tensor]
    facts: Facts
    key: str = ""

    def net(self) -> tuple[str, dict[str, Any]] | None:
        """`architecture` and `arguments` where the file says them of a net of timm; raises DataError."""
        named = "architecture" in self.facts and self.facts.get("timm", True)
        return net_of(self.path, self.facts) if named else None


def _not_had(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"model.name={name}: its pretrained weights could not be downloaded ({why}); "
        "connect to the Hugging Face hub, or give model.checkpoint=<file>, or model.pretrained=false"
    )


def create(name: str, checkpoint: Checkpoint | None, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A timm model with its weights; raises ConfigError that names what does not fit."""
    import timm

    from_hub, answers = pretrained and checkpoint is None, True
    try:
        with one_try() if from_hub and timm.is_model(name.partition(".")[0]) else nullcontext(True) as answers:
            net = timm.create_model(name, pretrained=from_hub, **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        if ":" not in name and not timm.is_model(name.partition(".")[0]):
            close = ", ".join(timm.list_models(f"*{name.partition('.')[0][:8]}*")[:5])
            raise ConfigError(
                f"model.name={name}: timm has no such model{'; did you mean ' + close if close else ''}"
            ) from error
        if answers:
            raise ConfigError(f"model.name={name}: {' '.join(str(error).split())}") from error
        raise _not_had(name, "the Hugging Face hub does not answer") from error  # a ValueError before its version 1
    except Exception as error:  # of the hub, whose own classes are many
        if name.startswith("local-dir:"):
            raise ConfigError(f"model.name={name}: {' '.join(str(error).split())[:200]}") from error
        why = f"{type(error).__name__}: {str(error)[:200]}" if answers else "the Hugging Face hub does not answer"
        raise _not_had(name, why) from error
    if checkpoint is None:
        return net
    path, tensors, facts, _ = checkpoint
    said = str(facts.get("architecture", name))
    if said.partition(".")[0] != name.partition(".")[0]:
        log.warning("%s says that it is a %s; its tensors are put into a %s, as model.name says", path, said, name)
    prepared_as(net, images_of(path, facts))
    _without_bias(net, tensors)
    if places := places_of(tensors):  # in the dtype in which map and inverse were stored: they need the digits
        _fold(net.to(tensors[f"{places[0]}.{FOLD}.weight"].dtype), tensors, facts)
    if problems := misfits(net, tensors):
        raise ConfigError(
            f"model.checkpoint={path} does not fit the model in {problems}. Choose the model.name, and "
            "+model.arguments.<argument>=<value> of timm.create_model, that it was made with"
        )
    net.load_state_dict(tensors, strict=False)
    return net


def head_size(name: str, tensors: Mapping[str, Tensor]) -> int | None:
    """How many outputs the classifier among `tensors` has, where those are not as many as of timm's `name`."""
    import timm

    known = None
    with suppress(AttributeError, RuntimeError):  # of names that are none, which `create` refuses
        known = timm.get_pretrained_cfg(name)
    weight = tensors.get(f"{known.classifier}.weight") if known else None
    return None if weight is None or not weight.ndim or len(weight) == known.num_classes else len(weight)


def read(path: Path, unwrap: bool = True) -> Checkpoint:
    """Tensors and facts of a file, with names as the net has them (`unwrap`); raises DataError."""
    if path.suffix == ".safetensors":
        (tensors, facts), key = files.read_weights(path), ""
        if facts.get("partial"):  # what was trained, as it was before; the rest has stayed
            tensors = files.read_weights(path.with_name(WEIGHTS))[0] | tensors
        elif unwrap and not facts:
            tensors = unwrapped(path, tensors)
    else:
        (tensors, key), facts = state_in(path, unwrap), {}
    if not facts and (facts := config_beside(path)):
        dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
        facts |= {"computed_in": "float64", "dtype": name_of(dtype)}
    return Checkpoint(path, tensors, facts, key)


def read_checkpoint(checkpoint: str, unwrap: bool = True) -> Checkpoint:
    """Tensors and facts of `model.checkpoint`: a run folder, safetensors or a state dict; raises ConfigError."""
    path = weights_of(Path(checkpoint).expanduser())
    if not path.exists():
        raise ConfigError(
            f"model.checkpoint: {path.absolute()} not found; give a run folder, a file of weights or, for a net, null "
            "for those of the Hugging Face hub (docs/install.md)"
        )
    try:
        weights = read(path, unwrap)
    except DataError as error:
        remedy = f"; give a run folder that holds a sound {WEIGHTS}" if path.suffix == ".safetensors" else ""
        raise ConfigError(f"model.checkpoint={error}{remedy}") from error
    for name, tensor in weights.tensors.items():
        dense = tensor.dtype in FLOATS and tensor.layout == torch.strided
        if dense and not torch.isfinite(tensor).all():
            raise ConfigError(f"model.checkpoint={path}: {name} holds NaN or infinite values; give sound weights")
    return weights


def restored(pair: TaskPair | ImagePair, model: Callable[..., Model], checkpoint: str) -> Model:
    """`model(pair=pair)`, a model that takes no checkpoint itself, with the weights of a run; raises ConfigError."""
    made = model(pair=pair)
    tensors = read_checkpoint(checkpoint, unwrap=False).tensors
    try:
        made.load_state_dict({name: tensors[name] for name in made.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model.checkpoint={checkpoint} does not hold the state dict of {type(made).__name__} "
            f"({' '.join(str(error).split())[:200]}); a model with an `export` of its own needs a key `checkpoint`"
        ) from error
    return made


def restore(net: nn.Module, tensors: Mapping[str, Tensor], facts: Facts) -> nn.Module:
    """Put exported `tensors` into `net`, one of the same architecture, and fold the map in if there is one."""
    net = net.to(_dtype(facts.get("dtype")))
    _without_bias(net, tensors)
    _fold(net, tensors, facts)
    net.load_state_dict(dict(tensors))
    return net.eval().requires_grad_(True)


def _fold(net: nn.Module, tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Put the layer of the map in, if there is one: before the classifiers, or behind another module of timm."""
    for place in places_of(tensors):
        weight = tensors[f"{place}.{FOLD}.weight"].to(next(net.parameters()))
        layer = tensors.get(f"{place}.{ORIGINAL}.weight", weight)  # files of timm itself do not say it
        before = facts.get("before", not facts.get("timm", True) or len(layer) != len(weight))
        fold_into(net, place, weight, before)


def _without_bias(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Take the bias away from a timm net's classifiers that have none among `tensors`."""
    heads = net.get_classifier() if is_of_timm(net) else ()
    heads = {id(part) for head in (heads if isinstance(heads, tuple | list) else [heads]) for part in head.modules()}
    for name, part in net.named_modules():
        of = "" if f"{name}.weight" in tensors else f"{ORIGINAL}."
        lacks = f"{name}.{of}weight" in tensors and f"{name}.{of}bias" not in tensors
        if id(part) in heads and isinstance(part, nn.Linear | nn.Conv2d) and lacks:
            part.bias = None


def misfits(net: nn.Module, state: Mapping[str, Tensor]) -> str:
    """The tensors of `state` that `net` does not take and those it lacks, in words; empty where all fit."""
    own = net.state_dict()
    problems = [f"{n} is missing" for n in own.keys() - state.keys() if not n.endswith("num_batches_tracked")]
    problems += [f"{n} is unknown" for n in state.keys() - own.keys()]
    problems += [
        f"{n} has shape {tuple(state[n].shape)}, not {tuple(own[n].shape)}"
        for n in own.keys() & state.keys()
        if state[n].shape != own[n].shape
    ]
    shown = "; ".join(sorted(problems)[:8]) + ("; ..." if len(problems) > 8 else "")
    return f"{len(problems)} tensors: {shown}" if problems else ""


def exported(model: Model, task: Task) -> tuple[dict[str, Tensor], Facts]:
    """Tensors and facts of immunized.safetensors, nets in the original's dtype; `task` is for `rounding_error`."""
    tensors, facts = _in_own_dtype(model.export(), model.facts())
    if facts and model.linear_map() is not None:
        facts["rounding"] = rounding_error(model, task.train.x[:ROWS], getattr(torch, facts["dtype"]))
    return tensors, facts


def original(model: Model) -> tuple[dict[str, Tensor], Facts]:
    """Tensors and facts of original.safetensors, of an untrained net in its original's dtype; both {} for none."""
    if not (tensors := model.original()):
        return {}, {}
    tensors, facts = _in_own_dtype(tensors, model.facts())
    return tensors, facts | {"partial": tensors.keys() < model.export().keys()}


def _in_own_dtype(tensors: dict[str, Tensor], facts: Facts) -> tuple[dict[str, Tensor], Facts]:
    """Tensors of a net in the dtype it came in, with facts that say so; those of a linear map as they are."""
    if not facts:
        return tensors, facts
    facts["computed_in"], facts["dtype"] = facts["dtype"], facts.pop("original_dtype", facts["dtype"])
    dtype = getattr(torch, facts["dtype"])
    rounded = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return rounded, facts | fold_of(tensors)


@torch.no_grad()
def rounding_error(model: Model, features: Tensor, dtype: torch.dtype) -> float:
    """max |y_rounded - y| / max |y| over the outputs y of `features` [n, D] by the map theta and its inverse.

    y is computed in the model's own dtype; y_rounded with theta and the head rounded to `dtype`, in which all is
    computed then, as it is where the file is loaded.
    """
    exact, bias = model.logits(features), model.head.bias
    theta, weight = model.linear_map().to(dtype), model.head.weight.to(dtype)
    rounded = F.linear(features.to(dtype) @ theta, weight, None if bias is None else bias.to(dtype))
    return (
        ((rounded.to(exact) - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(exact.dtype).tiny))
        .nan_to_num(torch.inf)
        .item()
    )


def rounding_flag(facts: Facts) -> str | None:
    """Why the outputs of an exported net are not those of the original; None where they agree within `TOLERANCE`."""
    error = facts.get("rounding", 0.0)
    if error <= TOLERANCE:
        return None
    return (
        f"{facts['dtype']}, the dtype of the original net, does not hold the map and its inverse: outputs differ from "
        f"the original's by up to {error:.1g} of the largest; choose a map of smaller condition number, or immunize "
        "the net in float64"
    )


def facts_of(net: nn.Module, arguments: Mapping[str, Any]) -> Facts:
    """What `load` needs beside the tensors; raises ConfigError if timm makes another net of it and `arguments`."""
    tensors = net.state_dict()
    facts: Facts = {"architecture": type(net).__name__, "arguments": {}, "data_config": None, "timm": False}
    facts |= {"weights": "the caller's own", "license": None, "computed_in": "float64"}
    facts["dtype"] = name_of(next(net.parameters()).dtype)
    facts |= fold_of(tensors) | {"immunized_by": getattr(net, "immunized_by", None)}
    if any(next(net.get_submodule(place).named_children())[0] == FOLD for place in places_of(tensors)):
        facts |= {"before": True, "stripped_by": "replacing the classifier"}
    if not is_of_timm(net) or "architecture" not in (getattr(net, "pretrained_cfg", None) or {}):
        return facts | described(net)
    facts |= {"architecture": net.pretrained_cfg["architecture"], "data_config": data_config(net), "timm": True}
    if getattr(net.get_classifier(), "bias", True) is None:
        facts["head_bias"] = False
    facts["arguments"] = known_arguments(net) | dict(arguments)
    if size := facts["arguments"].get("img_size"):  # which timm leaves out of a net's own data config
        facts["data_config"]["input_size"] = (
            facts["data_config"]["input_size"][0],
            *([size] * 2 if isinstance(size, int) else size),
        )
    try:
        again = restore(create(facts["architecture"], None, False, facts["arguments"]), tensors, facts)
        image = noise(facts["data_config"]["input_size"], 1)
        with torch.no_grad():
            nets = (again, copy.deepcopy(net).cpu().eval())
            outputs = (logits_of(made(image.to(next(made.parameters())))) for made in nets)
            if not torch.allclose(*outputs, equal_nan=True):
                raise ConfigError("its outputs differ")
    except (ConfigError, RuntimeError, AttributeError, AssertionError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in facts["arguments"].items())
        raise ConfigError(
            f"save: timm.create_model({facts['architecture']!r}, {shown}) does not give this net "
            f"({' '.join(str(error).split())[:200]}); say how it was made, save(model, folder, img_size=...)"
        ) from error
    return facts


def fold_of(tensors: Mapping[str, Tensor]) -> Facts:
    """Where the map hangs and its layer, in the words of who would put it into a Sequential by hand; {} without one."""
    if not (places := places_of(tensors)):
        return {}
    weight = tensors[f"{places[0]}.{FOLD}.weight"]
    kind, kernel = ("Linear", "") if weight.ndim == 2 else ("Conv2d", ", 1")
    layer = f"{FOLD}=nn.{kind}({weight.shape[1]}, {weight.shape[0]}{kernel}, bias=False)"
    return {"fold": places if len(places) > 1 else places[0], "layer": layer}


def places_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules at which a map was folded in: one, or each of several classifiers."""
    end = f".{FOLD}.weight"
    return [name.removesuffix(end) for name in tensors if name.endswith(end)]


def prepared_as(net: nn.Module, images: Mapping[str, Any]) -> nn.Module:
    """`net`, which then says that it wants its images so, as a file said it: timm knows only its own weights'."""
    net.pretrained_cfg = net.default_cfg = dict(net.pretrained_cfg) | dict(images)
    return net


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: object) -> torch.dtype:
    """The dtype of weights that a file names; raises DataError."""
    known = {name_of(dtype): dtype for dtype in FLOATS}
    if name not in known:
        raise DataError(f"the weights' file names the dtype {name!r}; known are {', '.join(known)}")
    return known[name]


def known_arguments(net: nn.Module) -> dict[str, Any]:
    """Arguments that timm remembers of a net, as far as its version does."""
    from timm.models import save_for_hf

    with TemporaryDirectory() as folder:
        bare = copy.copy(net)  # timm's function writes weights, too: none of this one
        bare.state_dict = dict
        try:
            save_for_hf(bare, folder)
            config = json.loads((Path(folder) / CONFIG_OF_NET).read_text())
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            config = {}
    known = config.get("model_args", {"num_classes": net.num_classes, **_size_of(net)})
    return {key: value for key, value in known.items() if (key, value) != ("in_chans", 3)}


def _size_of(net: nn.Module) -> dict[str, Any]:
    """The argument for the side of the images, of a transformer made for another one than its weights were."""
    from timm.models import get_pretrained_cfg

    size = getattr(getattr(net, "patch_embed", None), "img_size", None)
    known = get_pretrained_cfg(net.pretrained_cfg["architecture"])  # the own one is of its file (`prepared_as`)
    usual = known.input_size if known else net.pretrained_cfg["input_size"]
    return {"img_size": list(size)} if size and tuple(size) != tuple(usual[1:]) else {}
