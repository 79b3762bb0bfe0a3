"""Attacks that are done: a killed audit goes on with the next one, the baseline is attacked once for all methods."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from immunization.attacks.base import AttackCurve
from immunization.attacks.victim import Stage, Victim
from immunization.data.task import SPLITS
from immunization.errors import DataError, DegenerateSpectrum
from immunization.evaluation.measures import SUFFIX
from immunization.models.activations import fingerprint
from immunization.runs import environment, files

log = logging.getLogger(__name__)

VERSION = 4
"""Version of the file, to be raised whenever `AttackCurve` changes."""

PACKAGE = Path(__file__).resolve().parents[1]
DECIDE = ("attacks", "compute", "data", "evaluation", "models", "theory")
"""Folders of the package whose modules decide the numbers of an attack on the baseline."""

Curves = dict[Stage, AttackCurve]


class KeptCurves:
    """The curves of attacks that are done, in one file, which is replaced in one step after each attack.

    A curve is taken from there only for the same configuration of its attack (`settings`, by name), weights and data.
    Damaged curves are measured again. Curves of the baseline are shared by all runs with one folder `baselines`.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, object], victim: Victim, baselines: str | Path | None = None
    ) -> None:
        self.path = path
        self.baselines = KeptBaselines(Path(baselines).expanduser(), settings, victim) if baselines else None
        victim_key = _digest(_identity(victim))
        self.prefix = "" if victim.role == "harmful" else f"{victim.role}/"
        self.settings, self.victim_key = settings, victim_key
        self.kept: dict[str, dict[str, Any]] = {}
        with suppress(DataError, KeyError, TypeError):  # none, or a damaged one, or another version's
            content = files.read_archive(path)
            self.kept = content["attacks"] if content["version"] == VERSION else {}

    def get(self, name: str) -> Curves | None:
        """The curves of an attack on every stage; None where it has to be run."""
        entry = self.kept.get(self.prefix + name)
        if entry is None or entry["key"] != self._key(name):
            return None
        log.info("attack %s: done before", name)
        return {stage: AttackCurve(**fields) for stage, fields in entry["curves"].items()}

    def _key(self, name: str) -> dict[str, object]:
        return {"settings": _settings(self.settings, name), "victim": self.victim_key}

    def put(self, name: str, curves: Curves) -> None:
        """Keep the curves of an attack that is done."""
        self.kept[self.prefix + name] = {
            "key": self._key(name),
            "curves": {stage: vars(curve) for stage, curve in curves.items()},
        }
        files.write_archive(self.path, {"version": VERSION, "attacks": self.kept})


class KeptBaselines:
    """Curves of attacks on the baseline, or of a reference, one file each in a folder that all runs share.

    A file is named by a hash of all that its curve depends on: the attack, the baseline's net, features and labels, the
    code in `DECIDE` and the machine's arithmetic. If several processes need a curve, one computes it, the others wait.
    """

    def __init__(self, root: Path, settings: Mapping[str, object], victim: Victim) -> None:
        self.root, self.settings = root, settings
        machine = (_source(), *environment.arithmetic(victim.task.train.y.device))
        about = (machine, victim.role, str(victim.model.dtype))
        self.victim = f"{about} {_digest(_baseline(victim))}"
        if victim.model.deep:
            self.victim += fingerprint([victim.network("baseline")])

    def __call__(self, name: str, beside: tuple[object, ...], attack: Callable[[], AttackCurve]) -> AttackCurve:
        """The curve of the attack `name`, which `attack` runs where no run has done so.

        `beside` is what it depends on beside the baseline.
        """
        settings = json.dumps(_settings(self.settings, name), sort_keys=True)
        key = hashlib.sha256(f"{VERSION} {settings} {beside} {self.victim}".encode()).hexdigest()[:32]
        path, locks = self.root / f"{key}.pt", self.root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with files.locked(locks / key, wait=True):
            with suppress(DataError, KeyError, TypeError):  # none, or a damaged one
                curve = AttackCurve(**files.read_archive(path)["curve"])
                log.info("attack %s: the baseline was attacked before, %s", name, path)
                return curve
            curve = attack()
            files.write_archive(path, {"attack": name, "curve": vars(curve)})
            return curve


def _settings(settings: Mapping[str, object], name: str) -> object:
    """Those of an attack; one on few images is called <attack>@<images>.<draw>."""
    own, at, images = name.partition("@")
    return [settings[own], images] if at else settings[own]


def _source() -> str:
    digest = hashlib.sha256()
    for folder in DECIDE:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _baseline(victim: Victim) -> Iterator[Tensor]:
    """What attacks read of the baseline: features and labels of every task."""
    for role, task in victim.comparison.tasks.items():
        for split in SPLITS:
            if len(part := getattr(task, split)):
                yield part.y
                yield victim.features("baseline", split, role=role)


def _identity(victim: Victim) -> Iterator[Tensor]:
    """What the outcome of an attack depends on beside its own configuration: weights, labels and training features."""
    yield from victim.model.extractor.state_dict().values()
    yield from victim.start.values()
    yield victim.task.train.y
    for role, task in victim.comparison.tasks.items():
        yield from (part.y for part in (task.train, task.val, task.test))
        with suppress(DegenerateSpectrum):  # features that nothing can be learned from have none
            for stage in SUFFIX:
                probe = victim.comparison.probe(role, stage)
                yield from (probe.sigma, probe.coefficients)


def _digest(tensors: Iterator[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
