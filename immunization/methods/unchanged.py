"""Methods that do nothing: the baseline, and models that are immunized already."""

from immunization.checks import Count, checked
from immunization.methods.base import Method


class Identity(Method):
    """theta_I = theta_0; `epochs` is accepted so that sweeps can mix methods, and ignored."""

    several = True

    @checked("method")
    def __init__(self, epochs: Count = 0) -> None:
        super().__init__()


class Unmodified(Method):
    """The model as it stands, for `immunize=false`: an audit of weights that were immunized before."""

    several = True
