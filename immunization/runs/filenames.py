"""Every file of a run folder by its name; result.json is `Result.file`."""

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
ENVIRONMENT = "environment.json"
RUN_LOG = "run.log"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
OLDER_CHECKPOINT = "checkpoint.safetensors"  # of the version before
WEIGHTS = "immunized.safetensors"
ROWS = "splits.safetensors"
ARRAYS = "arrays.safetensors"
ATTACKS = "attacks.pt"  # of an audit on its way
MODEL_CARD = "model_card.md"
CONFIG_OF_NET = "config.json"  # beside a net that was saved from Python
