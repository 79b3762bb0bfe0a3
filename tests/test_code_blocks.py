"""Every code block of the pages is run by a test, or says before it what it needs."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.code_blocks import PAGES, Block, blocks
from helpers.commands import launched
from helpers.images import loader
from helpers.repository import ROOT

import immunization

pytestmark = pytest.mark.trains

BLOCKS = [block for page in PAGES for block in blocks(page)]
EXAMPLES = [path.read_text() for path in (ROOT / "examples").rglob("*.*") if path.suffix in (".py", ".yaml", ".md")]
STARTS = re.findall(r'(?<=block\(")[^"]+|(?<=")torch\.[\w.]+(?=")', (ROOT / "tests" / "test_deploy.py").read_text())
"""Parts of the code of docs/deploy.md that tests/test_deploy.py runs."""


def network() -> dict[str, object]:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=4).eval()
    loaders = {"primary_loader": loader(4, 0, size=32), "harmful_loader": loader(3, 1, size=32)}
    return {"immunization": immunization, "model": model, **loaders}


def matrices() -> dict[str, object]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), rng.integers(0, 2, 60)
    return {"np": np, "x_p": x[:30], "y_p": y[:30], "x_h": x[30:], "y_h": y[30:]}


PYTHON = {
    ("README.md", "immunization.run("): dict,
    ("docs/deploy.md", "# immunized.safetensors"): network,
    ("docs/own_data.md", "np.savez"): matrices,
    ("docs/own_data.md", "load_wine"): dict,
    ("docs/own_model.md", "immunization.immunize("): network,
}
"""Blocks that are run here, by a part of their code, and the names that they use: of those with none, whole runs."""


def run_elsewhere(block: Block) -> bool:
    """Quoted from examples/, which tests/test_examples.py runs, or run by tests/test_deploy.py."""
    if block.language == "sh":
        return all(any(line in example for example in EXAMPLES) for line in map(bare, block.lines))
    if block.page == "docs/deploy.md" and any(start in block.code for start in STARTS):
        return True
    return any("".join(block.code.split()) in "".join(example.split()) for example in EXAMPLES)


def bare(line: str) -> str:
    return line.removeprefix("PYTHONPATH=examples ").removeprefix("export PYTHONPATH=examples")


def run_here(block: Block) -> bool:
    """Whether a test of this module runs it."""
    if block.language == "yaml":
        return block.code.startswith("defaults: [adam@lion")
    if block.language == "python":
        return any(block.page == page and part in block.code for page, part in PYTHON)
    return block.language == "sh" and all(line.startswith("python launch.py ") for line in block.lines)


def test_the_blocks_are_found() -> None:
    assert len(BLOCKS) > 80
    assert sum(block.needs is not None for block in BLOCKS) > 40
    assert {block.language for block in BLOCKS} == {"sh", "python", "yaml"}
    fences = sum(len(re.findall(r"^\s*```\w", page.read_text(), re.M)) for page in PAGES)
    known = sum(len(re.findall(r"^```(?:math|text)$", page.read_text(), re.M)) for page in PAGES)
    assert len(BLOCKS) == fences - known
    assert not re.findall(r"\n\n    (?:python|make|pip|wandb|for) .*", "".join(page.read_text() for page in PAGES))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.code[:30].strip()}")
def test_every_block_is_run_or_says_what_it_needs(block: Block) -> None:
    """Commands with an output are run by tests/test_docs.py."""
    assert block.needs or block.output or run_elsewhere(block) or run_here(block), block.code


@pytest.mark.parametrize(
    ("page", "part"), [pytest.param(*key, marks=[pytest.mark.slow] * (PYTHON[key] is dict)) for key in PYTHON]
)
def test_python_of_the_pages_runs(page: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (code,) = (block.code for block in BLOCKS if block.page == page and part in block.code)
    names = PYTHON[page, part]()
    exec(code, names)
    assert "result" in names or list(tmp_path.iterdir())


def test_the_attacker_in_yaml_runs(tmp_path: Path) -> None:
    (code,) = (block.code for block in BLOCKS if block.language == "yaml" and run_here(block))
    (tmp_path / "conf" / "attack").mkdir(parents=True)
    (tmp_path / "conf" / "attack" / "lion.yaml").write_text(code)
    options = ["attack=[lion]", "attack.lion.steps=4", "evaluation=[rir]", "method.epochs=2", "tracker=none"]
    ended = launched("--config-dir", str(tmp_path / "conf"), *options, "figures=false", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "\n  lion " in ended.stdout


COMMANDS = {
    line: block.page
    for block in BLOCKS
    if block.language == "sh" and not block.needs and not block.output and not run_elsewhere(block)
    for line in block.lines
}


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS, ids=COMMANDS.get)
def test_commands_of_the_pages_run(line: str, tmp_path: Path) -> None:
    ended = launched(*shlex.split(line)[2:], "tracker=none", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.rglob("result.json"))
