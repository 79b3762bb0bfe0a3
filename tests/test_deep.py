"""Deep nets on tiny folders of images: splitting, freezing, kept activations, methods, folded maps and measures."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import immunization
from immunization import run
from immunization.data.images import image_folders
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError
from immunization.evaluation import LearningCurves, RelativeRatio
from immunization.evaluation.deep import DeepComparison, OwnHead, SampledRatio, compare
from immunization.methods import ClosedForm, ConditionNumber, LearningCurveNet, OptKappa, PairedBatches, train
from immunization.models.activations import Stream, load, take
from immunization.models.chain import Tail
from immunization.models.folded import fold_into, fold_place
from immunization.models.timm import Timm
from immunization.theory import spectrum
from immunization.training.loaders import LoaderBatches, batches_of


def draw_folder(root: Path, classes: int, train: int, val: int, seed: int) -> Path:
    """Noise around one color a class, `train` and `val` images each."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        color = rng.uniform(50, 200, 3)
        for split, count in (("train", train), ("val", val)):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(color + rng.normal(0, 30, (36, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    return draw_folder(root / "primary", 4, 20, 6, 0), draw_folder(root / "harmful", 3, 24, 8, 1)


def open_pair(folders, cache=None, **options):
    return image_folders(str(folders[0]), str(folders[1]), cache=cache and str(cache), size=32, **options).to(
        "cpu", torch.float64
    )


def build(pair, name="test_resnet", trainable="last", **options) -> Timm:
    torch.manual_seed(0)
    arguments = {"num_classes": 4} | ({"img_size": 32} if "vit" in name else {})
    return Timm(pair, name, trainable, pretrained=False, arguments=arguments, **options)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"])
def test_trunk_and_tail_are_the_net(name, folders):
    model = build(open_pair(folders), name)
    net = timm.create_model(name, pretrained=False, **model.arguments).double().eval()
    net.load_state_dict(model.export())
    images = torch.randn(3, *model.config["input_size"], dtype=torch.float64)
    with torch.no_grad():
        features = model.extractor(model.trunk(images))
        torch.testing.assert_close(features, net.forward_head(net.forward_features(images), pre_logits=True))
        torch.testing.assert_close(model.head(features), net(images))
    assert model._trunk
    assert not any(
        p.requires_grad for unit in model._trunk if isinstance(unit, torch.nn.Module) for p in unit.parameters()
    )


def test_trainable_names_and_patterns(folders):
    pair = open_pair(folders)
    assert build(pair, "test_vit", "blocks.1").trained == ["blocks.1"]
    assert len(build(pair, "test_resnet", ["layer3", "layer4.*"]).trained) > 2
    with pytest.raises(ConfigError, match=r"model\.trainable=stage9: no module .*layer4"):
        build(pair, "test_resnet", "stage9")


def test_a_net_that_is_no_chain_runs_whole(folders, monkeypatch):
    monkeypatch.setattr("immunization.models.chain._chain", lambda name, module: [])
    model = build(open_pair(folders))
    assert not model._trunk
    images = torch.randn(2, *model.config["input_size"], dtype=torch.float64)
    assert model.extractor(model.trunk(images)).shape == (2, 96)


def test_frozen_batchnorm_does_not_drift(folders):
    model = build(open_pair(folders))
    before = {name: tensor.clone() for name, tensor in model.net.state_dict().items()}
    model.train()
    images = torch.randn(4, *model.config["input_size"], dtype=torch.float64)
    model.extractor(model.trunk(images))
    after = model.net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(model.trained[0]) for name in changed)
    model.eval()
    assert not any(module.training for module in model.modules())


def test_activations_are_kept_verified_and_keyed(folders, tmp_path, caplog):
    cache = tmp_path / "cache"
    pair = open_pair(folders, cache)
    _, tasks = build(pair).prepare(pair, False)
    entries = sorted(cache.iterdir())
    assert len(entries) == 12  # two tasks, three splits, activations and features
    stamps = {path: (path / "data.bin").stat().st_mtime_ns for path in entries}
    _, again = build(pair).prepare(pair, False)
    assert stamps == {path: (path / "data.bin").stat().st_mtime_ns for path in sorted(cache.iterdir())}
    torch.testing.assert_close(again.primary.train.x, tasks.primary.train.x, rtol=0, atol=0)
    other = open_pair(folders, cache, crop_pct=0.5)
    build(other).prepare(other, False)
    assert len(list(cache.iterdir())) == 24

    damaged = entries[0] / "data.bin"
    content = bytearray(damaged.read_bytes())
    content[7] ^= 1
    damaged.write_bytes(bytes(content))
    assert load(cache, entries[0].name) is None
    assert not entries[0].exists()


def test_tasks_hold_what_the_extractor_reads(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).prepare(pair, False)
    sizes = {role: [len(getattr(task, split)) for split in SPLITS] for role, task in tasks.tasks.items()}
    assert sizes == {"primary": [72, 8, 24], "harmful": [66, 6, 24]}
    assert tasks.primary.rank == 72
    assert tasks.dim == 96
    x = tasks.primary.train.x
    torch.testing.assert_close(model.features(x), model.reference["primary", "train"])


def test_large_sets_are_streamed(folders):
    pair = open_pair(folders, cache_limit=0.0)
    model, tasks = build(pair).prepare(pair, False)
    kept, kept_tasks = build(open_pair(folders)).prepare(open_pair(folders), False)
    stream = tasks.harmful.train.x
    assert isinstance(stream, Stream)
    torch.testing.assert_close(model.features(stream), kept.features(kept_tasks.harmful.train.x))
    rows = torch.tensor([50, 3, 7])
    torch.testing.assert_close(take(stream, rows), kept_tasks.harmful.train.x[rows])
    batches = batches_of(model, tasks, 16, torch.Generator())
    assert isinstance(batches, LoaderBatches)
    assert batches.steps_per_epoch == 4
    (primary, harmful), *_ = batches.epoch()
    assert primary.x.shape == harmful.x.shape == (16, *stream.shape[1:])
    terms = ConditionNumber(1.0, 1.0, 1, 16, precondition="none", balance=False)
    terms.setup(model, tasks)
    assert torch.isfinite(terms.step(model, primary, harmful)["loss"])


def test_augmentation_turns_the_cache_of_activations_off(folders):
    pair = open_pair(folders, augment=True)
    model, tasks = build(pair).prepare(pair, False)
    assert isinstance(tasks.primary.train.x, Stream)
    batches = batches_of(model, tasks, 16, torch.Generator())
    first, second = (next(iter(batches.epoch()))[1].x for _ in range(2))
    assert not torch.equal(first, second)


def test_paired_batches_cycle_the_primary_task(folders):
    pair = open_pair(folders)
    _, tasks = build(pair).prepare(pair, False)
    batches = PairedBatches(tasks, 16, torch.Generator().manual_seed(0))
    assert [len(list(batches.epoch())) for _ in range(2)] == [4, 4]
    with pytest.raises(ConfigError, match=r"method\.batch_size must be set"):
        next(iter(PairedBatches(tasks, None, torch.Generator()).epoch()))


@pytest.mark.parametrize(
    "method",
    [
        ConditionNumber(1.0, 1.0, 1, 16, precondition="none", smoothing=0.1, balance=False),
        OptKappa(1, 16, form="log"),
        LearningCurveNet(1, 16),
    ],
    ids=lambda method: method.name,
)
def test_one_pass_of_the_trainable_part_a_batch(folders, method):
    """Primary features are computed once for the loss and the term of their Hessian."""
    pair = open_pair(folders)
    model, tasks = build(pair).prepare(pair, False)
    method.setup(model, tasks)
    primary, harmful = next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch()))
    calls = []
    model.extractor.register_forward_hook(lambda *_: calls.append(1))
    method.step(model, primary, harmful)
    assert len(calls) == 2


