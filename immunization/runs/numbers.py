"""Numbers as text."""

import math
from collections.abc import Callable
from typing import Any

SPELLED = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
"""Numbers that JSON lacks, as YAML writes them."""


def number(value: float) -> str:
    """Three significant digits, scientific where large or small: 0.0123, 356, 29,700, 3.11e12."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{float(f'{value:.3g}'):,.6g}"


def spelled(value: Any) -> Any:
    """A plain configuration with the numbers that JSON lacks as text."""

    def text(leaf: Any) -> Any:
        if not isinstance(leaf, float) or math.isfinite(leaf):
            return leaf
        return ".nan" if math.isnan(leaf) else ".inf" if leaf > 0 else "-.inf"

    return changed(value, text)


def unspelled(value: Any) -> Any:
    """What `spelled` was given."""
    return changed(value, lambda leaf: SPELLED.get(leaf, leaf) if isinstance(leaf, str) else leaf)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A plain configuration with `change` of everything in it that is neither a dict nor a list."""
    if isinstance(value, dict):
        return {key: changed(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [changed(one, change) for one in value]
    return change(value)
