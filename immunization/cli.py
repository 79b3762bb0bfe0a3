"""The command line. It does not load torch, so that help, completion and wrong arguments are answered at once."""

import math
import os
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from immunization import __version__
from immunization.checks import CONF, read_yaml
from immunization.compute.compiler import spare_the_compiler
from immunization.config import CHOOSE
from immunization.errors import Preempted, UserError
from immunization.multirun.callback import SweepSummary
from immunization.terminal import importing, robust_streams
from immunization.training.signals import between_runs, imported
from immunization.usage import explained, options

_VERBOSE = os.environ.get("HYDRA_FULL_ERROR") == "1"


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> float:
    """One job; returns the metric named by `objective` for Hydra's sweepers, NaN where there is none."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    spare_the_compiler()
    with importing("importing torch"):
        from immunization.compute.machine import keep_freed_memory
        from immunization.runner import record_failure, run
    imported()
    between_runs()
    keep_freed_memory()

    job = HydraConfig.get()
    folder, sweep = Path(job.runtime.output_dir), job.mode == RunMode.MULTIRUN
    overrides = OmegaConf.to_container(job.overrides.task)  # as they were typed, ${...} included

    def failed(said: object) -> float:
        if not sweep:
            sys.exit(f"error: {said}")
        print(f"{folder.name}: error: {said}", file=sys.stderr, flush=True)
        return math.nan

    try:
        result = run(cfg, folder, overrides, quiet=sweep, ahead=SweepSummary.ahead())
    except Exception as error:
        if sweep:  # recorded in result.json; the other jobs go on, and the summary at the end counts it
            return failed(record_failure(cfg, folder, error))
        if _VERBOSE or not isinstance(error, UserError):
            raise
        return failed(error)
    value = result.metrics.get(cfg.objective)
    leads = os.environ.get("RANK", "0") == "0"  # torchrun's other processes measure nothing
    if leads and value is None and any(override.startswith("objective=") for override in overrides):
        close = ", ".join(get_close_matches(str(cfg.objective), result.metrics, 5, 0.0)) or "none"
        why = result.reasons.get(cfg.objective, f"this run has no measure of that name; the closest are: {close}")
        return failed(f"objective={cfg.objective}: {why} (the run itself is complete)")
    return math.nan if value is None else value


def cli() -> None:
    """`main` with one-line messages for a user's mistakes; HYDRA_FULL_ERROR=1 shows every traceback."""
    robust_streams()
    if "--version" in sys.argv[1:]:
        print(f"immunization {__version__}")
        return
    if mistake := _flag_for_option(sys.argv[1:]):
        sys.exit(f"error: {mistake}")
    # overrides last: Hydra's parser takes none after a flag that stands between them
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word[:1] == "~" or ("=" in word and word[:1] != "-"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions to us instead of printing a trimmed traceback
    try:
        main()
    except (KeyboardInterrupt, Preempted) as end:
        if isinstance(end, KeyboardInterrupt) or SweepSummary.many():  # a run has said it
            print(f"error: {SweepSummary.interrupted()}", file=sys.stderr, flush=True)
        sys.exit(end.code if isinstance(end, Preempted) else 130)
    except TypeError as error:
        if _VERBOSE or "/hydra/" not in _raised_in(error):
            raise
        sys.exit(f"error: {CHOOSE}")
    except (UserError, HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        ours = isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException)
        of_list = ours and "/omegaconf/" in _raised_in(error) and "invalid literal for int" in str(error)
        if _VERBOSE or (ours and not of_list and "group override" not in str(error)):
            raise  # a ValueError is a fault of ours, unless it is how Hydra meets method=null
        if isinstance(error, OSError) and not isinstance(error, HydraException):
            said = f"{error}; if that is the run folder, move it with hydra.run.dir=... (hydra.sweep.dir=... for -m)"
        elif of_list:
            said = f"a list has no key {str(error).rpartition(': ')[2]}; give all of it, as in suite.images=[5,20]"
        elif ours:
            said = f"{error}: give every group=... the name of an option"
        else:
            said = str(error) if isinstance(error, UserError) else explained(error)
        sys.exit(f"error: {' '.join(said.split())}")


def _raised_in(error: Exception) -> str:
    """The file in which an error was raised, with forward slashes."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.replace("\\", "/")


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
