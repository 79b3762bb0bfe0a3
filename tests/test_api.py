"""Immunization in Python, and immunized models back from disk."""

import sys
import warnings
from functools import partial

import pytest
import timm
import torch
from helpers.images import draw_folder, loader
from helpers.terminals import Terminal
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import immunization
from immunization import ConfigError, DataError, api
from immunization.config import compose
from immunization.models.fold import folded_map
from immunization.theory import spectrum
from immunization.training import batches as batching

pytestmark = pytest.mark.trains


@pytest.fixture
def net():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", pretrained=False, num_classes=4).eval()


def rows_net():
    """A net whose trained part reads rows, behind a Flatten."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 4))


def features(model, images):
    return model.forward_head(model.forward_features(images), pre_logits=True)


@pytest.mark.parametrize("method", ["closed_form", "learning_curve"])
def test_folded_maps_keep_the_outputs(net, method):
    options = {"epochs": 3} if method == "learning_curve" else {"ridge": 1e-4}
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    immunized = immunization.immunize(net, loader(4, 0), loader(3, 1), method=method, **options)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    images = next(iter(loader(4, 2)))[0]
    with torch.no_grad():
        outputs, expected = immunized(images), net(images)
        assert outputs.dtype == torch.float32  # the net's own: the map and its inverse were rounded, once
        assert (outputs - expected).abs().max() < (1e-4 if method == "closed_form" else 1e-6) * expected.abs().max()
        assert not torch.allclose(features(immunized, images), features(net, images), rtol=0.1)
    assert not immunized.training


@pytest.mark.parametrize("make", [None, rows_net])
def test_a_net_with_a_folded_map_is_not_immunized_again(net, make):
    net = make() if make else net
    folded = immunization.immunize(net, loader(4, 0), loader(3, 1), "closed_form", ridge=1e-4)
    for method in ("closed_form", "condition_number"):
        with pytest.raises(ConfigError, match="the model already has a folded map"):
            immunization.immunize(folded, loader(4, 0), loader(3, 1), method)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rank_of_a_net_of_16_bits_is_not_that_of_its_rounding(dtype):
    maps = [
        folded_map(immunization.immunize(net, loader(4, 0), loader(3, 1), "closed_form", ridge=1e-2))
        for net in (rows_net(), rows_net().to(dtype))
    ]
    assert maps[1].dtype == dtype
    known, found = (torch.linalg.svdvals(map_.double()) for map_ in maps)
    torch.testing.assert_close(found, known, rtol=0.1, atol=0)


def test_augmented_training_reads_the_loaders_for_training_as_they_are(net):
    seen = []

    class Counted:
        def __iter__(self):
            seen.append(len(seen))
            yield from loader(4, 0)

        def __len__(self):
            return len(loader(4, 0))

    splits = {"train": loader(4, 0), "test": Counted()}
    options = {"trainable": "layer4", "epochs": 3, "augmented": True}
    immunization.immunize(net, splits, loader(3, 1), "condition_number", **options)
    assert seen == [0]  # read once, with all others, and not in training
    with pytest.raises(ConfigError, match="need images that training does not see"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), "condition_number", max_accuracy_drop=0.1, **options)


def test_defaults_are_those_of_folders_of_images():
    for method in ("learning_curve", "condition_number", "imma", "closed_form"):
        folders = compose(["dataset=image_folders", "model=timm", f"method={method}", "optimizer=adam"])
        own = api._configured(method, "none", {}).settings
        assert own["method"] == OmegaConf.to_container(folders.method)
        assert own["optimizer"] == OmegaConf.to_container(folders.optimizer)


@pytest.mark.parametrize("augmented", [False, True])
def test_training_a_part_of_the_model(net, augmented):
    options = {"epochs": 1, "batch_size": 16, "smoothing": 0.1, "optimizer__lr": 1e-4}
    immunized = immunization.immunize(
        net, loader(4, 0), loader(3, 1), "condition_number", trainable="layer4", augmented=augmented, **options
    )
    state, before = immunized.state_dict(), net.state_dict()
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert changed
    assert all(name.startswith(("layer4", "fc")) for name in changed)


def test_a_part_that_reads_rows_is_trained():
    net = rows_net()
    for method in ("forget", "condition_number"):
        immunized = immunization.immunize(net, loader(4, 0), loader(3, 1), method, trainable="1", epochs=1)
        assert not torch.equal(immunized[1].weight, net[1].weight)


def test_rir_of_the_closed_form(net):
    primary, harmful = loader(4, 0, 300), loader(3, 1, 300)
    immunized = immunization.immunize(net, primary, harmful, method="closed_form", ridge=1e-6)
    with torch.no_grad():
        sides = [
            torch.cat([features(model, x) for x, _ in data]).double()
            for data in (harmful, primary)
            for model in (immunized, net)
        ]
    rank = min(spectrum.numerical_rank(torch.linalg.svdvals(f), tuple(f.shape), 1e-6) for f in sides)
    assert spectrum.rir(*sides, rank=rank)["rir"] > 10


def test_mistakes_are_named(net):
    with pytest.raises(ConfigError, match="has no option 'epoch'; there are epochs"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), epoch=3)
    with pytest.raises(ConfigError, match="learning_curve has no option 'lr'; did you mean optimizer__lr; there are"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), lr=1e-3)
    with pytest.raises(ConfigError, match="'method/learning_curv'; did you mean learning_curve or learning_curve_net;"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), method="learning_curv")
    with pytest.raises(ConfigError, match="method must be"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), method=int)
    with pytest.raises(ConfigError, match=r"a net, which has no matrix K, takes method\.side=input"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), method="released_condition_number")
    with pytest.raises(ConfigError, match="labels of primary_loader go from 0 to 5, the model has 4 outputs"):
        immunization.immunize(net, loader(6, 0), loader(3, 1))
    with pytest.raises(DataError, match="harmful_loader gives no batches"):
        immunization.immunize(net, loader(4, 0), [])
    with pytest.raises(DataError, match="harmful_loader holds only one class"):
        immunization.immunize(net, loader(4, 0), loader(1, 0))
    for given, role in (((loader(4, 0), None), "harmful"), ((None, loader(3, 1)), "primary")):
        with pytest.raises(ConfigError, match=f"{role}_loader is None; give a loader for each of the two tasks"):
            immunization.immunize(net, *given)
    for label in (-1, 10**12):
        x, y = loader(3, 1).dataset.tensors
        with pytest.raises(DataError, match=r"labels of harmful_loader go from .*; number classes 0, 1"):
            immunization.immunize(net, loader(4, 0), [(x, y.where(y > 0, label))])
    single = DataLoader(loader(3, 1).dataset, batch_size=17)
    with pytest.raises(ConfigError, match=r"harmful_loader gives a batch of one row, which .*: set drop_last=True"):
        immunization.immunize(net, loader(4, 0), single, "condition_number", epochs=1, augmented=True)
    immunization.immunize(net, loader(4, 0), single, "closed_form", ridge=1e-2, augmented=True)  # nothing is trained
    split = {"train": loader(3, 1), "test": single}
    immunization.immunize(net, loader(4, 0), split, "condition_number", epochs=1, augmented=True)
    headless = nn.Sequential(nn.Flatten(), nn.Linear(768, 4))
    with pytest.raises(ConfigError, match="no layer with weights before its classifier"):
        immunization.immunize(headless, loader(4, 0), loader(3, 1))
    with pytest.raises(ConfigError, match=r"model\.trainable=zz: Sequential has no module with .*; there are 1 and"):
        immunization.immunize(rows_net(), loader(4, 0), loader(3, 1), "forget", trainable="zz")
    both = loader(4, 0)
    with pytest.raises(ConfigError, match="primary_loader and harmful_loader are the same"):
        immunization.immunize(net, both, both)
    for function in (immunization.immunize, immunization.audit):
        with pytest.raises(ConfigError, match=r"seed must be an integer of at least 0 and below 2\^32, not 4294967296"):
            function(net, loader(4, 0), loader(3, 1), seed=2**32)


def without_weights(_net):
    return nn.Flatten()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (partial(torch.compile, backend="eager"), r"made by torch\.compile: give the net itself \(\._orig_mod\)"),
        (
            lambda net: torch.jit.trace(net, torch.zeros(1, 3, 32, 32)),
            r"TorchScript, which can be audited and not changed: give the nn\.Module it was made from",
        ),
        (type, "must be an nn.Module, not type"),
        (without_weights, "a Flatten, has no weights: give a net with a linear classifier"),
    ],
    ids=["compiled", "scripted", "class", "without weights"],
)
def test_nets_that_cannot_be_taken_are_refused(net, made, message, tmp_path):
    with warnings.catch_warnings(action="ignore"):  # of torch.jit
        given = made(net)
    loaders = loader(4, 0), loader(3, 1)
    calls = [lambda: immunization.immunize(given, *loaders), lambda: immunization.save(given, tmp_path)]
    if made in (type, without_weights):
        calls.append(lambda: immunization.audit(net, *loaders, given))
    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call()


class Cosine(nn.Linear):
    """A classifier that is linear in unit features alone."""

    def forward(self, x):
        return super().forward(nn.functional.normalize(x))


def tied():
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.ReLU(), nn.Linear(4, 4))
    net.append(nn.Linear(4, 4))
    net[4].weight = net[3].weight
    return net


@pytest.mark.parametrize("method", ["closed_form", "learning_curve"])
@pytest.mark.parametrize(
    "classifier",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)),
        lambda: nn.utils.prune.l1_unstructured(nn.Linear(16, 4), "weight", 0.5),
        lambda: Cosine(16, 4),
    ],
    ids=["weight_norm", "pruned", "cosine"],
)
def test_a_map_that_would_not_keep_the_outputs_is_refused(classifier, method):
    net = rows_net()[:-1].append(classifier())
    with torch.no_grad():
        net(torch.zeros(1, 768))  # which leaves the weight of a pruned layer without a graph
    options = {"epochs": 3} if method == "learning_curve" else {"ridge": 1e-2}
    with pytest.raises(ConfigError, match=r"the classifier must be a plain nn\.Linear, whose weight is a parameter"):
        immunization.immunize(net, loader(4, 0), loader(3, 1), method, **options)


@pytest.mark.parametrize("method", ["closed_form", "condition_number"])
def test_a_net_that_gives_nan_is_refused(method):
    class Gap(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            outputs[5:6] = torch.nan
            return outputs

    with pytest.raises(ConfigError, match=r"outputs of the model are NaN for 1 of the first 32 inputs of primary_load"):
        immunization.immunize(rows_net().append(Gap(4, 4)), loader(4, 0), loader(3, 1), method)


def test_a_weight_that_two_layers_share_is_no_classifier():
    with pytest.raises(ConfigError, match="no other layer shares"):
        immunization.immunize(tied(), loader(4, 0), loader(3, 1), "closed_form", ridge=1e-2)


def test_a_net_that_cannot_be_copied_is_refused():
    net = rows_net()
    net[1].scale = net[1].weight * 2  # with a graph, as weight_norm leaves it
    with pytest.raises(ConfigError, match=r"cannot be copied .*: make its weights plain parameters"):
        immunization.immunize(net, loader(4, 0), loader(3, 1))


def test_frozen_parameters_and_random_numbers_stay_as_they_were(net):
    net.conv1.requires_grad_(False)
    state = torch.get_rng_state()
    made = immunization.immunize(net, loader(4, 0), loader(3, 1), "closed_form", ridge=1e-2)
    assert torch.equal(torch.get_rng_state(), state)
    frozen = {name for name, p in made.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in net.named_parameters() if not p.requires_grad} != set()


def test_a_run_is_exported_and_loaded(tmp_path):
    folders = [draw_folder(tmp_path / "p", 4, 12, 6, 0), draw_folder(tmp_path / "h", 3, 12, 6, 1)]
    overrides = [
        "dataset=image_folders",
        f"dataset.primary_root={folders[0]}",
        f"dataset.harmful_root={folders[1]}",
        "dataset.cache=null",
        "dataset.size=32",
        "model=timm",
        "model.name=test_resnet",
        "model.pretrained=false",
        "model.arguments={num_classes: 4}",
        "method=closed_form",
        "tracker=none",
        "figures=false",
    ]
    result = immunization.run(overrides, tmp_path / "run")
    assert result.status == "completed"
    assert result.metrics["primary/changed_predictions"] == 0
    model = immunization.load(tmp_path / "run")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 4)  # float32, whatever the run computed in
    card = (tmp_path / "run/model_card.md").read_text()
    assert "\n# test_resnet, immunized by closed_form\n" in card
    assert str(tmp_path) not in card
    assert "License of its weights: not stated" in card  # timm's own holds for its weights alone
    with pytest.raises(DataError, match="does not exist; give a run folder"):
        immunization.load(tmp_path)


def warned(*arguments, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        immunization.immunize(*arguments, **options)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_immunize_warns_where_harm_became_easier(net, tmp_path):
    """Without a weight on the harmful task, what makes the primary one fast makes it fast, too."""
    options = {"epochs": 20, "optimizer__lr": 1e-2}  # after 50 rounding decides
    with pytest.warns(match="on the training rows, a fresh probe learns the harmful task in 0."):
        easier = immunization.immunize(net, loader(4, 0), loader(3, 1), lambda_H=0.0, **options)
    card = (immunization.save(easier, tmp_path) / "model_card.md").read_text()
    assert card.index("**Do not use this model: on the training rows, a fresh probe") < card.index("## Made from")
    reasons = warned(net, loader(4, 0), loader(3, 1), lambda_H=10.0, **options)
    assert not any("a fresh probe" in reason for reason in reasons)


def test_immunize_warns_of_a_head_at_chance(net):
    images, labels = loader(4, 0).dataset.tensors
    with torch.no_grad():
        found = torch.nn.functional.one_hot(labels).float()
        net.fc.weight[:] = torch.linalg.lstsq(features(net, images), found, driver="gelsd").solution.T
        net.fc.bias.zero_()
    assert warned(net, loader(4, 0), loader(3, 1), "identity") == []
    net.fc.weight.data = net.fc.weight[[1, 2, 3, 0]].detach()  # outputs that mean other classes
    (reason,) = warned(net, loader(4, 0), loader(3, 1), "identity")
    assert "the model's own head reaches accuracy 0.0" in reason


def test_harm_that_became_easier_is_said_before_everything(tmp_path, folders):
    """A run on the features of random weights, whose RIR is above 1."""
    roots = [f"dataset.{role}_root={folder}" for role, folder in zip(("primary", "harmful"), folders, strict=True)]
    data = ["dataset=image_folders", "dataset.cache=null", "dataset.size=32", *roots]
    model = ["model=timm", "model.name=test_resnet", "model.pretrained=false", "model.arguments={num_classes: 4}"]
    method = ["method=learning_curve", "method.lambda_H=0", "method.benign_weight=0", "method.epochs=50"]
    options = ["optimizer.lr=1e-2", "tracker=none", "figures=false"]
    result = immunization.run([*data, *model, *method, *options], tmp_path)
    assert result.metrics["rir"] > 1
    assert result.metrics["steps_ratio/harmful"] < 0.5
    assert {"harmful_faster", "head_at_chance"} <= set(result.flags)
    assert result.verdict[0] == f"Worse than before: {result.reasons['harmful_faster']}."
    assert result.verdict[1] == f"Note: {result.reasons['head_at_chance']}."
    assert not any("Gradient descent on a fresh probe takes" in said for said in result.verdict if "harmful" in said)
    assert f"**Do not use this model: {result.reasons['harmful_faster']}.**" in (tmp_path / "model_card.md").read_text()


def test_calls_from_python_show_their_progress(net, monkeypatch):
    """On a terminal, as on the command line; with verbose=False nowhere."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    immune = immunization.immunize(net, loader(4, 0), loader(3, 1), epochs=2)
    trained = sys.stderr.getvalue()
    assert "learning_curve: 100%" in trained
    immunization.audit(immune, loader(4, 0), loader(3, 1), attacks=["closed_form_probe"])
    audited = sys.stderr.getvalue()[len(trained) :]
    assert "measuring ..." in audited
    assert "attack 1 of 1, closed_form_probe on theta_I" in audited
    monkeypatch.setattr(sys, "stderr", Terminal())
    immune = immunization.immunize(net, loader(4, 0), loader(3, 1), epochs=2, verbose=False)
    immunization.audit(immune, loader(4, 0), loader(3, 1), attacks=["closed_form_probe"], verbose=False)
    assert not sys.stderr.getvalue()
    with pytest.raises(ConfigError, match="verbose must be true or false, or null"):
        immunization.audit(immune, loader(4, 0), loader(3, 1), verbose="no")


