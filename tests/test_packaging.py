"""What is shipped agrees with itself: configuration files, versions and the wheel."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers.repository import ROOT
from omegaconf import OmegaConf

CONFIGS = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml") if path.name != "local.yaml"
)


def test_configs_are_mappings_without_hidden_characters():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in CONFIGS}
    assert [name for name, text in texts.items() if "\t" in text] == []
    assert [name for name, text in texts.items() if not isinstance(yaml.safe_load(text) or {}, dict)] == []


def test_one_version_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = OmegaConf.load(ROOT / "CITATION.cff")
    latest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert citation.version == version
    assert latest.startswith(f"## [{version}]")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_package_and_its_configuration(wheel):
    shipped = set(zipfile.ZipFile(wheel).namelist())
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "immunization").rglob("*.py")}
    assert code | {f"immunization/{name}" for name in CONFIGS} <= shipped
    folders = {"immunization", "hydra_plugins", wheel.stem.rsplit("-", 3)[0] + ".dist-info"}
    assert {name.split("/")[0] for name in shipped} == folders
    assert "immunization/conf/local.yaml" not in shipped
    for_agents = {f"immunization/conf/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("sweeps/wandb/*.yaml")}
    assert len(for_agents) == 3
    assert for_agents <= shipped


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh environment in which nothing but the wheel is installed; it sees this one's packages."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, system_site_packages=True)
    programs = home / "bin"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True)
    return programs


@pytest.mark.slow
def test_everything_runs_from_the_wheel(installed, tmp_path):
    """Single runs, multiruns, named sweeps, YAML files of one's own: without the repository."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    quick = ["tracker=none", "dataset.max_samples=20", "evaluation=[rir]", "figures=false"]

    def call(*arguments: str, start: tuple[str, ...] = ("immunize",)) -> str:
        command = [installed / start[0], *start[1:], *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [installed / "python", "-c", "import immunization; print(immunization.__file__)"]
    assert str(installed.parent) in subprocess.check_output(where, cwd=tmp_path, env=environment, text=True)
    assert call("--version") == call("--version", start=("python", "-m", "immunization"))
    assert "== Examples ==" in call("--help")
    assert "RIR" in call(*quick)
    assert "2 completed" in call("-m", "seed=0,1", *quick)
    assert "2 completed" in call("sweeps=seeds", "seed=3,4", "launcher=joblib", *quick)
    own = tmp_path / "mine" / "experiment" / "short.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\nname: short\nmethod: {epochs: 1}\n")
    assert "RIR" in call("--config-dir", "mine", "experiment=short", *quick)
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"digits", "short"}
