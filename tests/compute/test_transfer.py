"""What a GPU reads: the rows are right, they are read ahead, and nothing waits for them."""

import math
from types import SimpleNamespace

import joblib
import pytest
import torch
from helpers.methods import make_pair
from helpers.pretend_gpu import pretended_gpu

from immunization.compute import machine
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Comparison
from immunization.models import Linear
from immunization.training.batches import batches_of

pytestmark = pytest.mark.trains

CHUNKS = [torch.tensor([3, 0]), torch.tensor([1, 1, 2]), torch.tensor([4])]


@pytest.mark.parametrize("chunks", [CHUNKS, CHUNKS[:1], []], ids=len)
def test_rows_are_those_asked_for(chunks):
    x = torch.randn(5, 2, 3)
    expected = [x[rows] for rows in chunks]
    for found in (list(machine.gathered(x, chunks, torch.device("cpu"))), read_by_a_gpu(x, chunks)):
        assert len(found) == len(expected)
        assert all(torch.equal(part, wanted) for part, wanted in zip(found, expected, strict=True))


def read_by_a_gpu(x, chunks):
    with pretended_gpu() as seen:
        parts = list(machine.gathered(x, chunks, torch.device("cuda", 0)))
        assert not seen["waits"]
        assert all(part.is_cuda for part in parts)
        return [part.cpu() for part in parts]


def test_the_next_rows_are_read_while_a_step_is_taken(monkeypatch):
    read, select = [], torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *given, **room: read.append(given[2]) or select(*given, **room))
    with pretended_gpu():
        parts = machine.gathered(torch.randn(5, 2), CHUNKS, torch.device("cuda", 0))
        next(parts)
        parts.close()
    assert [rows.tolist() for rows in read] == [[3, 0], [1, 1, 2]]


def test_a_quarter_of_the_free_memory_is_taken():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with pretended_gpu():
        free = torch.cuda.mem_get_info()[0]
        assert [machine.room(gpu, most) for most in (math.inf, free, 5)] == [free / 4, free / 4, 5]
        assert machine.room(cpu, 5) == 5


@pytest.mark.parametrize("free", [0, 2**30])
def test_measures_keep_features_where_they_fit(monkeypatch, free):
    """What a GPU has free is asked once: features that are kept are not thrown away because they take memory."""
    pair = make_pair()
    model = Linear(pair).double()
    expected = Comparison(pair, model).sigma("harmful", "train", "immunized")
    with pretended_gpu():
        asked = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: asked.append(free) or (free, free))
        pair = pair.to("cuda", torch.float64)
        comparison = Comparison(pair, Linear(pair))
        for _ in range(2):
            comparison.features("harmful", "train", "immunized")
        assert len(asked) == 1
        assert (("features", "harmful", "train") in comparison._once) is bool(free)
        found = comparison.sigma("harmful", "train", "immunized").cpu()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def activations(name):
    x, y = torch.randn(12, 3, 2), torch.arange(12) % 2
    empty = Split(x[:0], y[:0])
    return Task(name, Split(x, y), empty, empty, classes=2, width=4)


@pytest.mark.parametrize("fits", [True, False])
def test_activations_are_kept_on_the_gpu_where_they_fit(monkeypatch, caplog, fits):
    """In both cases a step reads the rows that it reads on the CPU, and waits for none of them."""
    caplog.set_level("INFO")
    pair, model = TaskPair("pair", activations("primary"), activations("harmful")), SimpleNamespace(loaders=None)

    def read(device):
        batches = batches_of(model, pair.to(device, torch.float32), 4, torch.Generator().manual_seed(0))
        return [batch.x for both in batches.epoch() for batch in both]

    expected = read("cpu")
    with pretended_gpu() as seen:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**30 if fits else 0, 2**30))
        found = read("cuda")
        assert seen["to_gpu"]
        assert all(torch.equal(part.cpu(), wanted) for part, wanted in zip(found, expected, strict=True))
    assert ("are kept on the GPU" in caplog.text) is fits


@pytest.mark.parametrize(
    ("device", "how", "workers"),
    [
        ("cpu", {}, 0),
        ("cuda", {}, 6),
        ("cuda", {"loaders": 2}, 3),
        ("cuda", {"images": machine.FEW_IMAGES - 1}, 0),
        ("cuda", {"drawn": True}, 0),
        ("cuda", {"drawn": True, "workers": 2}, 2),
        ("cuda", {"workers": 40, "loaders": 2}, 40),
        ("cpu", {"workers": 3}, 3),
        ("cuda", {"workers": 0}, 0),
    ],
)
def test_how_images_are_read(monkeypatch, device, how, workers):
    """A number that is given is taken; batches for a GPU alone are pinned."""
    monkeypatch.setattr(machine, "cores", lambda: 6)
    found = machine.reading(torch.device(device), **{"images": 10_000, **how})
    assert found == {"num_workers": workers, "pin_memory": device == "cuda", "persistent_workers": False}


def test_cores_are_shared_by_the_processes_of_torchrun(monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: 6)
    for processes, expected in ((None, 6), ("2", 3), ("4", 1), ("8", 1)):
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert machine.cores() == expected
