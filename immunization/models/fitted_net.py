"""Small nets fitted to the primary images themselves: the deep pipeline without pretrained weights."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import AtLeastOne, Count, checked
from immunization.compute import keys
from immunization.data.images import ImagePair, create_loader
from immunization.errors import ConfigError, DataError
from immunization.models.timm import Timm
from immunization.models.weights import create
from immunization.runs import environment, files

log = logging.getLogger(__name__)

BATCH, BEFORE, PEAK = 64, 3e-3, 1e-2
"""Images of a mini-batch, and Adam's rate before the schedule sets it and at its peak."""


class FittedNet(Timm):
    """A net of timm fitted to the training images of D_P by Adam, deterministically, by conf/model/cifar_net.yaml."""

    @checked("model/cifar_net")
    def __init__(
        self,
        pair: ImagePair,
        name: str,
        trainable: str | Sequence[str],
        fit_epochs: AtLeastOne,
        shift: Count,
        channels: AtLeastOne,
        head_decay: float,
        cache: str,
    ) -> None:
        if not isinstance(pair, ImagePair) or pair.size is None:
            raise ConfigError(
                f"model.name={name} is fitted to small images; choose dataset=cifar10 or dataset=digits_deep"
            )
        pair.check_channels(name, channels)
        arguments = {"in_chans": channels, "num_classes": len(pair.tasks["primary"].classes)}
        train = pair.tasks["primary"].splits["train"]
        if len(train) < BATCH:
            raise DataError(
                f"model.name={name} is fitted in mini-batches of {BATCH}, and the primary task has {len(train)} "
                f"training images; give at least {BATCH}"
            )
        known = keys.key(
            images=[train.identity, train.origin.rows, pair.size],
            net=[name, fit_epochs, shift, channels],
            code=keys.source("compute", "data", "models"),
            machine=environment.arithmetic(torch.device("cpu")),
        )
        path = Path(cache).expanduser() / f"{known[:16]}.safetensors"
        with files.locked(files.lock_of(path), wait=True):  # jobs side by side fit it once
            try:
                weights, _ = files.read_tensors(path)
            except DataError as error:
                if os.path.exists(path):
                    log.warning("%s; the net is fitted again", error)
                weights = _fit(pair, name, arguments, fit_epochs, shift, path)
        net = create(name, None, False, arguments)
        net.load_state_dict(weights)
        own = tuple(range(arguments["num_classes"]))  # its head was fitted to these very labels
        pair = replace(pair, tasks=pair.tasks | {"primary": replace(pair.tasks["primary"], outputs=own)})
        options = {"pretrained": False, "head_decay": head_decay, "arguments": arguments}
        super().__init__(pair, name, trainable=trainable, net=net, **options)
        self.weights = path.name


class DigitsNet(FittedNet):
    """timm's `test_resnet` with one input channel, fitted to the digits of D_P as they are."""

    @checked("model/digits_net")
    def __init__(
        self,
        pair: ImagePair,
        trainable: str | Sequence[str],
        fit_epochs: AtLeastOne,
        head_decay: float,
        cache: str,
    ) -> None:
        super().__init__(pair, "test_resnet", trainable, fit_epochs, 0, 1, head_decay, cache)


def _fit(
    pair: ImagePair, name: str, arguments: dict[str, int], epochs: int, shift: int, path: Path
) -> dict[str, Tensor]:
    """The weights of the fitted net, kept at `path` where this account may write there."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = create(name, None, False, arguments).train()
        channels, split = arguments["in_chans"], pair.tasks["primary"].splits["train"]
        config = {"input_size": (channels, pair.size, pair.size), "crop_pct": 1.0}
        config |= dict.fromkeys(("mean", "std"), (0.5,) * channels)
        x, y, *_ = next(iter(create_loader(pair, split, config, batch_size=len(split))))
        optimizer = torch.optim.Adam(net.parameters(), lr=BEFORE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, epochs * (len(x) // BATCH))
        for _ in range(epochs):
            for rows in torch.randperm(len(x))[: len(x) - len(x) % BATCH].split(BATCH):
                optimizer.zero_grad()
                images = _moved(x[rows], shift) if shift else x[rows]
                F.cross_entropy(net(images), y[rows], label_smoothing=0.1).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_tensors(path, net.state_dict())
    except OSError as error:
        log.warning("the fitted net is not kept (%s: %s); set model.cache to a writable folder", path, error.strerror)
    return net.state_dict()


def _moved(images: Tensor, shift: int) -> Tensor:
    """Images [N, C, H, W], each mirrored or not and moved by up to `shift` pixels, edges filled by reflection."""
    height, width = images.shape[2:]
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    padded = F.pad(torch.where(mirrored, images.flip(3), images), (shift,) * 4, mode="reflect")
    places = torch.randint(2 * shift + 1, (len(images), 2)).tolist()
    return torch.stack([image[:, i : i + height, j : j + width] for image, (i, j) in zip(padded, places, strict=True)])
