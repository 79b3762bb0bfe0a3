"""Numbers as text."""

import math
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
    if isinstance(value, dict):
        return {key: spelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spelled(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value


def unspelled(value: Any) -> Any:
    """What `spelled` was given."""
    if isinstance(value, dict):
        return {key: unspelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [unspelled(one) for one in value]
    return SPELLED.get(value, value) if isinstance(value, str) else value
