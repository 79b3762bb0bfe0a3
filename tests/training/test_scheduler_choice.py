"""Where the choice of a scheduler comes from: data set, method, experiment or command line."""

import importlib.util
import re
import sys

import pytest
from helpers.repository import ROOT
from helpers.runs import QUICK
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from immunization.__main__ import start
from immunization.checks import CONF
from immunization.config import compose
from immunization.runs.tracker import history

pytestmark = pytest.mark.trains


@pytest.fixture
def own(tmp_path) -> list[str]:
    """Overrides that add a folder of configurations, in which data set and method have a scheduler of their own."""
    folder = tmp_path / "conf"
    files = {
        "hparams/scheduler/digits/r_ill_only.yaml": "# @package _global_\n# Made up\n"
        "defaults: [/scheduler/cosine@scheduler]\nscheduler: {eta_min: 1.0e-6}\n",
        "hparams/digits/r_ill_only.yaml": "# @package _global_\n# Searched\nmethod: {epochs: 7}\n",
        "experiment/own.yaml": "# @package _global_\ndefaults: [override /scheduler: linear]\n",
        "scheduler/poly.yaml": "_target_: torch.optim.lr_scheduler.PolynomialLR\n_partial_: true\ntotal_iters: 1.0\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [f"hydra.searchpath=[file://{folder}]"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "CosineAnnealingLR"),
        (["scheduler=default"], "CosineAnnealingLR"),
        (["scheduler=none"], None),
        (["scheduler=step"], "StepLR"),
        (["scheduler=poly"], "PolynomialLR"),
        (["experiment=own"], "LinearLR"),
        (["experiment=own", "scheduler=none"], None),
        (["method=imma"], None),
        (["dataset=mnist"], None),
    ],
)
def test_data_set_and_method_may_choose_and_whoever_says_more_wins(own, overrides, name):
    chosen = compose([*own, "method=r_ill_only", *overrides]).scheduler
    assert (chosen and chosen._target_.rpartition(".")[2]) == name
    if not overrides:
        assert (chosen.T_max, chosen.eta_min) == (1.0, 1e-6)
    if name == "StepLR":
        assert set(chosen) == {"_target_", "_partial_", "step_size", "gamma"}


def test_a_chosen_scheduler_stands_in_the_table_of_hyper_parameters(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [override /kind@_global_: linear]\n")
    (tmp_path / "other.yaml").write_text("name: other\n")
    spec = importlib.util.spec_from_file_location("hyperparameters", ROOT / "docs" / "hyperparameters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first, _ = module.rows(tmp_path)
    assert first.startswith("| condition_number | mine | `method.lambda_P=5.0`, ")
    assert first.endswith("`optimizer.lr=0.003`, `scheduler=cosine` |")


@pytest.mark.parametrize("folder", ["paper", "released"])
def test_the_papers_experiments_have_none(folder):
    for path in CONF.glob(f"experiment/{folder}/*.yaml"):
        assert compose([f"experiment={folder}/{path.stem}"]).scheduler is None


def test_a_scheduler_of_ones_own_from_the_command_line(tmp_path, own, monkeypatch):
    options = [*QUICK, "method.epochs=4", "optimizer.lr=1e-3", "scheduler=poly", f"hydra.run.dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["launch.py", "--config-dir", str(tmp_path / "conf"), *options])
    GlobalHydra.instance().clear()
    start()
    assert history(tmp_path / "run")["lr"]["y"] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4], rel=1e-12)


def test_keys_of_a_scheduler_that_is_not_chosen(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch.py", "method=imma", "scheduler.T_max=3"])
    GlobalHydra.instance().clear()
    message = "error: there is no key scheduler.T_max; choose a scheduler first; scheduler=cosine has it"
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        start()
    with pytest.raises(HydraException):
        compose(["scheduler=cosine", "scheduler.gamma=3"])
