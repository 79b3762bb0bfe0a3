"""The command line, light on purpose (no torch): help, completion and mistakes in arguments are answered at once."""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from immunization import __version__
from immunization.config import CONF, read_yaml
from immunization.errors import ConfigError
from immunization.multirun.callback import SweepSummary
from immunization.terminal import importing, robust_streams
from immunization.training.signals import imported
from immunization.usage import explained, options

_VERBOSE = os.environ.get("HYDRA_FULL_ERROR") == "1"


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Inside, a user's mistake ends the process with one line; HYDRA_FULL_ERROR=1 shows its traceback."""
    try:
        yield
    except Exception as error:
        if _VERBOSE or (said := explained(error)) is None:
            raise
        sys.exit(f"error: {said}")


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
@_in_one_line()
def main(cfg: DictConfig) -> float:
    """One job; returns the metric named by `objective` for Hydra's sweepers, NaN where there is none."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    with importing("importing torch"):
        from immunization.compute.machine import keep_freed_memory
        from immunization.runner import record_failure, run
    imported()
    keep_freed_memory()

    job = HydraConfig.get()
    folder, sweep = Path(job.runtime.output_dir), job.mode == RunMode.MULTIRUN
    overrides = OmegaConf.to_container(job.overrides.task)  # as they were typed, ${...} included

    try:
        result = run(cfg, folder, overrides, quiet=sweep)
    except Exception as error:
        if not sweep:
            raise
        return _failed(folder, record_failure(cfg, folder, error))
    value = result.metrics.get(cfg.objective)
    leads = os.environ.get("RANK", "0") == "0"  # torchrun's other processes measure nothing
    if leads and value is None and any(override.startswith("objective=") for override in overrides):
        close = ", ".join(get_close_matches(str(cfg.objective), result.metrics, 5, 0.0)) or "none"
        why = result.reasons.get(cfg.objective, f"this run has no measure of that name; the closest are: {close}")
        said = f"objective={cfg.objective}: {why} (the run itself is complete)"
        if not sweep:
            raise ConfigError(said)
        return _failed(folder, said)
    return math.nan if value is None else value


def _failed(folder: Path, said: str) -> float:
    """Say what happened to one job of a sweep: the others go on, and the summary at the end counts it."""
    print(f"{folder.name}: error: {said}", file=sys.stderr, flush=True)
    return math.nan


@_in_one_line()
def cli() -> None:
    """The command `immunize`."""
    robust_streams()
    if "--version" in sys.argv[1:]:
        print(f"immunization {__version__}")
        return
    if mistake := _flag_for_option(sys.argv[1:]):
        sys.exit(f"error: {mistake}")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions to us instead of printing a trimmed traceback
    try:
        main()
    except KeyboardInterrupt:
        print(f"error: {SweepSummary.interrupted()}", file=sys.stderr, flush=True)
        sys.exit(130)


def _flag_for_option(arguments: Iterable[str]) -> str | None:
    """What to write instead of `--method x`; None where no argument is like that."""
    for flag in (argument for argument in arguments if argument.startswith("--")):
        key = flag[2:].partition("=")[0]
        group, known = options(key)
        if known:
            return f"{flag}: write {group}=<option> without dashes; available for {group}: {', '.join(known)}"
        if key in read_yaml("config") or options(key.partition(".")[0])[1]:
            return f"{flag}: write {key}=<value> without dashes"
    return None
