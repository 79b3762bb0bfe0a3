#!/usr/bin/env bash
# safetensors 0.8.0 (numpy 2.4.6, Linux): save_file writes files that only their owner can read, whatever the umask is.
#
# Up to 0.7.0 a new file got the mode that the umask gives (0644 with umask 022), as torch.save and numpy.savez do. Since
# 0.8.0 it is 0600, also where the file was there before and was 0644: saving again takes the right to read from everybody
# else. On a cluster, weights and caches in a shared folder become unreadable for other accounts; a web server or a container that runs
# under another user answers "permission denied" for a model that was only updated.
#
# What helps: os.chmod after save_file, or save() (which gives bytes) and a file of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 0.7.0 0.8.0; do
    "$folder/venv/bin/pip" install --quiet safetensors==$version numpy==2.4.6
    "$folder/venv/bin/python" - "$folder/weights-$version.safetensors" <<'PYTHON'
import os
import sys

import numpy
import safetensors
from safetensors.numpy import save_file

path, tensors = sys.argv[1], {"x": numpy.zeros(1)}
os.umask(0o022)
save_file(tensors, path)
new = os.stat(path).st_mode & 0o777
os.chmod(path, 0o644)
save_file(tensors, path)
again = os.stat(path).st_mode & 0o777
print(safetensors.__version__, "new file", oct(new), "saved again over 0644", oct(again))
expected = 0o600 if safetensors.__version__ == "0.8.0" else 0o644
assert (new, again) == (expected, expected), "it changed"
PYTHON
done
