"""What the documents say is what the project does: examples run, tables are current, links resolve."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.repository import ROOT

from immunization.config import compose
from immunization.runner import run

pytestmark = pytest.mark.trains

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_tests_that_pages_name_exist() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", pages)) - {"test_resnet"}  # a net
    assert len(named) > 40
    assert named <= set(re.findall(r"def (test_\w+)", tests))


def test_hyperparameters_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("hyperparameters", ROOT / "docs" / "hyperparameters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "hyperparameters.md").read_text() == module.page()


def test_commands_of_the_readme_compose() -> None:
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
    lines = [re.sub("<[^>]*>", "placeholder", line.partition("#")[0]).split() for line in text.splitlines()]
    commands = [line[2:] for line in lines if line[:2] == ["python", "launch.py"]]
    assert len(commands) >= 5
    for command in commands:
        compose([word.partition(",")[0] if "-m" in command else word for word in command if word != "-m"])


@pytest.fixture
def own_method(tmp_path: Path) -> None:
    """The class and the YAML of the README, in the folders that it names."""
    code = next(block for block in blocks("python") if "RWellOnly" in block)
    (tmp_path / "my_methods.py").write_text(code)
    (tmp_path / "my_conf" / "method").mkdir(parents=True)
    (tmp_path / "my_conf" / "method" / "r_well_only.yaml").write_text(blocks("yaml")[0])


@pytest.mark.usefixtures("own_method")
def test_adding_a_method_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    command = [sys.executable, ROOT / "launch.py", "--config-dir", tmp_path / "my_conf", "method=r_well_only"]
    options = [
        "trusted=[my_methods]",
        "tracker=none",
        "figures=false",
        "evaluation=[rir]",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    subprocess.run([*command, *options], check=True, capture_output=True, cwd=tmp_path)
    assert '"method": "r_well_only"' in (tmp_path / "run" / "result.json").read_text()


@pytest.mark.usefixtures("own_method")
def test_the_method_of_the_readme_works_on_a_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = ["method=r_well_only", "trusted=[my_methods]", f"hydra.searchpath=[file://{tmp_path / 'my_conf'}]"]
    quick = ["method.epochs=1", "tracker=none", "figures=false", "evaluation=[rir]"]
    result = run(["experiment=digits_deep", *own, *quick], folder=tmp_path / "run")
    assert (result.status, result.method) == ("completed", "r_well_only")


def test_the_table_of_the_readme_is_what_the_default_run_prints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """To the digit, on every processor; flags, seconds and folder follow."""
    run(["tracker=none", "figures=false"], folder=tmp_path)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (shown,) = (block.splitlines() for block in blocks("text"))
    assert printed[: len(shown)] == shown


def test_python_example_of_the_readme(tmp_path: Path) -> None:
    result = run(["method=closed_form", "dataset.common_range=true", "tracker=none"], folder=tmp_path)
    assert result.metrics["rir"] == pytest.approx(result.metrics["ceiling/rir"], rel=1e-6)
