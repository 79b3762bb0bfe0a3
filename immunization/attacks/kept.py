"""Cache of finished attack curves: those of one run, and those on the baseline, which runs and machines share."""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.compute import keys
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError, DegenerateSpectrum
from immunization.models.activations import fingerprint
from immunization.runs import environment, files
from immunization.runs.records import STAGES

log = logging.getLogger(__name__)

DECIDE = ("attacks", "compute", "data", "evaluation", "models", "theory")
"""Folders of the package whose modules decide the numbers of an attack on the baseline."""
DIGITS = 12
"""Hexadecimal digits of a hash in the name of a curve."""

Curves = dict[Stage, AttackCurve]
Kept = dict[str, tuple[AttackCurve, str | None]]
"""By name, a curve and who made it, where that is known."""


class KeptCurves:
    """The curves of attacks that are done, in one file, which is replaced in one step after each attack.

    A curve is taken from there only for the same configuration of its attack (`settings`, by name), weights, data, code
    in `DECIDE` or of one's own, and libraries. Damaged curves are measured again. Curves of the baseline are shared by
    all runs with one folder `baselines`, and those of the suite called `version` by all machines in a file `published`.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, object],
        victim: Victim,
        baselines: str | Path | None = None,
        published: str | Path | None = None,
        version: str = "",
    ) -> None:
        self.path, self.settings, self.role = path, settings, victim.role
        places = [Path(place).expanduser() if place else None for place in (baselines, published)]
        self.baselines = KeptBaselines(*places, settings, victim, version) if any(places) else None
        self.key = keys.key(
            victim=_identity(victim), net=_net(victim, "immunized"), code=keys.source(*DECIDE), versions=keys.versions()
        )
        self.kept = _sound(path)

    def get(self, name: str, code: tuple[str, ...] = ()) -> Curves | None:
        """The curves of an attack, whose own `code` this is, on every stage; None where it has to be run."""
        place = self._place(name, code)
        curves = {key.removeprefix(place): kept for key, kept in self.kept.items() if key.startswith(place)}
        if not curves:
            return None
        log.info("attack %s: done before", name)
        for _, by in curves.values():
            if self.baselines and by:
                self.baselines.made_by[name] = by
        return {stage: curve for stage, (curve, _) in curves.items()}

    def _place(self, name: str, code: tuple[str, ...]) -> str:
        return f"{self.role}/{name}/{keys.key(settings=_settings(self.settings, name), code=code, key=self.key)}/"

    def put(self, name: str, curves: Curves, code: tuple[str, ...] = ()) -> None:
        """Keep the curves of an attack that is done."""
        by = self.baselines.made_by.get(name) if self.baselines else None
        self.kept |= {self._place(name, code) + stage: (curve, by) for stage, curve in curves.items()}
        write_curves(self.path, self.kept)


class KeptBaselines:
    """Curves of attacks on the baseline, or of a reference, which all runs share.

    The folder `root` has a file for each key of all that decides the curves beside the attack: the baseline's net,
    features and labels, the code in `DECIDE` and the machine's arithmetic. The file `published`, of nets only, has
    those of one track for every machine: the suite's `version` takes the place of code and arithmetic, and stands
    before the data, the task, the net (with hashes of images and labels, and of weights), the attack and its options.

    If several processes need a curve, one computes it, and the others attack theta_I before they wait. `made_by` says
    who made a curve, by the name of its attack.
    """

    def __init__(
        self,
        root: Path | None,
        published: Path | None,
        settings: Mapping[str, object],
        victim: Victim,
        version: str = "",
    ) -> None:
        self.settings, self.device = settings, victim.task.train.y.device
        self.made_by: dict[str, str] = {}
        self.places: list[tuple[Path, str]] = []  # a file, and what the names in it begin with
        if root:
            known = keys.key(
                machine=environment.arithmetic(self.device),
                code=keys.source(*DECIDE),
                task=[victim.role, None if victim.model.deep else victim.model.dtype],
                baseline=_baseline(victim),
                net=_net(victim, "baseline"),
            )
            self.places.append((root / f"{known}.safetensors", ""))
        if published and victim.model.deep:
            with suppress(Inapplicable):  # too many images to have at once
                data = f"{victim.comparison.pair.name}.{keys.key(shown=_shown(victim))[:DIGITS]}"
                net = f"{victim.model.name}.{fingerprint([victim.network('baseline')])[:DIGITS]}"
                self.places.append((published, f"{version}/{data}/{victim.role}/{net}/"))

    def __call__(
        self,
        name: str,
        beside: tuple[object, ...],
        attack: Callable[[], AttackCurve],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> AttackCurve:
        """The curve of the attack `name`, which `attack` runs where no run has done so.

        `beside` is what it depends on beside the baseline; `meanwhile` is done where another process is at it.
        """
        if not self.places:
            return attack()
        settings = json.dumps(_settings(self.settings, name), sort_keys=True)
        own = f"{name}/{hashlib.sha256(f'{settings} {beside}'.encode()).hexdigest()[:DIGITS]}"
        first, begin = self.places[0]
        lock = files.lock_of(first.with_name(keys.key(file=first.name, curve=begin + own)))
        with files.locked(lock, wait=True, meanwhile=meanwhile):
            known = {path: kept for path, begin in self.places if (kept := _sound(path).get(begin + own))}
            if known:
                curve, by = next(iter(known.values()))
                log.info("attack %s: the baseline was attacked before, %s", name, next(iter(known)))
            else:
                curve, by = attack(), environment.maker(self.device)
            for path, begin in self.places:
                if path not in known:
                    _add(path, begin + own, curve, by)
            self.made_by[name] = by
            return curve


def read_curves(path: Path) -> Kept:
    """The curves in a file of `write_curves`; raises DataError for a damaged or another one."""
    tensors, facts = files.read_tensors(path)
    try:
        content: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in facts.items()}
        for name, tensor in tensors.items():
            place, _, key = name.rpartition("/")
            content[place][key] = tensor
        return {name: _unpacked(**own) for name, own in content.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no curves of attacks ({type(error).__name__}: {error})") from error


def _unpacked(by: str | None, rows: int | None = None, **own: Any) -> tuple[AttackCurve, str | None]:
    if rows is not None:
        own["scores"] = torch.from_numpy(np.unpackbits(own["scores"].numpy(), axis=1, count=rows)).bool()
    own |= {key: tuple(own[key]) for key in ("diverged", "finals")}
    own["epochs"] = own["epochs"] and {int(epoch): point for epoch, point in own["epochs"].items()}
    return AttackCurve(**own), by


def write_curves(path: Path, kept: Kept) -> None:
    """Write a safetensors file in one step: tensors `<name>/<field>`, hits as bits, the rest as JSON in its header."""
    tensors, facts = {}, {}
    for name, (curve, by) in kept.items():
        own = dict(vars(curve), by=by)
        if curve.scores is not None and curve.scores.dtype == torch.bool:
            own["rows"], bits = curve.scores.shape[1], np.packbits(curve.scores.cpu().numpy(), axis=1)
            own["scores"] = torch.from_numpy(bits)
        tensors |= {f"{name}/{key}": value for key, value in own.items() if isinstance(value, Tensor)}
        facts[name] = json.dumps({key: value for key, value in own.items() if not isinstance(value, Tensor)})
    files.write_tensors(path, tensors, facts)


def _sound(path: Path) -> Kept:
    """The curves in a file; none where there is no file, or a damaged one."""
    with suppress(DataError):
        return read_curves(path)
    return {}


def _add(path: Path, name: str, curve: AttackCurve, by: str) -> None:
    """Add a curve to a file that runs share; what cannot be kept is measured all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(files.lock_of(path), wait=True):
            write_curves(path, _sound(path) | {name: (curve, by)})
    except OSError as error:
        log.warning("the baseline's curve of attack %s is not kept: %s: %s", name, path, error.strerror)


