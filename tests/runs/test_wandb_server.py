"""Online runs against a server on this machine that speaks W&B's protocol (openwandb), without an account."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.installed import install
from helpers.repository import ROOT

from immunization import run
from immunization.runs.result import Result

pytestmark = [pytest.mark.slow, pytest.mark.trains]

KEY = f"local{'0' * 35}"  # the server's own, of every installation
OPTIONS = ("method=closed_form", "dataset.common_range=true", "dataset.max_samples=40", "figures=false", "seed=4")


class Server:
    """openwandb in an environment and a process of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"OPENWANDB_DATA_DIR": str(folder / "data"), "HOME": str(folder)}
        command = [folder / "bin" / "openwandb", "serve", "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )

    def get(self, path: str) -> dict:
        account = b64encode(f"api:{KEY}".encode()).decode()
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Basic {account}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def ready(self) -> bool:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                return bool(self.get("/api/v1/viewer"))
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openwandb")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install(folder, "openwandb", python=folder / "bin" / "python")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(folder, port)
    try:
        if not server.ready():
            pytest.skip("openwandb does not start")
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)


def online(server: Server, *command: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "HYDRA_FULL_ERROR")}
    environment |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def found(server: Server, run_id: str) -> dict:
    """The run as the server has it, once it is finished."""
    deadline = time.monotonic() + 60
    while (content := server.get(f"/api/v2/runs/{run_id}"))["run"]["state"] != "finished":
        assert time.monotonic() < deadline, content["run"]["state"]
        time.sleep(0.5)
    return content["run"] | {"keys": server.get(f"/api/v2/runs/{run_id}/metrics")["keys"]}


def test_an_online_run_arrives_whole(server, tmp_path):
    folder = tmp_path / "run"
    options = [*OPTIONS, "attack=[linear_probe,scaled]", "tracker.mode=online", f"hydra.run.dir={folder}"]
    done = online(server, str(ROOT / "launch.py"), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run goes on" not in done.stderr  # the tracker's own warning; W&B's client says who is logged in
    result = Result.read(folder)
    (log,) = [line for line in (folder / "run.log").read_text().splitlines() if "W&B" in line]
    run_id = log.rpartition("/")[2]
    there = found(server, run_id)
    assert there["display_name"] == "closed_form digits 0-1 seed 4"
    assert {"rir", "curves/step", "curves/probe/harmful", "curves/attack/scaled/accuracy"} <= set(there["keys"])
    summary = json.loads(there["summary_json"])
    assert (summary["rir"], summary["status"]) == (result.metrics["rir"], "completed")
    kinds = {kept["artifact_type"] for kept in server.get(f"/api/v2/runs/{run_id}/artifacts")["artifacts"]}
    assert "model" in kinds


def test_an_offline_run_is_uploaded_by_the_command_that_it_names(server, tmp_path):
    run([*OPTIONS, "evaluation=[rir]", "tracker.mode=offline"], tmp_path / "run")
    (line,) = [line for line in (tmp_path / "run" / "run.log").read_text().splitlines() if "wandb sync" in line]
    command = line.partition("upload with: ")[2].split()
    done = online(server, "-m", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    there = found(server, command[-1].rpartition("-")[2])
    assert json.loads(there["summary_json"])["rir"] == Result.read(tmp_path / "run").metrics["rir"]
