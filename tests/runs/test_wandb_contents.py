"""What a real run leaves on W&B, read back from its offline file: names, groups, curves, attacks, the model."""

import json
from pathlib import Path

import pytest
from helpers.made_runs import made_result
from helpers.wandb_offline import kept, summary, values

from immunization import run
from immunization.results.tables import Cell, Table, numbers
from immunization.runs.result import Result
from immunization.runs.wandb_tracker import Wandb, attack_table, curve_rows, job_type, model_artifact, title

pytestmark = pytest.mark.trains

OPTIONS = ("method=closed_form", "dataset.common_range=true", "dataset.max_samples=60", "figures=false")


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    attack = ["attack=[linear_probe,scaled]", *(f"attack.{name}.steps=512" for name in ("linear_probe", "scaled"))]
    run([*OPTIONS, *attack, "tracker.mode=offline"], folder / "run")
    return folder / "run"


def history(folder: Path) -> list[dict]:
    return [values(entry.item) for entry in kept(folder, "history")]


def test_the_name_says_method_data_and_seed_and_the_method_can_be_grouped_by(audited):
    (started,) = kept(audited, "run")
    assert (started.display_name, started.run_group) == ("closed_form digits 0-1 seed 0", "digits")
    assert started.job_type == "immunize"
    assert values(started.config.update)["method"]["name"] == "closed_form"


def test_the_job_type_says_what_a_run_does():
    assert job_type({"method": {}, "immunize": False}) == "audit"
    assert job_type({"paths": ["a"]}) == "summary"


def test_a_job_is_named_by_its_folder():
    config = {"method": {"name": "imma"}, "dataset": {"name": "house_prices"}, "seed": 0}
    assert title(config, "3_seed=1", sweep=True) == "imma house_prices 3_seed=1"
    assert title({"paths": ["a"]}, "Results", sweep=False) == "Results"


def test_curves_over_steps_are_history_with_an_axis_of_their_own(audited):
    result, rows = Result.read(audited), history(audited)
    names = {name for row in rows for name in row if name.startswith("curves/")} - {"curves/step"}
    assert names >= {"curves/probe/harmful", "curves/norm_ratio/primary/baseline", "curves/attack/scaled/accuracy"}
    assert not any("spectrum" in name or "compute" in name for name in names)
    for name in names:
        found = [(row["curves/step"], row[name]) for row in rows if name in row]
        curve = result.curves[name.removeprefix("curves/")]
        points = list(zip(curve["x"], curve["y"], strict=True))
        assert set(found) <= set(points)
        assert found == sorted(found)
        assert found[-1] == points[-1]
        assert min(len(points), 40) <= len(found) + 5  # the first steps of a probe are several times the same
        assert len(found) <= 65
    axes = {metric.name or metric.glob_name: metric for metric in kept(audited, "metric")}
    assert axes["curves/*"].step_metric == "curves/step"
    assert [name for name in summary(audited) if name.startswith("curves/")] == []


def test_points_that_are_none_are_left_out():
    result = Result(0, "d", "m", "imma", curves={"probe/primary": {"x": [1, 2, 4], "y": [0.5, float("nan"), 1.0]}})
    assert list(curve_rows(result)) == [
        {"curves/step": 1, "curves/probe/primary": 0.5},
        {"curves/step": 4, "curves/probe/primary": 1.0},
    ]


def test_the_attacks_are_a_table_of_numbers(audited):
    (shown,) = [row for row in history(audited) if "attacks/path" in row]
    (path,) = audited.glob(f"wandb/offline-run-*/files/{shown['attacks/path']}")
    content, metrics = json.loads(path.read_text()), Result.read(audited).metrics
    rows = {row[0]: dict(zip(content["columns"], row, strict=True)) for row in content["data"]}
    assert {name: row["learns"] for name, row in rows.items()} == {"linear_probe": False, "scaled": True}
    for name, row in rows.items():
        for measure in ("final", "final_baseline", "cost", "steps_ratio"):
            assert row[measure] == metrics[f"attack/{name}/{measure}"]


def test_an_attack_that_diverged_neither_learns_nor_does_not():
    result = made_result(0, "d", "m", "imma", metrics={"attack/full/final": None, "attack/full/steps": 3.0})
    assert attack_table(result) == (["attack", "learns", "final", "steps"], [["full", None, None, 3.0]])


def test_the_model_is_an_artifact_with_aliases_by_method_and_seed(audited):
    (artifact,) = [artifact for artifact in kept(audited, "artifact") if artifact.type == "model"]
    assert artifact.name == "immunized-linear-digits"
    assert {"closed_form", "seed-0", "closed_form-seed-0"} <= set(artifact.aliases)
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) == {"immunized.safetensors", "config.yaml", "result.json"}
    assert files["immunized.safetensors"] == audited / "immunized.safetensors"  # no copy
    metadata = json.loads(artifact.metadata)
    assert (metadata["method"], metadata["rir"]) == ("closed_form", Result.read(audited).metrics["rir"])


def test_a_name_with_signs_that_wandb_does_not_take_is_changed(tmp_path):
    (tmp_path / "immunized.safetensors").write_bytes(b"x")
    artifact, _ = model_artifact(Result(1, "my data", "hf-hub:timm/resnet18", "imma"), tmp_path)
    assert artifact.name == "immunized-hf-hub-timm-resnet18-my-data"
    assert model_artifact(Result(1, "d", "m", "imma"), tmp_path / "nowhere") is None


def test_model_false_uploads_none_and_a_link_needs_a_server(tmp_path, caplog):
    for name, options in {"without": {"model": False}, "linked": {"link": "wandb-registry-model/immunized"}}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "immunized.safetensors").write_bytes(b"x")
        tracker = Wandb(mode="offline", **options)
        tracker.start(folder, {}, "n", "g", [])
        tracker.finish(Result(1, "d", "m", "imma"), [])
        tracker.close(failed=False)
        assert bool(kept(folder, "artifact")) == (name == "linked")
    assert "not linked to wandb-registry-model/immunized" in caplog.text


def test_tables_go_out_as_numbers_and_a_spread_as_a_column_of_its_own():
    rows = [
        [
            Cell("imma"),
            Cell("1.63 ± 0.081", 1.6321, spread=0.081),
            Cell("67 %", 2 / 3),
            Cell("0.9 → 0.8", 0.8, words=True),
            Cell("1,200", 1200.4),
        ],
        [Cell("identity"), Cell("–"), Cell("–"), Cell("–"), Cell("3.11e12", 3.1112e12)],  # noqa: RUF001
    ]
    head, data = numbers(Table("t", "T", ["method", "RIR", "holds", "accuracy", "κ"], rows))
    assert head == ["method", "RIR", "RIR ±", "holds", "accuracy", "κ"]
    assert data == [
        ["imma", 1.6321, 0.081, 2 / 3, "0.9 → 0.8", 1200.4],
        ["identity", None, None, None, None, 3.1112e12],
    ]
    assert numbers(Table("t", "T", ["method"], [])) == (["method"], [])
