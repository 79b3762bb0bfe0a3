"""Immunized nets on disk: saved from Python, loaded by this project, by plain timm, and as timm itself writes them."""

import re
import warnings

import pytest
import timm
import torch
from helpers.images import draw_folder, loader
from helpers.versions import KEEPS_ARGUMENTS, since
from torch import nn

import immunization
from immunization import ConfigError, DataError

pytestmark = pytest.mark.trains

NETS = {"test_resnet": {}, "test_vit": {"img_size": 32}, "test_convnext": {}, "test_efficientnet": {}}


def immunized(name: str = "test_resnet", dtype: torch.dtype = torch.float32, method: str = "closed_form") -> nn.Module:
    torch.manual_seed(0)
    net = timm.create_model(name, pretrained=False, num_classes=4, **NETS[name]).eval().to(dtype)
    options = {"ridge": 1e-2} if method == "closed_form" else {"epochs": 1, "batch_size": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random nets in bfloat16
        return immunization.immunize(net, loader(4, 0, size=32), loader(3, 1, size=32), method, **options)


def same(model: nn.Module, other: nn.Module) -> bool:
    images = next(iter(loader(4, 2, size=32)))[0].to(next(other.parameters()).dtype)
    with torch.no_grad():
        return torch.equal(model(images), other(images))


def run_block(card: str, monkeypatch: pytest.MonkeyPatch, folder) -> nn.Module:
    """What the card's block of plain timm gives, with nothing else loaded into its names."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", card, re.S) if "immunization.load" not in block)
    assert "import immunization" not in code
    assert len([line for line in code.splitlines() if line.startswith("model")]) <= 3
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(code, names)
    return names["model"]


@pytest.mark.parametrize("name", NETS)
def test_a_folded_net_saved_loaded_and_in_plain_timm(name, tmp_path, monkeypatch):
    model = immunized(name)
    assert immunization.save(model, tmp_path / "saved") == tmp_path / "saved"
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"immunized.safetensors", "config.json", "model_card.md"}
    loaded = immunization.load(tmp_path / "saved")
    assert same(loaded, model)
    assert loaded.immunized_by["method"] == "closed_form"
    card = (tmp_path / "saved/model_card.md").read_text()
    assert "immunized by closed_form" in card
    assert same(run_block(card, monkeypatch, tmp_path / "saved"), model)
    immunization.save(loaded, tmp_path / "again")
    weights = [tmp_path / folder / "immunized.safetensors" for folder in ("saved", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, tmp_path, monkeypatch):
    model = immunized(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    immunization.save(model, tmp_path)
    assert same(immunization.load(tmp_path), model)
    assert same(run_block((tmp_path / "model_card.md").read_text(), monkeypatch, tmp_path), model)


def test_a_trained_net(tmp_path, monkeypatch):
    model = immunized(method="condition_number")
    immunization.save(model, tmp_path)
    assert same(run_block((tmp_path / "model_card.md").read_text(), monkeypatch, tmp_path), model)


def test_the_card_of_a_run(tmp_path, monkeypatch):
    folders = [draw_folder(tmp_path / "p", 4, 12, 6, 0), draw_folder(tmp_path / "h", 3, 12, 6, 1)]
    overrides = ["dataset=image_folders", f"dataset.primary_root={folders[0]}", f"dataset.harmful_root={folders[1]}"]
    overrides += ["dataset.cache=null", "dataset.size=32", "model=timm", "model.name=test_resnet", "tracker=none"]
    overrides += ["model.pretrained=false", "model.arguments={num_classes: 4}", "method=closed_form", "figures=false"]
    immunization.run([*overrides, "method.ridge=1e-2", "evaluation=[]"], tmp_path / "run")
    card = (tmp_path / "run/model_card.md").read_text()
    assert str(tmp_path) not in card
    assert same(run_block(card, monkeypatch, tmp_path / "run"), immunization.load(tmp_path / "run"))


@pytest.mark.parametrize("name", ["test_resnet", since("timm", KEEPS_ARGUMENTS, "test_vit")])
def test_what_timm_writes_for_the_hub_is_loaded(name, tmp_path):
    model = immunized(name)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)  # as push_to_hf_hub does
    assert same(immunization.load(tmp_path), model)


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def test_a_net_of_another_library(tmp_path):
    torch.manual_seed(0)
    net = Small().eval()
    model = immunization.immunize(net, loader(4, 0, size=32), loader(3, 1, size=32), "closed_form", ridge=1e-2)
    immunization.save(model, tmp_path)
    assert same(immunization.load(tmp_path, net), model)
    with pytest.raises(
        ConfigError, match=r"holds a Small, which is not a net of timm; give your net, load\(path, net\)"
    ):
        immunization.load(tmp_path)
    with pytest.raises(ConfigError, match="do not fit the Sequential"):
        immunization.load(tmp_path, nn.Sequential(nn.Linear(2, 2)))
    net[-1] = nn.Linear(8, 7)
    with pytest.raises(ConfigError, match=r"4\.original\.bias has shape \(4,\), not \(7,\); .* with the same head"):
        immunization.load(tmp_path, net)
    card = (tmp_path / "model_card.md").read_text()
    assert "Stripped by replacing the classifier" in card
    assert "library_name: pytorch" in card


def test_a_net_of_timm_is_put_into_the_one_given_where_it_fits(tmp_path):
    model = immunized()
    immunization.save(model, tmp_path)
    given, other = (timm.create_model("test_resnet", pretrained=False, num_classes=n) for n in (4, 9))
    assert same(immunization.load(tmp_path, given), model)
    with pytest.raises(ConfigError, match=r"fc\.bias has shape \(4,\), not \(9,\); .* with the same head"):
        immunization.load(tmp_path, other)


def test_mistakes_are_named(tmp_path):
    model = immunized("test_vit")
    with pytest.raises(ConfigError, match=r"timm\.create_model\('test_vit', .*does not give this net"):
        immunization.save(model, tmp_path / "a", num_classes=7)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"must be an nn\.Module, not dict"):
        immunization.save({}, tmp_path)
    with pytest.raises(DataError, match="does not exist; give a run folder"):
        immunization.load(tmp_path)
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(DataError, match=r"whole\.pt: only weights in safetensors are read; immunization\.save\(model"):
        immunization.load(tmp_path / "whole.pt")
