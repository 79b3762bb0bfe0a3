"""The tracker for Weights & Biases, https://wandb.ai."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from immunization.checks import Positive, checked
from immunization.runs import strict_json
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)


class Wandb(Tracker):
    """Weights & Biases: configuration, live metrics, final measures as the summary, figures as images.

    `mode=auto` is what WANDB_MODE or `wandb offline` ask for, else online. Online needs an account (WANDB_API_KEY or
    `wandb login`) and a server that answers within `timeout` seconds; without either the run is an offline one, which
    `wandb sync` uploads later. There is never a prompt.
    """

    @checked("tracker")
    def __init__(
        self,
        project: str = "immunization",
        entity: str | None = None,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        timeout: Positive = 30.0,
    ) -> None:
        self.project, self.entity, self.mode, self.timeout = project, entity, mode, timeout
        self.run: wandb.Run | None = None
        self.failing = False

    def start(self, folder: Path, config: dict[str, Any], name: str, group: str, tags: list[str]) -> None:
        with self._guard("did not start"):
            # W&B's reports about itself, which it sends in offline mode too
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            import wandb

            init = partial(
                wandb.init,
                project=self.project,
                entity=self.entity,
                dir=str(folder.resolve()),  # W&B's service may have been started in another folder
                config=strict_json.plain(config),
                name=name,
                group=group,
                tags=tags,
                id=self.run_id,
                resume="allow" if self.run_id else None,
                reinit="create_new",  # a run of the caller's own in this process stays as it is
                settings=self._settings(),
            )
            mode = self._mode()
            try:
                self.run = init(mode=mode)
            except wandb.Error as error:
                if mode != "online":
                    raise
                log.warning("W&B cannot be used online, this run is tracked offline: %s", str(error).partition("\n")[0])
                self.run = init(mode="offline")
            self.run_id = self.run.id
            if self.run.offline:
                log.info("W&B is offline; upload the run with: wandb sync %s", Path(self.run.dir).parent)
            elif self.run.url:
                log.info("W&B: %s", self.run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guard("did not take everything"):
            if self.run:
                self.run.log(dict(metrics), step=step)

    def finish(self, result: Result, figures: list[Path]) -> None:
        with self._guard("did not take everything"):
            if self.run:
                from wandb import Image

                content = result.as_dict()
                known = {name: value for name, value in content["metrics"].items() if value is not None}
                seconds = {f"seconds/{name}": value for name, value in content["seconds"].items()}
                self.run.log({f"figures/{path.stem}": Image(str(path)) for path in figures})
                self.run.summary.update(known | seconds | {"status": result.status, "flags": result.flags})

    def report(self, tables: Mapping[str, tuple[list[str], list[list[str]]]], figures: list[Path], page: Path) -> None:
        """Log what sums up many runs: tables (name -> header and rows), PNG figures and an HTML page."""
        with self._guard("did not take everything"):
            if self.run:
                from wandb import Html, Image, Table

                shown = {f"tables/{name}": Table(columns=head, data=rows) for name, (head, rows) in tables.items()}
                shown |= {f"figures/{path.stem}": Image(str(path)) for path in figures}
                self.run.log(shown | {"report": Html(str(page))})

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

    def _mode(self) -> str:
        import wandb

        settings = wandb.setup().settings
        mode = self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or settings.mode
        if mode in ("offline", "dryrun", "disabled"):
            return mode
        account = settings.api_key or any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")))
        hosts = [urlsplit(settings.base_url).netloc]
        if settings.base_url == wandb.Settings.model_fields["base_url"].default:
            hosts.append("api.wandb.ai")  # where `wandb login` was before the default server moved
        return "online" if account or _in_netrc(hosts) else "offline"

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
