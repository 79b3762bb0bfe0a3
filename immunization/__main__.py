"""`python -m immunization`, the same as the command `immunize`."""

from immunization.training.signals import preemptible


def start() -> None:
    """The command line, listening to signals before its own imports, which take half a second."""
    with preemptible():
        from immunization.cli import cli

        cli()


if __name__ == "__main__":
    start()