def test_a_linear_run_is_loaded(tmp_path):
    immunization.run(["method=closed_form", "tracker=none", "evaluation=[]", "figures=false"], tmp_path)
    assert immunization.load(tmp_path)(torch.randn(3, 64)).shape == (3, 64)


def test_an_audit_of_a_folded_net(net):
    """`learning_curve` slows the probe it was made against; whoever strips the map has the model of before."""
    data = loader(4, 1), loader(3, 2)
    immune = immunization.immunize(net, *data, epochs=60, optimizer__lr=3e-2)
    attacks = ["linear_probe", "undo", "closed_form_probe", "full_finetune"]
    options = {"linear_probe__steps": 64, "undo__steps": 64, "full_finetune__steps": 2, "full_finetune__rates": (0.01,)}
    result = immunization.audit(immune, *data, attacks=attacks, **options)
    assert result.metrics["attack/linear_probe/steps_ratio"] > 2
    assert result.metrics["attack/undo/steps"] == result.metrics["attack/undo/steps_baseline"]
    assert result.metrics["primary/changed_predictions"] == 0
    assert result.metrics["attack/full_finetune/final"] is not None
    assert "attack_succeeds" in result.flags
    assert any("It does not hold" in sentence for sentence in result.verdict)
    with_reference = immunization.audit(immune, *data, net, attacks=["undo"], undo__steps=64)
    key = "attack/undo/final_baseline"
    assert with_reference.metrics[key] == pytest.approx(result.metrics[key], abs=0.05)
    unchanged = immunization.audit(net, *data, net, attacks=["closed_form_probe"])
    assert "unchanged" in unchanged.flags


