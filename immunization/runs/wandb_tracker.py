"""The Weights & Biases tracker, https://wandb.ai: name, curves, attacks and model of a run."""

import logging
import netrc
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from immunization.checks import Positive, check_value, checked, snake_case
from immunization.runs import files
from immunization.runs.filenames import CONFIG, MODEL_CARD, WEIGHTS
from immunization.runs.interpretation import attack_names, successes
from immunization.runs.numbers import spelled
from immunization.runs.records import SUFFIX
from immunization.runs.result import Result
from immunization.runs.tracker import DataTable, Tracker

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

STEPS = "curves/step"  # what the curves are drawn against: steps of the probe or attack, not of the training
NO_STEPS = ("spectrum/", "/compute", "/excess")
"""In names of curves that are left to result.json: against an index, against operations, and twice as much to send."""
OFFLINE = ("offline", "dryrun", "disabled")
ACCOUNTS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
POINTS = 64  # at most about so many of each curve: thousands of runs have to fit into a project


class Wandb(Tracker):
    """Weights & Biases, by conf/tracker/wandb.yaml: configuration, metrics, curves, pictures, attacks, the model.

    Without an account, or a server that answers in time, the run is an offline one and says so. There is no prompt.
    """

    said: ClassVar[set[str]] = set()  # why runs of this process are offline; the jobs of a multirun say it once

    @checked("tracker/wandb")
    def __init__(
        self,
        project: str,
        entity: str | None,
        mode: Literal["auto", "online", "offline", "disabled"],
        timeout: Positive,
        model: bool | None,
        link: str | None,
    ) -> None:
        modes = Literal["online", "offline", "disabled", "shared", "dryrun", "run"]  # two old names of offline, online
        check_value("WANDB_MODE", os.environ.get("WANDB_MODE") or "online", modes)
        self.project, self.entity, self.mode, self.timeout = project, entity, mode, timeout
        self.model, self.link = model, link
        self.run: Any = None  # a wandb.Run from `start` to `close`
        self.folder = Path()

    @property
    def waits(self) -> bool:  # type: ignore[override]  # read alone
        """Whether the run is an offline one, as far as that is known without importing W&B."""
        if mode := self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE"):
            return mode in OFFLINE
        settings = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb"), "settings")
        kept = (settings, Path("wandb/settings"), *map(Path, _netrcs()))
        return not (any(map(os.environ.get, ACCOUNTS)) or any(path.expanduser().is_file() for path in kept))

    def start(self, folder: Path, config: dict[str, Any], name: str, group: str, tags: list[str]) -> None:
        # W&B's reports about itself, which it sends in offline mode too
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.folder, sweep = folder.resolve(), _sweep()
        config = files.plain(spelled(config))
        if "method" in config:
            config["method"]["name"] = snake_case(config["method"]["_target_"])  # W&B can group runs by it
        init: Callable[..., wandb.Run] = partial(
            wandb.init,
            project=self.project,
            entity=self.entity,
            dir=str(self.folder),  # W&B's service may have been started in another folder
            config=config,
            name=title(config, name, bool(sweep)),
            group=f"{group}-{sweep.name}" if sweep else group,
            job_type=job_type(config),
            tags=tags,
            reinit="create_new",  # a run of the caller's own in this process stays as it is
            settings=self._settings(),
        )
        mode, why = self._mode()
        try:
            self.run = init(mode=mode, **self._name_of(mode, bool(sweep)))
        except wandb.Error as error:
            if mode != "online":
                raise
            why = f"cannot be used online, this run is tracked offline ({str(error).partition(chr(10))[0]})"
            self.run = init(mode="offline", **self._name_of("offline", bool(sweep)))
        if self.run_id not in (None, self.run.id):
            told = "W&B goes on with no offline run: %s takes the place of %s, the steps so far among its own"
            log.warning(told, self.run.id, self.run_id)
        self.run_id = self.run.id
        self.run.define_metric(STEPS, hidden=True, summary="none")
        self.run.define_metric("curves/*", step_metric=STEPS, summary="none")
        if self.run.offline:
            self._say_offline(why, sweep)
        elif self.run.url:
            log.info("W&B: %s", self.run.url)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, result: Result, figures: list[Path]) -> None:
        from wandb import Image, Table

        shown: dict[str, object] = {f"figures/{path.stem}": Image(str(path)) for path in figures}
        header, rows = attack_table(result)
        shown |= {"attacks": Table(columns=[*header], data=rows)} if rows else {}
        self.run.log(shown)
        for row in curve_rows(result):
            self.run.log(row)
        content = result.as_dict()
        known = {name: value for name, value in content["metrics"].items() if value is not None}
        seconds = {f"seconds/{name}": value for name, value in content["seconds"].items()}
        self.run.summary.update(known | seconds | {"status": result.status, "flags": result.flags})
        wanted = self.model if self.model is not None else not _sweep()
        if wanted and (made := model_artifact(result, self.folder)):
            artifact, aliases = made
            logged = self.run.log_artifact(artifact, aliases=aliases)
            if self.link and self.run.offline:  # only a server can link it
                log.warning("W&B is offline, so the model is not linked to %s (tracker.link)", self.link)
            elif self.link:
                self.run.link_artifact(logged, self.link, aliases=aliases)

    def report(self, tables: Mapping[str, DataTable], figures: list[Path], page: Path) -> None:
        from wandb import Html, Image, Table

        shown: dict[str, object] = {
            f"tables/{name}": Table(columns=[*head], data=rows, allow_mixed_types=True)
            for name, (head, rows) in tables.items()
        }
        shown |= {f"figures/{path.stem}": Image(str(path)) for path in figures}
        self.run.log(shown | {"report": Html(str(page))})

    def _say_offline(self, why: str, sweep: Path | None) -> None:
        """Name the command that uploads the run later; on the terminal if being offline is no wish, in run.log else."""
        runs = f"{shlex.quote(str(sweep))}/*/wandb/offline-run-*" if sweep and sweep.is_dir() else None
        command = f"wandb sync {runs or shlex.quote(str(Path(self.run.dir).parent))}"
        aloud = why and not (sweep and why in self.said)
        self.said.add(why)
        log.log(logging.WARNING if aloud else logging.INFO, "W&B %s; upload with: %s", why or "is offline", command)

    def close(self, failed: bool) -> None:
        run, self.run = self.run, None
        if run:
            run.finish(exit_code=int(failed))

    def _mode(self) -> tuple[str, str]:
        """The mode to start in, and why that is offline where nobody asked for it."""
        import wandb

        settings = wandb.setup().settings
        mode = self.mode if self.mode != "auto" else os.environ.get("WANDB_MODE") or settings.mode
        if mode in OFFLINE:
            return mode, ""
        account = settings.api_key or any(map(os.environ.get, ACCOUNTS))
        hosts = [urlsplit(settings.base_url).netloc]
        if settings.base_url == wandb.Settings.model_fields["base_url"].default:
            hosts.append("api.wandb.ai")  # where `wandb login` was before the default server moved
        if account or _in_netrc(hosts):
            return "online", ""
        return "offline", "has no account here (`wandb login`), this run is tracked offline"

    def _name_of(self, mode: str, sweep: bool) -> dict[str, str]:
        """The id of the run and how to go on with it; {} leaves both to W&B.

        An id is used twice only for a run that was online and goes on online: of two offline runs of one id the second
        that is uploaded replaces the first. WANDB_RUN_ID is for one run: W&B's own agents give each job another.
        """
        if self.run_id and mode == "online" and not list(self.folder.glob(f"wandb/offline-run-*-{self.run_id}")):
            return {"id": self.run_id, "resume": "allow"}
        given = os.environ.get("WANDB_RUN_ID")
        if given and sweep and not os.environ.get("WANDB_SWEEP_ID") and given not in self.said:
            self.said.add(given)
            log.warning("WANDB_RUN_ID=%s names one run: every job of this multirun has an id of its own", given)
        if self.run_id or (given and sweep and not os.environ.get("WANDB_SWEEP_ID")):
            return {"id": uuid4().hex[:8]}
        return {}

    def _settings(self) -> "wandb.Settings":
        """Quiet and quick: what this leaves out is in environment.json, config.yaml and run.log."""
        import wandb

        wanted: dict[str, Any] = {
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


def _netrcs() -> list[str]:
    """Where `wandb login` may have left an account."""
    given = os.environ.get("NETRC")
    return [given] if given else ["~/.netrc", "~/_netrc"]


def _in_netrc(hosts: list[str]) -> bool:
    """Whether `wandb login` has left an account for one of `hosts`."""
    for path in map(os.path.expanduser, _netrcs()):
        try:
            accounts = netrc.netrc(path)
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError) as error:
            log.warning("W&B stays offline because %s could not be read: %s", path, error)
            return False
        return any(accounts.authenticators(host) for host in hosts)
    return False


