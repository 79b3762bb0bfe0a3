"""`python benchmarks/gpu.py`, which waits for a machine with a GPU, runs on a pretended one, and says so without."""

import importlib
import json

import pytest
import torch
from helpers.pretend_gpu import pretended_gpu
from helpers.repository import ROOT

pytestmark = pytest.mark.trains


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_without_a_gpu_it_says_so(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "torch finds no GPU here: nothing to measure\n"


@pytest.mark.slow
def test_the_quick_form(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "ACTIVITIES", gpu.ACTIVITIES[:1])  # no kernel of a pretended GPU can be traced
    with pretended_gpu():
        assert gpu.main(["--quick", "--out", str(tmp_path), "--data", "method.epochs=2", *gpu.SMALL]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert all(row["agrees"] for row in report["agreement"])
    assert {row["method"] for row in report["agreement"]} == set(gpu.METHODS)
    assert all(row["steps/s, GPU"] > 0 for row in report["linear"])
    assert [row["runs"] for row in report["table2"]] == [2, 1, 2, 1]
    assert not any("failed" in row for row in report["nets"])
    assert (tmp_path / "gpu.md").read_text().count("\n### ") == 4