def test_an_audit_of_a_linear_map(tmp_path):
    learned = ["method=learning_curve", "method.epochs=150", "optimizer.lr=1e-2"]
    immunization.run([*learned, "evaluation=[]", "tracker=none", "figures=false"], folder=tmp_path)
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 2
    x = torch.randn(300, 64, generator=generator) + y[:, None] - 0.5
    rows = DataLoader(TensorDataset(x, y), batch_size=100)
    model = immunization.load(tmp_path)
    result = immunization.audit(
        model, rows, rows, attacks=["linear_probe", "strip"], linear_probe__steps=256, strip__steps=100
    )
    assert result.metrics["attack/strip/steps_ratio"] == 1
    assert result.metrics["attack/strip/final"] > 0.9


def test_an_audit_from_the_command_line_of_a_net_of_no_library_says_how(tmp_path):
    immunization.save(rows_net(), tmp_path)
    with pytest.raises(ConfigError, match=r"holds a Sequential, which is not a net of timm; audit it from Python"):
        immunization.run(["experiment=audit", "tracker=none", f"model.checkpoint={tmp_path}"], tmp_path / "audit")


def test_mistakes_of_an_audit_are_named(net):
    with pytest.raises(ConfigError, match="as it was before immunization"):
        immunization.audit(net, loader(4, 1), loader(3, 2))
    with pytest.raises(ConfigError, match="budget and attacks are both given; give one of them"):
        immunization.audit(net, loader(4, 1), loader(3, 2), net, attacks="adam", budget="quick")
    with pytest.raises(ConfigError, match="budget must be one of quick, standard, nightly, or null"):
        immunization.audit(net, loader(4, 1), loader(3, 2), net, budget="large")
    with pytest.raises(ConfigError, match="'attack/linear_prob'; did you mean linear_probe"):
        immunization.audit(net, loader(4, 1), loader(3, 2), net, attacks=["linear_prob"])
    with pytest.raises(ConfigError, match="no option 'adam__rate'"):
        immunization.audit(net, loader(4, 1), loader(3, 2), net, attacks=["adam"], adam__rate=1)
    with pytest.raises(ConfigError, match=r"\.steps must be an integer of at least 1"):
        immunization.audit(net, [], [], net, attacks=["adam"], adam__steps=0)  # before anything is read
    with pytest.raises(DataError, match="harmful_loader gives no batches"):
        immunization.audit(net, loader(4, 1), [], net, attacks=["adam"])


