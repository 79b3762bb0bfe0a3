#!/usr/bin/env bash
# torch 2.14.1, torchvision 0.29.1, on a CPU: `FlopCounterMode` counts nothing of a frozen `nn.TransformerEncoder`, and two
# thirds of torchvision's ViT.
#
# In eval mode, where nothing needs a gradient, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` with
# batch_first=True take a fast path: one operator for all of the attention, or for the whole layer. `FlopCounterMode` has
# no formula for these operators and leaves them out without a warning. So the count of the same net changes with
# torch.no_grad(), with requires_grad_ and with a hook on one of its layers, and a frozen net looks cheaper than it is.
# F.scaled_dot_product_attention is another one: on a CPU it is an operator of its own (it ends in _for_cpu), of which
# nothing is counted; while a gradient is needed, neither.
#
# Behaviour seen, in operations of one input: three encoder layers 0 (82,944 while they are trainable, or with the fast
# path switched off), vit_b_16 22.5e9 (33.7e9 with the fast path switched off), scaled_dot_product_attention 0.
# What helps: torch.backends.mha.set_fastpath_enabled(False) while counting; for scaled_dot_product_attention the backend
# SDPBackend.MATH.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1
"$folder/venv/bin/python" - <<'PYTHON'
from contextlib import nullcontext

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count(net, x, fast):
    torch.backends.mha.set_fastpath_enabled(fast)
    with FlopCounterMode(display=False) as counter:
        net(x)
    return counter.get_total_flops()


layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
encoder, tokens = nn.TransformerEncoder(layer, 3).eval(), torch.randn(1, 9, 16)
seen = [count(encoder, tokens, True)]
encoder.requires_grad_(False)
seen += [count(encoder, tokens, fast) for fast in (True, False)]
print("encoder: trainable, frozen, frozen without the fast path", seen)
assert seen[0] == seen[2] > 0, seen
assert seen[1] == 0, seen

vit, image = torchvision.models.vit_b_16().eval().requires_grad_(False), torch.randn(1, 3, 224, 224)
fast, slow = (count(vit, image, fast) for fast in (True, False))
print("vit_b_16: frozen, frozen without the fast path", fast, slow)
assert 0.6 < fast / slow < 0.7, (fast, slow)

query = torch.randn(1, 2, 9, 8)
attention = [0, 0]
for place, backends in enumerate([None, SDPBackend.MATH]):
    with sdpa_kernel(backends) if backends else nullcontext(), FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(query, query, query)
    attention[place] = counter.get_total_flops()
print("scaled_dot_product_attention: as it is, by SDPBackend.MATH", attention)
assert attention == [0, 2 * 2 * 2 * 9 * 9 * 8], attention
PYTHON
