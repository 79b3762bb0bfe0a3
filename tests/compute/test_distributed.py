"""Several processes that train one net end where one process ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.processes import wait_for
from helpers.repository import ROOT
from helpers.runs import DEEP
from safetensors.torch import load_file

from immunization import Result, run
from immunization.compute import distributed
from immunization.errors import ConfigError
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.tracker import history
from immunization.theory import regularizers

pytestmark = pytest.mark.trains

NET = (*DEEP, "dtype=float64", "method.epochs=1", "method.batch_size=25", "log_every=1", "threads=1")


def together(processes: int, work: Callable[[int], object]) -> list[int]:
    """Exit codes of forked processes that do `work(rank)` as torchrun would start them; 1 for an exception."""
    if torch.cuda.is_available():
        pytest.skip("a GPU that this process has used is lost to those that it forks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if not child:
            code = 1
            try:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                values = (rank, rank, processes, "127.0.0.1", port)
                os.environ |= dict(zip(names, map(str, values), strict=True))
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115
                work(rank)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:
                print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def assert_same(a: Path, b: Path) -> None:
    """Weights, history and measures agree to 1e-10."""
    weights, others = (load_file(folder / "immunized.safetensors") for folder in (a, b))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-10, atol=1e-10)
    curves, other_curves = history(a), history(b)
    for name, curve in curves.items():
        assert curve["x"] == other_curves[name]["x"]
        assert curve["y"] == pytest.approx(other_curves[name]["y"], rel=1e-9)
    assert Result.read(a).metrics == pytest.approx(Result.read(b).metrics, rel=1e-8)


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ("method=condition_number", "scheduler=cosine")),
        pytest.param(3, ("method=condition_number",), marks=pytest.mark.slow),
        pytest.param(3, ("method=opt_kappa", "method.form=log"), marks=pytest.mark.slow),
        pytest.param(2, ("method=learning_curve_net",), marks=pytest.mark.slow),
    ],
    ids=["2", "3", "opt_kappa", "learning_curve_net"],
)
def test_processes_train_one_net(processes, options, tmp_path):
    run([*NET, *options], folder=tmp_path / "one")
    names = ("many", "1", "2")
    assert together(processes, lambda rank: run([*NET, *options], folder=tmp_path / names[rank])) == [0] * processes
    assert_same(tmp_path / "one", tmp_path / "many")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "many"}  # files of the first process alone
    steps = history(tmp_path / "many")["loss"]["x"]
    assert len(steps) == len(set(steps))


@pytest.mark.slow
def test_a_distributed_run_goes_on_from_its_checkpoint(tmp_path):
    from immunization.training import checkpoint

    options = [*NET, "method=condition_number"]
    run(options, folder=tmp_path / "one")

    def cut(rank: int) -> None:
        taken = checkpoint.Checkpointer.__call__

        def killed(self, now, state):
            taken(self, now, state)
            if now == 5:
                os._exit(9)

        checkpoint.Checkpointer.__call__ = killed
        run([*options, "checkpoint.every=3"], folder=tmp_path / "many")

    assert together(2, cut) == [9, 9]
    assert together(2, lambda rank: run([*options, "resume=true"], folder=tmp_path / "many")) == [0, 0]
    assert_same(tmp_path / "one", tmp_path / "many")


@pytest.mark.parametrize(
    "options",
    [("method.epochs=1",), pytest.param((*NET, "method=imma"), marks=pytest.mark.slow)],
    ids=["linear", "imma"],
)
def test_what_cannot_be_shared_is_refused(options, tmp_path):
    def work(rank: int) -> None:
        with pytest.raises(ConfigError if not rank else SystemExit, match=None if rank else "without torchrun"):
            run(["tracker=none", "figures=false", *options], folder=tmp_path / "run")

    assert together(2, work) == [0, 0]


@pytest.mark.parametrize("processes", [2, 3])
def test_shares_gather_and_factors(processes, tmp_path):
    """Uneven shares; the gradient of a function of all rows; TSQR over batches that not every process has."""
    x = torch.randn(7, 4, dtype=torch.float64)
    weight = torch.randn(4, 3, dtype=torch.float64)

    def value(features: torch.Tensor) -> torch.Tensor:
        return regularizers.r_ill_of_features(features, 3) + regularizers.r_well_of_features(features)

    def gradient(rows: torch.Tensor, combine: Callable) -> torch.Tensor:
        theta = weight.clone().requires_grad_()
        value(combine(rows @ theta)).backward()
        return theta.grad

    whole = gradient(x, lambda features: features)

    def work(rank: int) -> None:
        with distributed.group("cpu"):
            own = gradient(distributed.share(x), distributed.gather)
            torch.distributed.all_reduce(own)
            torch.testing.assert_close(own, whole, rtol=1e-12, atol=1e-12)
            for rows in (x, x[:2]):
                factor = distributed.triangular_factor(rows.split(2)[rank :: distributed.size()], 4)
                expected = torch.linalg.svdvals(rows)
                torch.testing.assert_close(torch.linalg.svdvals(factor)[: len(expected)], expected)
            assert distributed.agree(tmp_path if not rank else None) == tmp_path.resolve()
            assert distributed.agree(None) is None

    assert together(processes, work) == [0] * processes


@pytest.mark.slow
def test_torchrun(tmp_path):
    """The command of the documents, in processes of their own."""
    options = [*NET, "method=condition_number"]
    run(options, folder=tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "launch.py"), *options, "hydra.run.dir=many"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RIR = (i) / (ii)") == 1
    assert_same(tmp_path / "one", tmp_path / "many")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_who_loses_another_process_says_so_and_the_run_goes_on(killed, tmp_path):
    options = [*NET, "method=condition_number", "method.epochs=200", "checkpoint.every=1", "hydra.run.dir=many"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*command, str(ROOT / "launch.py"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as both:
        try:
            wait_for((tmp_path / "many" / CHECKPOINT).exists)
            children = Path(f"/proc/{both.pid}/task/{both.pid}/children").read_text().split()
            rank = f"\0RANK={killed}\0".encode()
            (pid,) = (int(pid) for pid in children if rank in Path(f"/proc/{pid}/environ").read_bytes())
            os.kill(pid, signal.SIGKILL)
            said = both.communicate(timeout=120)[1]
        finally:
            both.kill()
    told = "another process of this training ended, or cannot be reached"
    assert f"{told} (this is process {1 - killed} of 2; what the other one said tells why); resume=true goes on" in said
    assert both.returncode
    if killed:
        result = Result.read(tmp_path / "many")
        assert result.status == "failed"
        assert result.error.startswith(told)
    assert (tmp_path / "many" / CHECKPOINT).exists()