def test_an_audit_by_harmful_data_alone(net):
    """As short as it can be: no primary task, splits by one loader or by a loader each, the whole list of attackers."""
    x, y = loader(3, 1, 72).dataset.tensors
    parts = {"train": slice(0, 48), "test": slice(48, 72)}
    splits = {split: DataLoader(TensorDataset(x[part], y[part]), batch_size=16) for split, part in parts.items()}
    result = immunization.audit(net, harmful_loader=splits, reference=net, budget="quick")
    assert result.about["suite"]["version"] == "quick-7"
    assert result.metrics["worth/before"] == result.metrics["worth/after"]
    assert result.metrics["attack/worst/test_rows"] == 24
    assert not any(name.startswith(("rir", "primary/")) for name in result.metrics)
    assert "with theta_0" in result.verdict[0]
    one = immunization.audit(net, harmful_loader=loader(3, 1, 60), reference=net, attacks=["neighbours"])
    assert one.metrics["attack/worst/test_rows"] == 12
    unchosen = {"train": loader(4, 1, 4), "test": loader(4, 1, 16)}
    few = immunization.audit(net, harmful_loader=unchosen, reference=net, budget="quick")
    assert few.verdict == [
        "What an attack on the harmful task costs is unknown: the attacked task has no val split: set "
        "dataset.val_fraction above 0."
    ]
    with pytest.raises(
        ConfigError, match="harmful_loader: give one loader each for train and test, and optionally for val, not"
    ):
        immunization.audit(net, None, {"train": loader(3, 1)}, net, attacks=["neighbours"])
    one = loader(3, 1)
    with pytest.raises(ConfigError, match="harmful_loader: train, test are the same loader"):
        immunization.audit(net, None, {"train": one, "test": one}, net, attacks=["neighbours"])
    with pytest.raises(ConfigError, match=r"an audit needs data of the harmful task, audit\(model, harm"):
        immunization.audit(net, loader(3, 1), reference=net)
    rows = {split: DataLoader(TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)) for split in ("train", "test")}
    theta = immunization.models.fold.LinearMap(torch.eye(4))
    linear = immunization.audit(theta, harmful_loader=rows, attacks=["closed_form_probe"])
    assert linear.metrics["attack/closed_form_probe/gap"] == 0
    shifted = {}
    for split in ("train", "test"):
        x = torch.randn(200, 4)
        shifted[split] = DataLoader(TensorDataset(x, 50 + x[:, 0]))
    linear = immunization.audit(theta, harmful_loader=shifted, attacks=["closed_form_probe"])
    assert linear.metrics["attack/closed_form_probe/final"] > 0.9  # of targets far from 0
    rows["train"] = DataLoader(TensorDataset(torch.randn(30, 4), torch.arange(30) % 2))
    rows["test"] = DataLoader(TensorDataset(torch.randn(30, 4), torch.arange(30) % 3))
    with pytest.raises(DataError, match="class 2 is empty, it has no training rows"):
        immunization.audit(theta, harmful_loader=rows, attacks=["closed_form_probe"])


