"""Import of torch's optimizers without torch's compiler, which a command seldom needs."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Compiler(ModuleType):
    """A placeholder for `torch._dynamo`, which is imported when more than what optimizers need is asked of it."""

    @staticmethod
    def graph_break(*_: Any) -> None:
        """Outside of the compiler there is no graph to break."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """What is not compiled needs no guard against it."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the import system asks for these
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def spare_the_compiler() -> None:
    """Let the optimizers of this process do without `torch._dynamo`: two fifths of the time of a short command."""
    sys.modules.setdefault(NAME, Compiler(NAME))
