"""Options of YAML files: their ranges, in annotations, and the messages derived from them.

A range is all that its errors are made of: `epochs: Count`, in a `Component` or under `@checked`.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import astuple
from functools import cache, partial, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

import yaml
from annotated_types import DocInfo, Ge, Gt, Le, Lt, Predicate, doc

from immunization.errors import ConfigError

_PACKAGE = Path(__file__).parent
CONF = next(path for path in (_PACKAGE.parent / "conf", _PACKAGE / "conf") if path.is_dir())
"""The YAML groups: at the top of the repository, or inside the package once it is installed as a wheel."""
SWEEPS = next(path for path in (CONF.parent / "sweeps", CONF / "sweeps") if path.is_dir())
"""The group of named multiruns, which is beside the others in the repository."""

NonNegative = Annotated[float, Ge(0), Lt(math.inf)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Gt(0), Le(1)]
Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
AboveOne = Annotated[float, Gt(1), Lt(math.inf)]
AtLeastTwo = Annotated[int, Ge(2)]
Octaves = Annotated[int, Ge(1), Le(40)]
Digit = Annotated[int, Ge(0), Le(9)]
Seed = Annotated[int, Ge(0), Lt(2**32), doc("an integer of at least 0 and below 2^32")]
"""Torch's generators on a CPU read 32 bits of a seed: a larger one would repeat the numbers of a smaller one."""
EvenPower = Annotated[
    float,
    Predicate(lambda power: power == math.inf or power in range(2, 66, 2)),
    doc("an even number from 2 to 64 (larger ones underflow), or inf"),
]

Hint = object  # a type, a union, a Literal, or one of those in Annotated
T = TypeVar("T")

get_type_hints = partial(typing.get_type_hints, include_extras=True)


def snake_case(name: str) -> str:
    """The name of a class, or the last of a `_target_`, as its YAML is called: ConditionNumber -> condition_number."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.rpartition(".")[2]).lower()


def read_yaml(name: str) -> dict[str, Any]:
    """The content of conf/<name>.yaml as it is there."""
    return yaml.load((CONF / f"{name}.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def checked(option: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Check the arguments of a function against its annotations; conf/`option`.yaml has those that are not given."""
    group = option.partition("/")[0]

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(function)

        @wraps(function)
        def checking(*args: object, **kwargs: object) -> T:
            given = signature.bind_partial(*args, **kwargs).arguments
            check_arguments(function, given, group)
            return function(*args, **kwargs, **values_of(option, signature.parameters.keys() - given.keys()))

        return checking

    return decorate


class Component:
    """The base of what a YAML builds: annotated attributes are options with their ranges.

    Their defaults are in the YAML, for this package's classes in conf/`option`.yaml, whose keys are all that can be
    given; other classes, and what the YAML leaves out, have the attributes of the class. Subclasses inherit both. The
    constructor refuses what is out of range as a key of `group`, and calls `__post_init__`.
    """

    group: ClassVar[str] = ""
    option: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "", **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.group = group or cls.group
        kind, _, name = group.partition(".")
        own = f"{kind or cls.group.partition('.')[0]}/{name or snake_case(cls.__name__)}"
        shipped = cls.__module__.startswith(f"{__package__}.")
        cls.option = vars(cls).get("option", own) if shipped else ""

    def __init__(self, **options: Any) -> None:
        cls = type(self)
        hints, known = annotated(cls), offered(cls)
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument '{unknown[0]}'")
        _check(hints, options, self.group)
        for base in reversed(cls.__mro__):
            if issubclass(base, Component):
                vars(self).update({name: value for name, value in vars(base).items() if name in hints})
                vars(self).update(values_of(base.option, hints.keys() - options.keys()))
        vars(self).update(options)
        if missing := [name for name in known if name not in vars(self)]:
            raise TypeError(f"{cls.__name__} needs the keyword argument '{missing[0]}'")
        self.__post_init__()

    def __post_init__(self) -> None:
        """Called at the end of the constructor."""

    @property
    def options(self) -> dict[str, Any]:
        """The values of all annotated options, also of inherited ones that cannot be given."""
        return {name: vars(self)[name] for name in annotated(type(self)) if name in vars(self)}


@cache
def annotated(component: type[Component]) -> dict[str, Hint]:
    """The annotated options of a class and its bases, also those that cannot be given."""
    try:
        hints = get_type_hints(component)
    except NameError:  # an annotation imported for type checkers alone
        hints = {name: object for base in reversed(component.__mro__) for name in vars(base).get("__annotations__", ())}
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def offered(component: type[Component]) -> list[str]:
    """The options that can be given: where there is a YAML, its keys."""
    keys = yaml_of(component.option)
    return [name for name in annotated(component) if not keys or name in keys]


