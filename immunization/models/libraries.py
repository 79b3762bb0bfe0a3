"""Nets of torchvision and Hugging Face: the facts that describe one, and the net made from these facts.

Facts of such a net: `library`, and `config` of its class `architecture` in transformers, or, in torchvision, the name
and the `arguments` of its builder. A file chooses no code by them: classes and builders are those of the libraries, and
options that would read a file or ask the network are refused.
"""

import copy
import json
import logging
import typing
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from immunization.data.fields import MASK
from immunization.errors import ConfigError, DataError
from immunization.models.adapted import logits_of
from immunization.models.chain import noise
from immunization.models.fold import FOLD, ORIGINAL
from immunization.runs import files
from immunization.runs.filenames import CONFIG_OF_NET, OF_HUB

log = logging.getLogger(__name__)

Facts = dict[str, Any]
CLASSIFIERS = ("ForImageClassification", "ForSequenceClassification")
ARGUMENTS = ("num_classes", "image_size")
"""Arguments of a builder of torchvision that a file may set."""
REFUSED = ("implementation", "backbone", "use_pretrained", "use_timm", "quantization", "kernel_config")
"""Parts of the names of options of transformers that may load other code or weights, or ask the network."""
PARTS = ("", "vision_model", "text_model")


class Encoder(nn.Module):
    """An encoder of transformers, or one `part` of it, with a head: logits of images, or of named fields of texts.

    Features [n, D] are the encoder's own pooled output (`pooled`), or the mean over tokens, of texts those that the
    mask has, or over places. The head is still to be set.
    """

    def __init__(self, whole: nn.Module, part: str, pooled: bool) -> None:
        super().__init__()
        if part not in PARTS:
            raise DataError(f"{part!r} is not a part of an encoder; choose from {', '.join(PARTS[1:])}")
        self.encoder = whole.get_submodule(part) if part else whole
        self.config, self.part, self.pooled = whole.config, part, pooled
        self.head: nn.Module = nn.Identity()

    def forward(self, x: Tensor | None = None, **fields: Tensor) -> Tensor:
        output = self.encoder(**fields) if x is None else self.encoder(x)
        if self.pooled:
            return self.head(output.pooler_output.flatten(1))
        hidden = output.last_hidden_state
        if hidden.ndim == 4:
            return self.head(hidden.mean((2, 3)))
        if (mask := fields.get(MASK)) is None:
            return self.head(hidden.mean(1))
        mask = mask[..., None].to(hidden)
        return self.head((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))


def transformers() -> Any:
    """The module; raises ConfigError that says what to install."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "models of Hugging Face need transformers; install it with pip install 'immunization[text]'"
        ) from error


def described(net: nn.Module) -> Facts:
    """`library`, `architecture`, and what makes the same net with other weights; {} for a net of no library."""
    if isinstance(net, Encoder):
        found = {"library": "transformers", "architecture": "Encoder", "config": config_of(net.config)}
        found |= {"part": net.part, "pooled": net.pooled, "head": [net.head.in_features, net.head.out_features]}
    elif type(net).__module__.startswith("transformers.") and type(net).__name__.endswith(CLASSIFIERS):
        found = {"library": "transformers", "architecture": type(net).__name__, "config": config_of(net.config)}
    elif type(net).__module__.startswith("torchvision.models."):
        return _of_torchvision(net)
    else:
        return {}
    with suppress(ConfigError, DataError):
        if _shapes(_made("", found, "meta").state_dict()) == _shapes(net.state_dict()):
            return found
    return {}


def config_of(config: Any) -> Facts:
    """What transformers writes of a net's configuration into config.json."""
    return json.loads(config.to_json_string())


def made(path: Path, facts: Mapping[str, Any]) -> nn.Module:
    """The net that `described` had those facts of, its weights drawn anew; raises DataError, ConfigError."""
    return _made(f"{path}: ", facts, "cpu")


