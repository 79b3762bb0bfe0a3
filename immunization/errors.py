"""The errors a user can cause, whose messages name the key or file and the remedy, shown without a traceback."""


class UserError(Exception):
    """A mistake in a configuration, a file or the data; `launch.py` prints the message and exits with code 1."""


class ConfigError(UserError):
    """A configuration value that cannot work; the message names the key and the values allowed."""


class BusyError(ConfigError):
    """A run folder in which another process is at work."""


class DataError(UserError):
    """A data file or array that cannot be used; the message names the file, column or array."""


class DegenerateSpectrum(UserError):
    """A spectrum for which the quantity asked for does not exist (rank 0, or R_ill of a flat spectrum)."""


class Diverged(UserError):
    """Training stopped on a non-finite loss, or on one above 1e12 times the first."""


class OtherEnded(UserError):
    """One of several processes that train together has ended, so that this one cannot go on."""


class Preempted(SystemExit):
    """The process was told to end by a signal; its exit code is 128 + the signal's number, as shells have it."""

    why = ""  # in the words of a cluster's launcher that ended it


class Requeued(Preempted):
    """A cluster's launcher has put the job back into the queue; the exit code is the launcher's."""


class Inapplicable(Exception):
    """An attack that does not exist for this model or these data; the message is the reason."""
