"""Cache of finished attack curves: of one run, and of the baseline for all runs and machines."""

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
from immunization.attacks.victim import Victim
from immunization.compute import keys
from immunization.compute.machine import onto
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError, DegenerateSpectrum, Inapplicable
from immunization.models.activations import fingerprint
from immunization.runs import environment, files
from immunization.runs.records import STAGES, Stage

log = logging.getLogger(__name__)

DECIDE = ("attacks", "compute", "data", "evaluation", "models", "theory")
"""Folders of the package whose modules decide the numbers of an attack on the baseline."""
DIGITS = 12
"""Hexadecimal digits of a hash in the name of a curve."""

Kept = dict[str, tuple[AttackCurve, str | None]]
"""By name, a curve and who made it, where that is known."""


class KeptCurves:
    """Curves that were measured before: of this run in the file `path`, and those of the baseline in shared files.

    A curve is taken only for the same configuration of its attack (`settings`, by name), code of one's own, and

    - from `path`: for the same weights, data, code in `DECIDE` and libraries. The file is replaced in one step.
    - from the folder `baselines`, with a file for each key of all that decides the curves beside the attack: the
      baseline's net, features and labels, the code in `DECIDE` and the machine's arithmetic.
    - from the file `published`, of nets only, with those of one track for every machine: the suite's `version` takes
      the place of code and arithmetic, and precedes the data, the task, the net (with hashes of images and labels,
      and of weights), the attack and its options.

    Damaged files are as good as none. `makers`: who made the curves of the baseline.
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
        self.path, self.settings, self.victim = path, settings, victim
        self.makers: set[str] = set()
        self.device = victim.task.train.y.device
        self.own = keys.key(
            victim=_identity(victim), net=_net(victim, "immunized"), code=keys.source(*DECIDE), versions=keys.versions()
        )
        self.kept = _sound(path)
        self.shared: list[tuple[Path, str]] = []  # a file, and what the names in it begin with
        if baselines:
            known = keys.key(
                machine=environment.arithmetic(self.device),
                code=keys.source(*DECIDE),
                task=[victim.role, None if victim.model.deep else victim.model.dtype],
                baseline=_baseline(victim),
                net=_net(victim, "baseline"),
            )
            self.shared.append((Path(baselines).expanduser() / f"{known}.safetensors", ""))
        if published and victim.model.deep:
            with suppress(Inapplicable):  # too many images to have at once
                data = f"{victim.comparison.pair.name}.{keys.key(shown=_shown(victim))[:DIGITS]}"
                net = f"{victim.model.name}.{fingerprint([victim.network('baseline')])[:DIGITS]}"
                begin = f"{version}/{data}/{victim.role}/{net}/"
                self.shared.append((Path(published).expanduser(), begin))

    def __call__(
        self,
        name: str,
        attack: Attack,
        stage: Stage,
        run: Callable[[], AttackCurve],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> AttackCurve:
        """The curve of an attack on a stage, which `run` gives where it is not kept.

        `meanwhile` is done where another process is at work on the baseline.
        """
        curve = self._name(name, attack)
        own = f"{self.victim.role}/{self.own}/{stage}/{curve}"
        if own in self.kept:
            log.info("attack %s: done before", name)
            measured = self.kept[own]
        else:
            shared = stage == "baseline" and self.shared
            measured = self._shared(name, curve, run, meanwhile) if shared else (run(), None)
            self.kept[own] = measured
            write_curves(self.path, self.kept)
        if measured[1]:
            self.makers.add(measured[1])
        return measured[0]

    def _name(self, name: str, attack: Attack) -> str:
        """Of a curve on the baseline, with a hash of its attack's configuration and of what else it depends on."""
        settings = json.dumps(_settings(self.settings, name), sort_keys=True)
        beside = (*attack.beside(self.victim), *_code_of(attack))
        return f"{name}/{hashlib.sha256(f'{settings} {beside}'.encode()).hexdigest()[:DIGITS]}"

    def _shared(
        self, name: str, curve: str, run: Callable[[], AttackCurve], meanwhile: Callable[[], object]
    ) -> tuple[AttackCurve, str | None]:
        """A curve of the baseline and its maker: if several processes need it, one computes it, and the others wait."""
        first, begin = self.shared[0]
        lock = files.lock_of(first.with_name(keys.key(file=first.name, curve=begin + curve)))
        with files.locked(lock, wait=True, meanwhile=meanwhile):
            known = {path: kept for path, begin in self.shared if (kept := _sound(path).get(begin + curve))}
            if known:
                log.info("attack %s: the baseline was attacked before, %s", name, next(iter(known)))
            measured = next(iter(known.values())) if known else (run(), environment.maker(self.device))
            for path, begin in self.shared:
                if path not in known:
                    _add(path, begin + curve, measured)
        return measured


