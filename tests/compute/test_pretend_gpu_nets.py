"""Runs of a small net on a pretended GPU: the results are the CPU's."""

import pytest
from helpers.both_devices import agree, run_on_both

pytestmark = pytest.mark.trains

SHORT = ("experiment=digits_deep", "dtype=float64", "model.fit_epochs=1", "dataset.val_fraction=0.2")
SHORT += ("dataset.size=16", "dataset.primary=[0,1]", "dataset.harmful=[4,5]", "dataset.benign=[7,8]")
SHORT += ("dataset.test_fraction=0.5", "tracker=none", "figures=false", "evaluation=[rir]", "method.epochs=1")
QUICK = ("method=condition_number", "method.batch_size=32")
MORE = [
    ("method=learning_curve", "evaluation=[rir,own_head,sampled,deployment,validity]", "evaluation.sampled.groups=2"),
    *[(f"method={name}",) for name in ("r_ill_only", "opt_kappa", "imma", "learning_curve_net", "closed_form")],
    ("model.trainable=fold", "method=condition_number"),
    *[(f"method={name}",) for name in ("forget", "forget_blocks", "sophon", "ntl", "encoderlock", "clamp", "tar")],
    ("method=condition_number", "method.max_accuracy_drop=0.5", "deterministic=true"),
]
FOLDERS = ("dataset=image_folders", "dataset.size=32", "dataset.batch_size=16", "model=timm", "model.name=test_resnet")
FOLDERS += ("model.pretrained=false", "+model.arguments.num_classes=4", "method=condition_number", "method.epochs=1")
FOLDERS += ("method.batch_size=16", "tracker=none", "figures=false", "evaluation=[rir]")
READING = [
    ("dataset.cache_limit=0",),
    ("dataset.augment=true",),
    ("dataset.cache=null",),
    ("model.channels_last=true",),
]
READERS = ("block_probe", "frozen_blocks", "neighbours")
PROBES, TUNING = ("linear_probe", "undo", "weights_int8"), ("last_block_finetune", "full_finetune_adamw", "lora")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Where the net that all tests start from is kept."""
    return f"cache={tmp_path_factory.mktemp('cache')}"


def roots(folders) -> list[str]:
    return [f"dataset.{role}_root={folder}" for role, folder in zip(("primary", "harmful"), folders, strict=True)]


def test_a_method(tmp_path, cache):
    agree(*run_on_both([*SHORT, cache, *QUICK], tmp_path)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("options", MORE, ids=" ".join)
def test_more_methods_and_options(tmp_path, cache, options):
    agree(*run_on_both([*SHORT, cache, *options], tmp_path)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("options", READING, ids=" ".join)
def test_how_images_are_read(tmp_path, folders, options):
    cache = f"dataset.cache={tmp_path / 'cache'}"
    agree(*run_on_both([*FOLDERS, *roots(folders), cache, "dtype=float64", *options], tmp_path)[:2])


@pytest.mark.slow
def test_low_precision(tmp_path, folders):
    """Which operations autocast rounds is the device's own affair: the runs are alike to bfloat16's three digits."""
    options = ["model.amp=bfloat16", "dtype=float32", f"dataset.cache={tmp_path}"]
    agree(*run_on_both([*FOLDERS, *roots(folders), *options], tmp_path)[:2], tolerance=0.05)


@pytest.mark.slow
def test_attacks(tmp_path, cache):
    options = [f"attack.{name}.steps=2" for name in (*PROBES[:2], *TUNING)]
    options += [f"attack.{name}.rates=[0.01]" for name in TUNING]
    cpu, gpu, _ = run_on_both(
        [*SHORT, cache, "method=closed_form", f"attack=[{','.join((*PROBES, *TUNING))}]", *options], tmp_path
    )
    agree(cpu, gpu)
    assert all(gpu.metrics[f"attack/{name}/final"] is not None for name in (*PROBES, *TUNING))


@pytest.mark.slow
def test_attackers_who_read_blocks(tmp_path, cache):
    options = [*SHORT, cache, "method=forget_blocks", "method.enlarged=0.5", f"attack=[{','.join(READERS)}]"]
    cpu, gpu, _ = run_on_both([*options, "attack.block_probe.images=true"], tmp_path)
    agree(cpu, gpu)
    assert all(gpu.metrics[f"attack/{name}/final"] is not None for name in READERS)
