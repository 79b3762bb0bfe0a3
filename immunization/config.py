"""From configurations to objects: compose, check and build. The command line imports this first, without torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, partial, reduce
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.checks import CONF, SWEEPS, check_arguments, read_yaml, takes
from immunization.errors import ConfigError


class Kind(NamedTuple):
    """What the `_target_` of a group may name, in one of `packages` or of the modules of `trusted`.

    A subclass of `base`; or a function, and without `base` a class with a `__call__`, annotated to return one of
    `returns`. One's own, defined in a module of `trusted`, may do without the annotation. The option `nests` holds a
    further node of the group, or a list of them; no other option may.
    """

    packages: tuple[str, ...]
    base: str = ""
    returns: tuple[str, ...] = ()
    nests: str = ""

    def __str__(self) -> str:
        function = f"annotated -> {' or '.join(self.returns)}"
        other = f"a function {function}" if self.base else f"a function, or a class with a __call__, {function}"
        return " or ".join([f"a subclass of {self.base}"] * bool(self.base) + [other] * bool(self.returns))

    def allows(self, found: Any, trusted: Iterable[str]) -> bool:
        if isinstance(found, type) and self.base:
            module, _, name = self.base.rpartition(".")
            return issubclass(found, getattr(import_module(module), name))
        function = found.__call__ if isinstance(found, type) else found
        if not inspect.isfunction(function):
            return False
        returned = inspect.signature(function).return_annotation
        if returned is inspect.Signature.empty:
            own = function.__module__ == found.__module__ and _below(found.__module__, trusted)
            return bool(self.returns) and own
        text = returned if isinstance(returned, str) else getattr(returned, "__name__", str(returned))
        return {part.strip().rpartition(".")[2] for part in text.split("|")} <= {*self.returns}


def _below(module: str, packages: Iterable[str]) -> bool:
    return f"{module}.".startswith(tuple(f"{package}." for package in packages))


KINDS = {
    "dataset": Kind(("immunization.data",), returns=("TaskPair", "ImagePair")),
    "model": Kind(("immunization.models",), "immunization.models.Model", ("Model",), nests="model"),
    "method": Kind(("immunization.methods",), "immunization.methods.Method"),
    "optimizer": Kind(("torch.optim", "timm.optim"), "torch.optim.Optimizer"),
    "scheduler": Kind(("torch.optim.lr_scheduler",), "torch.optim.lr_scheduler.LRScheduler", nests="schedulers"),
    "evaluation": Kind(("immunization.evaluation",), returns=("Measures",)),
    "attack": Kind(("immunization.attacks",), "immunization.attacks.Attack"),
    "suite": Kind(("immunization.attacks",), "immunization.attacks.Suite"),
    "tracker": Kind(("immunization.runs.wandb_tracker",), "immunization.runs.tracker.Tracker"),
}
"""The groups of which something is built. A module elsewhere is not even imported, which would run its code."""

TRACK = "experiment=leaderboard/"
"""Starts the override that chooses a track of the leaderboard."""

LONGEST = 150
"""Characters of a file name that is made from text."""

_OURS = ("_target_", "_partial_")
"""Keys of a node that are no arguments."""


def slug(text: object) -> str:
    """`text` as one safe file name: no separators or leading dots, cut ones with a hash."""
    name = re.sub(r"[^\w.,=+-]+", "-", str(text)).lstrip(".-") or "run"
    cut = name.encode()[: LONGEST - 9].decode(errors="ignore")  # file systems count bytes
    return name if len(name.encode()) <= LONGEST else f"{cut}-{sha256(name.encode()).hexdigest()[:8]}"


def job_folder(multirun: str, number: int, name: str, resume: bool) -> str:
    """The folder of a job in that of its multirun: `resume` finds it by its name, whatever number it had before."""
    folder = f"{number}_{name}"
    if not resume or Path(multirun, folder).exists():
        return folder
    known = (path.name for path in sorted(Path(multirun).glob(f"[0-9]*_{name}")))
    return next((other for other in known if other.partition("_")[2] == name), folder)


def class_of(pair: str, place: int) -> int:
    """The primary (place 0) or harmful (1) class of a pair that is written `3-5`."""
    classes = pair.split("-")
    if len(classes) != 2 or not all(map(str.isdecimal, classes)):
        raise ConfigError(f"pair={pair}: write the primary and the harmful class as in 3-5")
    return int(classes[place])


def folder_of(package: str) -> str:
    """The folder of an installed package, which is not imported; one that is not installed says so in its place."""
    spec = find_spec(package)
    name = package.replace("_", "-")
    return str(Path(spec.origin).parent) if spec and spec.origin else f"<pip install {name}, or 'immunization[text]'>"


OmegaConf.register_new_resolver("absent", lambda value: value is None, replace=True)
OmegaConf.register_new_resolver("slug", slug, replace=True)
OmegaConf.register_new_resolver("folder_of", folder_of, replace=True)
OmegaConf.register_new_resolver("class_of", class_of, replace=True)
OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
OmegaConf.register_new_resolver("cores", lambda model: 1 if model.endswith(".Linear") else 4, replace=True)  # of a job


if not (CONF / "local.yaml").is_file():  # which is optional
    ConfigStore.instance().store("local", {})


for _path in SWEEPS.glob("*.yaml") if SWEEPS.parent != CONF else ():
    _content = yaml.load(_path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    ConfigStore.instance().store(_path.stem, _content, "sweeps", "_global_")


@cache
def hparams(kind: str) -> dict[str, dict[str, Any]]:
    """Defaults of methods on data of a kind: the sections of conf/hparams/<kind>.yaml, over those it is `like`."""
    own = read_yaml(f"hparams/{kind}")
    found = dict(hparams(own.pop("like"))) if "like" in own else {}
    for method, section in own.items():
        below = found.get(method, {}) if section else {}  # null: the method's own defaults
        merged = {k: below.get(k, {}) | v if isinstance(v, dict) else v for k, v in (section or {}).items()}
        found[method] = below | merged
    return found


class _Shared(dict):
    """A dict that deep-copies to itself, since copies would take most of the time of `--help`."""

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


def _store_hparams() -> None:
    """Offer Hydra each kind of data, and its sections as what config.yaml and scheduler=default look for."""
    ConfigStore.instance().repo = _Shared(ConfigStore.instance().repo)
    store = ConfigStore.instance().store
    for kind in (path.stem for path in (CONF / "hparams").glob("*.yaml")):
        store(kind, {}, "kind", "_global_")
        for method, section in hparams(kind).items():
            values = {k: v for k, v in section.items() if k in ("defaults", "method", "model", "optimizer")}
            store(method, values, f"hparams/{kind}", "_global_")
            if name := section.get("scheduler"):
                chosen = {"defaults": [f"/scheduler/{name}@scheduler"]}
                store(method, chosen, f"hparams/scheduler/{kind}", "_global_")


_store_hparams()


CHOOSE = "every group=... takes the name of an option, or, as evaluation=[...] and attack=[...], a list of names"


def compose(overrides: Iterable[str] = ()) -> DictConfig:
    """The configuration that `python launch.py <overrides>` would run; a Hydra application around stays as it is."""
    words = [] if isinstance(overrides, str) else list(overrides)
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in words):
        raise ConfigError("overrides must be a list of words as on the command line, such as ['method=closed_form']")
    config = _compose(words)
    check_trust(config, words)
    return config


def _compose(words: list[str], **options: bool) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    outside = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("config", overrides=words, **options)
    except (TypeError, ValueError) as error:  # Hydra's own, of a group that is chosen by a number or null
        if isinstance(error, OmegaConfBaseException):
            raise
        raise ConfigError(CHOOSE) from error
    finally:
        GlobalHydra.instance().hydra = outside


def run_folder(overrides: list[str], folder: str | Path | None) -> str | Path | None:
    """The folder of a run from Python: `folder`, or that of an override `hydra.run.dir=`; None for neither.

    Raises ConfigError for both, and for any other option of Hydra's: these act on the command line alone.
    """
    given = [word for word in overrides if re.match(r"[+~]*hydra[./]", word)]
    if other := [word for word in given if not re.match(r"\+*hydra\.run\.dir=", word)]:
        raise ConfigError(
            f"run: {other[0]} works only on the command line; of Hydra's options, run takes only hydra.run.dir="
        )
    if not given:
        return folder
    if folder is not None:
        raise ConfigError(f"run: {given[0]} and folder={str(folder)!r} are both given: choose one of them")
    return _compose(overrides, return_hydra_config=True).hydra.run.dir


def build(cfg: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    """The result of `factory`, called with `arguments`; a YAML with `_partial_: true` gives the callable itself."""
    made = factory(cfg, key)
    try:
        return made if _node(cfg, key).get("_partial_") else made(**arguments)
    except ConfigError as error:  # of an attack, which knows its group and not its name
        raise ConfigError(str(error).replace(f"{key.partition('.')[0]}.*", key)) from error


def factory(cfg: Mapping[str, Any], key: str) -> partial[Any]:
    """The maker of `cfg[key]`, whose values must fit the annotations of its constructor.

    Raises ConfigError, which names the key, also for a target, here or below, that is not allowed or does not exist.
    """
    target_of(cfg, key)  # nothing below is built before
    return _factory(_plain(_node(cfg, key)), key, cfg.get("trusted") or ())


def _factory(node: Mapping[str, Any], key: str, own: Iterable[str]) -> partial[Any]:
    target = _located(str(node["_target_"]), key, own)
    values = _check_signature(target, node, key)
    if made := [_factory(part, place, own) for place, part in _nested(node, key).items()]:
        name = _kind(key).nests
        values[name] = made if isinstance(values[name], list) else made[0]
    return partial(target, **values)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _node(cfg: Mapping[str, Any], key: str) -> Any:
    return reduce(getitem, key.split("."), cfg)


def target_of(cfg: Mapping[str, Any], key: str) -> Any:
    """The class, or function, that `cfg[key]` names, once it and all targets below are allowed; raises ConfigError."""
    node = _plain(_node(cfg, key))
    group, _, name = key.rpartition(".")
    if group and not isinstance(node, Mapping):
        raise ConfigError(f"{key}={node} has no _target_: to do without {name}, leave it out of {group}=[...]")
    if group and "_target_" not in node:
        raise ConfigError(f"{key} has options and no _target_: choose it ({group}=[...,{name}]), or leave them out")
    if not group:
        target_name(cfg, key)
    return _target(node, key, cfg.get("trusted") or ())


def check_components(cfg: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Raise ConfigError unless every target of the groups is allowed; done before the first of them is built."""
    for group in KINDS.keys() - {*without}:
        if (node := cfg.get(group)) is not None:
            for name in node if group in ("attack", "evaluation") else ("",):
                target_of(cfg, f"{group}.{name}" if name else group)


