"""A multirun outlives its jobs: whatever engine runs them elsewhere, what is lost is recorded and the others go on.

Launchers of Hydra end with the first job that does not return. Here every job is asked for what became of it.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from immunization.errors import ConfigError, Preempted, UserError
from immunization.runs.filenames import LOST, OVERRIDES, RUN_LOG
from immunization.training.signals import end_at_once

PATIENCE = 30.0
"""Seconds that jobs wait in Slurm's queue before a message says why."""
FAREWELL = 20.0
"""Seconds that jobs which were told to stop have for a checkpoint before the command ends without them."""
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("CONFIGURING", "COMPLETING", "RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")


def outlive() -> None:
    """From here on the launchers that Hydra makes of its plugins are `Outliving` ones."""
    made = Plugins.instantiate_launcher

    def instantiate_launcher(plugins: Plugins, *args: Any, **options: Any) -> Launcher:
        launcher = made(plugins, *args, **options)
        plugin = type(launcher).__module__.startswith("hydra_plugins.hydra_")  # others run jobs in this process
        return ENGINES.get(type(launcher).__name__, Outliving)(launcher) if plugin else launcher

    setattr(Plugins, "instantiate_launcher", instantiate_launcher)  # noqa: B010


class Outliving(Launcher):
    """A launcher that returns something for every job, NaN for one that was lost; `inner` is Hydra's own.

    This one is for launchers that come back once all jobs have, and break off with the first one that is lost.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.jobs: dict[int, list[str]] = {}  # of this launch, by number
        self.ended: dict[int, JobReturn] = {}

    def setup(self, **options: Any) -> None:
        self.inner.setup(**options)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.jobs, self.ended = {initial_job_idx + i: [*job] for i, job in enumerate(job_overrides)}, {}
        before = signal.signal(signal.SIGTERM, _preempted)
        try:
            self.run()
        except (KeyboardInterrupt, Preempted):
            end_at_once()
            self.stop()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        return [self.ended[number] for number in self.jobs]

    @property
    def left(self) -> list[int]:
        return [number for number in self.jobs if number not in self.ended]

    def run(self) -> None:
        """Until every job has ended: those that had not begun when the launcher broke off are launched again."""
        from immunization.results.rows import overrides_of
        from immunization.runs.result import Result

        while left := self.left:
            began, block = time.time(), [number for i, number in enumerate(left) if number == left[0] + i]
            try:
                returns = self.inner.launch([self.jobs[number] for number in block], block[0])
                self.ended |= {number: self.returned(number, end) for number, end in zip(block, returns, strict=True)}
                continue
            except (UserError, HydraException, OmegaConfBaseException):
                raise
            except Exception as error:
                word = f"{type(error).__name__}: {_words(error)}"
            logs = Path(self.inner.config.hydra.sweep.dir).glob(f"*/{RUN_LOG}")
            begun = {frozenset(overrides_of(log.parent)): log.parent for log in logs if log.stat().st_mtime > began - 1}
            known = {number: begun[job] for number in block if (job := frozenset(self.jobs[number])) in begun}
            for number in known or block:
                over = known and (known[number] / Result.file).exists() and not Result.read(known[number]).interrupted
                self.ended[number] = self.measured(number, known[number]) if over else self.returned(number, word)

    def stop(self) -> None:
        """After Ctrl-C or SIGTERM: such launchers have ended their processes by themselves."""

    def returned(self, number: int, end: JobReturn | str) -> JobReturn:
        """What a job returned; NaN where `end` is a word for how it was lost, which is written into its folder."""
        if isinstance(end, JobReturn):
            if end.status is JobStatus.COMPLETED:
                return end
            end = _words(end._return_value)
        from immunization.runs import files
        from immunization.runs.result import Result

        config = self.composed(number)
        folder = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
        if Result.completed_in(folder):
            return self.measured(number, folder)
        print(f"{folder.name}: {end}", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / LOST, end)
        if not (folder / OVERRIDES).exists():
            files.write(folder / OVERRIDES, OmegaConf.to_yaml(self.jobs[number]))
        return _return(self.jobs[number])

    def measured(self, number: int, folder: Path) -> JobReturn:
        """What a job would have returned, from its result."""
        from immunization.runs.result import Result

        value = Result.read(folder).metrics.get(self.inner.config.objective)
        return _return(self.jobs[number], math.nan if value is None else value)

    def composed(self, number: int) -> DictConfig:
        """The configuration of a job."""
        config = self.inner.hydra_context.config_loader.load_sweep_config(self.inner.config, self.jobs[number])
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, f"job_{number}"
        return config


class Engine(Outliving):
    """One that can be asked for each job, and to cancel them; subclasses say how."""

    name = ""
    cancelling = "Ctrl-C cancels them"

    def submit(self) -> str:
        """Hand over all jobs; returns what to say of it."""
        raise NotImplementedError

    def look(self) -> None:
        """What there is to do before `end` is asked for every job."""

    def end(self, number: int) -> JobReturn | str | None:
        """What a job returned, or the engine's word for how it was lost; None while there is hope."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Have what is left end, running jobs after a checkpoint."""

    def run(self) -> None:
        try:
            said = self.submit()
        except (RuntimeError, OSError, ValueError) as error:
            word = f"{self.name} takes no jobs: {_words(error)}"
            if not min(self.jobs):
                raise ConfigError(word) from error
            self.ended = {number: self.returned(number, word) for number in self.jobs}
            return
        print(f"{self.name}: {len(self.jobs)} jobs submitted, {said}; {self.cancelling}", flush=True)
        while self.left:
            self.look()
            self.ended |= {number: self.returned(number, end) for number in self.left if (end := self.end(number))}
            time.sleep(max(0.5, len(self.left) / 200) if self.left else 0)  # results are files, all on one disk

    def stop(self) -> None:
        self.say(f"cancelling {len(self.left)} jobs; once more ends at once")
        try:
            self.cancel()
        except (OSError, subprocess.SubprocessError) as error:
            self.say(f"{_words(error)}; {self.cancelling}")
        deadline = time.monotonic() + FAREWELL
        while self.left and time.monotonic() < deadline:
            self.look()
            self.ended |= {number: _return(self.jobs[number]) for number in self.left if self.end(number)}
            time.sleep(0.5)
        if self.left:
            self.say(
                f"{len(self.left)} jobs have not ended yet, {min(self.left)} to {max(self.left)}; {self.cancelling}"
            )

    def say(self, line: str) -> None:
        print(f"{self.name}: {line}", file=sys.stderr, flush=True)


