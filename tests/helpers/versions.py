"""What the lowest versions that pyproject.toml allows cannot do yet."""

import re
from importlib.metadata import version

import pytest


def before(library: str, first: str) -> bool:
    """Whether a version of `library` before `first` is installed."""
    installed, wanted = (tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (version(library), first))
    return installed < wanted


def since(library: str, first: str, value: object) -> object:
    """A parameter of a test that is left out with versions of `library` before `first`."""
    return pytest.param(value, marks=pytest.mark.skipif(before(library, first), reason=f"needs {library} {first}"))


asks_once = pytest.mark.skipif(
    before("wandb", "0.31"), reason="earlier versions ask a server that does not answer for minutes"
)
KEEPS_ARGUMENTS = "1.0.31"
"""The first timm that writes the arguments of a net, such as its size of images, beside its weights for the hub."""
