"""Run folders of the version before: options that are gone, at a value that did nothing, change no configuration."""

import pytest
from omegaconf import OmegaConf

from immunization import run
from immunization.config import compose
from immunization.errors import ConfigError
from immunization.runs.filenames import CONFIG
from immunization.runs.resume import result_settings

pytestmark = pytest.mark.trains
QUICK = ["tracker=none", "figures=false", "dataset.max_samples=40", "evaluation=[rir]", "method.epochs=1"]


def with_older_options(folder, **options):
    config = OmegaConf.load(folder / CONFIG)
    for name, value in options.items():
        config.method[name] = value
    (folder / CONFIG).write_text(OmegaConf.to_yaml(config))


def test_a_completed_run_is_recognized(tmp_path, capsys):
    done = run(QUICK, tmp_path)
    with_older_options(tmp_path, side="input", rank="data", ridge_harmful=None)
    assert run([*QUICK, "resume=true"], tmp_path).metrics == done.metrics
    assert "completed before" in capsys.readouterr().out


def test_one_that_used_them_is_another(tmp_path):
    run(QUICK, tmp_path)
    with_older_options(tmp_path, side="output")
    with pytest.raises(ConfigError, match=r"method\.side: output -> None"):
        run([*QUICK, "resume=true"], tmp_path)


@pytest.mark.parametrize("dataset", ["image_folders", "imagenet_cars"])
def test_options_of_unseen_tasks_change_no_configuration_of_before(dataset):
    config = OmegaConf.to_container(compose([f"dataset={dataset}"]), resolve=True)
    before = {key: value for key, value in config["dataset"].items() if not key.startswith("unseen")}
    assert result_settings(config) == result_settings(config | {"dataset": before})


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
