"""Model immunization from a condition-number perspective (arXiv 2505.23760); names are loaded on first use."""

from importlib import import_module

_LAZY = {
    "UserError": "immunization.errors",
    "ConfigError": "immunization.errors",
    "DataError": "immunization.errors",
    "audit": "immunization.api",
    "immunize": "immunization.api",
    "load": "immunization.models.weights",
    "run": "immunization.runner",
    "save": "immunization.api",
    "Result": "immunization.runs.result",
    "Tracker": "immunization.runs.tracker",
    "condition_number": "immunization.theory.spectrum",
    "rir": "immunization.theory.spectrum",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("immunization")
        except PackageNotFoundError:  # a checkout that was not installed
            return "0+unknown"
    if name not in _LAZY:
        raise AttributeError(f"module 'immunization' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