def test_training_moves_only_the_trainable_part(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).prepare(pair, False)
    before = {name: tensor.clone() for name, tensor in model.export().items()}
    method = ConditionNumber(1.0, 1.0, 1, 16, precondition="none", balance=True)
    method.setup(model, tasks)
    optimizer = torch.optim.SGD(model.groups(), lr=1e-3, momentum=0.9, nesterov=True)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 2e-5]
    train(method, model, PairedBatches(tasks, 16, torch.Generator()), optimizer)
    changed = {name for name, tensor in model.export().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith((model.trained[0], "fc")) for name in changed)


@pytest.mark.parametrize("kept", [2**31, 0])
def test_comparison_is_exact_and_batched(folders, monkeypatch, kept):
    monkeypatch.setattr("immunization.evaluation.deep.KEPT", kept)
    pair = open_pair(folders)
    model, tasks = build(pair).prepare(pair, False)
    with torch.no_grad():
        for parameter in model.extractor.parameters():
            parameter.mul_(1.1)
    comparison = compare(tasks, model)
    assert isinstance(comparison, DeepComparison)
    features = model.features(tasks.harmful.train.x)
    sigma = torch.linalg.svdvals(features)
    found = comparison.sigma("harmful", "train", "after")
    torch.testing.assert_close(found, sigma[: len(found)], rtol=1e-8, atol=1e-12)
    probe = comparison.probe("harmful", "after")
    targets = tasks.harmful.targets(tasks.harmful.train.y)
    expected = torch.linalg.lstsq(features, targets, driver="gelsd").solution
    torch.testing.assert_close(features @ probe.optimum(), features @ expected, rtol=1e-6, atol=1e-6)
    rows = torch.tensor([5, 60, 2])
    torch.testing.assert_close(comparison.sampled("harmful", "after", rows), features[rows])


