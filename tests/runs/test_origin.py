"""Audits take data and model from the run that made their checkpoint, and say so where they are told to use others."""

import shutil

import numpy as np
import pytest
import torch
from helpers.data_files import IMAGES, image_pair
from helpers.runs import DEEP, QUICK

from immunization import load, run
from immunization.errors import ConfigError
from immunization.models import timm as nets
from immunization.models import weights
from immunization.runs import files
from immunization.runs.filenames import ORIGINAL, WEIGHTS
from immunization.runs.resume import read_config

pytestmark = pytest.mark.trains

AUDIT = ("experiment=audit", "tracker=none", "figures=false", "evaluation=[rir]", "attack=[closed_form_probe]")
MADE = ("dataset.primary=3", "dataset.harmful=8", "dataset.common_range=true", "seed=2", "method=closed_form")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a linear run on digits 3 and 8, which are not the default ones."""
    folder = tmp_path_factory.mktemp("made")
    return folder, run([*QUICK, *MADE], folder=folder)


@pytest.mark.parametrize("place", ["", "immunized.safetensors"])
def test_data_preparation_and_seed_are_those_of_the_checkpoint(made, place, tmp_path):
    folder, first = made
    again = run([*AUDIT, f"model.checkpoint={folder / place}"], folder=tmp_path)
    assert again.metrics["rir"] == pytest.approx(first.metrics["rir"], rel=1e-9)
    assert again.seed == 2
    assert not {"other_data", "unknown_data"} & set(again.flags)
    before, now = read_config(folder), read_config(tmp_path)
    assert now["dataset"] == before["dataset"]
    assert now["model"] == before["model"] | {"checkpoint": str(folder / place)}


def test_the_command_line_wins_and_the_verdict_says_so(made, tmp_path):
    options = [*AUDIT, f"model.checkpoint={made[0]}", "dataset.primary=0"]
    other = run(options, folder=tmp_path / "other")
    assert read_config(tmp_path / "other")["dataset"]["harmful"] == 8
    assert "made on other data than it is audited on (dataset.primary: 3 -> 0)" in other.reasons["other_data"]
    assert other.verdict[0] == f"Note: {other.reasons['other_data']}."
    same = run([*options[:-1], "dataset=digits"], folder=tmp_path / "same")
    assert "other_data" not in same.flags


def test_arrays_that_were_overwritten_are_other_data(tmp_path):
    def write(rows, seed):
        x = np.random.default_rng(seed).normal(size=(2, rows, 6))
        tasks = {f"{role}_x": own for role, own in zip(("primary", "harmful"), x, strict=True)}
        np.savez(tmp_path / "p.npz", **tasks, **{f"{key[:-1]}y": own[:, 0] for key, own in tasks.items()})

    options = ["dataset=arrays", f"dataset.path={tmp_path}/p.npz", "method=closed_form", "evaluation=[rir]"]
    write(60, 0)
    run([*options, "tracker=none", "figures=false"], folder=tmp_path / "run")
    audit = [*AUDIT, f"model.checkpoint={tmp_path / 'run'}"]
    write(60, 0)  # other bytes, perhaps, of the same rows
    assert "other_data" not in run(audit, folder=tmp_path / "same").flags
    write(50, 1)
    other = run(audit, folder=tmp_path / "fewer")
    made, now = (" + ".join(str(round(rows * share)) for share in (0.7, 0.1, 0.2)) for rows in (60, 50))
    assert f"audited on (primary: {made} rows, now {now}; harmful: {made} rows" in other.reasons["other_data"]
    assert other.verdict[0].startswith("Note: model.checkpoint was made on other data")
    write(60, 1)
    assert "(primary: other rows; harmful: other rows)" in run(audit, folder=tmp_path / "other").reasons["other_data"]
    (tmp_path / "run" / "environment.json").unlink()  # a folder that does not say what its data were
    assert "other_data" not in run(audit, folder=tmp_path / "unknown").flags


def test_images_that_were_added_make_other_data(tmp_path):
    image_pair(tmp_path)
    options = [option.replace("{tmp}", str(tmp_path)) for option in IMAGES]
    run([*options, "tracker=none", "figures=false", "evaluation=[rir]"], folder=tmp_path / "run")
    shutil.copy(next((tmp_path / "h" / "train").rglob("*.png")), tmp_path / "h" / "train" / "class0" / "more.png")
    reason = run([*AUDIT, f"model.checkpoint={tmp_path / 'run'}"], folder=tmp_path / "audit").reasons["other_data"]
    assert reason.endswith("than it is audited on (harmful: 12 + 0 + 4 rows, now 13 + 0 + 4)")


def test_weights_alone_leave_their_data_unknown(tmp_path):
    run([*QUICK, "method=closed_form"], folder=tmp_path / "run")
    weights = shutil.copy(tmp_path / "run" / "immunized.safetensors", tmp_path)
    alone = run([*AUDIT, f"model.checkpoint={weights}"], folder=tmp_path / "audit")
    assert "unknown_data" in alone.flags
    assert alone.verdict[0].startswith("Note: no config.yaml lies beside model.checkpoint")


def test_a_net_is_found_again_from_its_run_folder(tmp_path):
    """digits_net has no key `checkpoint`: its audit reads the weights into timm's own net, and writes them again."""
    first = run([*DEEP, "method=learning_curve", "seed=1"], folder=tmp_path / "run")
    again = run([*AUDIT, f"model.checkpoint={tmp_path / 'run'}"], folder=tmp_path / "audit")
    assert (again.dataset, again.model, again.seed) == ("digits_deep", "test_resnet", 1)
    for name in ("rir", "kappa_harmful", "kappa_harmful_baseline"):
        assert again.metrics[name] == pytest.approx(first.metrics[name], rel=1e-3)
    assert not {"other_data", "unknown_data"} & set(again.flags)
    images = torch.rand(2, 1, 32, 32)
    outputs = [load(tmp_path / folder)(images) for folder in ("run", "audit")]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


