"""An immunized net in what people do with nets: docs/deploy.md is run, and what it exports answers the same."""

import io
import re
from pathlib import Path

import pytest
import timm
import torch
from helpers.images import loader
from helpers.repository import ROOT
from helpers.versions import KEEPS_ARGUMENTS, before
from torch import nn

import immunization

pytestmark = pytest.mark.trains

PAGE = (ROOT / "docs" / "deploy.md").read_text()


@pytest.fixture(scope="module", params=["test_resnet", "test_vit"])
def net(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 32} if request.param == "test_vit" else {}
    net = timm.create_model(request.param, pretrained=False, num_classes=4, **size).eval()
    return immunization.immunize(net, loader(4, 0, size=32), loader(3, 1, size=32), "closed_form", ridge=1e-2)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return next(iter(loader(4, 2, size=32)))[0][:8]


def block(start: str) -> str:
    return next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if start in code)


def names(net: nn.Module, images: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    immunization.save(net, folder / "immunized")
    monkeypatch.chdir(folder)
    return {"torch": torch, "model": net, "images": images}


@torch.no_grad()
@pytest.mark.parametrize("start", ["torch.export", "torch.jit.trace"])
def test_exports_answer_the_same(net, images, start, tmp_path, monkeypatch):
    known = names(net, images, tmp_path, monkeypatch)
    exec(block(start), known)
    torch.testing.assert_close(known["again"](images), net(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(known["again"](images[:3]), net(images[:3]), rtol=1e-4, atol=1e-5)  # any batch size


@pytest.mark.parametrize("net", ["test_resnet"], indirect=True, scope="module")
def test_what_was_exported_is_audited(net, images, tmp_path, monkeypatch):
    known = names(net, images, tmp_path, monkeypatch)
    with torch.no_grad():
        exec(block("torch.export.save"), known)
    known |= {"immunization": immunization, "harmful_loader": loader(3, 1, 60, 32), "net_before": net}
    exec(block("immunization.audit(program"), known)
    assert known["result"].metrics["worth/theta_0"] is not None
    assert "only_run" in known["result"].flags


@torch.no_grad()
@pytest.mark.parametrize(
    "net", ["test_resnet", pytest.param("test_vit", marks=pytest.mark.slow)], indirect=True, scope="module"
)
def test_onnx_answers_the_same(net, images, tmp_path, monkeypatch):
    known = names(net, images, tmp_path, monkeypatch)
    exec(block("torch.onnx"), known)
    torch.testing.assert_close(torch.from_numpy(known["outputs"]), net(images), rtol=1e-4, atol=1e-5)
    for n in (1, 3):  # any batch size
        (few,) = known["session"].run(None, {"images": images[:n].numpy()})
        torch.testing.assert_close(torch.from_numpy(few), net(images[:n]), rtol=1e-4, atol=1e-5)
    try:
        exec(block("quantize_dynamic"), known)
    except Exception as error:
        if before("torch", "2.14") and "ShapeInferenceError" in str(error):
            pytest.skip("this torch exports shapes that onnx's own inference refuses")
        raise
    (int8,) = known["onnxruntime"].InferenceSession("int8.onnx").run(None, {"images": images.numpy()})
    assert 0 < (torch.from_numpy(int8) - net(images)).abs().max() < net(images).abs().max()


@torch.no_grad()
def test_serving_and_numbers_of_fewer_bits(net, images, tmp_path, monkeypatch):
    known = names(net, images, tmp_path, monkeypatch)
    exec(block("immunization.load"), known)
    assert torch.equal(known["probabilities"].argmax(1), net(images).argmax(1))
    exec(block("bfloat16()"), known)
    exec(block("in_format"), known)
    assert known["rounded"].keys() >= {"float16", "int8", "int4"}
    for given in (known["half"], *known["rounded"].values()):
        assert torch.isfinite(given).all()
        assert given.shape == (8, 4)
    assert (known["half"] - known["rounded"]["bfloat16"]).abs().max() < 0.1 * net(images).abs().max()


def test_the_hub_by_the_function_of_timm(net, images, tmp_path, monkeypatch):
    """All but the network: what the page calls makes its folder, and hands it to a stand-in of the Hub's client."""
    if hasattr(net, "patch_embed") and before("timm", KEEPS_ARGUMENTS):  # made with an image size
        pytest.skip(f"needs timm {KEEPS_ARGUMENTS}")
    known = names(net, images, tmp_path, monkeypatch)
    pushed = tmp_path / "pushed"

    class Hub:
        def __init__(self, *_: object, **__: object) -> None: ...

        def create_repo(self, repo_id: str, **_: object) -> "Hub":
            self.repo_id = repo_id
            return self

        def file_exists(self, **_: object) -> bool:
            return (pushed / "README.md").exists()

        def upload_folder(self, folder_path: str, **_: object) -> None:
            for path in Path(folder_path).iterdir():
                (pushed / path.name).write_bytes(path.read_bytes())

        def upload_file(self, path_or_fileobj: str, path_in_repo: str, **_: object) -> None:
            (pushed / path_in_repo).write_bytes(Path(path_or_fileobj).read_bytes())

    pushed.mkdir()
    monkeypatch.setattr("timm.models._hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo_id: str(pushed))
    exec(block("push_to_hf_hub"), known)
    assert (pushed / "README.md").read_text().startswith("---\nlicense: ")
    exec(block("snapshot_download"), known)
    with torch.no_grad():
        assert torch.equal(known["model"](images), net(images))


def test_fine_tuning_by_others_starts_from_the_model(net, images, tmp_path):
    """It is an ordinary module: it copies, pickles and trains."""
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    again = torch.load(file, weights_only=False).train()
    again(images).sum().backward()
    assert all(p.grad is not None for p in again.parameters())
