"""Optimizers without torch's compiler, which is there as soon as somebody asks for it."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from immunization.compute.compiler import spare_the_compiler
spare_the_compiler()
import torch
weight = torch.nn.Parameter(torch.ones(2))
for make in (torch.optim.Adam, torch.optim.SGD):
    optimizer = make([weight], lr=0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
print(weight.tolist())
doubled = torch.compile(lambda x: 2 * x + 1, backend="eager")
print(doubled(torch.ones(1)).tolist(), "torch._dynamo.convert_frame" in sys.modules)
import torch._dynamo.config
torch.optim.AdamW([weight]).step()
print(type(torch._dynamo).__name__)
"""


def test_optimizers_step_without_it_and_compiling_imports_it():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    first, second, third = run.stdout.splitlines()
    assert json.loads(first) == pytest.approx([0.0, 0.0], abs=1e-5)
    assert second == "[3.0] True"
    assert third == "module"
