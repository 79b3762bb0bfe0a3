"""`wandb_run=`: a run that is tracked offline is run again from W&B's own file."""

import shutil
from pathlib import Path

import pytest
import wandb
import yaml
from helpers.commands import launched
from helpers.wandb_offline import kept

from immunization import run
from immunization.errors import ConfigError, DataError
from immunization.runs.result import Result
from immunization.runs.wandb_again import again, tracked_config

pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> Path:
    """The offline folder alone, as it comes from another machine."""
    folder = tmp_path_factory.mktemp("tracked")
    options = ["method.epochs=3", "method.lambda_P=0.25", "dataset.max_samples=40", "evaluation=[rir]", "seed=7"]
    run([*options, "figures=false", "tracker.mode=offline"], folder / "run")
    assert kept(folder / "run", "exit")  # W&B's service is done writing
    (wandb_folder,) = (folder / "run" / "wandb").glob("offline-run-*")
    return Path(shutil.copytree(wandb_folder, folder / "elsewhere" / wandb_folder.name))


def test_the_configuration_is_the_one_of_the_run_folder(offline):
    assert tracked_config(str(offline)) == yaml.safe_load((offline.parents[1] / "run" / "config.yaml").read_text())


def test_a_tracked_run_gives_the_same_numbers_again(offline, tmp_path):
    done = launched(f"wandb_run={offline}", "tracker=none", "name=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "again").iterdir()
    before, after = Result.read(offline.parents[1] / "run"), Result.read(folder)
    assert (after.metrics, after.seed) == (before.metrics, 7)


def test_values_can_be_changed_and_the_folder(offline):
    config, folder = again([f"wandb_run={offline}", "method.lambda_P=0.5", "hydra.run.dir=here"])
    assert (config.method.lambda_P, config.seed, folder) == (0.5, 7, Path("here"))


@pytest.mark.parametrize("argument", ["method=imma", "method.nonsense=3", "-m", "attack=[linear_probe]"])
def test_groups_and_unknown_keys_are_refused(offline, argument):
    with pytest.raises(ConfigError, match="only single values"):
        again([f"wandb_run={offline}", argument])


def test_code_of_others_is_trusted_on_the_command_line_alone(tmp_path):
    settings = wandb.Settings(silent=True, console="off")
    config = {"method": {"_target_": "evil.Method"}, "dataset": {"name": "d"}, "trusted": ["evil"], "seed": 0}
    with wandb.init(mode="offline", dir=tmp_path, config=config, settings=settings):
        pass
    assert kept(tmp_path, "exit")
    with pytest.raises(ConfigError, match=r"trusted=.*command line"):
        again([f"wandb_run={tmp_path / 'wandb'}"])


def test_what_cannot_be_read_is_one_line(tmp_path, offline):
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off")):
        pass
    assert kept(tmp_path, "exit")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    expected = {"wandb": "none of immunization", "empty": "give the folder of one run", "notes.txt": "no file of W&B"}
    for name, message in expected.items():
        with pytest.raises(DataError, match=message):
            tracked_config(str(tmp_path / name))
    done = launched("wandb_run=no/such/run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: wandb_run=no/such/run: no such folder here, and W&B does not give run")
    assert done.stderr.count("\n") == 1
