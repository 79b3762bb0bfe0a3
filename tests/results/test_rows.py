"""Rows of the leaderboard: written from run folders, without paths of the machine, and read back as runs."""

import json
from pathlib import Path

import pytest
import yaml
from helpers.made_rows import SUITE, track_run
from helpers.made_runs import make_run

from immunization.errors import DataError
from immunization.results.__main__ import main
from immunization.results.collect import collect
from immunization.results.columns import board_columns
from immunization.results.leaderboard import tracks
from immunization.results.rows import FOLDER, _command, plan, write


def test_a_row_holds_what_checks_and_repeats_it(tmp_path):
    curve = {"x": [1.0, 2.0], "y": [0.5, 0.6]}
    curves = {"worth/removed": curve, "attack/probe/accuracy": curve}
    about = SUITE | {"attackers": {"probe": {"attack": "Probe", "ridge": 0.1}}, "cache": "/home/me/cache"}
    about |= {"keep": {"/home/me/images, 8 classes": 8}}
    made = track_run(tmp_path / "run", seed=2, curves=curves, about=about, flags=["attack_succeeds"])
    config = yaml.safe_load((made / "config.yaml").read_text()) | {"data_root": "/home/me/data", "pool": "/home/me/x"}
    (made / "config.yaml").write_text(yaml.safe_dump(config))
    (path,) = write([made], tmp_path / "rows")
    assert path == tmp_path / "rows" / "cifar" / "identity-2.json"
    assert "/home/me" not in path.read_text()
    row = json.loads(path.read_text())["about"]["row"]
    assert row["command"] == "python launch.py --config-dir my_conf experiment=leaderboard/cifar method=identity seed=2"
    assert row["environment"] == {"git": {"commit": "abc", "dirty": False}}
    assert row["config"]["pool"] == "<folder>"
    (run,) = collect([path]).runs
    assert (run.track, run.command, run.result.folder) == ("cifar", row["command"], path)
    assert run.result.curves == {}
    (before,) = collect([made]).runs
    for key in ("seed", "method", "flags", "seconds", "status"):
        assert getattr(run.result, key) == getattr(before.result, key)
    assert run.result.metrics.items() < before.result.metrics.items()
    assert run.result.about["attackers"] == about["attackers"]


def test_the_leaderboard_is_the_same_from_runs_and_from_their_rows(tmp_path):
    """Rows keep the measures of which its cells are made, and measures of one's own."""
    for seed in range(3):
        about = SUITE | {"own_measures": ["mine/measure"]}
        measures = {"mine/measure": 0.1 * seed, "attack/worst/flops_ratio_searched": 2.0, "attack/probe/area": 0.5}
        measures |= {f"worth/theta_0{end}": 0.4 for end in ("", "_low", "_high")} | {"other_classes/accuracy": 0.5}
        measures |= {"attack/sgrc/sgrc_3": 0.2, "transfer_benign/before_5": 0.6, "transfer_benign/after_5": 0.5}
        measures |= {"attack/worst/bar": 0.8, "attack/probe/final": 0.9, "attack/probe/cost": 300.0}
        measures |= {"attack/probe/final_baseline": 0.95, "attack/probe/cost_baseline": 100.0}
        track_run(tmp_path / "runs" / str(seed), seed=seed, about=about, measures=measures, flags=["capped_harmful"])
    rows = collect(write([tmp_path / "runs"], tmp_path / "rows"))
    (made,), (kept,) = tracks(collect([tmp_path / "runs"])), tracks(rows)
    cells = [[column.cell(some[0], column.of) for column in board_columns([])] for some in (made, kept)]
    assert cells[0] == cells[1]
    metrics = rows.runs[0].result.metrics
    assert {"mine/measure", "attack/probe/cost", "worth/theta_0_low"} <= metrics.keys()
    assert "attack/probe/area" not in metrics


def test_infinite_settings_come_back(tmp_path):
    made = track_run(tmp_path / "run")
    config = yaml.safe_load((made / "config.yaml").read_text())
    config["method"]["power"] = float("inf")
    (made / "config.yaml").write_text(yaml.safe_dump(config))
    (run,) = collect(write([made], tmp_path / "rows")).runs
    assert run.config["method"]["power"] == float("inf")


