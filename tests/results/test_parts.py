"""What RESULTS.md is made of: every multirun composes and is counted, data that are absent are named."""

from functools import cache
from pathlib import Path

import pytest
import yaml
from helpers.made_runs import make_run
from omegaconf import OmegaConf

from immunization.config import build, compose
from immunization.errors import ConfigError
from immunization.results.parts import Chapter, Multirun, read

COUNTS = {"digits": 1620, "house_prices": 30, "house_prices_stated": 30, "house_prices_closest": 20}
COUNTS |= {"house_prices_released": 3, "mnist_stated": 80, "resnet18": 15, "vit_tiny": 15}


def multirun(folder: Path, overrides: tuple[str, ...] = ("seed=0,1", "method=closed_form,r_ill_only")) -> Multirun:
    return Multirun(overrides, (), folder)


@cache
def sections(quick: bool) -> list[Chapter]:
    return read(Path("runs"), quick)


def test_every_table_has_all_of_its_runs():
    found = {section.name: sum(len(run.jobs) for run in section.multiruns) for section in sections(quick=False)}
    assert COUNTS.items() <= found.items()


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
def test_every_multirun_composes_and_builds_its_methods(quick):
    seen = set()
    for run in (run for section in sections(quick) for run in section.multiruns):
        jobs = {next((word for word in job if word.startswith("method=")), None): job for job in run.jobs}
        first = next(iter(jobs))
        for method, job in jobs.items():
            if method in seen and method != first:
                continue
            seen.add(method)
            config = compose(job)
            assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            assert method in (None, f"method={build(config, 'method').name}")


def test_jobs_have_the_order_of_hydra_whose_numbers_their_folders_have(tmp_path):
    jobs = multirun(tmp_path, ("seed=range(2)", "method=closed_form,r_ill_only", "seed=3,4", "+tags=[a, 'b c']")).jobs
    methods = ["closed_form", "r_ill_only"]
    assert jobs == [[f"seed={seed}", f"method={m}", "+tags=[a,'b c']"] for seed in (3, 4) for m in methods]


def test_the_small_form_is_small():
    assert sum(len(run.jobs) for section in sections(quick=True) for run in section.multiruns) < 20


def test_absent_data_are_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("IMMUNIZATION_DATA_ROOT", str(tmp_path / "none"))
    monkeypatch.setenv("IMMUNIZATION_CACHE", str(tmp_path / "cache"))
    lacking = {section.name: section.lacking for section in read(tmp_path)}
    assert lacking["digits"] is None
    assert lacking["house_prices"].startswith(
        f"no train.csv in {tmp_path / 'none' / 'house_prices'} or {tmp_path}/cache"
    )
    assert "python launch.py dataset=house_prices" in lacking["house_prices"]
    assert "weights/resnet18_imagenet.safetensors" in lacking["resnet18"]


def test_data_in_the_cache_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("IMMUNIZATION_DATA_ROOT", str(tmp_path / "none"))
    monkeypatch.setenv("IMMUNIZATION_CACHE", str(tmp_path))
    (tmp_path / "house_prices").mkdir()
    (tmp_path / "house_prices" / "train.csv").touch()
    section = next(section for section in read(tmp_path) if section.name == "house_prices")
    assert section.lacking is None
    assert f"dataset.root='{tmp_path / 'house_prices'}'" in section.multiruns[0].arguments


def test_completed_jobs_are_not_counted_as_left(tmp_path):
    run = multirun(tmp_path / "sweep")
    assert run.missing() == [0, 1, 2, 3]
    make_run(tmp_path / "sweep" / "0_x", "closed_form")
    make_run(tmp_path / "sweep" / "1_x", "r_ill_only", status="failed", error="diverged")
    (tmp_path / "sweep" / "3_x").mkdir()
    assert run.missing() == [1, 2, 3]
    assert run.missing([0, 2]) == [2]


def test_completed_jobs_of_another_configuration_are_refused(tmp_path):
    run = multirun(tmp_path / "sweep", ("method=closed_form", "seed=0,1"))
    folder = make_run(tmp_path / "sweep" / "0_x", "closed_form")
    config = OmegaConf.to_container(compose(run.jobs[0]), resolve=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run.check()
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"dtype": "float32"}))
    with pytest.raises(ConfigError, match="dtype: float32 -> float64"):
        run.check()
