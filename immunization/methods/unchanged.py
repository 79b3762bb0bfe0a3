"""Methods that do nothing: the baseline, and models that are immunized already."""

from immunization.methods.base import Method


class Identity(Method):
    """theta_I = theta_0; `epochs` is accepted so that sweeps can mix methods, and ignored."""

    several = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = 0


class Unmodified(Method):
    """The model as it stands, for `immunize=false`: an audit of weights that were immunized before."""

    several = True