def test_features_are_computed_once_for_all_measures(folders):
    model, tasks = build(open_pair(folders)).prepare(open_pair(folders), False)
    seen = []
    model.extractor.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    comparison = compare(tasks, model)
    for measure in (RelativeRatio(), LearningCurves(), SampledRatio(2, 20)):
        measure(comparison)
    assert sum(seen) == sum(len(task.train) + len(task.test) for task in tasks.tasks.values())


def test_sampled_protocol(folders):
    pair = open_pair(folders)
    model, tasks = build(pair).prepare(pair, False)
    comparison = compare(tasks, model)
    same = SampledRatio(groups=3, samples=20)(comparison)
    assert same.metrics["authors/rir"] == pytest.approx(1.0)
    assert not same.flags
    fewer = SampledRatio(groups=20, samples=20)(comparison)
    assert set(fewer.flags) == {"fewer_groups_primary", "fewer_groups_harmful"}
    none = SampledRatio(groups=20, samples=100)(comparison)
    assert none.metrics["authors/rir"] is None
    assert "66 training rows" in none.reasons["authors/rir"]


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_folded_map_keeps_the_logits_and_exports(name, folders):
    pair = open_pair(folders)
    net, tasks = build(pair, name).prepare(pair, True)
    method = ClosedForm(ridge=1e-5)
    method.setup(net, tasks)
    method.finish(net)
    measures = OwnHead()(compare(tasks, net))
    assert measures.metrics["primary/changed_predictions"] == 0
    assert measures.metrics["primary/head_loss"] == pytest.approx(
        measures.metrics["primary/head_loss_baseline"], rel=1e-8
    )

    base = net.base[0]
    exported = timm.create_model(name, pretrained=False, **base.arguments)
    place = fold_place(exported.eval(), base.config["input_size"])
    fold_into(exported, place, base.head.in_features)
    exported.double().load_state_dict(net.export())
    images = torch.randn(3, *base.config["input_size"], dtype=torch.float64)
    with torch.no_grad():
        plain = base.extractor(base.trunk(images))
        features = exported.forward_head(exported.forward_features(images), pre_logits=True)
        torch.testing.assert_close(features, plain @ net.extractor.theta)
        torch.testing.assert_close(exported(images), base.head(plain), rtol=1e-6, atol=1e-6)


