"""The set-ups that come closest to the paper's Table 2: they compose for every method, and run."""

import numpy as np
import pytest
from helpers.images import write_idx

from immunization import run
from immunization.config import compose

pytestmark = pytest.mark.trains

EXPERIMENT = "experiment=paper/table2_closest"


@pytest.mark.parametrize(
    ("method", "chosen"),
    [
        ("r_ill_only", {"lr": 5e4, "init": "identity", "epochs": 1, "batch_size": 64, "normalize": False}),
        ("imma", {"lr": 1e-3, "init": "random", "epochs": 4, "heads": "shared"}),
        ("opt_kappa", {"lr": 3e-3, "init": "random", "epochs": 1, "form": "reciprocal_log", "task_weight": 0}),
        ("released_condition_number", {"lr": 5e-3, "bias": True, "lambda_P": 1, "lambda_H": 5e7, "epochs": 1}),
    ],
)
def test_every_method_has_its_set_up(method, chosen):
    cfg = compose([EXPERIMENT, f"method={method}"])
    assert (cfg.dataset.protocol, list(cfg.evaluation)) == ("authors_pixels", ["rir", "theta0"])
    assert {**cfg.optimizer, **cfg.model, **cfg.method}.items() >= chosen.items()


@pytest.mark.parametrize("method", ["r_ill_only", "imma", "opt_kappa", "released_condition_number"])
def test_a_pair_of_digits(method, tmp_path):
    """The images are noise: MNIST itself need not be there."""
    raw, draw = tmp_path / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, count in (("train", 1500), ("t10k", 50)):
        write_idx(raw / f"{part}-images-idx3-ubyte", draw.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    options = [f"method={method}", f"dataset.root={tmp_path}", "dataset.download=false", "tracker=none"]
    result = run([EXPERIMENT, *options, "dataset.val_fraction=0", "figures=false"], folder=tmp_path / "run")
    assert result.status == "completed"
    for name in ("rir", "ratio_harmful", "ratio_primary", "rir_theta0"):
        assert result.metrics[f"authors/{name}"] > 0
    assert result.metrics["authors/rir_theta0"] != 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) <= 3