def test_an_audit_by_harmful_data_alone_says_where_test_rows_were_trained_on(net):
    x, y = loader(3, 1, 48).dataset.tensors
    splits = {split: DataLoader(TensorDataset(x.clone(), y), batch_size=16) for split in ("train", "test")}
    result = immunization.audit(net, harmful_loader=splits, reference=net, attacks=["neighbours"])
    assert result.reasons["test_rows_seen_harmful"].startswith("48 of 48 test rows have features and label of a train")
    splits["test"] = DataLoader(TensorDataset(*loader(3, 2, 48).dataset.tensors), batch_size=16)
    result = immunization.audit(net, harmful_loader=splits, reference=net, attacks=["neighbours"])
    assert not [name for name in result.flags if name.startswith(("test_rows", "other_ref", "untested"))]


def small(outputs, *, widths=(16, 16), wrap=lambda net: net):
    torch.manual_seed(1)
    layers = [nn.Flatten(), nn.Linear(768, widths[0]), nn.ReLU(), nn.Linear(*widths), nn.ReLU()]
    return wrap(nn.Sequential(*layers, nn.Linear(widths[1], outputs)))


def test_the_head_of_a_reference_with_other_outputs_is_not_compared():
    """Its features are."""
    result = immunization.audit(small(4), loader(4, 0), loader(3, 1), small(3), attacks=["neighbours"])
    assert result.metrics["primary/head_accuracy"] is not None
    assert result.metrics["rir"] == pytest.approx(1, rel=1e-4)
    assert "other_reference" not in result.flags
    for name in ("primary/head_accuracy_baseline", "primary/changed_predictions", "deployment/accuracy_int8_baseline"):
        assert result.metrics[name] is None
        assert result.reasons[name] == "the reference has 3 outputs, the model 4: they mean other classes"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (partial(small, 9, wrap=nn.Sequential), None),
        (partial(small, 4, widths=(16, 20)), "2 of 4 parameters of the model and 2 of 4 of the reference have no"),
    ],
    ids=["wrapped", "wider"],
)
def test_a_reference_of_another_architecture_is_told(reference, reason):
    model = immunization.immunize(small(4), loader(4, 0), loader(3, 1), "closed_form", ridge=1e-2)
    result = immunization.audit(model, harmful_loader=loader(3, 1), reference=reference(), attacks=["neighbours"])
    assert ("other_reference" in result.flags) is (reason is not None)
    assert reason is None or result.verdict[0].startswith(f"Note: {reason}")