def title(config: Mapping[str, Any], name: str, sweep: bool) -> str:
    """`closed_form digits 0-1 seed 3`; in a sweep the run folder's name in place of the seed."""
    if "method" not in config:
        return name
    data = config.get("dataset", {})
    pair = [data.get(role) for role in ("primary", "harmful")]
    classes = f" {pair[0]}-{pair[1]}" if all(isinstance(label, int) for label in pair) else ""
    last = name if sweep else f"seed {config.get('seed')}"
    return f"{config['method'].get('name')} {data.get('name', '')}{classes} {last}".strip()[:128]


def job_type(config: Mapping[str, Any]) -> str:
    """What a run does: `immunize`, `audit` of a model as it is, or `summary` of many runs."""
    if "method" not in config:
        return "summary"
    return "immunize" if config.get("immunize", True) else "audit"


def curve_rows(result: Result) -> Iterator[dict[str, float]]:
    """The curves over steps, a row a step: `curves/step` and `curves/<name>` of every curve that has a point there."""
    rows: dict[float, dict[str, float]] = {}
    for name, curve in result.as_dict()["curves"].items():
        if not any(part in name for part in NO_STEPS):
            points = list(zip(curve["x"], curve["y"], strict=True))
            for x, y in points[:: len(points) // POINTS + 1] + points[-1:]:
                if y is not None:
                    rows.setdefault(x, {STEPS: x})[f"curves/{name}"] = y
    yield from (rows[x] for x in sorted(rows))


def attack_table(result: Result) -> DataTable:
    """Header and a row an attack: its name, whether it learns the harmful task, and its measures as numbers."""
    learned, rows = successes(result), []
    names = dict.fromkeys(attack_names(result))
    records = [r for r in result.records.where(task="harmful") if r.attack in names and r.stage != "reference"]
    columns = dict.fromkeys((record.measure, record.stage) for record in records)
    for name in names:
        values = {(record.measure, record.stage): record.value for record in records if record.attack == name}
        learns = None if values.get(("final", "immunized")) is None else name in learned
        rows.append([name, learns, *map(values.get, columns)])
    measures = [measure + SUFFIX[stage] for measure, stage in columns]
    return ["attack", "learns", *measures], rows


def model_artifact(result: Result, folder: Path) -> "tuple[wandb.Artifact, list[str]] | None":
    """The weights with card, configuration and result as a version of an artifact, and its aliases; None without."""
    import wandb

    if not (folder / WEIGHTS).is_file():
        return None
    name = re.sub(r"[^\w.-]+", "-", f"immunized-{result.model}-{result.dataset}")[:128]
    facts = {key: getattr(result, key) for key in ("method", "seed", "dataset", "model", "flags")}
    measured = {key: value for key, value in result.as_dict()["metrics"].items() if "/" not in key}
    artifact = wandb.Artifact(name, type="model", metadata=facts | measured)
    for path in (folder / file for file in (WEIGHTS, MODEL_CARD, CONFIG, Result.file)):
        if path.is_file():
            artifact.add_file(str(path), policy="immutable")  # not copied: an offline run uploads it from where it is
    seed = f"seed-{result.seed}"
    return artifact, [result.method, seed, f"{result.method}-{seed}"]
