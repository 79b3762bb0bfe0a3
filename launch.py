"""Run immunization experiments: `python launch.py [group=option] [key=value] [-m]`; see `--help` and README.md."""

import math
import os
import sys
from difflib import get_close_matches
from pathlib import Path

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from immunization.config import CONF, check_trust
from immunization.errors import UserError
from immunization.multirun.callback import SweepSummary
from immunization.training.signals import preemptible

_VERBOSE = os.environ.get("HYDRA_FULL_ERROR") == "1"


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> float:
    """One job; returns the metric named by `objective` for Hydra's sweepers, NaN where there is none."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from immunization.runner import run
    from immunization.runs.folder import record_failure

    job = HydraConfig.get()
    sweep = job.mode == RunMode.MULTIRUN
    try:
        check_trust(cfg, job.overrides.task)
        overrides = list(job.overrides.task)
        result = run(cfg, job.runtime.output_dir, overrides, quiet=sweep)
    except Exception as error:
        if sweep:  # recorded in result.json; the other jobs go on, and the summary at the end counts it
            said = record_failure(cfg, Path(job.runtime.output_dir), error)
            print(f"{os.path.basename(job.runtime.output_dir)}: error: {said}", file=sys.stderr, flush=True)
            return math.nan
        if _VERBOSE or not isinstance(error, UserError):
            raise
        sys.exit(f"error: {error}")
    value = result.metrics.get(cfg.objective)
    if value is not None:
        return value
    if any(override.startswith("objective=") for override in job.overrides.task):
        close = ", ".join(get_close_matches(str(cfg.objective), result.metrics, 5, 0.0)) or "none"
        why = result.reasons.get(cfg.objective, f"this run has no measure of that name; the closest are: {close}")
        said = f"error: objective={cfg.objective}: {why} (the run itself is complete)"
        if not sweep:
            sys.exit(said)
        print(f"{os.path.basename(job.runtime.output_dir)}: {said}", file=sys.stderr, flush=True)
    return math.nan


def cli() -> None:
    """`main` with one-line messages for a user's mistakes; HYDRA_FULL_ERROR=1 shows every traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without kappa shows another sign
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions to us instead of printing a trimmed traceback
    try:
        with preemptible():
            if any(argument.startswith("wandb_run=") for argument in sys.argv[1:]):
                from immunization.runner import run
                from immunization.runs.wandb_again import again

                run(*again(sys.argv[1:]), sys.argv[1:])
            else:
                main()
    except KeyboardInterrupt:
        print(f"error: {SweepSummary.interrupted()}", file=sys.stderr, flush=True)
        sys.exit(130)
    except (UserError, HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        if _VERBOSE or (isinstance(error, ValueError) and "group override" not in str(error)):
            raise  # a ValueError is a fault of ours, unless it is how Hydra meets method=null
        sys.exit(f"error: {' '.join(_explain(error).split())}")


def _explain(error: Exception) -> str:
    """The message of an error, with the remedy where Hydra names none."""
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        keys = ", ".join(str(key) for key in cause.parent_node if not str(key).startswith("_"))
        group, _, name = str(cause.full_key).rpartition(".")
        remedy = f"allowed here are {keys}" if keys else f"choose a {group} first"
        having = [path.stem for path in sorted((CONF / group).glob("*.yaml")) if f"\n{name}: " in path.read_text()]
        also = f"; {group}={' and '.join(having)} {'has' if len(having) == 1 else 'have'} it" if having else ""
        return f"there is no key {cause.full_key}; {remedy}{also}"
    if "'hydra/launcher/" in str(error):
        return f"{str(error).splitlines()[0]}: pip install 'immunization[launchers]'"
    if isinstance(error, MissingConfigException):  # a list of options, a tab before each, then where Hydra looked
        found, _, options = str(error).partition("Config search path")[0].partition("Available options in ")
        return found + (f"; available in {', '.join(options.split())}".replace(":,", ":", 1) if options else "")
    if isinstance(error, ValueError):
        return f"{error}: give every group=... the name of an option"
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"{error}; if that is the run folder, move it with hydra.run.dir=... (hydra.sweep.dir=... for -m)"
    return f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error)


if __name__ == "__main__":
    cli()
