"""What every test stands on: one thread per process, no network, the same numbers in every run."""

import ast
import copy
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import ModuleType

gc.disable()  # until the tests are collected: imports make much and leave no garbage

import hydra
import omegaconf
import pytest
import torch
from helpers.images import draw_folder
from helpers.repository import ROOT
from helpers.runs import kill_at
from helpers.victims import colored_pair
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.plugins.config_source import ConfigResult
from hypothesis import settings
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.base import Box, Node
from omegaconf.grammar_parser import parse
from threadpoolctl import threadpool_info
from torch.optim.optimizer import register_optimizer_step_post_hook

from immunization.attacks import patches
from immunization.checks import CONF
from immunization.data.images import ImagePair
from immunization.results import run_figures

torch.set_num_threads(1)
# No deadline: a first call pays for imports and allocation, and the machine may be busy.
settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("reproducible")

_load = OmegaConf.load
_kept = cache(lambda path: pickle.dumps(_load(path)))
_SHIPPED = tuple(f"{folder}{os.sep}" for folder in (CONF, Path(hydra.__file__).parent))


@wraps(_load)
def _load_once(file) -> DictConfig:
    """OmegaConf.load, but each file of conf/ and of Hydra is read once."""
    path = str(file if isinstance(file, str | Path) else file.name)
    return pickle.loads(_kept(path)) if path.startswith(_SHIPPED) else _load(file)


_list, _merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
_listed: dict[tuple, DefaultsList] = {}
_merged: dict[str, bytes] = {}


def _ours(repo: IConfigRepository) -> bool:
    """Whether Hydra looks in conf/ only, and in no folder of a test."""
    return [source.path for source in repo.get_sources()] == ["hydra.conf", str(CONF), ""]


@wraps(_list)
def _list_once(repo, config_name, overrides_list, prepend_hydra, skip_missing) -> DefaultsList:
    """The files that a choice of options leads to, but for each choice once: most tests differ in values only."""
    if not _ours(repo):
        return _list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    options = [override for override in overrides_list if repo.group_exists(override.key_or_group)]
    key = (config_name, *(option.input_line for option in options), prepend_hydra, skip_missing)
    if key not in _listed:
        _listed[key] = _list(repo, config_name, options, prepend_hydra, skip_missing)
    return replace(_listed[key], config_overrides=Overrides(repo, overrides_list).config_overrides)


@wraps(_merge)
def _merge_once(self, defaults, repo) -> DictConfig:
    """The content of these files in one, without the values of the command line, but once; so are Hydra's own, which
    stand before ours."""
    if not _ours(repo):
        return _merge(self, defaults, repo)
    key = repr(defaults)
    if key not in _merged:
        ours = [str(default.config_path).startswith("hydra/") for default in defaults].index(False)
        first = repr(defaults[:ours])
        if first not in _merged:
            _merged[first] = pickle.dumps(_merge(self, defaults[:ours], repo))
        whole = pickle.loads(_merged[first])
        with flag_override(whole, "no_deepcopy_set_nodes", True):
            whole.merge_with(_merge(self, defaults[ours:], repo))
        _merged[key] = pickle.dumps(whole)
    return pickle.loads(_merged[key])


_read, _single = ConfigRepository.load_config, ConfigLoaderImpl._load_single_config
_results: dict[str, ConfigResult | None] = {}
_embedded: dict[str, bytes] = {}


@wraps(_read)
def _read_once(self, config_path) -> ConfigResult | None:
    """A file with its header, in which nobody changes anything once `_single_once` copies it."""
    if not _ours(self):
        return _read(self, config_path)
    if config_path not in _results:
        _results[config_path] = _read(self, config_path)
    found = _results[config_path]
    return copy.deepcopy(found) if config_path == "config" else found  # read before Hydra knows of other folders