def test_labels_are_recoded_also_where_the_training_reads_the_loaders(net):
    """Some outputs of the model are primary classes; harmful labels may be any integers."""

    def some(loader, labels):
        return DataLoader([(x, labels[y]) for batch in loader for x, y in zip(*batch, strict=True)], batch_size=32)

    primary, harmful = some(loader(3, 0), [0, 2, 3]), some(loader(2, 1), [3, 9])
    options = {"epochs": 1, "batch_size": 16, "optimizer__lr": 1e-4, "trainable": "layer4"}
    trained = [immunization.immunize(net, primary, harmful, "imma", augmented=way, **options) for way in (False, True)]
    assert all(torch.isfinite(p).all() for one in trained for p in one.parameters())


def test_batches_are_no_larger_than_the_data_and_grouped_by_shots(net, monkeypatch):
    made = []
    kept = batching.PairedBatches
    monkeypatch.setattr(batching, "PairedBatches", lambda *given: made.append(given[1:2] + given[3:]) or kept(*given))
    few = loader(4, 0, 40), loader(3, 1, 20)
    immunization.immunize(net, *few, "condition_number", trainable="layer4", epochs=1)
    immunization.immunize(net, *few, "forget_blocks", trainable="layer4", epochs=1, batch_size=12, shots=3)
    assert made == [(18, 1), (12, 3)]


