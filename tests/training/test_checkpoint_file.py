"""The file of a checkpoint: nothing in it runs, nothing damaged in it is used, and other versions are told apart."""

import io
import random
import zipfile

import numpy as np
import pytest
import torch
from helpers.data_files import Trap

from immunization.errors import ConfigError, DataError
from immunization.models.base import kept_of, load_into
from immunization.runs.filenames import CHECKPOINT
from immunization.training import checkpoint
from immunization.training.checkpoint import Checkpointer
from immunization.training.signals import Stop

CONFIG = {"seed": 0}


@pytest.fixture
def keeper(tmp_path) -> Checkpointer:
    return Checkpointer(tmp_path, CONFIG, Stop())


def test_states_come_back_with_their_types(keeper, tmp_path):
    state = {
        "a": [1, 2.5, None, True, "x", float("inf")],
        3: ({"t": torch.arange(3)}, torch.tensor(1.5, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)),
        "random": random.getstate(),
        "empty": {},
    }
    keeper.write(1, lambda: state)
    assert repr(checkpoint.read(tmp_path, CONFIG)) == repr(state)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]


def test_what_only_a_pickle_could_keep_is_refused_when_it_is_written(keeper, tmp_path):
    keeper.write(1, lambda: {"step": 1})
    for thing, name in ((object(), "builtins.object"), (np.float64(2), "numpy")):
        with pytest.raises(TypeError, match=f"tensors and plain values alone, not .*{name}"):
            keeper.write(2, lambda thing=thing: {"deep": [thing]})
    assert checkpoint.read(tmp_path, CONFIG) == {"step": 1}


def test_code_in_a_checkpoint_does_not_run(tmp_path, caplog):
    torch.save({"version": checkpoint.VERSION, "config": CONFIG, "state": Trap(tmp_path / "ran")}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / CHECKPOINT)
    assert checkpoint.read(tmp_path, CONFIG) is None
    assert not (tmp_path / "ran").exists()


def test_no_byte_of_a_checkpoint_changes_unseen(keeper, tmp_path):
    """A changed byte is found, or is one of those between the entries that mean nothing."""
    state = {"weights": torch.arange(40.0), "step": 7, "name": "x" * 50}
    keeper.write(1, lambda: state)
    path = tmp_path / CHECKPOINT
    content, found = path.read_bytes(), 0
    for place in random.Random(0).sample(range(len(content)), 300):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        again = checkpoint.read(tmp_path, CONFIG)
        assert again is None or repr(again) == repr(state)
        found += again is None
    assert found > 50
    for length in random.Random(0).sample(range(len(content)), 50):
        path.write_bytes(content[:length])
        assert checkpoint.read(tmp_path, CONFIG) is None


def test_every_entry_has_a_checksum(keeper, tmp_path):
    keeper.write(1, lambda: {"weights": torch.arange(40.0)})
    with zipfile.ZipFile(tmp_path / CHECKPOINT) as archive:
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)


def test_a_checkpoint_of_another_version_or_configuration_is_refused(keeper, tmp_path):
    keeper.write(1, lambda: {"step": 1})
    assert checkpoint.read(tmp_path, CONFIG) == {"step": 1}
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        checkpoint.read(tmp_path, {"seed": 1})
    archive = io.BytesIO()
    torch.save({"version": checkpoint.VERSION + 1, "config": CONFIG, "state": {}}, archive)
    (tmp_path / CHECKPOINT).write_bytes(archive.getvalue())
    with pytest.raises(DataError, match=r"made by another version; give another hydra.run.dir=... to start a new run"):
        checkpoint.read(tmp_path, CONFIG)


def test_models_get_back_what_is_trained_in_them():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    kept = {name: tensor.clone() for name, tensor in kept_of(model).items()}
    assert set(kept) == {"0.weight", *(f"1.{name}" for name in model[1].state_dict())}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    load_into(model, kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in kept_of(model).items())
    assert model[0].weight.requires_grad