class Submitit(Engine):
    """Jobs of hydra-submitit-launcher, in processes of this machine: as many at once as there are cores for."""

    name = "submitit"
    settling = 1.0  # seconds in which the result of a job appears on a shared disk, or the job in the queue again

    def submit(self) -> str:
        from submitit import AutoExecutor

        kept: list[Any] = []  # the executor as the launcher sets it up, what it runs, and arguments for each job

        def keep(*parts: Any) -> list[Any]:
            kept.extend(parts)
            return []

        map_array = AutoExecutor.map_array
        setattr(AutoExecutor, "map_array", keep)  # noqa: B010
        try:
            self.inner.launch(list(self.jobs.values()), min(self.jobs))
        finally:
            setattr(AutoExecutor, "map_array", map_array)  # noqa: B010
        self.executor, self.function, *columns = kept
        self.waiting = dict(zip(self.jobs, zip(*columns, strict=True), strict=True))
        self.handles: dict[int, Any] = {}
        self.over: dict[int, float] = {}  # since when a job has ended without a result
        self.logs, self.params = Path(self.inner.params["submitit_folder"]).parent, self.inner.params
        return self.hand_over()

    def hand_over(self) -> str:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.most = max(1, cores // (self.params.get("cpus_per_task") or 1))
        return f"at most {self.most} at once; logs in {self.logs}"

    def look(self) -> None:
        free = self.most - len(self.handles.keys() - self.ended.keys())
        for number in list(self.waiting)[: max(0, free)]:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's Ctrl-C this command alone hears,
            try:
                self.handles[number] = self.executor.submit(self.function, *self.waiting.pop(number))
            finally:
                signal.signal(signal.SIGINT, before)  # and tells the jobs, once

    def end(self, number: int) -> JobReturn | str | None:
        if (job := self.handles.get(number)) is None:
            return None
        if all(job.task(i).paths.result_pickle.exists() for i in range(job.num_tasks)):
            try:
                return job.results()[0]
            except Exception as error:  # what the job raised, with its traceback
                return _words(error)
        now = time.monotonic()
        if not (word := self.ending(job)):
            self.over.pop(number, None)
        elif now - self.over.setdefault(number, now) >= self.settling:
            return f"{self.name} job {job.job_id}: {word}{_said(job.paths.stderr)}"
        return None

    def ending(self, job: Any) -> str:
        """How a job without a result has ended; nothing while it runs."""
        return "" if job.get_info()["jobState"] == "RUNNING" else f"its process ended, see {job.paths.stderr}"

    def cancel(self) -> None:
        self.ended |= {number: _return(self.jobs[number]) for number in self.waiting}
        self.waiting.clear()
        for number in self.left:
            with suppress(ProcessLookupError):
                os.kill(int(self.handles[number].job_id), signal.SIGTERM)


class Slurm(Submitit):
    """Jobs of hydra-submitit-launcher on a cluster, as one array; squeue knows them, also without accounting."""

    name, array = "Slurm", ""
    settling = 10.0

    def hand_over(self) -> str:
        jobs = self.executor.map_array(self.function, *zip(*self.waiting.values(), strict=True))
        self.handles, self.array = dict(zip(self.waiting, jobs, strict=True)), jobs[0].job_id.partition("_")[0]
        self.states: dict[str, list[str]] = {}
        self.told: set[str] = set()
        self.began = self.due = time.monotonic()
        self.cancelling = f"Ctrl-C or `scancel {self.array}` cancels them"
        return f"{jobs[0].job_id} to {jobs[-1].job_id}; logs in {self.logs}"

    def look(self) -> None:
        """Ask squeue for the state of every job, and sacct for those that it has forgotten."""
        waited = time.monotonic() - self.began
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + min(30.0, max(2.0, waited / 10))
        ids = {self.handles[number].job_id for number in self.left}
        known, wrong = _rows(ids, "squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T|%r")
        if wrong:
            self.once(f"{wrong}; it is asked again until it answers")
            return
        if missing := ids - known.keys():
            known |= _rows(missing, "sacct", "-X", "-n", "-P", "-j", self.array, "-o", "JobID,State,Reason")[0]
        self.states = {name: known.get(name, ["squeue does not know it any more", ""]) for name in ids}
        reasons = Counter(reason for state, reason in self.states.values() if state in QUEUED)
        keys = [key for key in ("partition", "cpus_per_task", "mem_gb", "gpus_per_node") if self.params.get(key)]
        for reason, count in reasons.items() if waited >= PATIENCE else ():
            asked = ", ".join(f"{key}={self.params[key]}" for key in keys)
            self.once(f"{count} jobs wait for {reason}; each asks for {asked}", reason)

    def once(self, line: str, key: str = "") -> None:
        if (key or line) not in self.told:
            self.say(line)
        self.told.add(key or line)

    def ending(self, job: Any) -> str:
        state, reason = self.states.get(job.job_id, ["PENDING", ""])
        why = "" if reason in ("", "None") else f" ({reason})"
        return "" if state in (*QUEUED, *RUNNING) else f"{state}{why}"

    def cancel(self) -> None:
        self.began, self.settling = time.monotonic(), 0.0
        if self.array:
            self.due = 0.0
            subprocess.run(["scancel", self.array], check=True)


class Ray(Engine):
    """Jobs as tasks of Ray: on the cluster that RAY_ADDRESS names or that runs here, else on one of their own."""

    name = "Ray"

    def submit(self) -> str:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of different jobs are not the same
        import ray
        from hydra_plugins.hydra_ray_launcher._launcher_util import launch_job_on_ray

        where, inner = self.joined(dict(self.inner.ray_cfg.init)), self.inner
        signal.signal(signal.SIGTERM, _preempted)  # again: Ray's own handler prints its stack and dies
        parts, state = (inner.hydra_context, inner.ray_cfg.remote), Singleton.get_state()
        self.tasks = {n: launch_job_on_ray(*parts, self.composed(n), inner.task_function, state) for n in self.jobs}
        cores, nodes = ray.cluster_resources().get("CPU", 0), sum(node["Alive"] for node in ray.nodes())
        return f"to {where}: {nodes} nodes, {cores:.0f} cores"

    def joined(self, options: dict[str, Any]) -> str:
        """Connect, and say with what. Raises ConnectionError where an address was given and nothing answers."""
        import ray

        # a worker of a cluster that runs knows neither this package nor what relative paths refer to
        variables, folder = {"PYTHONPATH": os.environ["PYTHONPATH"]}, os.getcwd()
        environment = {"env_vars": variables, "worker_process_setup_hook": lambda: os.chdir(folder)}
        options = {"runtime_env": environment, "ignore_reinit_error": True} | options
        memory, address = options.pop("object_store_memory", 78_643_200), options.pop("address", None)
        try:
            ray.init(address=address or "auto", **options)
        except ConnectionError:
            if address or "RAY_ADDRESS" in os.environ:
                raise
            ray.init(address="local", object_store_memory=memory, **options)
            return "a Ray of its own, as none runs here"
        return f"the cluster at {ray.get_runtime_context().gcs_address}"

    def look(self) -> None:
        import ray

        tasks = [self.tasks[number] for number in self.left]
        self.ready = {*ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]}

    def end(self, number: int) -> JobReturn | str | None:
        import ray

        if self.tasks[number] not in self.ready:
            return None
        try:
            return ray.get(self.tasks[number])
        except Exception as error:
            return f"Ray: {type(error).__name__}: {_words(error)}"

    def cancel(self) -> None:
        import ray

        for number in self.left:
            ray.cancel(self.tasks[number])


