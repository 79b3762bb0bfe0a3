"""Nets of Hugging Face's transformers and of torchvision, by name or folder, for the command line."""

import copy
import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from immunization.checks import checked
from immunization.data.images import ImagePair
from immunization.data.task import Task
from immunization.data.text import TextPair, tokenized, tokenizer_in
from immunization.errors import ConfigError
from immunization.models.adapted import Adapted, outputs_of_two
from immunization.models.chain import noise
from immunization.models.fold import folded_map, unfold
from immunization.models.libraries import CLASSIFIERS, Encoder, check_options, described, explained, made, transformers
from immunization.models.named import Named
from immunization.models.timm import Timm
from immunization.models.weights import Checkpoint, misfits, one_try, read_checkpoint, restore

log = logging.getLogger(__name__)

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


class OfLibrary(Timm):
    """A net of another library, taken apart as one of timm's is: see conf/model of its subclasses."""

    def _take(
        self,
        pair: ImagePair,
        name: str,
        net: nn.Module,
        config: dict[str, Any],
        stored: Checkpoint | None,
        reference: str | None,
        **options: Any,
    ) -> None:
        """Begin as `net` with the weights that are `stored`, whose inputs are as `config` says."""
        if pair.size is not None and "fields" not in config:
            config["input_size"] = (config["input_size"][0], pair.size, pair.size)
        self.made = described(net)
        if stored is not None:
            try:
                net = restore(net, stored.tensors, {"before": True, "timm": False, "dtype": "float32", **stored.facts})
            except (AttributeError, RuntimeError) as error:
                told = f"does not fit {name} in {misfits(net, stored.tensors)}: give the model.name it was made with"
                raise ConfigError(f"model.checkpoint={stored.path} {told}") from error
        sample = sample_of(pair, config)
        taken = Adapted(Named(net, config["fields"]) if "fields" in config else net, sample)
        taken.data_config = config
        before = copy.deepcopy(taken).double() if reference is None and folded_map(taken) is not None else None
        super().__init__(pair, Path(name).name, net=taken, reference=None, **options)
        self.weights = stored.path.name if stored else f"weights of {Path(name).name}"
        if before is not None:
            unfold(before)
            self.compare_with(Timm(pair, net=before))
            self._stripped = True

    def _compare(self, pair: ImagePair, name: str, reference: str | None, **options: Any) -> None:
        """Take the net with the weights of `reference` as the baseline, with those of `name` where that is `hub`."""
        if reference is not None:
            checkpoint = None if reference == "hub" else reference
            self.compare_with(type(self)(pair, name, checkpoint=checkpoint, reference=None, **options))

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"timm": False} | self.made


class Transformers(OfLibrary):
    """A classifier of transformers, or an encoder with a linear head that is fitted to the training rows of D_P."""

    @checked("model/transformers")
    def __init__(
        self,
        pair: ImagePair,
        name: str,
        *,
        trainable: str | Sequence[str],
        checkpoint: str | None,
        reference: str | None,
        head_decay: float,
        channels_last: bool,
        amp: Literal["bfloat16", "auto"] | None,
    ) -> None:
        check_images(pair, name)
        stored, texts = read_checkpoint(checkpoint) if checkpoint else None, isinstance(pair, TextPair)
        local = Path(name).expanduser()
        place = str(local) if local.is_dir() else name
        with nullcontext(True) if local.is_dir() else one_try() as answers, explained(name, answers):
            net, config = opened(name, place, texts)
            if texts:
                pair, config = tokenized(pair, place, takes(net), longest(net), words_of(net))
                if net.config.pad_token_id is None:
                    net.config.pad_token_id = tokenizer_in(place).pad_token_id
        head = stored and stored.facts.get("head")
        if isinstance(net, Encoder):
            net.head = nn.Linear(*(head or head_for(net, pair, config)))
        pair = with_outputs(pair, net)
        options = {"trainable": trainable, "head_decay": head_decay, "channels_last": channels_last, "amp": amp}
        self._take(pair, name, net, config, stored, reference, **options)
        self.unfitted = isinstance(net, Encoder) and not head
        self._compare(pair, name, reference, **options)

    def _task(self, role: str) -> Task:
        task = super()._task(role)
        if role == "primary" and self.unfitted:
            self._fit_head(self.reference[role, "train"], task.train.y)
        return task

    @torch.no_grad()
    def _fit_head(self, x: Tensor, y: Tensor) -> None:
        """Logistic regression on standardized features x [N, D] and labels y [N], with sklearn's penalty of C = 1."""
        from sklearn.linear_model import LogisticRegression

        x = x.double().cpu()
        mean, std = x.mean(0), x.std(0).clamp(min=1e-6)
        fit = LogisticRegression(max_iter=1000).fit(((x - mean) / std).numpy(), y.cpu().numpy())
        weight, bias = torch.from_numpy(fit.coef_) / std, torch.from_numpy(fit.intercept_)
        if len(weight) == 1:  # of two classes sklearn has the difference of their logits
            weight, bias = (torch.cat([-part, part]) / 2 for part in (weight, bias))
        self.head.weight.copy_(weight)
        self.head.bias.copy_(bias - weight @ mean)
        for before, parameter in zip(self._original_head, self.head.parameters(), strict=True):
            before.copy_(parameter)
        self.unfitted = False
        log.info("a head of %d outputs was fitted to %d training rows of the primary task", len(weight), len(x))