def read_curves(path: Path) -> Kept:
    """The curves in a file of `write_curves`; raises DataError for a damaged or another one."""
    tensors, facts = files.read_tensors(path)
    try:
        content: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in facts.items()}
        for name, tensor in tensors.items():
            curve, _, field = name.rpartition("/")
            content[curve][field] = tensor
        return {name: _unpacked(**fields) for name, fields in content.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of attack curves ({type(error).__name__}: {error})") from error


def _unpacked(by: str | None, rows: int | None = None, **fields: Any) -> tuple[AttackCurve, str | None]:
    if rows is not None:
        fields["scores"] = torch.from_numpy(np.unpackbits(fields["scores"].numpy(), axis=1, count=rows)).bool()
    fields |= {key: tuple(fields[key]) for key in ("diverged", "finals")}
    fields["epochs"] = fields["epochs"] and {int(epoch): point for epoch, point in fields["epochs"].items()}
    return AttackCurve(**fields), by


def write_curves(path: Path, kept: Kept) -> None:
    """Write a safetensors file in one step: tensors `<name>/<field>`, hits as bits, the rest as JSON in its header."""
    tensors: dict[str, Tensor] = {}
    facts = {}
    for name, (curve, by) in kept.items():
        fields = dict(vars(curve), by=by)
        if curve.scores is not None and curve.scores.dtype == torch.bool:
            fields["rows"], bits = curve.scores.shape[1], np.packbits(curve.scores.cpu().numpy(), axis=1)
            fields["scores"] = torch.from_numpy(bits)
        tensors |= {f"{name}/{key}": value for key, value in fields.items() if isinstance(value, Tensor)}
        facts[name] = json.dumps({key: value for key, value in fields.items() if not isinstance(value, Tensor)})
    files.write_tensors(path, tensors, facts)


def _sound(path: Path) -> Kept:
    """The curves in a file; none where there is no file, or a damaged one."""
    with suppress(DataError):
        return read_curves(path)
    return {}


def _add(path: Path, name: str, measured: tuple[AttackCurve, str | None]) -> None:
    """Add a curve to a file that runs share; what cannot be kept is measured all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(files.lock_of(path), wait=True):
            write_curves(path, _sound(path) | {name: measured})
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
    attack, at, images = name.partition("@")
    options = settings[attack]
    if isinstance(options, Mapping) and (replay := options.get("replay")):
        options = {**options, "replay": hashlib.sha256(Path(replay).expanduser().read_bytes()).hexdigest()}
    return [options, images] if at else options


def _code_of(attack: Attack) -> tuple[object, ...]:
    """The code of an attack of one's own, and the content of files that it was given; nothing for those of `DECIDE`."""
    own = keys.code(type(attack))
    return (*own, *keys.named(vars(attack)).items()) if own else ()


def _net(victim: Victim, stage: Stage) -> str:
    if not victim.model.deep:
        return ""
    network = victim.network(stage)
    return keys.net([network], lambda inputs: network(onto(inputs, next(network.parameters()))), network.sample)


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
