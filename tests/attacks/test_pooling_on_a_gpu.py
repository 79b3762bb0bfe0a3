"""Where outputs of blocks lie when the net runs on a GPU: near it, or in the CPU's memory; kernels are the same."""

import pytest
import torch
from helpers.pretend_gpu import pretended_gpu
from torch.testing import assert_close

from immunization.attacks.kernels import Kernel
from immunization.attacks.pooling import Outputs, gathered
from immunization.data.task import SPLITS


def kernel_of(images, device):
    images = {split: x.to(device) for split, x in images.items()}
    parts = gathered(lambda x: {("block", "average"): x.mean((2, 3))}, images, mirrored=True, batch=4)
    outputs = Outputs(parts, [{"block": 1.0}], device=images["train"].device)
    train, test = (outputs.columns("block", "average", split)[0].double() for split in ("train", "test"))
    return parts["block", "average"]["train"], Kernel.of(train, test)


@pytest.mark.parametrize("free", [2**30, 0])
def test_outputs_that_do_not_fit_stay_in_the_memory_of_the_cpu(monkeypatch, free):
    torch.manual_seed(0)
    images = {split: torch.randn(6, 3, 4, 4) for split in SPLITS}
    _, expected = kernel_of(images, "cpu")
    with pretended_gpu() as seen:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 2**30))
        part, found = kernel_of(images, "cuda")
        assert part.is_cuda is bool(free)
        assert seen["to_cpu"]
    assert not found.own.is_cuda
    for name in ("own", "others", "squares"):
        assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)
