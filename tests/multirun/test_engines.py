"""A multirun outlives its jobs: with made launchers here, and marked slow with a real Slurm, a real Ray and joblib."""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.gated import written
from helpers.processes import wait_for
from helpers.repository import ROOT
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from immunization.errors import ConfigError
from immunization.multirun import engines
from immunization.results.collect import collect
from immunization.runs.filenames import CONFIG, LOST, OVERRIDES, RUN_LOG
from immunization.runs.records import Record, Records
from immunization.runs.result import Result

SCRIPT = ROOT / "tests" / "multirun" / "slurm.sh"


def value(number: int) -> JobReturn:
    return JobReturn(status=JobStatus.COMPLETED, _return_value=float(number))


def completed(folder: Path, seed: int) -> None:
    """What a completed run leaves, with an RIR of 10 times its seed."""
    result = Result(seed, "digits", "linear", "identity", status="completed")
    result.records = Records([Record("rir", 10.0 * seed)])
    result.write(folder)
    (folder / CONFIG).write_text(f"seed: {seed}\n")


class Launcher:
    """A launcher of Hydra's kind whose job `breaks` ends it; `launched` has the numbers of the jobs of each call."""

    def __init__(self, folder: Path, breaks: int | None = None) -> None:
        self.folder, self.breaks, self.launched = folder, breaks, []
        self.config = OmegaConf.create(
            {"objective": "rir", "hydra": {"sweep": {"dir": str(folder), "subdir": ""}, "job": {}}}
        )
        self.hydra_context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=self.composed))

    def composed(self, config, job):
        return OmegaConf.merge(config, {"hydra": {"sweep": {"subdir": job[0].partition("=")[2]}}})

    def launch(self, jobs, first):
        self.launched.append([first, len(jobs)])
        for number, job in enumerate(jobs, first):
            (folder := self.folder / str(number)).mkdir()
            (folder / RUN_LOG).touch()
            (folder / OVERRIDES).write_text(OmegaConf.to_yaml(job))
            if number == self.breaks:
                raise RuntimeError("a worker is gone")
            completed(folder, number)
        return [value(first + i) for i in range(len(jobs))]


JOBS = [[f"seed={i}"] for i in range(5)]


def test_a_launcher_that_breaks_off_is_started_again_for_what_had_not_begun(tmp_path, capsys):
    inner = Launcher(tmp_path, breaks=2)
    returns = engines.Outliving(inner).launch(JOBS, 0)
    assert inner.launched == [[0, 5], [3, 2]]
    values = [end.return_value for end in returns]
    assert values[:2] + values[3:] == [0.0, 10.0, 3.0, 4.0]  # what the first ones returned is gone, not their results
    assert math.isnan(values[2])
    assert [path.parent.name for path in tmp_path.glob(f"*/{LOST}")] == ["2"]
    problems = [(problem.folder.name, problem.kind, problem.message) for problem in collect([tmp_path]).problems]
    assert problems == [("2", "lost", "RuntimeError: a worker is gone")]
    assert capsys.readouterr().err == "2: RuntimeError: a worker is gone\n"


def test_a_launcher_that_starts_no_job_loses_all(tmp_path):
    inner = Launcher(tmp_path)
    inner.launch = lambda jobs, first: 1 / 0
    assert all(math.isnan(end.return_value) for end in engines.Outliving(inner).launch(JOBS, 0))
    assert {problem.kind for problem in collect([tmp_path]).problems} == {"lost"}


class Made(engines.Engine):
    """An engine with ends that are known before; a number that is not among them never ends."""

    name, ends = "made", {0: value(0), 1: "its node burnt down", 2: JobReturn(status=JobStatus.FAILED)}
    cancelled = False

    def submit(self) -> str:
        return "into the blue"

    def end(self, number):
        return "cancelled" if self.cancelled else self.ends.get(number)

    def cancel(self) -> None:
        self.cancelled = True


