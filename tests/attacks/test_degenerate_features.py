"""Audits of features of rank 0 and 1, before or after: measures of their own rank, or one line that names them."""

import pytest
import timm
import torch
from helpers.images import loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import immunization
from immunization import run
from immunization.errors import DegenerateSpectrum
from immunization.models.fold import LinearMap
from immunization.runs import files
from immunization.runs.tracker import history

AUDIT = ("experiment=audit", "tracker=none", "figures=false", "attack=[closed_form_probe]")
MEASURES = "evaluation=[rir,definition,primary,ceiling,learning_curves,sampled,validity]"
DIM = 64


def untrained() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", pretrained=False, num_classes=4).eval()


def dead() -> nn.Module:
    """All features are 0."""
    net = untrained()
    for parameter in net.layer4.parameters():
        nn.init.zeros_(parameter)
    return net


def constant() -> nn.Module:
    """A net with equal features for every image."""
    net = dead()
    for module in net.layer4.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, 0.1, 1)
    return net


def rank_one() -> nn.Module:
    """All features are the same one."""
    net = untrained()
    for module in net.layer4.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data[:] = module.weight.data[:1].clone()
    return net


NETS = {"constant": constant, "rank_one": rank_one}
MAPS = {
    "zeros": torch.zeros(DIM, DIM),
    "rank_one": torch.outer(torch.arange(1.0, DIM + 1), torch.arange(DIM) % 3 - 1.0),
    "half": (torch.arange(DIM) % 2).double().diag(),
}


@pytest.fixture
def rows() -> DataLoader:
    y = torch.arange(120) % 2
    x = torch.randn(120, DIM, generator=torch.Generator().manual_seed(0)) + y[:, None] - 0.5
    return DataLoader(TensorDataset(x, y), batch_size=60)


def audited(folders, tmp_path, net, reference):
    for name, one in {"net": net, "reference": reference}.items():
        files.write_tensors(tmp_path / f"{name}.safetensors", one.state_dict())
    roots = zip(("primary", "harmful"), folders, strict=True)
    data = [
        "dataset=image_folders",
        f"dataset.cache={folders[0].parent / 'kept'}",
        "dataset.size=32",
        *(f"dataset.{r}_root={f}" for r, f in roots),
    ]
    model = ["model=timm", "model.name=test_resnet", "model.arguments={num_classes: 4}"]
    weights = [f"model.checkpoint={tmp_path}/net.safetensors", f"model.reference={tmp_path}/reference.safetensors"]
    return run([*AUDIT, MEASURES, *data, *model, *weights], folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("net", "before"),
    [
        ("constant", False),
        ("rank_one", True),
        pytest.param("constant", True, marks=pytest.mark.slow),
        pytest.param("rank_one", False, marks=pytest.mark.slow),
    ],
)
def test_a_net_of_rank_one_features_has_measures(folders, tmp_path, net, before):
    nets = (untrained(), NETS[net]()) if before else (NETS[net](), untrained())
    result = audited(folders, tmp_path, *nets)
    suffix = "_baseline" if before else ""
    of_loaders = immunization.audit(nets[0], loader(4, 0), loader(3, 1), nets[1], attacks=["linear_probe"])
    for metrics in (result.metrics, of_loaders.metrics):
        kappas = {metrics[f"kappa_{role}{suffix}"] for role in ("harmful", "primary")}
        assert kappas == {1} if before else min(kappas) > 1e8  # all other directions are lost
    if before:
        assert history(tmp_path / "run")["rir"]["y"] == [pytest.approx(result.metrics["rir"], rel=1e-6)]
    else:
        assert "lost directions of the primary task" in result.reasons["rir"]
        assert {"noise_floor_primary", "noise_floor_harmful"} <= set(result.flags)
        assert history(tmp_path / "run")["rir"]["y"] == [None]


@pytest.mark.parametrize("before", [True, False])
def test_dead_features_of_a_net_are_named(folders, tmp_path, before):
    nets = (untrained(), dead()) if before else (dead(), untrained())
    whose = "baseline" if before else "model"
    with pytest.raises(DegenerateSpectrum, match=f"primary task, {whose}.*: the features are all zero"):
        audited(folders, tmp_path, *nets)
    with pytest.raises(DegenerateSpectrum, match=f"harmful task, {whose}: the features are all zero"):
        immunization.audit(nets[0], loader(4, 0), loader(3, 1), nets[1], attacks=["linear_probe"])


@pytest.mark.parametrize("name", [name for name in MAPS if name != "zeros"])
def test_linear_maps_of_low_rank_have_measures(tmp_path, rows, name):
    of_loaders = immunization.audit(LinearMap(MAPS[name].double()), rows, rows, attacks=["linear_probe", "undo"])
    assert of_loaders.metrics["primary/head_accuracy"] == of_loaders.metrics["primary/accuracy"]
    files.write_tensors(tmp_path / "map.safetensors", {"theta": MAPS[name].double()})
    options = ["dataset.max_samples=60", MEASURES, f"model.checkpoint={tmp_path}/map.safetensors"]
    again = run([*AUDIT, *options], folder=tmp_path / "run")
    for result, attack in ((of_loaders, "linear_probe"), (again, "closed_form_probe")):
        assert 0 <= result.metrics[f"attack/{attack}/final"] <= 1


def test_a_map_of_zeros_is_named_unless_it_has_a_bias(tmp_path, rows):
    zeros = MAPS["zeros"].double()
    with pytest.raises(DegenerateSpectrum, match="primary task, model: the features are all zero"):
        immunization.audit(LinearMap(zeros), rows, rows, attacks=["linear_probe"])
    files.write_tensors(tmp_path / "map.safetensors", {"theta": zeros})
    with pytest.raises(DegenerateSpectrum, match="primary task, model at step 0: the features are all zero"):
        run([*AUDIT, f"model.checkpoint={tmp_path}/map.safetensors"], folder=tmp_path / "run")
    biased = immunization.audit(LinearMap(zeros, torch.ones(DIM)), rows, rows, attacks=["linear_probe"])
    assert biased.metrics["kappa_harmful"] > 1e10  # the tolerance of rows of float32
