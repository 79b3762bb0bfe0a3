"""Run immunization experiments from a checkout: `python launch.py`, the same as `immunize` of an installed package."""

from immunization.cli import cli

if __name__ == "__main__":
    cli()
