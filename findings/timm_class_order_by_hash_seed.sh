#!/usr/bin/env bash
# timm 1.0.31 (torch 2.14.1, torchvision 0.29.1): the class indices of an image folder can change from one process to the next.
#
# timm's folder reader sorts a *set* of folder names by `natural_key`, which ignores case and leading zeros of numbers. Names
# that are equal under that key (`class_1` and `class_01`, `Jaguar` and `jaguar`) keep the order in which the set gives
# them, and that order depends on PYTHONHASHSEED, which Python draws anew for every process. A net that was trained in one process is
# then evaluated with two classes exchanged in another one: no warning, the same `class_to_idx` keys, other values.
#
# Behaviour seen: over eight hash seeds both orders of the pair occur. torchvision's ImageFolder gives one order for all.
# What helps: give `class_map`, keep `reader.class_to_idx` with the checkpoint, or rename one of the folders.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 timm==1.0.31
cat > "$folder/read.py" <<'PYTHON'
import sys
from pathlib import Path

from PIL import Image
from timm.data import create_dataset
from torchvision.datasets import ImageFolder

root = Path(sys.argv[1])
for name in ("class_01", "class_1", "class_2"):
    (root / name).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(root / name / "one.png")
timm = create_dataset("", root=str(root)).reader.class_to_idx
print("timm", [timm[name] for name in ("class_01", "class_1", "class_2")], "torchvision", ImageFolder(root).class_to_idx)
PYTHON
for seed in 0 1 2 3 4 5 6 7; do
    PYTHONHASHSEED=$seed "$folder/venv/bin/python" "$folder/read.py" "$folder/images"
done | tee "$folder/out"
[ "$(cut -d']' -f1 "$folder/out" | sort -u | wc -l)" -eq 2 ] || { echo "it changed: timm gives one order"; exit 1; }
[ "$(sed 's/.*torchvision//' "$folder/out" | sort -u | wc -l)" -eq 1 ] || { echo "torchvision's order changed"; exit 1; }