def check_places(baselines: str | None, published: str | None) -> None:
    """Raise ConfigError where curves could not be kept, and DataError for a damaged file of published ones.

    Either would else be found after training.
    """
    for key, place, kind in (("baselines", baselines, "folder"), ("published", published, "file")):
        if place is None:
            continue
        path = Path(place).expanduser()
        try:
            (locks := (path if kind == "folder" else path.parent) / ".locks").mkdir(parents=True, exist_ok=True)
            if not os.access(locks, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            with suppress(FileNotFoundError):
                if path.stat() and kind == "file":
                    read_curves(path)
        except OSError as error:
            raise ConfigError(
                f"{key}={place}: {error.strerror}; give a {kind} that can be made and written, or null"
            ) from error


def _settings(settings: Mapping[str, object], name: str) -> object:
    """Those of an attack, with the content of a file that it replays; one on few images is <attack>@<images>.<draw>."""
    own, at, images = name.partition("@")
    found = settings[own]
    if isinstance(found, Mapping) and (replay := found.get("replay")):
        found = {**found, "replay": hashlib.sha256(Path(replay).expanduser().read_bytes()).hexdigest()}
    return [found, images] if at else found


def code_of(attack: Attack) -> tuple[str, ...]:
    """The code of an attack of one's own, and the content of files that it was given; nothing for those of `DECIDE`."""
    own = keys.code(type(attack))
    return (*own, *keys.named(vars(attack)).items()) if own else ()


def _net(victim: Victim, stage: Stage) -> str:
    if not victim.model.deep:
        return ""
    network = victim.network(stage)
    return keys.net([network], lambda images: network(images.to(next(network.parameters()))), network.input_size)


def _baseline(victim: Victim) -> Iterator[Tensor]:
    """What attacks read of the baseline: features and labels of every task."""
    for role, task in victim.comparison.tasks.items():
        for split in SPLITS:
            if len(part := getattr(task, split)):
                yield part.y
                yield victim.features("baseline", split, role=role)


def _shown(victim: Victim) -> Iterator[Tensor]:
    """What attacks on a net read, whatever the net makes of it: images and labels of the attacked task."""
    for split in SPLITS:
        yield from victim.images(split)


def _identity(victim: Victim) -> Iterator[Tensor]:
    """What the outcome of an attack depends on beside its own configuration: weights, labels and training features."""
    yield from victim.model.extractor.state_dict().values()
    yield from victim.start.values()
    yield victim.task.train.y
    for role, task in victim.comparison.tasks.items():
        yield from (part.y for part in (task.train, task.val, task.test))
        with suppress(DegenerateSpectrum):  # features that nothing can be learned from have none
            for stage in STAGES:
                probe = victim.comparison.probe(role, stage)
                yield from (probe.sigma, probe.coefficients)
