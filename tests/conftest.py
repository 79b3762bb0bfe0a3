"""What every test stands on: one thread per process, no network, the same numbers in every run."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Set before torch, timm or wandb are imported; processes started by tests inherit them.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)
# No deadline: a first call pays for imports and allocation, and the machine may be busy.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


FAULTS: Counter[str] = Counter()
FAULT_LINES = {
    "kills": "{} kills survived without a lost or wrong result",
    "bad inputs": "{} bad inputs refused in one line",
    "damaged files": "{} damaged files detected",
    "full disks": "{} full or read-only disks met",
}


@pytest.fixture
def count() -> Counter:
    """`count["kills"] += 1` once a fault was survived; the summary line at the end has the sums."""
    return FAULTS


def pytest_terminal_summary(terminalreporter) -> None:
    if FAULTS:
        text = ", ".join(line.format(FAULTS[name]) for name, line in FAULT_LINES.items() if FAULTS[name])
        terminalreporter.write_line(f"faults: {text}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw from torch's global generator draw the same numbers in any order and process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quiet_errors() -> Iterator[None]:
    """launch.cli() here asks Hydra for exceptions, which the processes of later tests would show as tracebacks."""
    yield
    os.environ.pop("HYDRA_FULL_ERROR", None)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data, from the environment variable IMMUNIZATION_DATA (default: `../shared/data`)."""
    folder = Path(os.environ.get("IMMUNIZATION_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set IMMUNIZATION_DATA to the folder that holds it")
    return folder
