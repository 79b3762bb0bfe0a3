"""Which device a run takes, with which precision, and what it says when memory ends."""

import os
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from helpers.pretend_gpu import pretended_gpu
from hydra.types import RunMode
from omegaconf import OmegaConf

from immunization import Result, run
from immunization.compute import distributed, machine
from immunization.errors import ConfigError
from immunization.evaluation import Comparison
from immunization.methods import ConditionNumber
from immunization.models.fold import LinearMap

pytestmark = pytest.mark.trains

SHORT = ("dataset.max_samples=40", "tracker=none", "figures=false", "evaluation=[rir]", "method.epochs=2")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_the_cpu_for_small_linear_models(monkeypatch):
    with pretended_gpu():
        assert machine.device_of("auto", 256) == machine.device_of("cpu") == CPU
        assert machine.device_of("auto", 257) == machine.device_of("auto") == machine.device_of("cuda", 2) == GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.device_of("auto") == CPU
    with pytest.raises(ConfigError, match="finds no GPU here; use device=auto or device=cpu"):
        machine.device_of("cuda")


def test_a_small_run_leaves_the_gpu_alone_and_says_so(tmp_path):
    with pretended_gpu() as seen:
        run(SHORT, tmp_path, quiet=True)
    assert not seen["waits"]
    assert OmegaConf.load(tmp_path / "environment.json").device == "cpu"


def test_jobs_of_a_multirun_take_turns(monkeypatch):
    job = SimpleNamespace(mode=RunMode.MULTIRUN, job=SimpleNamespace(num=5))
    monkeypatch.setattr(machine, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: job))
    with pretended_gpu(devices=4):
        assert machine.device_of("auto") == torch.device("cuda", 1)
    with pretended_gpu():
        assert machine.device_of("auto") == GPU


@pytest.mark.parametrize(("devices", "own"), [(4, 2), (1, 0)], ids=["all GPUs visible", "one GPU visible to a rank"])
def test_a_rank_takes_its_gpu_before_it_joins(monkeypatch, devices, own):
    said = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **how: said.append((backend, how)))
    with pretended_gpu(devices):
        monkeypatch.setattr(torch.cuda, "set_device", said.append)
        with distributed.group("cuda"):
            pass
    mine = torch.device("cuda", own)
    assert said == [mine, ("nccl", {"timeout": timedelta(days=1), "device_id": mine})]


def test_float32_is_never_rounded_to_tf32(tmp_path, monkeypatch):
    kinds = torch.backends.cudnn, torch.backends.cuda.matmul
    before, seen, forward = [kind.allow_tf32 for kind in kinds], [], LinearMap.forward

    def watched(self, x):
        seen.extend(kind.allow_tf32 for kind in kinds)
        return forward(self, x)

    monkeypatch.setattr(LinearMap, "forward", watched)
    run([*SHORT, "method=imma"], tmp_path, quiet=True)
    assert seen
    assert not any(seen)
    assert [kind.allow_tf32 for kind in kinds] == before


def test_cublas_is_told_before_its_first_product():
    """cuBLAS reads the variable once per process, whose first job need not be the one that asks for the same bits."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]


@pytest.mark.parametrize(
    ("owner", "name", "said", "kept"),
    [
        (ConditionNumber, "step", "no memory for method.batch_size=None; lower it", False),
        (Comparison, "probe", "no memory for the measures; what was trained is kept: measure it with", True),
    ],
)
def test_a_full_gpu_is_said_in_one_line(tmp_path, monkeypatch, owner, name, said, kept):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(ConfigError, match=said):
        run(SHORT, tmp_path, quiet=True)
    assert said in Result.read(tmp_path).error
    assert (tmp_path / "immunized.safetensors").exists() is kept


def test_threads_are_those_that_the_process_may_use(monkeypatch):
    set_to = []
    monkeypatch.setattr(machine, "set_threads", set_to.append)
    monkeypatch.setattr(machine, "cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine.choose_threads(None, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    machine.choose_threads(None, None)
    machine.choose_threads(None, machine.SMALL)
    machine.choose_threads(7, None)
    assert set_to == [3, 5, 1, 7]


def test_torchs_newer_names_of_precision_may_be_in_use():
    """In a process of its own, where they cannot be left."""
    script = """
import torch
from immunization.compute.machine import full_precision
if hasattr(torch.backends, "fp32_precision"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""
    subprocess.run([sys.executable, "-c", script], check=True)