def test_fold_raises_rir_on_features(folders):
    pair = open_pair(folders)
    net, tasks = build(pair).prepare(pair, True)
    method = ClosedForm(ridge=1e-5)
    method.setup(net, tasks)
    after = {role: net.features(task.train.x) for role, task in tasks.tasks.items()}
    before = {role: task.train.x for role, task in tasks.tasks.items()}
    values = spectrum.rir(after["harmful"], before["harmful"], after["primary"], before["primary"])
    assert values["rir"] > 1


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_images_are_named_or_left_out(tmp_path, caplog):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    good = (folders[1] / "train/class0/0.png").read_bytes()
    (folders[1] / "train/class0/0.png").write_bytes(good[: len(good) // 2])  # truncated
    (folders[1] / "train/class1/3.png").write_bytes(b"no image")
    huge = good[:16] + (10**5).to_bytes(4) * 2 + good[24:29]  # the size stands in the header
    (folders[1] / "train/class2/1.png").write_bytes(huge + zlib.crc32(huge[12:]).to_bytes(4) + good[33:])
    options = {"val_fraction": 0.0}
    pair = open_pair(folders, **options)
    names = r"class0/0\.png.*class1/3\.png.*class2/1\.png: Image size.*on_bad_image=skip"
    with pytest.raises(DataError, match=r"3 images cannot be read: .*" + names):
        build(pair).prepare(pair, True)
    pair = open_pair(folders, tmp_path / "cache", on_bad_image="skip", **options)
    for _ in range(2):  # also from the cache
        _, tasks = build(pair).prepare(pair, True)
        assert len(tasks.harmful.train) == 15


def test_empty_class_folder(tmp_path):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    for path in (folders[1] / "train/class1").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"train/class1: the class folder is empty"):
        open_pair(folders)


def test_folders_that_are_missing_or_disagree(tmp_path):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    with pytest.raises(DataError, match=r"dataset\.harmful_root=.*no such folder"):
        open_pair((folders[0], tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"dataset\.primary_root is not set"):
        image_folders(None, str(folders[1]))
    (folders[1] / "val/class2").rename(folders[1] / "val/other")
    with pytest.raises(DataError, match="class other is not in"):
        open_pair(folders)
    (tmp_path / "flat").mkdir()
    with pytest.raises(DataError, match="holds no folders"):
        open_pair((folders[0], tmp_path / "flat"))


def test_one_folder_without_splits(tmp_path, folders):
    flat = folders[0] / "train"
    pair = open_pair((flat, folders[1]), test_fraction=0.25)
    assert [len(pair.tasks["primary"].splits[split]) for split in SPLITS] == [52, 8, 20]


def test_head_and_classes(folders, tmp_path):
    pair = open_pair(folders)
    model = Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 7})
    with pytest.raises(ConfigError, match=r"has 7 outputs, the primary task .* 4 classes.*dataset\.primary\.outputs"):
        model.prepare(pair, True)
    table = tmp_path / "outputs.csv"
    table.write_text("index,dir\n6,class0\n2,class1\n0,class2\n4,class3\n")
    pair = open_pair(folders, primary={"outputs": str(table)})
    _, tasks = Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 7}).prepare(pair, True)
    assert tasks.primary.head.tolist() == [0, 2, 4, 6]
    logits = torch.full((len(tasks.primary.test), 7), -1.0)
    logits[:, 6] = 1.0
    share = pair.tasks["primary"].splits["test"].dataset.reader.samples
    assert tasks.primary.measure(logits, tasks.primary.test.y) == pytest.approx(6 / len(share))
    for index in (7, -1, 2):
        table.write_text(f"index,dir\n{index},class0\n2,class1\n0,class2\n4,class3\n")
        pair = open_pair(folders, primary={"outputs": str(table)})
        with pytest.raises(ConfigError, match="outputs must differ and be from 0 to 6, those of test_resnet"):
            Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 7}).prepare(pair, True)
    table.write_text("index,dir\n6,class0\n")
    with pytest.raises(DataError, match="no column names all 4"):
        open_pair(folders, primary={"outputs": str(table)})


