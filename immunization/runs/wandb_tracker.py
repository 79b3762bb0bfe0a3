"""The tracker for Weights & Biases, https://wandb.ai."""

from __future__ import annotations

import logging
import netrc
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from immunization.checks import Positive, check_value, checked
from immunization.runs import files
from immunization.runs import wandb_contents as contents
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

ModeOfWandb = Literal["online", "offline", "disabled", "shared", "dryrun", "run"]
"""What its variable WANDB_MODE may be; the last two are its old names of offline and online."""

DataTable = tuple[list[str], list[list[str | float | bool | None]]]
"""Header and rows."""


class Wandb(Tracker):
    """Weights & Biases: configuration, live metrics, curves, measures as the summary, figures, attacks, the model.

    `mode=auto` is what WANDB_MODE or `wandb offline` ask for, else online. Online needs an account (WANDB_API_KEY or
    `wandb login`) and a server that answers within `timeout` seconds; without either the run is an offline one, which
    `wandb sync` uploads later, and says so. There is never a prompt. `model` says whether the immunized model is kept
    as an artifact (None: unless the run is one of many), `link` to which collection it is linked besides.
    """

    said: ClassVar[set[str]] = set()
    """Why runs of this process are offline; the jobs of a multirun say it once."""

    @checked("tracker")
    def __init__(
        self,
        project: str = "immunization",
        entity: str | None = None,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        timeout: Positive = 30.0,
        model: bool | None = None,
        link: str | None = None,
    ) -> None:
        check_value("WANDB_MODE", os.environ.get("WANDB_MODE") or "online", ModeOfWandb)
        self.project, self.entity, self.mode, self.timeout = project, entity, mode, timeout
        self.model, self.link = model, link
        self.run: wandb.Run | None = None
        self.folder = Path()
        self.failing = False

    def start(self, folder: Path, config: dict[str, Any], name: str, group: str, tags: list[str]) -> None:
        with self._guard("did not start"):
            # W&B's reports about itself, which it sends in offline mode too
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            import wandb

            self.folder, sweep = folder.resolve(), _sweep()
            config = files.plain(config)
            config = contents.with_method_name(config)
            init = partial(
                wandb.init,
                project=self.project,
                entity=self.entity,
                dir=str(self.folder),  # W&B's service may have been started in another folder
                config=config,
                name=contents.title(config, name, bool(sweep)),
                group=f"{group}-{sweep.name}" if sweep else group,
                job_type=contents.job_type(config),
                tags=tags,
                id=self.run_id,
                resume="allow" if self.run_id else None,
                reinit="create_new",  # a run of the caller's own in this process stays as it is
                settings=self._settings(),
            )
            mode, why = self._mode()
            try:
                self.run = init(mode=mode)
            except wandb.Error as error:
                if mode != "online":
                    raise
                why = f"cannot be used online, this run is tracked offline ({str(error).partition(chr(10))[0]})"
                self.run = init(mode="offline")
            self.run_id = self.run.id
            self.run.define_metric(contents.STEPS, hidden=True, summary="none")
            self.run.define_metric("curves/*", step_metric=contents.STEPS, summary="none")
            if self.run.offline:
                self._say_offline(why, sweep)
            elif self.run.url:
                log.info("W&B: %s", self.run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guard("did not take everything"):
            if self.run:
                self.run.log(dict(metrics), step=step)

    def finish(self, result: Result, figures: list[Path]) -> None:
        with self._guard("did not take everything"):
            if self.run:
                from wandb import Image, Table

                shown: dict[str, object] = {f"figures/{path.stem}": Image(str(path)) for path in figures}
                header, rows = contents.attack_table(result)
                if rows:
                    shown["attacks"] = Table(columns=header, data=rows)
                self.run.log(shown)
                for row in contents.curve_rows(result):
                    self.run.log(row)
                content = result.as_dict()
                known = {name: value for name, value in content["metrics"].items() if value is not None}
                seconds = {f"seconds/{name}": value for name, value in content["seconds"].items()}
                self.run.summary.update(known | seconds | {"status": result.status, "flags": result.flags})
        with self._guard("did not take the model"):
            if self.run and (self.model if self.model is not None else not _sweep()):
                self._keep_model(result)

    def report(self, tables: Mapping[str, DataTable], figures: list[Path], page: Path) -> None:
        """Log what sums up many runs: tables (name -> header and rows), PNG figures and an HTML page."""
        with self._guard("did not take everything"):
            if self.run:
                from wandb import Html, Image, Table

                shown: dict[str, object] = {
                    f"tables/{name}": Table(columns=head, data=rows, allow_mixed_types=True)
                    for name, (head, rows) in tables.items()
                }
                shown |= {f"figures/{path.stem}": Image(str(path)) for path in figures}
                self.run.log(shown | {"report": Html(str(page))})

    def _keep_model(self, result: Result) -> None:
        """Upload the model as a version of its artifact; only a server can link it."""
        if not (made := contents.model_artifact(result, self.folder)):
            return
        artifact, aliases = made
        logged = self.run.log_artifact(artifact, aliases=aliases)
        if self.link and self.run.offline:
            log.warning("W&B is offline: the model is not linked to %s (tracker.link)", self.link)
        elif self.link:
            self.run.link_artifact(logged, self.link, aliases=aliases)

    def _say_offline(self, why: str, sweep: Path | None) -> None:
        """Name the command that uploads the run later; on the terminal if being offline is no wish, in run.log else."""
        runs = f"{shlex.quote(str(sweep))}/*/wandb/offline-run-*" if sweep and sweep.is_dir() else None
        command = f"wandb sync {runs or shlex.quote(str(Path(self.run.dir).parent))}"
        aloud = why and not (sweep and why in self.said)
        self.said.add(why)
        log.log(logging.WARNING if aloud else logging.INFO, "W&B %s; upload with: %s", why or "is offline", command)

    def close(self, failed: bool) -> None:
        with self._guard("did not take everything"):
            if self.run:
                self.run.finish(exit_code=int(failed))
        self.run = None

    @contextmanager
    def _guard(self, problem: str) -> Iterator[None]:
        """Turn failures of W&B into one warning."""
        try:
            yield
        except Exception as error:
            level = logging.DEBUG if self.failing else logging.WARNING
            log.log(level, "W&B %s (%s: %s); the run goes on", problem, type(error).__name__, error)
            self.failing = True

    def _mode(self) -> tuple[str, str]:
        """The mode to start in, and why that is offline where nobody asked for it."""
        import wandb

        settings = wandb.setup().settings
        mode = self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or settings.mode
        if mode in ("offline", "dryrun", "disabled"):
            return mode, ""
        account = settings.api_key or any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")))
        hosts = [urlsplit(settings.base_url).netloc]
        if settings.base_url == wandb.Settings.model_fields["base_url"].default:
            hosts.append("api.wandb.ai")  # where `wandb login` was before the default server moved
        if account or _in_netrc(hosts):
            return "online", ""
        return "offline", "has no account here (`wandb login`), this run is tracked offline"

    def _settings(self) -> wandb.Settings:
        """Quiet and quick: what this leaves out stands in environment.json, config.yaml and run.log."""
        import wandb

        wanted = {
            "silent": True,
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "x_disable_meta": True,
            "x_save_requirements": False,
            "init_timeout": self.timeout,
            "finish_timeout": self.timeout,
            "finish_timeout_raises": True,
        }
        known = wandb.Settings.model_fields  # some are newer than the oldest W&B that works, x_ ones may go again
        return wandb.Settings(**{key: value for key, value in wanted.items() if key in known})


def _sweep() -> Path | None:
    """What keeps two sweeps apart: the folder of a multirun, the id of a sweep of W&B; None in single runs."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if sweep := os.environ.get("WANDB_SWEEP_ID"):
        return Path(sweep)
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return Path(HydraConfig.get().sweep.dir).resolve()
    return None


def _in_netrc(hosts: list[str]) -> bool:
    """Whether `wandb login` has left an account for one of `hosts`."""
    given = os.environ.get("NETRC")
    for path in map(os.path.expanduser, [given] if given else ["~/.netrc", "~/_netrc"]):
        try:
            accounts = netrc.netrc(path)
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError) as error:
            log.warning("W&B stays offline, %s cannot be read: %s", path, error)
            return False
        return any(accounts.authenticators(host) for host in hosts)
    return False