def test_failed_runs_are_rows_and_interrupted_ones_are_not(tmp_path):
    track_run(tmp_path / "runs" / "a", status="failed", error="identity diverged")
    track_run(tmp_path / "runs" / "b", "closed_form", status="failed", error="interrupted")
    (row,) = write([tmp_path / "runs"], tmp_path / "rows")
    (problem,) = collect([row]).problems
    assert (problem.kind, problem.message, problem.run.track) == ("failed", "identity diverged", "cifar")


def test_the_name_tells_settings_and_pairs_apart(tmp_path):
    track_run(
        tmp_path / "runs" / "a",
        "closed_form",
        1,
        "method.lambda_H=2",
        "model.trainable=last",
        "pair=3-5",
        "tracker=none",
    )
    write([tmp_path / "runs"], tmp_path / "rows")
    (path,) = tmp_path.glob("rows/*/*")
    assert path.name == "closed_form-method.lambda_H=2-model.trainable=last-pair=3-5-1.json"


def test_two_runs_of_one_name_are_refused(tmp_path):
    track_run(tmp_path / "runs" / "a", lambdas=(1.0, 1.0))
    track_run(tmp_path / "runs" / "b", lambdas=(1.0, 2.0))
    with pytest.raises(DataError, match=r"b and another run are both the row .*identity-0\.json; give one of them"):
        write([tmp_path / "runs"], tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_a_run_of_no_track_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a run of a track: none of its overrides is experiment=leaderboard/"):
        write([make_run(tmp_path / "run")], tmp_path / "rows")


def test_a_new_run_replaces_the_row_of_an_old_one(tmp_path):
    track_run(tmp_path / "old", rir=1.0)
    track_run(tmp_path / "new", rir=2.0)
    for run in ("old", "new"):
        (path,) = write([tmp_path / run], tmp_path / "rows")
    assert collect([path]).runs[0].result.metrics["rir"] == 2.0
    path.write_text(path.read_text()[:-20])
    assert write([tmp_path / "old"], tmp_path / "rows") == [path]
    assert collect([path]).runs[0].result.metrics["rir"] == 1.0


def test_a_failed_run_leaves_a_completed_row_and_other_settings_are_refused(tmp_path):
    track_run(tmp_path / "good", rir=1.0)
    track_run(tmp_path / "bad", status="failed", error="diverged")
    track_run(tmp_path / "other", suite="quick-1")
    (path,) = write([tmp_path / "good"], tmp_path / "rows")
    assert write([tmp_path / "bad"], tmp_path / "rows") == []
    refused = r"identity-0\.json is a row of other settings \(suite\.version\); move it or remove it first"
    with pytest.raises(DataError, match=refused):
        write([tmp_path / "other"], tmp_path / "rows")
    assert collect([path]).runs[0].result.metrics["rir"] == 1.0


def test_a_failed_run_of_other_settings_stops_no_other_row(tmp_path):
    track_run(tmp_path / "runs" / "good", rir=1.0)
    write([tmp_path / "runs"], tmp_path / "rows")
    track_run(tmp_path / "runs" / "bad", suite="quick-1", status="failed", error="diverged")
    assert len(write([tmp_path / "runs" / "bad"], tmp_path / "rows")) == 0
    assert len(write([tmp_path / "runs" / "good"], tmp_path / "rows")) == 1


def test_paths_of_the_machine_are_left_out_wherever_they_stand(tmp_path):
    error = 'no file "/home/me/x", [a,/home/me/y], file:///home/me/z or ~/me; 3/4 of https://example.org/page remain'
    track_run(tmp_path / "run", status="failed", error=error)
    (path,) = write([tmp_path / "run"], tmp_path / "rows")
    (problem,) = collect([path]).problems
    shown = 'no file "<folder>", [a,<folder>], <folder> or <folder>; 3/4 of https://example.org/page remain'
    assert problem.message == shown


@pytest.mark.parametrize("track", ["../../outside", "{tmp}/outside", "..", "a/b", ".hidden", ""])
def test_rows_stay_in_their_folder_whatever_a_run_says_of_its_track(track, tmp_path):
    made = track_run(tmp_path / "runs" / "run")
    overrides = [f"experiment=leaderboard/{track.replace('{tmp}', str(tmp_path))}", "method=identity"]
    (made / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"overrides\.yaml: .* is not the name of a track"):
        write([made], tmp_path / "runs" / "rows")
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["a: 1", "[1, 2]", "word", "[[experiment=leaderboard/cifar]]"])
def test_overrides_that_are_none_are_of_no_track(text, tmp_path):
    made = track_run(tmp_path / "run")
    (made / "overrides.yaml").write_text(f"{text}\n")
    with pytest.raises(DataError, match="is not a run of a track"):
        write([made], tmp_path / "rows")