def test_checkpoints(folders, tmp_path):
    from safetensors.torch import save_file

    pair = open_pair(folders)
    net = timm.create_model("test_resnet", pretrained=False, num_classes=4)
    for path, write in ((tmp_path / "a.safetensors", save_file), (tmp_path / "b.pt", torch.save)):
        write(net.state_dict(), path)
        model = build(pair, checkpoint=str(path))
        torch.testing.assert_close(model.export()["fc.weight"].float(), net.fc.weight.detach())
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "conv1.0.weight"}
    state["fc.weight"] = torch.zeros(9, 96)
    save_file(state | {"extra": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ConfigError) as caught:
        build(pair, checkpoint=str(tmp_path / "c.safetensors"))
    for words in (
        "3 tensors",
        "conv1.0.weight is missing",
        "extra is unknown",
        "fc.weight has shape (9, 96), not (4, 96)",
    ):
        assert words in str(caught.value)
    (tmp_path / "d.pt").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"d\.pt cannot be read"):
        build(pair, checkpoint=str(tmp_path / "d.pt"))
    with pytest.raises(ConfigError, match="no such file"):
        build(pair, checkpoint=str(tmp_path / "e.safetensors"))


def test_unknown_models_and_options(folders):
    pair = open_pair(folders)
    with pytest.raises(ConfigError, match=r"model\.name=resnet19: timm has no such model"):
        Timm(pair, "resnet19", pretrained=False)
    with pytest.raises(ConfigError, match="no linear classifier"):
        Timm(pair, "test_resnet", pretrained=False, arguments={"num_classes": 0})
    with pytest.raises(ConfigError, match=r"dataset\.on_bad_image"):
        open_pair(folders, on_bad_image="ignore")
    with pytest.raises(ConfigError, match=r"dataset\.harmful\.crop"):
        open_pair(folders, harmful={"crop": "zoom"})


# --- the embedded case -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Overrides of runs that fit the net once."""
    cache = tmp_path_factory.mktemp("fitted")
    return ["experiment=digits_deep", "tracker=none", "figures=false", f"model.cache={cache}", "model.fit_epochs=6"]


def test_digits_deep_needs_nothing(tmp_path, digits):
    result = run([*digits, "method.epochs=20"], tmp_path / "run")
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
    assert result.metrics["rir"] > 0
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
        pytest.param("compile=true", 1e-4, marks=pytest.mark.slow),
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
    measured = run([*net, "immunize=false", stored], tmp_path / "measured")
    assert [measured.metrics[name] for name in kappas] == [result.metrics[name] for name in kappas]


def test_faster_steps_are_in_effect_in_training_alone(folders):
    """In another layout the weights need not end elsewhere, not even by rounding: what the layers see tells."""
    pair = image_folders(*map(str, folders), cache=None, size=64).to("cpu", torch.float32)
    model, tasks = build(pair, channels_last=True, amp="bfloat16").prepare(pair, False)
    seen = []
    layer = next(module for module in model.extractor.modules() if isinstance(module, torch.nn.Conv2d))
    layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output))
    method = ConditionNumber(1.0, 1.0, 1, 16, precondition="none", balance=False)
    method.setup(model, tasks)
    method.step(model, *next(iter(PairedBatches(tasks, 16, torch.Generator()).epoch())))
    trained = len(seen)
    model.features(tasks.primary.test.x)
    assert 0 < trained < len(seen)
    for index, output in enumerate(seen):
        assert output.dtype == (torch.bfloat16 if index < trained else torch.float32)
        assert output.is_contiguous(memory_format=torch.channels_last) == (index < trained)


@pytest.mark.slow
def test_without_a_compiler_a_message_says_so(tmp_path, net):
    command = [sys.executable, "launch.py", *net, "model.compile=true", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, env={**os.environ, "CXX": "/nowhere/c++"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: model.compile=true: torch.compile fails here (InvalidCxxCompiler" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_real_weights_and_images(data_dir, tmp_path):
    """ResNet18, ten ImageNet classes, 80 classes of cars: the figures that the design measured beforehand."""
    common = ["experiment=resnet18_cars_small", f"data_root={data_dir}", f"dataset.cache={tmp_path / 'cache'}"]
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


def test_a_full_gpu_is_a_message(tmp_path, digits, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ConditionNumber, "step", full)
    with pytest.raises(ConfigError, match=r"no memory for method\.batch_size=64; lower it"):
        run([*digits, "method=condition_number"], tmp_path / "run")
    monkeypatch.setattr(Tail, "forward", full)  # while features are collected
    with pytest.raises(ConfigError, match=r"no memory for dataset\.batch_size=64 images; lower it"):
        run([*digits, "method=closed_form"], tmp_path / "features")
