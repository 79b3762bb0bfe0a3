"""Runs of nets: every method, early stopping, faster steps, full memory and real weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import immunization
from immunization import run
from immunization.errors import ConfigError
from immunization.models.chain import Tail

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Overrides of runs that fit the net once."""
    cache = tmp_path_factory.mktemp("fitted")
    few = ["dataset.primary=[0,1,2]", "dataset.harmful=[4,5]", "dataset.benign=null", "tracker=none", "figures=false"]
    return ["experiment=digits_deep", "dataset.size=16", *few, f"model.cache={cache}", "model.fit_epochs=6"]


def test_digits_deep_needs_nothing(tmp_path, digits):
    result = run([*digits, "dataset.benign=[7,8]", "method.epochs=20"], tmp_path / "run")
    assert result.metrics["primary/head_accuracy"] == result.metrics["primary/head_accuracy_baseline"] > 0.7
    assert result.metrics["steps_ratio/harmful"] > 10
    assert result.metrics["steps_ratio/benign"] is not None


def test_early_stopping_on_accuracy(tmp_path, digits):
    method = ["method=r_ill_only", "method.max_accuracy_drop=0.05", "method.epochs=5", "optimizer.lr=0.3"]
    result = run([*digits, *method], tmp_path / "run")
    assert "stopped_early" in result.flags
    assert result.metrics["primary/head_accuracy"] > result.metrics["primary/head_accuracy_baseline"] - 0.1


@pytest.mark.parametrize("method", ["condition_number", "imma", "opt_kappa", "learning_curve_net"])
def test_every_method_trains_the_net(tmp_path, digits, method):
    result = run(
        [*digits, f"method={method}", "method.epochs=1", "evaluation=[rir,sampled,own_head]"], tmp_path / "run"
    )
    assert result.status == "completed"
    assert result.metrics["kappa_harmful"] != result.metrics["kappa_harmful_baseline"]
    assert result.metrics["authors/rir"] > 0


@pytest.fixture(scope="module")
def net():
    """Overrides of runs that train a net of random weights in a few steps."""
    return [
        *("dataset=digits_deep", "dataset.primary=[0,1]", "dataset.harmful=[4,5]", "dataset.benign=null"),
        *("dataset.test_fraction=0.7", "model=timm", "model.name=test_resnet", "model.pretrained=false"),
        *("model.arguments={in_chans: 1, num_classes: 2}", "method.epochs=1", "method.batch_size=32", "optimizer=sgd"),
        *("optimizer.lr=0.01", "dtype=float32", "tracker=none", "figures=false", "evaluation=[rir]"),
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "immunized.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, net):
    """The weights of such a net before and after its training, and the result."""
    root = tmp_path_factory.mktemp("net")
    run([*net, "immunize=false"], root / "before")
    result = run(net, root / "after")
    return weights(root / "before"), weights(root / "after"), result


@pytest.mark.parametrize(
    ("option", "rounding"),
    [
        ("channels_last=true", 1e-4),  # sums of float32 in another order
        ("amp=bfloat16", 2**-5),  # 2^-9 in each of some sixteen layers, forward and back
    ],
)
def test_faster_steps_train_the_same_net_and_change_no_measure(tmp_path, net, trained, option, rounding):
    before, after, plain = trained
    result = run([*net, f"model.{option}"], tmp_path / "fast")
    fast = weights(tmp_path / "fast")
    assert fast.keys() == after.keys() == immunization.load(tmp_path / "fast").state_dict().keys()
    moved, apart = (
        sum((b[name].double() - a[name].double()).square().sum() for name in after) ** 0.5
        for a, b in ((before, after), (after, fast))
    )
    assert apart < rounding * moved

    kappas = ("kappa_harmful", "kappa_primary")
    for name in kappas:
        assert result.metrics[f"{name}_baseline"] == plain.metrics[f"{name}_baseline"]
    stored = f"model.checkpoint={tmp_path / 'fast' / 'immunized.safetensors'}"
    itself = stored.replace("checkpoint", "reference")
    measured = run([*net, "immunize=false", stored, itself], tmp_path / "measured")
    assert [measured.metrics[name] for name in kappas] == [result.metrics[name] for name in kappas]


@pytest.mark.slow
def test_real_weights_and_images(real_images, tmp_path):
    """ResNet18, ten ImageNet classes, 80 classes of cars: the figures that the design measured beforehand."""
    common = ["experiment=resnet18_cars_small", *real_images, "evaluation=[rir,own_head,learning_curves]"]
    best = run([*common, "method=closed_form"], tmp_path / "closed_form")
    assert best.metrics["primary/head_accuracy_baseline"] == pytest.approx(0.638)
    assert best.metrics["primary/changed_predictions"] == 0
    assert best.metrics["test/rir"] >= 3000
    curve = run([*common, "method=learning_curve"], tmp_path / "learning_curve")
    assert curve.metrics["primary/changed_predictions"] == 0
    assert curve.metrics["steps_ratio/harmful"] >= 500
    assert curve.metrics["steps_ratio/primary"] <= 1
    after = dict(zip(*(curve.curves["probe/harmful"][axis] for axis in "xy"), strict=True))
    assert after[1024] <= 0.10


def test_a_gpu_that_is_full_of_images_is_a_message(tmp_path, digits, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Tail, "forward", full)  # while features are collected
    with pytest.raises(ConfigError, match=r"no memory for dataset\.batch_size=64 inputs; lower it"):
        run([*digits, "method=closed_form"], tmp_path / "features")
