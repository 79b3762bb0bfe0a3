"""Run immunization experiments from a checkout: `python launch.py`, the same as `immunize` of an installed package."""

from immunization.__main__ import start

if __name__ == "__main__":
    start()
