"""Attacks that are done: a killed audit goes on with the next one, the baseline is attacked once for all methods."""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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

VERSION = 4
"""Version of the file, to be raised whenever `AttackCurve` changes."""

DECIDE = ("attacks", "compute", "data", "evaluation", "models", "theory")
"""Folders of the package whose modules decide the numbers of an attack on the baseline."""

Curves = dict[Stage, AttackCurve]


class KeptCurves:
    """The curves of attacks that are done, in one file, which is replaced in one step after each attack.

    A curve is taken from there only for the same configuration of its attack (`settings`, by name), weights, data, code
    in `DECIDE` or of one's own, and libraries. Damaged curves are measured again. Curves of the baseline are shared by
    all runs with one folder `baselines`, and by all machines where the suite called `version` has a folder of
    `published` ones.
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
        self.path = path
        roots = [Path(root).expanduser() if root else None for root in (baselines, published)]
        self.baselines = KeptBaselines(*roots, settings, victim, version) if any(roots) else None
        self.prefix = "" if victim.role == "harmful" else f"{victim.role}/"
        self.settings = settings
        self.key = keys.key(
            victim=_identity(victim), net=_net(victim, "immunized"), code=keys.source(*DECIDE), versions=keys.versions()
        )
        self.kept: dict[str, dict[str, Any]] = {}
        with suppress(DataError, KeyError, TypeError):  # none, or a damaged one, or another version's
            content = files.read_archive(path)
            self.kept = content["attacks"] if content["version"] == VERSION else {}

    def get(self, name: str, code: tuple[str, ...] = ()) -> Curves | None:
        """The curves of an attack, whose own `code` this is, on every stage; None where it has to be run."""
        entry = self.kept.get(self.prefix + name)
        if entry is None or entry["key"] != self._key(name, code):
            return None
        log.info("attack %s: done before", name)
        if self.baselines and entry.get("by"):
            self.baselines.made_by[name] = entry["by"]
        return {stage: AttackCurve(**fields) for stage, fields in entry["curves"].items()}

    def _key(self, name: str, code: tuple[str, ...]) -> str:
        return keys.key(settings=_settings(self.settings, name), code=code, key=self.key)

    def put(self, name: str, curves: Curves, code: tuple[str, ...] = ()) -> None:
        """Keep the curves of an attack that is done."""
        self.kept[self.prefix + name] = {
            "key": self._key(name, code),
            "curves": {stage: vars(curve) for stage, curve in curves.items()},
            "by": self.baselines.made_by.get(name) if self.baselines else None,
        }
        files.write_archive(self.path, {"version": VERSION, "attacks": self.kept})


class KeptBaselines:
    """Curves of attacks on the baseline, or of a reference, one file each in a folder that all runs share.

    A file is named by a key of all that its curve depends on: the attack, the baseline's net, features and labels, the
    code in `DECIDE` and the machine's arithmetic. If several processes need a curve, one computes it, and the others
    attack theta_I before they wait.

    In the folder `published` it is named by a hash of the suite's `version` in place of code and arithmetic, so that a
    curve of another machine is taken, too; `made_by` says who made a curve, by the name of its attack. Of nets only.
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
        self.places: list[tuple[Path, str]] = []
        if root:
            known = keys.key(
                machine=environment.arithmetic(self.device),
                code=keys.source(*DECIDE),
                task=[victim.role, None if victim.model.deep else victim.model.dtype],
                baseline=_baseline(victim),
                net=_net(victim, "baseline"),
            )
            self.places.append((root, known))
        if published and victim.model.deep:
            net = fingerprint([victim.network("baseline")])
            with suppress(Inapplicable):  # too many images to have at once
                self.places.append((published, f"{version} {victim.role} {_digest(_shown(victim))} {net}"))

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
        paths = []
        for root, victim in self.places:
            known = hashlib.sha256(f"{VERSION} {settings} {beside} {victim}".encode()).hexdigest()[:32]
            paths.append(root / f"{known}.pt")
        with files.locked(files.lock_of(paths[0]), wait=True, meanwhile=meanwhile):
            found = {path: content for path in paths if (content := _read(path))}
            if found:
                content = next(iter(found.values()))
                log.info("attack %s: the baseline was attacked before, %s", name, next(iter(found)))
            else:
                content = {"attack": name, "curve": vars(attack()), "by": environment.maker(self.device)}
            for path in paths:
                if path not in found:
                    _keep(path, content)
            self.made_by[name] = content["by"]
            return AttackCurve(**content["curve"])


def check_folder(key: str, folder: str) -> None:
    """Raise ConfigError for the folder of `key` that cannot be made or written, which else is found after training."""
    try:
        (locks := Path(folder).expanduser() / ".locks").mkdir(parents=True, exist_ok=True)
        if not os.access(locks, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{key}={folder}: {error.strerror}; give a folder that can be made and written, or null"
        ) from error


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a file of `KeptBaselines`; None where there is none, or a damaged one."""
    with suppress(DataError, KeyError, TypeError):
        content = files.read_archive(path)
        if content["by"] and AttackCurve(**content["curve"]):
            return content
    return None


def _keep(path: Path, content: dict[str, Any]) -> None:
    """Write a file of `KeptBaselines`; what cannot be kept is measured all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_archive(path, content)
    except OSError as error:
        log.warning("the baseline's curve of attack %s is not kept: %s: %s", content["attack"], path, error.strerror)


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


def _digest(tensors: Iterator[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
