#!/usr/bin/env bash
# torch 2.14.1, CPU with AVX2 or AVX-512: the sigmoid of a number depends on the place of the number in its tensor.
#
# torch computes most elements of a tensor in vectors and the few left over at the end one by one. For some functions the
# two ways give other last bits: sigmoid, softplus, silu, gelu, mish, elu, selu, pow. For exp, tanh, erf, log1p,
# logsigmoid and binary_cross_entropy_with_logits they agree. So rows in one tensor give other last bits than each row in
# a tensor of its own, as soon as the length of a row is no multiple of the vectors. Nothing random is involved, one
# thread is used, and torch.use_deterministic_algorithms(True) changes nothing. binary_cross_entropy_with_logits itself
# is safe, but its gradient holds a sigmoid.
#
# Behaviour seen: of 20,000 numbers in float64, 518 have another sigmoid in a tensor of length 1 than in the long one (by
# at most 3e-16 of it), 2,569 another softplus, 612 another gelu, 0 another exp, tanh or erf.
# With ATEN_CPU_CAPABILITY=default all agree, as nothing is computed in vectors.
# What helps: apply the function to each row alone where the rows have to be as they are alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy
cat > "$folder/places.py" <<'PYTHON'
import sys

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
numbers = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def differing(function):
    together = function(numbers)
    alone = torch.cat([function(number.reshape(1)) for number in numbers])
    assert torch.allclose(together, alone, rtol=1e-12, atol=0)
    return int((together != alone).sum())


def power(x):
    return x.abs() ** 1.3


def log1p(x):
    return torch.log1p(x.abs())


same = (torch.exp, torch.tanh, torch.erf, log1p, F.logsigmoid)
other = (torch.sigmoid, F.softplus, F.silu, F.gelu, F.mish, F.elu, F.selu, power)
found = {f.__name__: differing(f) for f in (*same, *other)}
print(torch.__version__, torch.backends.cpu.get_cpu_capability(), found)
vectors = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
assert vectors == (sys.argv[1] == "vectors"), "needs a processor with AVX2"
assert all((found[f.__name__] > 0) == vectors for f in other), found
assert not any(found[f.__name__] for f in same), found

# the gradient of the binary cross-entropy of 60 rows, alone and in a stack of two
logits = torch.randn(500, 2, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradient(part):
    leaf = part.detach().clone().requires_grad_()
    F.binary_cross_entropy_with_logits(leaf, torch.zeros_like(leaf), reduction="sum").backward()
    return leaf.grad


changed = sum(not torch.equal(gradient(pair)[0], gradient(pair[0])) for pair in logits)
print(f"another gradient in {changed} of 500 stacks")
assert (changed > 0) == vectors
PYTHON
"$folder/venv/bin/python" "$folder/places.py" vectors
ATEN_CPU_CAPABILITY=default "$folder/venv/bin/python" "$folder/places.py" none