@wraps(_single)
def _single_once(self, default, repo) -> ConfigResult:
    """A file at its place in the whole, of which every composition gets its own copy."""
    if not _ours(repo):
        return _single(self, default, repo)
    key = repr(default)
    if key not in _embedded:
        _embedded[key] = pickle.dumps(_single(self, default, repo))
    return pickle.loads(_embedded[key])


@wraps(Box._re_parent)
def _re_parent(self) -> None:
    """Tells what a node holds whose it is; Hydra has OmegaConf tell all of them after every file."""
    content = self.__dict__["_content"]
    held = content.values() if isinstance(content, dict) else content if isinstance(content, list) else [content]
    for node in held:
        if isinstance(node, Node):
            if node.__dict__["_parent"] is not self:
                node._set_parent(self)
            if isinstance(node, Box):
                node._re_parent()


_choices = defaults_list._create_interpolation_map


@wraps(_choices)
def _choices_where_needed(overrides, defaults, self_added) -> DictConfig | None:
    """What ${...} among the defaults of a file stands for; Hydra makes it for files without any, half of its time.

    Without ${defaults...}, a form that is deprecated and not used here.
    """
    return _choices(overrides, [], self_added) if any(d.is_interpolation() for d in defaults) else None


_module_of = inspect.getmodule


@wraps(_module_of)
def _module(thing, _filename=None) -> ModuleType | None:
    """A frame knows its module; inspect goes through the files of all that are imported, for each import of wandb's."""
    name = thing.f_globals.get("__name__") if inspect.isframe(thing) else None
    return sys.modules.get(name) or _module_of(thing, _filename)


OmegaConf.load = _load_once
defaults_list._create_interpolation_map = _choices_where_needed
config_loader_impl.create_defaults_list = _list_once
ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
ConfigRepository.load_config = _read_once
ConfigLoaderImpl._load_single_config = _single_once
Box._re_parent = _re_parent
omegaconf.base.parse = omegaconf._utils.parse = cache(parse)
inspect.getmodule = _module
os.fsync = lambda _: None  # no test takes the power away


FAULTS: Counter[str] = Counter()
FAULT_LINES = {
    "kills": "{} kills survived without a lost or wrong result",
    "bad inputs": "{} bad inputs refused in one line",
    "damaged files": "{} damaged files detected",
    "full disks": "{} full or read-only disks met",
}


def asserts_digits(test: Callable) -> bool:
    """Whether a test compares with a tolerance, with a figure with decimals, or by an order (not of sizes or sets)."""
    source = dedent(inspect.getsource(test))
    asserted = (node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert))
    compared = (node for test in asserted for node in ast.walk(test) if isinstance(node, ast.Compare))
    return bool(re.search(r"approx|(all|is|assert_)close\(|\bagree", source)) or any(
        _of_digits(map(ast.unparse, sides), operator)
        for node in compared
        for sides, operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True)
    )


def _of_digits(sides: Iterable[str], operator: ast.cmpop) -> bool:
    if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return not any(re.match(r"0$|len\(|set\(|\{", side) for side in sides)
    return isinstance(operator, ast.Eq) and any(re.fullmatch(r"-?\d*\.\d+|.*e-\d+", side) for side in sides)


_steps = Counter()
register_optimizer_step_post_hook(lambda *_: _steps.update(["taken"]))