class Torchvision(OfLibrary):
    """A classifier of torchvision, by the name of its builder."""

    @checked("model/torchvision")
    def __init__(
        self,
        pair: ImagePair,
        name: str,
        *,
        trainable: str | Sequence[str],
        checkpoint: str | None,
        pretrained: bool,
        reference: str | None,
        head_decay: float,
        arguments: dict[str, int] | None,
        channels_last: bool,
        amp: Literal["bfloat16", "auto"] | None,
    ) -> None:
        from torchvision import models

        check_images(pair, name)
        if isinstance(pair, TextPair):
            pair.check_channels(name, 3)
        if name not in models.list_models(module=models):
            close = ", ".join(models.list_models(module=models, include=f"*{name[:6]}*")[:5])
            told = f"; did you mean {close}" if close else ""
            raise ConfigError(f"model.name={name}: torchvision has no such model{told}")
        stored, known = read_checkpoint(checkpoint) if checkpoint else None, models.get_model_weights(name).DEFAULT
        arguments = dict(arguments or (stored.facts.get("arguments") if stored else None) or {})
        if stored and "num_classes" not in arguments:
            arguments["num_classes"] = len(list(stored.tensors.values())[-1])  # of the classifier, the last layer
        net = made(Path(name), {"library": "torchvision", "architecture": name, "arguments": arguments})
        if pretrained and stored is None:
            with explained(name):
                net.load_state_dict(known.get_state_dict(progress=False, check_hash=True, weights_only=True))
        options = {"trainable": trainable, "head_decay": head_decay, "channels_last": channels_last, "amp": amp}
        self._take(pair, name, net, transforms_of(known, arguments), stored, reference, **options)
        self._compare(pair, name, reference, arguments=arguments, pretrained=pretrained, **options)


def check_images(pair: object, name: str) -> None:
    if not isinstance(pair, ImagePair):
        told = f"model={name} needs images or texts, for example dataset=image_folders or dataset=text"
        raise ConfigError(f"{told}; '{getattr(pair, 'name', pair)}' has none")


