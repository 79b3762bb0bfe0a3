"""A small net fitted to the primary digits of `dataset=digits_deep`: the deep pipeline without a download."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from immunization.data.image_loading import create_loader
from immunization.data.images import ImagePair
from immunization.errors import DataError
from immunization.models.timm import Timm
from immunization.models.weights import create
from immunization.runs import files

log = logging.getLogger(__name__)

NAME = "test_resnet"


class DigitsNet(Timm):
    """timm's `test_resnet` with one input channel, fitted to the training images of D_P by Adam for `fit_epochs`.

    The weights are kept in `cache`, under a hash of the images and options; the fit is deterministic.
    """

    def __init__(
        self,
        pair: ImagePair,
        trainable: str | Sequence[str] = "layer4",
        fit_epochs: int = 15,
        head_decay: float = 2e-5,
        cache: str = "~/.cache/immunization/digits_deep",
    ) -> None:
        classes = len(pair.tasks["primary"].classes)
        arguments = {"in_chans": 1, "num_classes": classes}
        key = f"{pair.tasks['primary'].splits['train'].identity} {pair.size} {fit_epochs} {torch.__version__}"
        path = Path(cache).expanduser() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
        try:
            files.read_tensors(path)
        except DataError as error:
            if path.exists():
                log.warning("%s; the net is fitted again", error)
            _fit(pair, arguments, fit_epochs, path)
        super().__init__(pair, NAME, trainable, str(path), False, head_decay, arguments)


def _fit(pair: ImagePair, arguments: dict[str, int], epochs: int, path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = create(NAME, None, False, arguments).train()
        split = pair.tasks["primary"].splits["train"]
        config = {"input_size": (1, pair.size, pair.size), "mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
        loader = create_loader(pair, split, config, batch_size=len(split))
        x, y, _ = next(iter(loader))
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs * (len(x) // 64))
        for _ in range(epochs):
            for rows in torch.randperm(len(x))[: len(x) - len(x) % 64].split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows], label_smoothing=0.1).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_tensors(path, net.state_dict())
