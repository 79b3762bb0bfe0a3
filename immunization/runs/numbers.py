"""Numbers as text."""

import math


def number(value: float) -> str:
    """Three significant digits, scientific where large or small: 0.0123, 356, 29,700, 3.11e12."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{float(f'{value:.3g}'):,.6g}"