@pytest.mark.parametrize("text", ["{", "3", "[1]"])
def test_an_environment_that_is_none(text, tmp_path):
    made = track_run(tmp_path / "run")
    (made / "environment.json").write_text(text)
    with pytest.raises(DataError, match=r"environment\.json cannot be read"):
        write([made], tmp_path / "rows")


def test_an_edited_row_is_not_trusted(tmp_path):
    track_run(tmp_path / "run", rir=10.0)
    write([tmp_path / "run"], tmp_path / "rows")
    (path,) = tmp_path.glob("rows/*/*")
    path.write_text(path.read_text().replace('"rir": 10.0', '"rir": 99.0'))
    (problem,) = collect([path]).problems
    assert (problem.kind, "was edited or damaged" in problem.message) == ("unreadable", True)


def test_another_result_is_no_row(tmp_path):
    path = (make_run(tmp_path / "run") / "result.json").rename(tmp_path / "other.json")
    (problem,) = collect([path]).problems
    assert (problem.kind, problem.message) == ("unreadable", f"{path} is not a row of the leaderboard")


def test_the_command(tmp_path, capsys):
    track_run(tmp_path / "run")
    main(["rows", str(tmp_path / "run"), "--into", str(tmp_path / "rows")])
    assert capsys.readouterr().out == f"{tmp_path / 'rows' / 'cifar' / 'identity-0.json'}\n"


@pytest.mark.parametrize(
    ("given", "one"),
    [
        ("python launch.py -m experiment=x seed=0,1", "python launch.py experiment=x seed=1"),
        ("python -m immunization seed=0,1 -m experiment=x", "python -m immunization experiment=x seed=1"),
        ("immunize -m experiment=x seed=0,1", "immunize experiment=x seed=1"),
        ("/opt/bin/immunize seed=0,1 -m experiment=x", "/opt/bin/immunize experiment=x seed=1"),
    ],
)
def test_the_command_of_one_job_of_a_multirun(given, one):
    assert _command(given, ["experiment=x", "seed=1"]) == one


def test_what_is_missing_of_a_track_and_how_long_it_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = Path("outputs")
    jobs = [["experiment=leaderboard/cifar", f"method={method}", f"seed={seed}"] for method in "ab" for seed in (0, 1)]
    assert plan(jobs, sweep) == "track cifar: 0 of 4 jobs are complete, 4 to run: time unknown"
    for i, seconds in enumerate((60.0, 3600.0, 7200.0)):
        track_run(Path("elsewhere", str(i)), "c", i, seconds={"immunize": seconds})
    write([Path("elsewhere")], FOLDER)
    line = "track cifar: 0 of 4 jobs are complete, 4 to run: about 4 h one after another"
    assert plan(jobs, sweep) == line
    track_run(sweep / "done", "a", 0, "tracker=none", seconds={"immunize": 60.0, "evaluate": 30.0})
    track_run(sweep / "failed", "a", 1, status="failed", error="no memory")
    line = "track cifar: 1 of 4 jobs are complete, 3 to run: about 0.075 h one after another"
    assert plan([[*job, "tracker=wandb"] for job in jobs], sweep, ["tracker"]) == line
    assert plan(jobs[:1], sweep, ["tracker"]) == "track cifar: 1 of 1 jobs are complete"
