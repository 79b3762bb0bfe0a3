"""Model immunization from a condition-number perspective (arXiv 2505.23760): methods, measures and experiments.

The names below are loaded on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_LAZY = {
    "ConfigError": "immunization.errors",
    "DataError": "immunization.errors",
    "audit": "immunization.api",
    "immunize": "immunization.api",
    "load": "immunization.models.stored",
    "run": "immunization.runner",
    "save": "immunization.api",
    "Result": "immunization.runs.result",
    "Tracker": "immunization.runs.tracker",
    "condition_number": "immunization.theory.spectrum",
    "rir": "immunization.theory.spectrum",
}
__all__ = sorted(_LAZY)

try:
    __version__ = version("immunization")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'immunization' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