LAST = ("method=condition_number", "method.epochs=3", "method.batch_size=16")


def test_the_baseline_of_a_net_from_the_hub_is_the_hubs(tmp_path, monkeypatch):
    """Its last block was trained: in a folder of before, nothing in the weights tells what it was."""

    def create(name, checkpoint, pretrained, arguments):
        if checkpoint is None and pretrained:
            torch.manual_seed(7)
        return weights.create(name, checkpoint, False, arguments)

    monkeypatch.setattr(nets, "create", create)
    hub = ("model=timm", "model.name=test_resnet", "model.arguments={in_chans:1,num_classes:2}")
    first = run([*DEEP, *hub, *LAST], folder=tmp_path / "run")
    (tmp_path / "run" / ORIGINAL).unlink()
    again = run([*AUDIT, f"model.checkpoint={tmp_path / 'run'}"], folder=tmp_path / "audit")
    assert read_config(tmp_path / "audit")["model"]["reference"] == "hub"
    for name in ("kappa_harmful", "kappa_harmful_baseline"):
        assert again.metrics[name] == pytest.approx(first.metrics[name], rel=1e-3)
    assert first.metrics["kappa_harmful"] != pytest.approx(first.metrics["kappa_harmful_baseline"], rel=1e-3)


def test_layers_that_were_trained_are_kept_as_they_were(tmp_path):
    """digits_net fits its own weights, and the file it was read from is gone: the folder has all that an audit needs.

    Also that of an audit, and a folder that was moved."""
    first = run([*DEEP, *LAST, "model.fit_epochs=2", f"model.cache={tmp_path / 'fitted'}"], folder=tmp_path / "made")
    shutil.rmtree(tmp_path / "fitted")
    (tmp_path / "made").rename(tmp_path / "run")
    before, after = (files.read_tensors(tmp_path / "run" / name)[0] for name in (ORIGINAL, WEIGHTS))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {name.partition(".")[0] for name in before} == {"layer4", "fc"}
    assert changed
    audited = tmp_path / "run"
    for name in ("audit", "again"):
        result = run([*AUDIT, f"model.checkpoint={audited}"], folder=tmp_path / name)
        for metric in ("kappa_harmful", "kappa_harmful_baseline", "rir"):
            assert result.metrics[metric] == pytest.approx(first.metrics[metric], rel=1e-3)
        assert "unchanged" not in result.flags
        audited = tmp_path / name
    assert first.metrics["kappa_harmful"] != pytest.approx(first.metrics["kappa_harmful_baseline"], rel=1e-3)


def test_a_baseline_that_nothing_names_is_asked_for(tmp_path):
    run([*DEEP, *LAST], folder=tmp_path / "run")
    (tmp_path / "run" / ORIGINAL).unlink()  # a folder of before
    with pytest.raises(ConfigError, match=r"give model=timm model\.reference=<file or run folder>, or hub"):
        run([*AUDIT, f"model.checkpoint={tmp_path / 'run'}"], folder=tmp_path / "audit")
    run([*DEEP, "method=identity"], folder=tmp_path / "start")
    asked = [*AUDIT, f"model.checkpoint={tmp_path / 'run'}", "model=timm", f"model.reference={tmp_path / 'start'}"]
    assert "unchanged" not in run(asked, folder=tmp_path / "again").flags
