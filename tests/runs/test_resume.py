"""resume=true: a completed result is never destroyed, and is none of other data, weights or code."""

import os
import shutil
from pathlib import Path

import pytest
import timm
import torch
from helpers.commands import launched
from helpers.data_files import IMAGES, csv, image_pair, table
from omegaconf import OmegaConf
from PIL import Image

from immunization import Result, run
from immunization.config import compose
from immunization.errors import DataError, UserError
from immunization.runs.filenames import WEIGHTS
from immunization.runs.resume import result_settings

pytestmark = pytest.mark.trains
HARMFUL = table(first="0.4,0.2,0.3")
TABLES = ("tracker=none", "figures=false", "evaluation=[rir]", "dataset=arrays", "method.epochs=1", "resume=true")


@pytest.fixture
def tables(tmp_path) -> tuple[list[str], Path]:
    """The options of a completed run on two tables, and its folder."""
    csv(tmp_path, HARMFUL)
    options = [*TABLES, *(f"dataset.{role}_csv={tmp_path / role}.csv" for role in ("primary", "harmful"))]
    run(options, folder=tmp_path / "run")
    return options, tmp_path / "run"


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.log"}


def test_a_result_without_its_weights_and_data_stays(tables, capsys):
    options, folder = tables
    (folder / WEIGHTS).unlink()
    (folder.parent / "harmful.csv").unlink()
    before = kept(folder)
    result = run(options, folder=folder)
    assert (result.status, kept(folder)) == ("completed", before)
    said = capsys.readouterr().err
    assert f"{WEIGHTS} is missing; the result is kept" in said
    assert "its inputs cannot be read now" in said


@pytest.mark.parametrize("name", [WEIGHTS, "config.yaml", "splits.safetensors"])
def test_what_is_done_again_and_fails_leaves_the_result_that_was_there(name, tables):
    options, folder = tables
    (folder / name).write_bytes((folder / name).read_bytes()[:20])
    (folder.parent / "harmful.csv").rename(folder.parent / "elsewhere.csv")
    before = kept(folder)
    with pytest.raises(UserError):
        run(options, folder=folder)
    assert kept(folder) == before
    assert Result.read(folder).metrics
    (folder.parent / "elsewhere.csv").rename(folder.parent / "harmful.csv")
    assert run(options, folder=folder).status == "completed"
    assert kept(folder).keys() == before.keys()
    assert kept(folder)[name] != before[name]


def test_a_result_is_none_of_other_data_of_the_same_name(tables):
    options, folder = tables
    before = kept(folder)
    csv(folder.parent, table(first="3.0,0.2,0.3"))
    with pytest.raises(
        DataError, match=r"does not match this run any more.* dataset harmful/\w+, .*dataset.harmful_csv"
    ):
        run(options, folder=folder)
    assert kept(folder) == before
    csv(folder.parent, HARMFUL)
    assert run(options, folder=folder).metrics == Result.read(folder).metrics


def test_data_that_are_the_same_but_for_rounding_are_no_others(tables, monkeypatch):
    options, folder = tables
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, **how: norm(x, **how) * (1 + 1e-12))
    assert run(options, folder=folder).status == "completed"


def test_a_result_is_none_of_other_weights_or_images_of_the_same_name_size_and_time(tmp_path):
    image_pair(tmp_path)
    net = timm.create_model("test_resnet", num_classes=2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    options = [option.replace("{tmp}", str(tmp_path)) for option in IMAGES] + [f"model.checkpoint={tmp_path}/net.pt"]
    options += ["tracker=none", "figures=false", "evaluation=[rir]", "resume=true"]
    first = run(options, folder=tmp_path / "run")
    before = kept(tmp_path / "run")
    with torch.no_grad():
        net.layer4[-1].conv2.weight.mul_(2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    with pytest.raises(DataError, match=r"the content of model\.checkpoint has changed\."):
        run(options, folder=tmp_path / "run")
    with torch.no_grad():
        net.layer4[-1].conv2.weight.div_(2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert run(options, folder=tmp_path / "run").metrics == first.metrics

    for path in sorted((tmp_path / "h" / "train").rglob("*.png")):
        with Image.open(path) as image:
            other = image.rotate(180)
        status = path.stat()
        other.save(path)
        os.truncate(path, max(path.stat().st_size, status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="the content of dataset harmful/train"):
        run(options, folder=tmp_path / "run")
    assert kept(tmp_path / "run") == before
    again = run(options, folder=tmp_path / "other")  # of the same cache
    shutil.rmtree(tmp_path / "c")
    assert run(options, folder=tmp_path / "anew").metrics == again.metrics != first.metrics


def test_where_the_files_lie_makes_no_other_run():
    here, there = (
        OmegaConf.to_container(compose(["dataset=house_prices", *options]), resolve=True)
        for options in (["dataset.root=here"], ["dataset.root=there", "dataset.download=false"])
    )
    assert result_settings(here) == result_settings(there)


def test_neither_does_where_activations_are_kept():
    here, there = (
        OmegaConf.to_container(compose(["dataset=image_folders", "model=digits_net", f"cache={cache}"]), resolve=True)
        for cache in ("here", "there")
    )
    assert here["dataset"]["cache"] != there["dataset"]["cache"]
    assert result_settings(here) == result_settings(there)


def test_a_run_again_from_its_folder(tmp_path):
    """config.yaml holds the whole configuration, of which values can be changed."""
    options = ["method.epochs=3", "method.lambda_P=0.25", "dataset.max_samples=40", "evaluation=[rir]", "seed=7"]
    first = run([*options, "tracker=none", "figures=false"], tmp_path / "run")
    given = ("--config-path", str(tmp_path / "run"), f"hydra.run.dir={tmp_path / 'again'}")
    done = launched(*given, "name=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Result.read(tmp_path / "again").metrics == first.metrics
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("trusted: []", "trusted: [evil]"))
    refused = launched(*given, cwd=tmp_path)
    assert refused.stderr.startswith("error: trusted=['evil'] is set in a configuration file")
