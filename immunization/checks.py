"""The ranges of options: `epochs: Count`, in a `Component` or under `@checked`, is all that its errors are made of."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cache, partial, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

from annotated_types import DocInfo, Ge, Gt, Le, Lt, Predicate, doc

from immunization.errors import ConfigError

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
F = TypeVar("F", bound=Callable[..., Any])

get_type_hints = partial(typing.get_type_hints, include_extras=True)


def checked(group: str, of: type | None = None) -> Callable[[F], F]:
    """Check the arguments, keys of `group`, of a function against its annotations, or those of the dataclass `of`."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        @wraps(function)
        def checking(*args: object, **kwargs: object) -> object:
            check_arguments(of or function, signature.bind(*args, **kwargs).arguments, group)
            return function(*args, **kwargs)

        return checking

    return decorate


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class Component:
    """The base of what a YAML builds: annotated attributes are options with their ranges, as in a dataclass.

    A subclass names only what is its own: `name = value` without an annotation changes an inherited default, and nobody
    can set the options listed as `without`. The constructor, unless a class writes its own, is that of `dataclass`, and
    refuses what is out of range as a key of `group`.
    """

    group: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "", without: Sequence[str] = (), **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.group = group or cls.group
        own = cls.__annotations__
        for option in fields(cls):
            name = option.name
            if name in without or (name in vars(cls) and name not in own):
                own[name] = Any  # what is allowed stays as it was, see _hints
                init = option.init and name not in without
                setattr(cls, name, field(default=getattr(cls, name), init=init, kw_only=option.kw_only))
        if own and "__init__" not in vars(cls):
            dataclass(cls, eq=False, repr=False)
            cls.__init__ = checked(cls.group, cls)(cls.__init__)


def check_arguments(function: Callable[..., object], arguments: Mapping[str, object], group: str) -> None:
    """Raise ConfigError for the first of `arguments`, keys of `group` if any, that `function`'s annotation excludes."""
    for name, hint in _plain_hints(function).items():
        if name in arguments:
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
def _plain_hints(function: Callable[..., object]) -> dict[str, Hint]:
    """Annotations of arguments that a YAML file can hold; those of other kinds are left to the constructor."""
    try:
        hints = _hints(function)
    except NameError:  # an annotation imported for type checkers alone
        return {}
    return {name: hint for name, hint in hints.items() if name != "return" and _is_plain(hint)}


def _hints(function: Callable[..., object]) -> dict[str, Hint]:
    """Annotations of arguments; where `dataclass` wrote a constructor, they stand in the classes."""
    if not isinstance(function, type):
        return get_type_hints(function)
    builder = next(base for base in function.__mro__ if "__init__" in vars(base))
    if "__dataclass_fields__" not in vars(builder):
        return get_type_hints(builder.__init__)
    above = [get_type_hints(base) for base in reversed(builder.__mro__)]
    return {name: hint for hints in above for name, hint in hints.items() if hint is not Any}


def _is_plain(hint: Hint) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType, Sequence):
        return all(map(_is_plain, args))
    if origin is Mapping:
        return args == (str, Any)
    return origin is Literal or (
        _is_plain(args[0]) if origin is Annotated else hint in (int, float, bool, str, NoneType)
    )