def test_an_engines_words_are_in_the_folders_of_lost_jobs(tmp_path, capsys):
    Made.ends[2]._return_value = ImportError("no module of that name")
    returns = Made(Launcher(tmp_path)).launch(JOBS[:3], 0)
    assert returns[0].return_value == 0.0
    said = {path.parent.name: path.read_text() for path in tmp_path.glob(f"*/{LOST}")}
    assert said == {"1": "its node burnt down", "2": "no module of that name"}
    assert capsys.readouterr().out == "made: 3 jobs submitted, into the blue; Ctrl-C cancels them\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_has_the_engine_cancel_what_is_left(tmp_path, monkeypatch, capsys, number):
    once = []
    monkeypatch.setattr(engines, "end_at_once", lambda: once.append(number))
    launcher = Made(Launcher(tmp_path))
    launcher.look = lambda: os.kill(os.getpid(), number) if not launcher.cancelled else None
    before = [signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as end:
        launcher.launch(JOBS, 0)
    signal.signal(signal.SIGINT, before[1])
    assert signal.getsignal(signal.SIGTERM) is before[0]
    assert (launcher.left, once) == ([], [number])
    assert getattr(end.value, "code", 143) == 143
    assert "made: cancelling" in capsys.readouterr().err


def test_an_engine_that_takes_no_jobs_says_why(tmp_path):
    launcher = Made(Launcher(tmp_path))
    launcher.submit = (tmp_path / "gone").read_text
    with pytest.raises(ConfigError, match=r"made takes no jobs: .*No such file"):
        launcher.launch(JOBS, 0)
    launcher.launch(JOBS[1:], 1)  # a later batch: the earlier one is to be in the table
    assert len(list(tmp_path.glob(f"*/{LOST}"))) == 4


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A Slurm launch of three jobs in which squeue says what the returned file has, and sacct fails."""
    answers = tmp_path / "answers"
    for name, text in {"squeue": f"cat {answers}", "sacct": "echo disabled >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    paths = SimpleNamespace(result_pickle=tmp_path / "none", stderr=tmp_path / "log")
    slurm = engines.Slurm(Launcher(tmp_path / "sweep"))
    slurm.jobs, slurm.params, slurm.over = dict(enumerate(JOBS[:3])), {"cpus_per_task": 9, "mem_gb": 8}, {}
    slurm.executor = SimpleNamespace(
        map_array=lambda *_: [
            SimpleNamespace(job_id=f"7_{i}", num_tasks=1, task=lambda _: SimpleNamespace(paths=paths), paths=paths)
            for i in range(3)
        ]
    )
    slurm.waiting, slurm.function, slurm.logs = {i: (i,) for i in range(3)}, print, tmp_path
    assert slurm.hand_over() == f"7_0 to 7_2; logs in {tmp_path}"
    return slurm, answers


def test_jobs_that_wait_in_the_queue_say_why_once(queue, monkeypatch, capsys):
    slurm, answers = queue
    answers.write_text("7_0|RUNNING|None\n7_1|PENDING|PartitionConfig\n7_2|PENDING|PartitionConfig\n")
    for patience in (math.inf, 0.0, 0.0):
        monkeypatch.setattr(engines, "PATIENCE", patience)
        slurm.due = 0.0
        slurm.look()
    assert [slurm.end(i) for i in range(3)] == [None] * 3
    asked = "2 jobs wait for PartitionConfig; each asks for cpus_per_task=9, mem_gb=8"
    assert capsys.readouterr().err == f"Slurm: {asked}\n"


def test_slurms_word_for_a_lost_job_is_that_of_squeue_and_of_its_log(queue, monkeypatch):
    slurm, answers = queue
    slurm.settling = 0.0
    answers.write_text("7_0|OUT_OF_MEMORY|None\n7_1|FAILED|NonZeroExitCode\n8_2|RUNNING|None\n")
    slurm.look()
    (slurm.logs / "log").write_text("a line\nslurmstepd: error: Exceeded job memory limit\n")
    assert slurm.end(0) == "Slurm job 7_0: OUT_OF_MEMORY: Exceeded job memory limit"
    assert slurm.end(1).startswith("Slurm job 7_1: FAILED (NonZeroExitCode): ")
    assert slurm.end(2).startswith("Slurm job 7_2: squeue does not know it any more")


def test_a_queue_that_does_not_answer_is_asked_again(queue, capsys):
    slurm, _ = queue  # without answers: cat fails
    slurm.look()
    assert slurm.end(0) is None
    assert "answers: No such file or directory; it is asked again until it answers" in capsys.readouterr().err


# --- With real engines ------------------------------------------------------------------------------------------------


class Command:
    """`launch.py -m` with gated jobs in a process of its own, whose output goes to a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self.sweep, self.said = folder, folder / "sweep", folder / "said"
        gates = () if (folder / "conf").exists() else written(folder)
        self.arguments = [*gates, *arguments, "log_every=1", "resume=true", f"hydra.sweep.dir={self.sweep}"]

    def start(self) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        command = [sys.executable, str(ROOT / "launch.py"), "-m", *self.arguments]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background ignores it
        try:
            with self.said.open("w") as said:
                streams = {"stdout": said, "stderr": subprocess.STDOUT}
                return subprocess.Popen(command, cwd=self.folder, env=environment, **streams)
        finally:
            signal.signal(signal.SIGINT, before)

    def gate(self, *numbers: int, says: str = "wait") -> None:
        for number in numbers:
            (self.folder / "gate" / str(number)).write_text(says)

    def opened(self) -> None:
        for gate in (self.folder / "gate").iterdir():
            gate.unlink()

    def of(self, seed: int) -> Path:
        return next(path for path in self.sweep.iterdir() if path.name.endswith(f"seed={seed}"))

    def runs(self, seed: int) -> bool:
        """Whether the job has taken steps; the first line is written before them."""
        return any(path.read_text().count("\n") > 1 for path in self.sweep.glob(f"*seed={seed}/metrics.jsonl"))

    def kill(self, seed: int) -> None:
        """The process that has the job's log open."""
        log = str(self.of(seed) / RUN_LOG)
        for place in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                if place.readlink() == Path(log):
                    os.kill(int(place.parts[2]), signal.SIGKILL)
                    return
        raise AssertionError(f"no process has {log} open")

    def problems(self) -> dict[int, tuple[str, str]]:
        """Kind and message by seed."""
        found = collect([self.sweep]).problems
        return {int(problem.folder.name.rpartition("=")[2]): (problem.kind, problem.message) for problem in found}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    up = subprocess.run([SCRIPT, "up", folder], capture_output=True, text=True, check=False)
    if up.returncode:
        pytest.skip(up.stderr.strip() or up.stdout.strip())
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    yield folder
    del os.environ["SLURM_CONF"]
    subprocess.run([SCRIPT, "down", folder], check=True)


ON_SLURM = ("launcher=submitit_slurm", "hydra.launcher.mem_gb=1", "hydra.launcher.max_num_timeout=0")


@pytest.mark.slow
def test_slurm_with_jobs_cancelled_killed_out_of_memory_and_out_of_time(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    times = ("hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=10")
    command = Command(tmp_path, *ON_SLURM, *times, "seed=range(0,6)")
    command.gate(1, 2, 3, 4)
    process = command.start()
    wait_for(lambda: all(map(command.runs, (1, 2, 3, 4))))
    array = command.said.read_text().partition("scancel ")[2].partition("`")[0]
    subprocess.run(["scancel", f"{array}_1"], check=True)
    command.kill(2)
    command.gate(3, says="memory")
    assert process.wait(300) == 1
    said, problems = command.said.read_text(), command.problems()
    assert "Traceback" not in said
    assert {seed: kind for seed, (kind, _) in problems.items()} == {
        1: "interrupted",
        2: "lost",
        3: "lost",
        4: "interrupted",
    }
    for seed, word in {1: "CANCELLED", 2: "Killed", 3: "memory limit", 4: "timed-out too many times"}.items():
        assert f"Slurm job {array}_{seed}: " in problems[seed][1]
        assert word in problems[seed][1]
    assert "2 completed, 2 interrupted, 2 lost" in said
    assert len((command.sweep / "results.csv").read_text().splitlines()) == 3
    assert "memory limit" in (command.sweep / "report.html").read_text()
    written_at = {seed: (command.of(seed) / Result.file).stat().st_mtime_ns for seed in (0, 5)}

    command.opened()
    assert command.start().wait(300) == 0
    assert "6 completed\n" in command.said.read_text()
    assert written_at == {seed: (command.of(seed) / Result.file).stat().st_mtime_ns for seed in (0, 5)}
    log = (command.of(1) / RUN_LOG).read_text()
    assert "checkpoint after step" in log  # of scancel's SIGTERM, from which it went on
    assert not list(command.sweep.glob(f"*/{LOST}"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_command_cancels_its_jobs_on_slurm(slurm, tmp_path, number, code):
    command = Command(tmp_path, *ON_SLURM, "seed=0,1", "+hydra.launcher.additional_parameters.hold=true")
    process = command.start()
    wait_for(lambda: "jobs wait for JobHeldUser" in command.said.read_text())
    process.send_signal(number)
    assert process.wait(180) == code
    said = command.said.read_text()
    assert "Slurm: cancelling 2 jobs; once more ends at once" in said
    assert "resume=true goes on" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert not subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout


@pytest.mark.slow
def test_ray_with_a_node_stopped_amid_its_job(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    cluster = pytest.importorskip("ray.cluster_utils").Cluster
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    nodes = cluster(initialize_head=True, head_node_args=node)
    try:
        second = nodes.add_node(**node)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        command = Command(tmp_path, "launcher=ray", "seed=range(0,4)")
        command.gate(0, 1)
        process = command.start()
        wait_for(lambda: command.runs(0) and command.runs(1))
        nodes.remove_node(second, allow_graceful=False)
        time.sleep(2)
        command.opened()
        assert process.wait(300) == 1
        said, problems = command.said.read_text(), command.problems()
        assert f"the cluster at {nodes.address}: 2 nodes, 2 cores" in said
        assert "Traceback" not in said
        assert "3 completed, 1 " in said
        ((kind, message),) = problems.values()
        assert kind in ("lost", "interrupted")
        assert "Ray: NodeDiedError" in message or "Ray: WorkerCrashedError" in message
        assert command.start().wait(300) == 0
        assert "4 completed\n" in command.said.read_text()
    finally:
        nodes.shutdown()


@pytest.mark.slow
def test_joblib_with_a_process_killed_amid_its_job(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    command = Command(tmp_path, "launcher=joblib", "hydra.launcher.n_jobs=2", "seed=range(0,4)")
    command.gate(0, 1)
    process = command.start()
    wait_for(lambda: command.runs(0) and command.runs(1))
    command.kill(0)
    time.sleep(1)
    command.opened()
    assert process.wait(300) == 1
    problems = command.problems()
    assert problems[0][0] == "lost"
    assert all("TerminatedWorkerError" in message for _, message in problems.values())
    assert {0} <= problems.keys() <= {0, 1}  # joblib ends the other process, too
    assert command.start().wait(300) == 0
    assert "4 completed\n" in command.said.read_text()


@pytest.mark.slow
def test_a_signal_to_the_command_has_local_jobs_write_checkpoints(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    cores = len(os.sched_getaffinity(0))
    command = Command(tmp_path, "launcher=submitit_local", f"seed=range(0,{cores + 2})")
    command.gate(*range(cores + 2))
    process = command.start()
    wait_for(lambda: all(map(command.runs, range(cores))))
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 143
    said = command.said.read_text()
    assert f"submitit: {cores + 2} jobs submitted, at most {cores} at once" in said
    assert f"0 completed, {cores} interrupted" in said
    assert "Traceback" not in said
    assert len(list(command.sweep.glob("*/checkpoint.pt"))) == cores
    command.opened()
    assert command.start().wait(300) == 0
