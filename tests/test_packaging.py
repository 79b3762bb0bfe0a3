"""What is shipped agrees with itself: configuration files, versions and the wheel."""

import subprocess
import sys
import tomllib
import zipfile

import pytest
from helpers.repository import ROOT
from omegaconf import OmegaConf

CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_a_mapping_without_hidden_characters(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "\t" not in text
    assert OmegaConf.is_dict(OmegaConf.create(text))


def test_one_version_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = OmegaConf.load(ROOT / "CITATION.cff")
    latest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert citation.version == version
    assert latest.startswith(f"## [{version}]")


def test_wheel_holds_the_package_and_its_configuration(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "immunization").rglob("*.py")}
    assert code | {f"immunization/{name}" for name in CONFIGS} <= shipped
    assert {name.split("/")[0] for name in shipped} == {"immunization", wheel.stem.rsplit("-", 3)[0] + ".dist-info"}