ENGINES: dict[str, type[Engine]] = {"SlurmLauncher": Slurm, "LocalLauncher": Submitit, "RayLauncher": Ray}


def _preempted(number: int, _: object) -> None:
    raise Preempted(128 + number)


def _return(job: Sequence[str], value: float = math.nan) -> JobReturn:
    return JobReturn(overrides=job, status=JobStatus.COMPLETED, _return_value=value)


def _rows(ids: set[str], *command: str) -> tuple[dict[str, list[str]], str]:
    """State and reason of some jobs as `command` tells them, and what went wrong with it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = (line.split("|") for line in done.stdout.splitlines())
    wrong = f"{command[0]}: {' '.join(done.stderr.split())}" if done.returncode else ""
    return {name: told for name, *told in rows if name in ids}, wrong


def _words(error: BaseException) -> str:
    """An error in one line, without the traceback that it quotes."""
    text = re.sub(r"(?s)^.*Traceback \(most recent call last\):\n(?: .*?\n)*(?=\S)|\n-{5,}\n.*", "", str(error))
    return " ".join(text.split())[:400] or type(error).__name__


def _said(log: Path) -> str:
    """The last two errors in the log of a job of Slurm, after a colon; nothing where there are none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return ": " + "; ".join(errors[-2:]) if errors else ""