def _made(where: str, facts: Mapping[str, Any], device: str) -> nn.Module:
    name, library = str(facts.get("architecture")), facts.get("library")
    try:
        with torch.device(device):
            if library == "transformers":
                return _of_transformers(where, name, facts)
            if library == "torchvision":
                return _built(where, name, facts.get("arguments") or {})
    except (TypeError, ValueError, AttributeError, KeyError, ImportError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{where}{library} cannot make a {name} from its configuration ({said})") from error
    raise DataError(f"{where}names the library {library!r}; expected torchvision or transformers")


def _of_transformers(where: str, name: str, facts: Mapping[str, Any]) -> nn.Module:
    library, options = transformers(), facts.get("config")
    if not isinstance(options, Mapping) or not isinstance(options.get("model_type"), str):
        raise DataError(f"{where}has no model_type of transformers in its config")
    check_options(where, options)
    if name == "Encoder":
        whole = library.AutoModel.from_config(library.AutoConfig.for_model(**options))
        made = Encoder(whole, str(facts["part"]), bool(facts["pooled"]))
        made.head = nn.Linear(*facts["head"])
        return made.eval()
    kind = getattr(library, name, None)
    if not name.endswith(CLASSIFIERS) or not isinstance(kind, type):
        raise DataError(f"{where}names the class {name!r}: a file may name classifiers of transformers alone")
    return kind(kind.config_class.from_dict(dict(options))).eval()


def check_options(where: str, options: Mapping[str, Any]) -> None:
    """Raise DataError for a configuration with options that choose code, or weights beside the file's."""
    for key, value in options.items():
        if value and any(refused in str(key) for refused in REFUSED):
            raise DataError(f"{where}its configuration sets {key}, which may load other code or weights: leave it out")
        if isinstance(value, Mapping):
            check_options(where, value)


def _built(where: str, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    from torchvision import models

    if name not in models.list_models(module=models):
        raise DataError(f"{where}names the model {name!r}: a file may name those of torchvision.models.list_models()")
    if refused := [str(key) for key, value in arguments.items() if key not in ARGUMENTS or type(value) is not int]:
        raise DataError(f"{where}sets {', '.join(refused)} of {name}: a file may set {' and '.join(ARGUMENTS)} alone")
    return models.get_model(name, weights=None, **arguments).eval()


@torch.no_grad()
def _of_torchvision(net: nn.Module) -> Facts:
    """The builder of a net, found by trial: one with tensors of the same shapes, and the same outputs."""
    from torchvision import models

    state = _shapes(net.state_dict())
    arguments = {"num_classes": next(iter(reversed(state.values())))[0]}
    if hasattr(net, "image_size"):
        arguments["image_size"] = net.image_size
    for name in models.list_models(module=models):
        if typing.get_type_hints(models.get_model_builder(name)).get("return") is not type(net):
            continue
        found = {"library": "torchvision", "architecture": name, "arguments": arguments}
        with suppress(DataError):
            if _shapes(_made("", found, "meta").state_dict()) == state and _same_outputs(net, found):
                return found
    return {}


def _same_outputs(net: nn.Module, facts: Facts) -> bool:
    """Whether the net that facts make has the outputs of `net`, with its weights and without a folded map."""
    bare, again = copy.deepcopy(net).cpu().float().eval(), _made("", facts, "cpu").float()
    for name in [name for name, part in bare.named_modules() if isinstance(getattr(part, FOLD, None), nn.Module)]:
        bare.set_submodule(name, bare.get_submodule(f"{name}.{ORIGINAL}"))
    again.load_state_dict(bare.state_dict())
    side = facts["arguments"].get("image_size", 224)
    images = noise((3, side, side), 1)
    return torch.allclose(logits_of(bare(images)), logits_of(again(images)), atol=1e-5)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a net by name, as they are without a folded map."""
    own = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{FOLD}.weight")}
    return {name.replace(f".{ORIGINAL}.", "."): tuple(tensor.shape) for name, tensor in own.items()}


def save_config(net: nn.Module, folder: Path) -> None:
    """Write config.json as transformers reads it."""
    config = copy.deepcopy(net.config)
    if type(net).__name__.endswith(CLASSIFIERS):
        config.architectures = [type(net).__name__]
    files.write(folder / CONFIG_OF_NET, config.to_json_string())


def is_pretrained(facts: Mapping[str, Any]) -> bool:
    """Whether a net is all that from_pretrained of its class makes: a classifier of transformers without a map."""
    return "fold" not in facts and str(facts["architecture"]).endswith(CLASSIFIERS) and "library" in facts


def save_pretrained(net: nn.Module, folder: Path, facts: Facts) -> Path:
    """Write model.safetensors and config.json as from_pretrained of the net's class reads them, with `facts`."""
    with TemporaryDirectory(dir=folder) as written:
        net.save_pretrained(written)
        parts = [files.read_tensors(path)[0] for path in Path(written).glob("*.safetensors")]
    save_config(net, folder)
    files.write_weights(folder / OF_HUB[0], dict(ChainMap(*parts)), facts, {"format": "pt"})
    return folder / OF_HUB[0]


def from_saved(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> nn.Module:
    """The classifier of transformers whose tensors have the names of its files, as `save_pretrained` writes them."""
    empty = _made(f"{path}: ", facts, "meta")
    dtype = getattr(torch, facts["dtype"])
    return type(empty).from_pretrained(None, config=empty.config, state_dict=dict(tensors), dtype=dtype).eval()


@contextmanager
def explained(name: str, answers: bool = True) -> Iterator[None]:
    """Inside, that a model cannot be had is a ConfigError of one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:200] if answers else "the Hugging Face hub does not answer"
        raise ConfigError(
            f"model.name={name}: the model could not be loaded ({why}); give a folder with config.json and weights in "
            "safetensors, as save_pretrained writes them, or connect to the Hugging Face hub"
        ) from error
