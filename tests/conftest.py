"""What is set before anything is imported; helpers/everywhere.py is what every test stands on."""

import os
import sys

import pytest

# Set before torch, timm or wandb are imported; processes started by tests inherit them.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}

os.environ.pop("IMMUNIZATION_CACHE", None)  # whoever runs the tests may have one of their own

# What a processor of 2008 computes with, as far as each library can be told: torch's own loops, numpy's and scipy's
# OpenBLAS, and torch's MKL, which on processors of other makers heeds MKL_CBWR alone.
os.environ |= (
    {"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Nehalem", "MKL_CBWR": "COMPATIBLE"}
    if "--oldest" in sys.argv
    else {}
)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--oldest", action="store_true", help="what asserts digits, on the instructions of the oldest processor"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config) -> None:
    """A process that only hands tests to others, as with `-n 2`, does without torch."""
    if config.getoption("--oldest") or not config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.import_plugin("helpers.everywhere")