def opened(name: str, place: str, texts: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier or encoder in a folder or on the hub, in eval mode, and how it wants its images.

    Weights are read from safetensors alone, and no code of the folder is run. Raises ConfigError, OSError, ValueError.
    """
    library = transformers()
    options, _ = library.PretrainedConfig.get_config_dict(place)
    check_options(f"model.name={name}: ", options)
    how = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    kind = next(iter(options.get("architectures") or []), "")
    if kind.endswith(CLASSIFIERS):
        if texts != kind.endswith(CLASSIFIERS[1]):
            raise ConfigError(f"model.name={name} is a {kind}, and the data set has {'texts' if texts else 'images'}")
        how.pop("trust_remote_code")
        net, info = getattr(library, kind).from_pretrained(place, **how)
        lacking = info["missing_keys"]
    else:
        whole, info = library.AutoModel.from_pretrained(place, **how)
        part = next((part for part in (["text_model"] if texts else ["vision_model"]) if hasattr(whole, part)), "")
        lacking = [key for key in info["missing_keys"] if "pooler" not in key]
        pooled = bool(part) if texts else len(lacking) == len(info["missing_keys"])
        net = Encoder(whole, part, pooled)
        lacking = [key for key in lacking if not part or key.startswith(part)]
    if lacking:
        raise ConfigError(f"model.name={name} lacks weights: {', '.join(sorted(lacking)[:3])}; give a trained model")
    return net.eval(), {} if texts else processing_of(place, net.config)


def takes(net: nn.Module) -> set[str]:
    """Names of the fields that a net reads of texts."""
    return set(inspect.signature((net.encoder if isinstance(net, Encoder) else net).forward).parameters)


def words_of(net: nn.Module) -> int:
    """How many tokens a net of texts knows."""
    return (net.encoder if isinstance(net, Encoder) else net).get_input_embeddings().num_embeddings


def longest(net: nn.Module) -> int:
    """Most tokens that a net reads: as many as have a position, of which some nets begin behind that of the padding."""
    config = getattr(net.config, "text_config", net.config)
    places = (part for name, part in net.named_modules() if name.endswith("position_embeddings"))
    padded = any(getattr(part, "padding_idx", None) is not None for part in places)
    return getattr(config, "max_position_embeddings", 512) - (config.pad_token_id + 1 if padded else 0)


def processing_of(place: str, config: Any) -> dict[str, Any]:
    """How a net wants its images, in timm's words: as the image processor beside it says, else as is usual."""
    config = getattr(config, "vision_config", config)
    try:
        said, _ = transformers().ImageProcessingMixin.get_image_processor_dict(place)
    except (OSError, ValueError):
        log.warning("%s has no preprocessor_config.json: mean and std of images are taken to be ImageNet's", place)
        said = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
    size = said.get("crop_size") if said.get("do_center_crop") else said.get("size")
    resized, size = _side(said.get("size"), config), _side(size, config)
    channels = getattr(config, "num_channels", 3)
    normalized = said.get("do_normalize", True)
    mean, std = (said["image_mean"], said["image_std"]) if normalized else ([0.0] * channels, [1.0] * channels)
    found = {"input_size": (channels, size, size), "mean": tuple(mean), "std": tuple(std)}
    return found | {"interpolation": RESAMPLING.get(said.get("resample"), "bilinear"), "crop_pct": size / resized}


def _side(size: Any, config: Any) -> int:
    """Pixels of a side, of what an image processor says; else of the net's configuration."""
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    own = getattr(config, "image_size", 224)
    return size if isinstance(size, int) else own if isinstance(own, int) else own[0]


def transforms_of(weights: Any, arguments: dict[str, int]) -> dict[str, Any]:
    """How the transforms of weights of torchvision prepare images, in timm's words."""
    said = weights.transforms()
    (crop,), (side,) = said.crop_size, said.resize_size
    size = arguments.get("image_size", crop)
    found = {"input_size": (3, size, size), "interpolation": said.interpolation.value, "crop_pct": crop / side}
    return found | {"mean": tuple(said.mean), "std": tuple(said.std)}


def sample_of(pair: ImagePair, config: dict[str, Any]) -> Tensor:
    """Two images of noise, or two training texts of a task of middle length, packed: [2, fields, tokens]."""
    if "fields" not in config:
        return noise(config["input_size"])
    split = next(iter(pair.tasks.values())).splits["train"]
    middle = torch.arange(len(split))[len(split) // 2 :][:2]  # texts stand by their length
    return next(iter(split.take(middle).loader(pair, config, batch_size=2)))[0]


@torch.no_grad()
def head_for(net: Encoder, pair: ImagePair, config: dict[str, Any]) -> tuple[int, int]:
    """Features of an encoder, and classes of D_P, to which a head is fitted once its features are read."""
    if (task := pair.tasks.get("primary")) is None:
        raise ConfigError("the model has no classifier; give a primary task to fit one, or a checkpoint that has one")
    read = Named(net, config["fields"]) if "fields" in config else net
    return outputs_of_two(read, sample_of(pair, config)).shape[1], len(task.classes)


def with_outputs(pair: ImagePair, net: nn.Module) -> ImagePair:
    """The pair whose primary task says which output means which class, as the net says, or as its head was fitted."""
    task = pair.tasks.get("primary")
    if task is None or task.outputs is not None:
        return pair
    known = getattr(net.config, "label2id", None) or {}
    if isinstance(net, Encoder):
        outputs = tuple(range(len(task.classes)))
    elif task.classes and set(task.classes) <= set(known):
        outputs = tuple(int(known[name]) for name in task.classes)
    else:
        return pair
    return replace(pair, tasks=pair.tasks | {"primary": replace(task, outputs=outputs)})
