"""`python launch.py` on a terminal, in a process of its own, by somebody who has no account at W&B."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.repository import ROOT
from helpers.wandb_offline import WITHOUT_ACCOUNT, kept, values

from immunization import Result


class Launched(NamedTuple):
    """What the process left; `imported` are the modules in the order in which their imports ended."""

    code: int
    shown: str
    errors: list[str]
    imported: list[str]
    cwd: Path

    @property
    def folder(self) -> Path:
        (folder,) = (self.cwd / "outputs" / "digits").iterdir()
        return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Launched:
    """Standard input is a terminal, too, which a prompt would take for a person."""
    cwd, errors = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("errors") / "stderr"
    env = {**os.environ, "NETRC": str(errors.with_name("netrc")), **WITHOUT_ACCOUNT, "HYDRA_FULL_ERROR": None}
    ours, terminal = pty.openpty()
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", ROOT / "launch.py", "dataset.max_samples=20", "method.epochs=2"],
            env={name: value for name, value in env.items() if value is not None},
            cwd=cwd,
            stdin=terminal,
            stdout=terminal,
            stderr=file,
        )
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # once nobody writes any more
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    code, lines = process.wait(timeout=60), errors.read_text().splitlines()
    said = [line for line in lines if not line.startswith("import time:")]
    imported = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
    return Launched(code, shown.decode(), said, imported, cwd)


def test_a_run_with_the_defaults(done):
    """Exit code 0, a table, figures, W&B offline inside of the run folder, nothing outside of outputs/."""
    assert done.code == 0, done.errors
    assert "RIR" in done.shown
    assert not any("Traceback" in line for line in done.errors)
    assert Result.read(done.folder).status == "completed"
    there = {path.name for path in done.folder.iterdir()}
    assert there >= {"config.yaml", "immunized.safetensors", "history.png", "wandb"}
    assert [path.name for path in done.cwd.iterdir()] == ["outputs"]


def test_without_an_account_there_is_no_prompt_even_on_a_terminal(done):
    (run,) = done.folder.glob("wandb/offline-run-*")
    assert done.errors == [
        f"W&B has no account here (`wandb login`), this run is tracked offline; upload with: wandb sync {run}"
    ]
    steps = [json.loads(line)["step"] for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert {*steps} <= {values(entry.item)["_step"] for entry in kept(done.folder, "history")}


def test_nothing_of_the_report_is_loaded_with_the_runner_no_matplotlib_with_the_figures_no_sklearn_with_digits(done):
    assert "immunization.results.run_figures" in (runner := done.imported[: done.imported.index("immunization.runner")])
    assert not {"pandas", "jinja2", "wandb", "matplotlib", "sklearn"} & {name.partition(".")[0] for name in runner}
    assert "sklearn" not in {name.partition(".")[0] for name in done.imported}


def test_no_compiler_is_loaded_to_train(done):
    assert not [name for name in done.imported if name.startswith(("torch._dynamo", "sympy"))]
