"""The benchmarks run; what they measure is no test, but for portability.py, which fails where answers differ."""

import os
import runpy
import subprocess
import sys

import pytest
import timm
from helpers.repository import ROOT

SMALL = {
    "linear.py": ["--sizes", "house_prices", "--repeats", "1"],
    "deep.py": [
        "--model=test_resnet",
        "--trainable=layer4",
        "--size=32",
        "--batch=8",
        "--batches=2",
        "--repeats=1",
        "--channels-last",
    ],
    "portability.py": ["--small"],
}
TOLD = ("has no linear classifier", "read different features", "cannot read inputs")
"""How nets are refused that cannot be taken."""
EXPECTED = {"portability.py": "the same table"}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_find_what_they_import(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_run(name):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *SMALL[name]]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert EXPECTED.get(name, "condition_number") in run.stdout


@pytest.mark.slow
def test_bounds_are_compared_and_drawn(tmp_path):
    arguments = ["experiment=digits_deep", "method=learning_curve", "method.epochs=2", "--bounds=4,null"]
    command = [sys.executable, str(ROOT / "benchmarks/max_condition.py"), *arguments, "--figure=bounds.png"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # the second takes the runs of the first
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split("|")[1].strip() for line in run.stdout.split("\n")[5:8]] == ["before", "4", "null"]
    assert run.stderr.count("completed before") == 2
    assert (tmp_path / "bounds.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("module", timm.list_modules())
def test_a_net_of_each_module_of_timm_works_or_is_refused(module):
    zoo = runpy.run_path(str(ROOT / "benchmarks/zoo.py"))
    if not timm.list_models(module=module):
        pytest.skip(f"timm has no model in {module}")
    line = zoo["tried"](zoo["pick"](module), 600)
    refused = {line[step] for step in ("made", *zoo["METHODS"], "audit") if line.get(step, "works") != "works"}
    assert all(any(told in reason for told in TOLD) for reason in refused), line