def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    """On the oldest instructions only the tests that hold numbers against numbers: others see the same bits twice."""
    if config.getoption("--oldest"):
        kept = {item for item in items if asserts_digits(item.function)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """What was imported stays: garbage is not looked for in it again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # what a test leaves is little


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or triton complains of what is left at the end of the process


def pytest_configure(config) -> None:
    if config.getoption("--oldest") and (wrong := _not_oldest()):
        raise pytest.UsageError(f"--oldest: the instructions of this processor are in use ({', '.join(wrong)})")


def _not_oldest() -> list[str]:
    """The libraries that compute with more than was asked for, as they see it themselves."""
    import scipy.linalg  # noqa: F401  its OpenBLAS is another one than numpy's

    found = {f"torch: {torch.backends.cpu.get_cpu_capability()}"} - {"torch: DEFAULT"}
    blas = [library for library in threadpool_info() if library["internal_api"] == "openblas"]
    found |= {f"OpenBLAS: {library['architecture']}" for library in blas} - {"OpenBLAS: Nehalem"}
    if torch.backends.mkl.is_available():
        command = [sys.executable, "-c", "import torch; x = torch.ones(9, 9); x @ x"]
        old_processor = {**os.environ, "MKL_VERBOSE": "1"}
        done = subprocess.run(command, env=old_processor, capture_output=True, text=True, check=True)
        found |= set() if "CNR:COMPATIBLE" in done.stdout else {"MKL: not CNR:COMPATIBLE"}
    return sorted(found)


@pytest.fixture(autouse=True)
def _marked(request) -> Iterator[None]:
    """A test that trains and asserts digits is run on the oldest processor's instructions too."""
    before = _steps.total()
    yield
    if request.node.get_closest_marker("trains") is None:
        mark = "pytestmark = pytest.mark.trains"
        assert _steps.total() == before, f"something trains: {request.module.__name__} needs {mark}"


@pytest.fixture
def count() -> Counter:
    """`count["kills"] += 1` once a fault was survived; the summary line at the end has the sums."""
    return FAULTS


def pytest_terminal_summary(terminalreporter) -> None:
    if FAULTS:
        text = ", ".join(line.format(FAULTS[name]) for name, line in FAULT_LINES.items() if FAULTS[name])
        terminalreporter.write_line(f"faults: {text}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw from torch's global generator draw the same numbers in any order and process."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes the whole stack for GPUs that may come


@pytest.fixture(autouse=True)
def _quiet_errors() -> Iterator[None]:
    """start() here asks Hydra for exceptions, which the processes of later tests would show as tracebacks."""
    yield
    os.environ.pop("HYDRA_FULL_ERROR", None)


@pytest.fixture
def cut(monkeypatch) -> Iterator[Callable[[int], None]]:
    """Ends a run at a step as a kill would, without a chance to write anything."""
    yield lambda step: kill_at(step, monkeypatch)
    monkeypatch.undo()


@pytest.fixture
def no_figures(monkeypatch) -> None:
    """They take most of the time of a small run."""
    monkeypatch.setattr(run_figures, "draw", lambda result, folder: [])


@pytest.fixture
def few_patches(monkeypatch) -> None:
    """Who reads images without a net compares patches with 16 others, not 256, chosen of 2000: most of the time."""
    for name, value in {"FILTERS": 16, "IMAGES": 24, "SAMPLE": 2000}.items():
        monkeypatch.setattr(patches, name, value)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Images of a primary task with 4 classes and of a harmful one with 3."""
    root = tmp_path_factory.mktemp("images")
    return draw_folder(root / "primary", 4, 20, 6, 0), draw_folder(root / "harmful", 3, 24, 8, 1)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> list[Path]:
    """Images of a primary and a harmful task and images to keep, 4 classes each."""
    root = tmp_path_factory.mktemp("drawn")
    return [draw_folder(root / name, 4, 20, 4, seed) for seed, name in enumerate(("primary", "harmful", "kept"))]


@pytest.fixture(scope="session")
def colors(tmp_path_factory) -> ImagePair:
    """Images of three colors a task, which no test changes."""
    return colored_pair(tmp_path_factory.mktemp("colors"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data, from the environment variable IMMUNIZATION_DATA (default: `../shared/data`)."""
    folder = Path(os.environ.get("IMMUNIZATION_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set IMMUNIZATION_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def real_images(data_dir, tmp_path_factory) -> list[str]:
    """Options of a run on real images, whose activations tests of one process share: they take minutes."""
    return [f"data_root={data_dir}", f"dataset.cache={tmp_path_factory.mktemp('activations')}"]
