#!/usr/bin/env bash
# torch 2.14.1, timm 1.0.31: counting a net's operations under torch.no_grad() fails for some nets, and only while they are trainable.
#
# `FlopCounterMode` follows modules by hooks that ask every tensor that enters a module, and that requires a gradient, for its
# node in the graph. A view of a parameter (a class token after `expand`) that is made under `no_grad` still requires a
# gradient but has no node. As soon as a net gives one to a module of its own, the count ends with an assertion,
# "Expected gradient function to be set"; under `inference_mode` with an AttributeError. Most nets concatenate the token first and
# are counted; timm's cait and pit hand it over as it is.
#
# Behaviour seen: a two-line net and cait_xxs24_224 raise while trainable, and are counted once frozen
# (`requires_grad_(False)`), with the same result as under gradients (for the two-line net, under enable_grad: 96 operations).
# What helps: freeze the net, or a copy of it, before counting.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 timm==1.0.31
"$folder/venv/bin/python" - <<'PYTHON'
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Token(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.zeros(1, 1, 4)), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(self.token.expand(len(x), -1, -1)) + self.layer(x)


def count(net, x, mode):
    try:
        with mode(), FlopCounterMode(display=False) as counter:
            net(x)
        return counter.get_total_flops()
    except (AssertionError, AttributeError) as error:
        return type(error).__name__


small, x = Token().eval(), torch.randn(1, 2, 4)
cait, image = timm.create_model("cait_xxs24_224", num_classes=2).eval(), torch.randn(1, 3, 224, 224)
seen = [count(small, x, mode) for mode in (torch.no_grad, torch.inference_mode)] + [count(cait, image, torch.no_grad)]
small.requires_grad_(False), cait.requires_grad_(False)
seen += [count(small, x, mode) for mode in (torch.no_grad, torch.enable_grad)] + [count(cait, image, torch.no_grad) > 10**9]
print(seen)
assert seen == ["AssertionError", "AttributeError", "AssertionError", 96, 96, True], seen
PYTHON
