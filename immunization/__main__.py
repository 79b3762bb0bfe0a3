"""`python -m immunization`, the same as the command `immunize`."""

from immunization.cli import cli

if __name__ == "__main__":
    cli()
