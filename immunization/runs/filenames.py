"""Names of the files in a run folder. That of result.json is `Result.file`."""

from pathlib import Path

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
ENVIRONMENT = "environment.json"
RUN_LOG = "run.log"
REFUSED = "refused.txt"  # why a job of a multirun left what it found here as it is; until the multirun ends
LOST = "lost.txt"  # why an engine lost the job of a multirun that was to run here; until one begins here
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
WEIGHTS = "immunized.safetensors"
ROWS = "splits.safetensors"
ARRAYS = "arrays.safetensors"
ATTACKS = "attacks.safetensors"  # of an audit on its way
CLASSES = "classes.json"  # of each task: the output that means a class, its folder and images
MODEL_CARD = "model_card.md"
CONFIG_OF_NET = "config.json"  # beside a net that was saved from Python, or by timm
OF_HUB = ("model.safetensors", "pytorch_model.bin")  # weights as timm saves them for the Hugging Face hub
ORIGINAL = "original.safetensors"  # what layers that were trained were before


def settings_file(attack: str, role: str = "harmful") -> str:
    """Settings that an attack on a task found by searching; `replay` takes them."""
    return f"attack_{attack}.json" if role == "harmful" else f"attack_{role}_{attack}.json"


def weights_of(checkpoint: Path) -> Path:
    """The file of weights that a run folder, a download from the hub, or such a file itself, stands for."""
    if not checkpoint.is_dir():
        return checkpoint
    return next((path for name in (WEIGHTS, *OF_HUB) if (path := checkpoint / name).exists()), checkpoint / WEIGHTS)