def takes(target: Callable[..., object], name: str) -> bool:
    """Whether something can be given by this name to a component, or to another class or function."""
    if _builds(target):
        return name in offered(target)
    return any(name == p.name or p.kind is p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())


def _builds(target: Callable[..., object]) -> TypeGuard[type[Component]]:
    """Whether a target is a `Component` without a constructor of its own."""
    return isinstance(target, type) and target.__init__ is Component.__init__


def values_of(option: str, names: Collection[str]) -> dict[str, Any]:
    """What conf/<option>.yaml says of some options, where it says something."""
    values = {name: value for name, value in yaml_of(option).items() if name in names and value != "???"}
    if "${" in str(values):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(OmegaConf.create({**read_yaml("config"), "_": values})._, resolve=True)
    return deepcopy(values)


@cache
def yaml_of(option: str) -> dict[str, Any]:
    """The values in conf/<option>.yaml and those that it inherits; empty where there is no such file."""
    group, _, name = option.rpartition("/")
    if not option or not (CONF / f"{option}.yaml").is_file():
        return {}
    content, values = read_yaml(option), {}
    for entry in content.pop("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            values |= yaml_of(f"{group}/{entry.partition('@')[0]}")
    values |= content[name] if content.keys() == {name} else content
    return {key: value for key, value in values.items() if not key.startswith("_")}


def check_arguments(function: Callable[..., object], arguments: Mapping[str, object], group: str) -> None:
    """Raise ConfigError for the first of `arguments`, keys of `group` if any, that `function`'s annotation excludes."""
    _check(annotated(function) if _builds(function) else _hints(function), arguments, group)


def _check(hints: Mapping[str, Hint], arguments: Mapping[str, object], group: str) -> None:
    """Annotations of kinds that no YAML file can hold are left to the constructor."""
    for name, hint in hints.items():
        if name in arguments and _is_plain(hint):
            check_value(f"{group}.{name}" if group else name, arguments[name], hint)


def check_options(function: Callable[..., object], options: Mapping[str, object], group: str) -> None:
    """`check_arguments`, and ConfigError for the first that is no optional argument of `function`."""
    known = [name for name, own in inspect.signature(function).parameters.items() if own.default is not own.empty]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"there is no key {group}.{unknown[0]}; allowed here are {', '.join(known)}")
    check_arguments(function, options, group)


def check_value(key: str, value: object, hint: Hint) -> None:
    """Raise ConfigError unless `value` of the configuration's `key` is what `hint` says; nothing is converted."""
    from pydantic import ValidationError

    try:
        _validator(hint).validate_python(_plain(value))
    except ValidationError:
        raise ConfigError(f"{key} must be {words(hint)}, not {value!r}") from None


def _plain(value: object) -> object:
    """Lists, also inside of others, and mappings as Python's: OmegaConf's are none to pydantic."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(map(_plain, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


def words(hint: Hint) -> str:
    """The values that `hint` allows: `Count | None` is "an integer of at least 0, or null"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return ", or ".join(map(words, args))
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is Sequence:
        return f"a list of which each is {words(args[0])}"
    if origin is Mapping:
        return "a mapping of keys to values"
    if origin is Annotated:
        return next((extra.documentation for extra in args if isinstance(extra, DocInfo)), None) or _range(*args)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return names[hint]


def _range(kind: type, *bounds: Ge | Gt | Le | Lt) -> str:
    phrases = {Ge: "of at least", Gt: "above", Le: "at most", Lt: "below"}
    limits = [f"{phrases[type(bound)]} {astuple(bound)[0]}" for bound in bounds if bound != Lt(math.inf)]
    return f"{'a finite number' if Lt(math.inf) in bounds else words(kind)} {' and '.join(limits)}"


@cache
def _validator(hint: Hint) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # imported by the first check: it takes a tenth of a second

    return TypeAdapter(hint, config=ConfigDict(strict=True))


@cache
def _hints(function: Callable[..., object]) -> dict[str, Hint]:
    try:
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function)
    except NameError:  # an annotation imported for type checkers alone
        return {}
    return {name: hint for name, hint in hints.items() if name != "return"}


def _is_plain(hint: Hint) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType, Sequence):
        return all(map(_is_plain, args))
    if origin is Mapping:
        return args == (str, Any)
    return origin is Literal or (
        _is_plain(args[0]) if origin is Annotated else hint in (int, float, bool, str, NoneType)
    )
