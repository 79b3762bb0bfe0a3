"""The baseline: no immunization."""

from immunization.methods.base import Method


class Identity(Method):
    """theta_I = theta_0; `epochs` is accepted so that sweeps can mix methods, and ignored."""

    def __init__(self, epochs: int = 0) -> None:
        super().__init__()