def target_name(cfg: Mapping[str, Any], group: str) -> str:
    """The name of the class of a group's option. Raises ConfigError where there is none."""
    if not (target := (cfg.get(group) or {}).get("_target_")):
        raise ConfigError(
            f"{group} names no class: choose {group}=<option>; a YAML begins with _target_: my_module.MyClass"
        )
    return str(target)


def _kind(key: str) -> Kind:
    return KINDS[re.split(r"[.\[]", key)[0]]


def _nested(node: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """The nodes in the one option of `node` that may hold some, by their keys."""
    name = _kind(key).nests
    inner = node.get(name)
    places = {f"{key}.{name}": inner}
    if isinstance(inner, list):
        places = {f"{key}.{name}[{i}]": part for i, part in enumerate(inner)}
    return {place: part for place, part in places.items() if isinstance(part, Mapping) and "_target_" in part}


def _target(node: Mapping[str, Any], key: str, own: Iterable[str]) -> Any:
    """What `node` names, once it and every target below are allowed."""
    nested = _nested(node, key)
    for place, part in nested.items():
        _target(part, place, own)
    _check_values({name: value for name, value in node.items() if name != "_target_"}, key, nested)
    return _located(str(node.get("_target_")), key, own)


def _check_values(value: object, key: str, nested: Collection[str]) -> None:
    """Raise ConfigError for a `_target_` at or below what is none of the `nested` nodes."""
    if key in nested or not isinstance(value, Mapping | list):
        return
    if "_target_" in value:
        raise ConfigError(f"{key}._target_={value['_target_']}: this key takes values and no class; remove _target_")
    places = {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {}
    for place, part in (places or {f"{key}[{i}]": part for i, part in enumerate(value)}).items():
        _check_values(part, place, nested)


def _located(target: str, key: str, own: Iterable[str]) -> Any:
    """What `target` names; raises ConfigError unless the `Kind` of the group allows it."""
    kind = _kind(key)
    module, _, name = target.rpartition(".")
    packages = (*kind.packages, *own)
    if not _below(module, packages):
        raise ConfigError(
            f"{key}._target_={target}: not from a trusted package ({', '.join(packages)}); add yours with "
            "trusted=[package]"
        )
    try:
        place = import_module(module)
    except Exception as error:  # the module is the user's, and runs
        absent = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if not absent or not f"{module}.".startswith(f"{absent}."):
            raise ConfigError(f"{key}._target_={target}: importing {module} failed{_told(error)}") from error
        remedy = "; install it, or put its folder into PYTHONPATH" if "." not in absent else ""
        raise ConfigError(f"{key}._target_={target}: there is no module {absent}{remedy}") from error
    if not hasattr(place, name):
        near = get_close_matches(name, dir(place), n=1)
        meant = f"; did you mean {near[0]}" if near else ""
        raise ConfigError(f"{key}._target_={target}: {module} has no {name}{meant}") from None
    if not kind.allows(found := getattr(place, name), own):
        raise ConfigError(f"{key}._target_={target}: expected {kind}")
    return found


def _told(error: Exception) -> str:
    """Where an error of a user's module was raised, and what it says."""
    if isinstance(error, SyntaxError):
        return f" in {error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    frames = [frame for frame in extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames[1:] else ""
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"


def check_trust(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """A file must not declare its own code as trusted: `trusted` counts from the command line alone."""
    if cfg.get("trusted") and not any(override.lstrip("+").startswith("trusted=") for override in overrides):
        raise ConfigError(
            f"trusted={list(cfg.trusted)} is set in a configuration file, where it does not count; if you trust these "
            "packages, give it on the command line"
        )


def _check_signature(target: Callable[..., object], node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arguments in `node`, once they fit."""
    values = {str(name): node[name] for name in node if name not in _OURS}
    if unknown := [name for name in values if not takes(target, name)]:
        more = "arguments" in inspect.signature(target).parameters
        also = f"; one of timm.create_model goes to +{key}.arguments.<name>=<value>" if more else ""
        told = f"got an unexpected keyword argument '{unknown[0]}'; {node['_target_']} does not take that key"
        raise ConfigError(f"{key}: {told}{also}")
    check_arguments(target, values, key)
    return values