def test_a_label_that_the_first_pass_did_not_give_is_refused():
    class Drawn:
        passes = 0

        def __iter__(self):
            self.passes += 1
            for x, y in loader(3, 1):
                keep = (y != 1) | torch.tensor(self.passes > 1)
                yield x[keep], y[keep]

    options = {"epochs": 2, "augmented": True}
    with pytest.raises(DataError, match="harmful_loader gives label 1, which it did not give when it was first read"):
        immunization.immunize(rows_net(), loader(4, 0), Drawn(), "condition_number", **options)


def test_images_that_hold_nan_are_refused():
    broken = [(x.clone(), y) for x, y in loader(3, 1)]
    broken[0][0][0] = torch.nan
    with pytest.raises(DataError, match="harmful_loader gives inputs that hold NaN or infinity"):
        immunization.immunize(rows_net(), loader(4, 0), broken, "closed_form")


def test_a_run_leaves_random_numbers_and_threads_as_they_were(tmp_path):
    torch.manual_seed(5)
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        immunization.run(["tracker=none", "figures=false", "method.epochs=1", "threads=2"], folder=tmp_path, quiet=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_labels_of_few_bits_are_numbers_of_classes():
    """uint8 would be taken for a mask where labels choose rows."""
    short = [(x, y.to(torch.uint8)) for x, y in loader(3, 1)]
    options = {"method": "condition_number", "epochs": 1, "augmented": True}
    trained = [immunization.immunize(rows_net(), loader(4, 0), given, **options) for given in (loader(3, 1), short)]
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in trained), strict=True))
