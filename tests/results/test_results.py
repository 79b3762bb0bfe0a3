"""From run folders to tables: what is collected, what is left out and named, and the statistics."""

import hashlib
import json
import math
import os
import runpy
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers.made_runs import METHODS, make_run
from scipy import stats

from immunization.errors import DataError
from immunization.results import __main__ as command
from immunization.results.collect import collect
from immunization.results.formatting import NONE
from immunization.results.seed_statistics import paired_p, paired_ratio, rank_correlation, summarize, ties
from immunization.results.settings import RATIO_PRIMARY, RIR, Setting, best, settings, title
from immunization.results.tables import _strong, alignment, comparison, counts, pair_counts, relative


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Two methods, three seeds."""
    for i, method in enumerate(METHODS):
        for seed in range(3):
            make_run(tmp_path / "sweep" / f"{3 * i + seed}_{method}", method, seed, rir=10.0 * (i + 1) + seed)
    return tmp_path / "sweep"


def table(folder: Path):
    (group,) = settings(collect([folder]))
    return comparison(group, "name", "Heading")


def column(made, header: str) -> list[str]:
    place = made.header.index(header)
    return [row[place].text for row in made.rows]


# --- Collecting -------------------------------------------------------------------------------------------------------


def test_a_tidy_row_for_each_run(sweep):
    frame = collect([sweep]).frame()
    assert len(frame) == 6
    assert set(frame.columns) >= {"method", "seed", "pair", "rir", "steps_ratio/harmful", "seconds/immunize", "folder"}
    assert frame.groupby("method").rir.mean().to_dict() == {"condition_number": 11.0, "opt_kappa": 21.0}


def test_jobs_are_in_the_order_of_their_numbers(tmp_path):
    for i in (10, 9, 1):
        make_run(tmp_path / f"{i}_x", seed=i)
    assert [run.result.seed for run in collect([tmp_path]).runs] == [1, 9, 10]


def test_paths_may_be_files_and_overlap(sweep, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    assert collect(["sweep", sweep]).counts() == "6 completed"
    assert len(collect([sweep, sweep / "0_condition_number", sweep / "0_condition_number" / "result.json"]).runs) == 6


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda path: path.write_text(path.read_text()[:100]), "unreadable", "is not JSON"),
        (lambda path: path.write_text("{}"), "unreadable", "schema 1"),
        (lambda path: path.write_text(path.read_text().replace('"schema": 2', '"schema": 3')), "unreadable", "schema"),
        (lambda path: path.write_text(path.read_text().replace('"rir": 10.0', '"rir": "10"')), "unreadable", "edited"),
        (lambda path: path.write_text("[1, 2]"), "unreadable", "schema 1"),
        (lambda path: path.write_bytes(b"\xff\x00\x12"), "unreadable", "is not JSON"),
        (lambda path: path.unlink(), "unfinished", "killed or is still going"),
        (lambda path: path.with_name("config.yaml").unlink(), "unreadable", "config.yaml"),
    ],
)
def test_what_cannot_be_read_is_named_counted_and_left_out(sweep, damage, kind, message):
    damage(sweep / "0_condition_number" / "result.json")
    collection = collect([sweep])
    assert len(collection.runs) == 5
    (problem,) = collection.problems
    assert (problem.kind, problem.folder.name) == (kind, "0_condition_number")
    assert message in problem.message
    assert collection.counts() == f"5 completed, 1 {kind}"


@pytest.mark.parametrize(
    ("bounds", "others", "shown"),
    [
        ([100, 100], [100], "> 100"),
        ([], [100], "100"),
        ([1000], [50, 20], "50"),  # whatever it is, it is the largest
        ([10], [50, 200], "> 50"),
        ([100, 1000], [2, None, None], "> 100"),
        ([1000, 1000], [2, 3], "> 502"),
    ],
)
def test_a_median_that_depends_on_lower_bounds_is_one(bounds, others, shown, tmp_path):
    for seed, value in enumerate(bounds + others):
        flags = ["capped_harmful"] * (seed < len(bounds))
        make_run(tmp_path / str(seed), seed=seed, flags=flags, measures={"steps_ratio/harmful": value})
    made = table(tmp_path)
    assert column(made, "harmful steps ratio") == [shown]
    assert column(made, "primary steps ratio") == ["1"]


def test_a_mean_with_one_lower_bound_is_one(tmp_path):
    for seed, value in enumerate((2.0, 3.0, 1e9)):
        flags = ["noise_floor_harmful"] * (seed == 2)
        make_run(tmp_path / str(seed), seed=seed, flags=flags, measures={"ratio_harmful": value})
    (shown,) = column(table(tmp_path), "(i)")
    assert shown.startswith("> 3.33e8")
    shutil.rmtree(tmp_path / "2")
    make_run(tmp_path / "2", seed=2, flags=["noise_floor_harmful"], measures={"ratio_harmful": None})
    assert column(table(tmp_path), "(i)") == ["2.5 ± 0.71"]


def test_settings_with_lower_bounds_have_no_ratio_to_the_best(tmp_path):
    for seed in range(3):
        for method, steps in (("condition_number", 100), ("opt_kappa", 50)):
            flags = ["capped_harmful"] * (method == "condition_number")
            measures = {"steps_ratio/harmful": steps, "steps_ratio/primary": 1.0}
            make_run(tmp_path / f"{seed}{method}", method, seed, flags=flags, measures=measures)
    (group,) = settings(collect([tmp_path]))
    assert relative(group, "name", "Heading").header == ["method", "RIR", "primary steps"]


def test_what_only_rounding_brings_above_1_is_not_above_1(tmp_path):
    for seed in range(3):
        for pair in ((0, 1), (1, 0), (1, 2)):
            make_run(tmp_path / f"{seed}{pair}", seed=seed, pair=pair, rir=1 + 2e-15)
    (group,) = settings(collect([tmp_path]))
    assert column(counts(group, "counts", ""), "RIR > 1") == ["0"]
    assert column(pair_counts(group, "pairs", ""), "RIR > 1") == ["0"]


def test_what_is_nothing_in_all_runs_has_its_column(tmp_path):
    for seed in range(3):
        make_run(tmp_path / str(seed), seed=seed, measures={"definition/immunized": 0, "rir": 10.0**seed})
    made = table(tmp_path)
    assert column(made, "Def. 3.1 holds") == ["0 %"]
    assert column(made, "RIR, 95 % interval") == ["0 to 173"]
    assert "failed" not in made.header


def test_audits_of_several_runs_stand_side_by_side(tmp_path):
    for name in ("one", "two"):
        folder = make_run(tmp_path / name, "unmodified")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config |= {"immunize": False, "model": {"name": "linear", "checkpoint": f"/runs/{name}/0_lr=1"}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert column(table(tmp_path), "method") == ["unmodified one/0_lr=1 ★", "unmodified two/0_lr=1"]


@pytest.mark.parametrize(
    ("error", "kind", "other", "message"),
    [
        ("diverged", "failed", "interrupted", "diverged"),
        ("interrupted", "interrupted", "failed", "resume=true goes on with it"),
    ],
)
def test_runs_that_did_not_complete_are_counted_with_their_setting(error, kind, other, message, sweep):
    make_run(sweep / "6_x", seed=7, status="failed", error=error, metrics={"rir": 1e9})
    collection = collect([sweep])
    assert (collection.counts(), collection.problems[0].message) == (f"6 completed, 1 {kind}", message)
    made = table(sweep)
    assert column(made, "runs") == ["3", "3"]
    assert sorted(column(made, kind)) == ["1", NONE]
    assert other not in made.header
    assert "1e9" not in str(made.rows)


@pytest.mark.parametrize("same", [False, True])
def test_runs_are_averaged_over_seeds_but_not_over_splits(same, tmp_path):
    for seed in range(3):
        folder = make_run(tmp_path / str(seed), "identity", seed if same else 0)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["dataset"]["seed"] = 0 if same else seed
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if same:
            (folder / "environment.json").write_text('{"command": "python launch.py -m seed=0,1,2 dataset.seed=0"}')
    collection = collect([tmp_path])
    assert (len(collection.runs), collection.problems) == (3, [])
    assert len({run.setting for run in collection.runs}) == (1 if same else 3)


def test_the_same_run_twice_counts_once(sweep):
    make_run(sweep / "9_again", METHODS[0], 0, rir=500.0)
    collection = collect([sweep])
    assert [problem.kind for problem in collection.problems] == ["repeated"]
    assert collection.problems[0].folder.name == "0_condition_number"
    assert max(run.result.metrics["rir"] for run in collection.runs) == 500.0


@pytest.mark.parametrize(("content", "kind"), [("b", "of other inputs"), ("a", "repeated")])
def test_runs_on_other_data_are_no_repeats(content, kind, tmp_path):
    for name, own in (("old", "a"), ("new", content)):
        inputs = {"dataset primary/train": "same", "dataset harmful/train": own}
        (make_run(tmp_path / name) / "environment.json").write_text(json.dumps({"inputs": inputs}))
        os.utime(tmp_path / name / "result.json", (10.0 * (name == "new"),) * 2)
    collection = collect([tmp_path])
    (problem,) = collection.problems
    assert collection.counts() == f"1 completed, 1 {kind}"
    assert problem.folder.name == "old"
    assert ("another content of dataset harmful/train: give" in problem.message) is (content == "b")


def test_different_preparations_are_never_averaged(sweep):
    make_run(sweep / "9_other", protocol="authors", rir=1e6)
    groups = settings(collect([sweep]))
    assert [len(group) for group in groups] == [2, 1]
    assert {title(group, groups) for group in groups} == {
        "digits, linear, protocol=one_vs_rest",
        "digits, linear, protocol=authors",
    }


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_nothing_to_collect(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no result\.json|does not exist"):
        collect([tmp_path / name])


@pytest.mark.slow
def test_2000_files_in_ten_seconds(tmp_path):
    for i in range(2000):
        make_run(tmp_path / str(i), METHODS[i % 2], i // 2)
    started = time.process_time()
    collection = collect([tmp_path])
    collection.frame()
    assert len(collection.runs) == 2000
    assert time.process_time() - started < 10


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_mean_and_standard_deviation_over_seeds(sweep):
    made = table(sweep)
    assert column(made, "method") == ["opt_kappa ★", "condition_number"]
    assert column(made, "RIR") == ["21 ± 1", "11 ± 1"]
    spreads = [row[made.header.index("RIR")].spread for row in made.rows]
    assert spreads == pytest.approx([1.0, 1.0], rel=1e-12)
    assert made.rows[0][made.header.index("primary accuracy, before → after")].spread is None


def test_pairs_are_averaged_within_a_seed(tmp_path):
    for seed in range(2):
        for harmful, rir in ((1, 1.0), (2, 3.0 + seed)):
            make_run(tmp_path / f"{seed}_{harmful}", seed=seed, pair=(0, harmful), rir=rir)
    made = table(tmp_path)
    assert column(made, "RIR") == ["2.25 ± 0.35"]  # the mean of 2 and 2.5
    assert "2 pairs of classes" in " ".join(made.notes)


def test_runs_with_different_benign_classes_all_count(tmp_path):
    for i, benign in enumerate((7, 8, 9)):
        path = make_run(tmp_path / str(i), rir=10.0 ** (1 + i)) / "config.yaml"
        path.write_text(path.read_text().replace("  harmful: 1", f"  harmful: 1\n  benign: {benign}"))
    (group,) = settings(collect([tmp_path]))
    assert group[0].median(RIR) == 100.0
    assert column(table(tmp_path), "RIR") == ["370"]


def test_settings_are_named_by_what_tells_them_apart(tmp_path):
    for i, lambdas in enumerate([(1.0, 1e5), (1.0, 1e6)]):
        make_run(tmp_path / str(i), lambdas=lambdas, rir=float(i + 3))
    (group,) = settings(collect([tmp_path]))
    assert [setting.label for setting in group] == [
        "condition_number lambda_H=1e5",
        "condition_number lambda_H=1e6",
    ]
    assert best(group, "rir").label.endswith("1e6")


def test_missing_values_are_told(tmp_path):
    make_run(tmp_path / "0", seed=0)
    make_run(tmp_path / "1", seed=1, rir=None, reasons={"rir": "rank 0"})
    made = table(tmp_path)
    assert column(made, "RIR") == ["10"]
    assert any(note.startswith("No RIR in 1 of 2 runs of ") and note.endswith(": rank 0.") for note in made.notes)


def test_the_papers_figures_stand_beside_ours(tmp_path):
    make_run(tmp_path / "0", dataset="house_prices")
    assert column(table(tmp_path), "paper RIR") == ["356 ± 5.49"]


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_summary_of_values():
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    summary = summarize(x)
    assert summary.mean == pytest.approx(np.mean(x))
    assert summary.std == pytest.approx(np.std(x, ddof=1))
    for values in (x, x[:3]):  # of three, an interval of the mean goes beyond them all
        summary = summarize(values)
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (summary.low, summary.high) == pytest.approx((low, high))
    assert summary.low < min(x[:3]) < max(x[:3]) < summary.high
    assert math.isnan(summarize([1.0]).std)
    assert math.isnan(summarize([1.0, 2.0]).low)
    assert summarize([]).n == 0
    assert summarize([3.0, 3.0, 3.0]).low == 3.0
    assert summarize([0.1 + 0.2, 0.3, 0.3]).std == 0.0  # rounding alone


def by_seed(values) -> pd.Series:
    """By keys as those of Setting.values."""
    return pd.Series({(seed, "0→1"): float(value) for seed, value in enumerate(values)})


def test_paired_test_is_scipys_on_logarithms():
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(0, 1, 6), rng.lognormal(0.5, 1, 6)
    expected = stats.ttest_rel(np.log(a), np.log(b)).pvalue
    assert paired_p(by_seed(a), by_seed(b)) == pytest.approx(expected)
    signed = paired_p(by_seed(-a), by_seed(b))
    assert signed == pytest.approx(stats.ttest_rel(-a, b).pvalue)


def test_rank_correlation_is_spearmans_and_its_p_value_that_of_permuted_classes():
    rng = np.random.default_rng(1)
    pairs = [(a, b) for a in "abcdef" for b in "abcdef" if a != b]
    x, y = (pd.Series(rng.normal(size=len(pairs)), pd.MultiIndex.from_tuples(pairs)) for _ in range(2))
    expected = stats.spearmanr(x, y)
    rho, p = rank_correlation(x, y)
    assert rho == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue, abs=0.2)
    some = x[:20]  # not all pairs of the classes: no permutation takes them to each other
    expected = stats.spearmanr(some, y[:20])
    assert rank_correlation(some, y) == pytest.approx((expected.statistic, expected.pvalue))
    # a measure of one class alone has as many independent values as classes, not as pairs
    level = dict(zip("abcdef", rng.normal(size=6), strict=True))
    level = pd.Series({pair: level[pair[0]] for pair in pairs})
    other = level + 0.5 * rng.normal(size=len(pairs))
    assert rank_correlation(level, other)[1] > 10 * stats.spearmanr(level, other).pvalue
    assert all(math.isnan(value) for value in rank_correlation(y[:0], y))


def test_paired_tests_use_common_keys_and_need_five_seeds():
    a = by_seed([1.0, 2.0, 3.0, 4.0, 5.0])
    assert paired_p(a, 2 * a) == 0.0
    assert math.isnan(paired_p(a, 2 * a[:4]))
    assert math.isnan(paired_p(a, a[:0]))
    pairs = pd.Series({(seed, f"0→{pair}"): 1.0 + pair for seed in range(2) for pair in range(9)})
    assert math.isnan(paired_p(pairs, 2 * pairs))  # two seeds, whatever pairs
    one, other = (
        pd.Series({(seed, pair): v for seed in range(5) for pair, v in enumerate(x)}) for x in ((100, 1), (10, 20))
    )
    assert paired_p(one, other) == 1.0  # the means of values and of logarithms disagree, alike with every seed
    for some in (a, a[:1]):
        assert paired_p(some, some * (1 + 1e-14)) == 1.0


def test_pairs_of_classes_of_one_seed_are_one_observation():
    rng = np.random.default_rng(2)
    effects, noise = rng.normal(size=5), rng.normal(size=(5, 9))
    keys = pd.MultiIndex.from_product([range(5), range(9)])
    b = pd.Series(np.exp(effects[:, None] + 0.01 * noise).ravel(), keys)
    expected = stats.ttest_1samp(3 - (effects + 0.01 * noise.mean(1)), 0).pvalue
    assert paired_p(pd.Series(math.exp(3.0), keys), b) == pytest.approx(expected)


def test_a_larger_mean_that_one_run_makes_is_not_told_from_what_is_larger_elsewhere():
    outlier, steady = by_seed([1000, 1, 1.1, 0.9, 1, 1.2]), by_seed([90, 110, 100, 95, 105, 100])
    assert paired_p(outlier, steady) == 1
    assert ties({"outlier": outlier, "steady": steady}, ["outlier", "steady"]) == {"outlier", "steady"}


def test_ties_hold_holms_correction():
    """p = 0.04 alone is significant at 5 %; beside another test it is not."""
    base = by_seed(np.exp([0.1, -0.2, 0.05, 0.0, 0.1]))
    seeds = np.arange(5)
    far = base * 100 * (1 + 0.01 * seeds)
    near = by_seed(np.exp([0.4, -0.1, 0.45, 0.2, 0.15]))
    p = paired_p(base, near)
    assert 0.025 < p < 0.05
    assert ties({"base": base, "near": near}, ["base", "near"]) == {"base"}
    other = base * np.where(seeds % 2, 1.1, 0.9)
    values = {"base": base, "near": near, "other": other, "far": far}
    assert ties(values, list(values)) == {"base", "near", "other"}


def bold(folder: Path, rirs: dict[str, list[float]]) -> list[str]:
    """The methods whose RIR is bold, where each has these, one a seed."""
    for method, values in rirs.items():
        for seed, rir in enumerate(values):
            make_run(folder / f"{method}_{seed}", method, seed, rir=rir)
    made = table(folder)
    place = made.header.index("RIR")
    return [row[0].text.removesuffix(" ★") for row in made.rows if row[place].strong]


BEST = [9.9, 10.1, 10.0, 10.2, 9.8]


def test_bold_is_the_best_alone_until_there_are_five_seeds(tmp_path):
    close = [value * (1.02 if i % 2 else 0.97) for i, value in enumerate(BEST)]
    assert bold(tmp_path / "four", {"clamp": BEST[:4], "ntl": close[:4]}) == ["clamp"]
    assert bold(tmp_path / "five", {"clamp": BEST, "ntl": close}) == ["clamp", "ntl"]
    assert bold(tmp_path / "same", {"clamp": BEST[:2], "ntl": BEST[:2]}) == ["clamp", "ntl"]


@pytest.mark.parametrize(("pairs", "also", "starred"), [([(1, 2)], "", []), ([(0, 1), (1, 2)], "0→1, ", ["ntl ★"])])
def test_settings_on_other_pairs_of_classes_are_not_compared(pairs, also, starred, tmp_path):
    for seed in range(3):
        make_run(tmp_path / str(seed), "clamp", seed)
        for pair in pairs:
            make_run(tmp_path / f"{seed}{pair}", "ntl", seed, pair, rir=20.0)
    made = table(tmp_path)
    assert [name for name in column(made, "method") if "★" in name] == starred
    assert any(cell.strong for row in made.rows for cell in row) == bool(starred)
    assert f"different pairs of classes: 0→1 in 1 of 2; {also}1→2 in 1 of 2." in str(made.notes)


def test_of_ratios_of_the_primary_task_the_smallest_is_bold(tmp_path):
    for method, values in {"clamp": [0.1, 0.2, 0.1], "ntl": [70.0, 71.0, 72.0]}.items():
        for seed, ratio in enumerate(values):
            make_run(tmp_path / f"{method}_{seed}", method, seed, measures={"ratio_primary_theta0": ratio})
    (group,) = settings(collect([tmp_path]))
    assert {setting.method for setting in _strong(group, RATIO_PRIMARY._replace(stage="start"))} == {"clamp"}


def test_what_only_spreads_is_not_bold_behind_one_that_is_worse_than_the_best(tmp_path):
    worse, spread = [8.2, 9.3, 8.7, 9.0, 8.35], [24.0, 3.0, 1.0, 2.0, 1.5]
    assert paired_p(by_seed(BEST), by_seed(worse)) < 0.025
    assert paired_p(by_seed(BEST), by_seed(spread)) > 0.05
    assert bold(tmp_path, {"clamp": BEST, "ntl": worse, "sophon": spread}) == ["clamp"]


def test_settings_are_compared_with_the_best_one_run_by_run(tmp_path):
    """What all methods have in common, here a factor per seed, is no part of the interval."""
    for i, common in enumerate((1.0, 10.0, 100.0, 1000.0)):
        for method, rir in {"closed_form": 8.0, "opt_kappa": 2.0 * (1 + 0.1 * (i % 2))}.items():
            measures = {"definition/immunized": 1.0, "steps_ratio/primary": 1.0}
            make_run(tmp_path / f"{method}{i}", method=method, seed=i, rir=common * rir, measures=measures)
    logs = [math.log(2.0 * (1 + 0.1 * (i % 2)) / 8) for i in range(4)]
    low, high = np.exp(stats.t.interval(0.95, 3, np.mean(logs), stats.sem(logs)))
    a, b = (by_seed([10**i * rir for i, rir in enumerate(own)]) for own in ((2.0, 2.2, 2.0, 2.2), (8.0,) * 4))
    found = paired_ratio(a, b)
    assert (found.mean, found.low, found.high) == pytest.approx((np.exp(np.mean(logs)), low, high))
    (group,) = settings(collect([tmp_path]))
    table = relative(group, "name", "Heading")
    assert table.title == "Heading: relative to ★ closed_form"
    found = [dict(zip(table.header, (cell.text for cell in row), strict=True)) for row in table.rows]
    assert [(row["method"], row["RIR"]) for row in found] == [("opt_kappa", "0.262 (0.24 to 0.286)")]
    assert paired_ratio(-a, b) is None
    assert paired_ratio(a[:2], b) is None


def test_successes_are_counted_by_run(tmp_path):
    for i, (rir, harmful, primary) in enumerate([(2.0, 5.0, 1.0), (0.5, 5.0, 1.1), (3.0, 1.0, 0.5), (4.0, None, None)]):
        measures = {"steps_ratio/harmful": harmful, "steps_ratio/primary": primary, "definition/a": i < 2}
        make_run(tmp_path / str(i), pair=(0, i + 1), rir=rir, measures=measures)
    (group,) = settings(collect([tmp_path]))
    made = counts(group, "name", "Heading")
    found = dict(zip(made.header, (cell.text for cell in made.rows[0]), strict=True))
    assert (found["runs"], found["RIR > 1"]) == ("4", "3")
    assert found["(a)"] == "2"
    assert (found["harmful > 1"], found["primary ≤ 1"], found["both"]) == ("2/3", "2/3", "1/3")
    assert "benign ≤ 1" not in found  # no run has it
    assert counts([Setting(group[0].runs[:1])], "name", "Heading") is None


def test_alignment_is_correlated_with_what_it_may_predict(tmp_path):
    for i, (a, b) in enumerate((a, b) for a in range(4) for b in range(4) if a != b):
        measures = {"alignment/score": i / 12, "alignment/kernel": (a - b) ** 2.0, "ceiling/rir": 1e3 / (1 + i)}
        make_run(tmp_path / str(i), pair=(a, b), rir=2.0 + i % 2, measures=measures)
    (group,) = settings(collect([tmp_path]))
    made = alignment(group, "name", "Heading")
    assert [row[0].text for row in made.rows] == ["ceiling", "condition_number"]
    ceiling = dict(zip(made.header, made.rows[0], strict=True))
    assert ceiling["score"].value == pytest.approx(-1)
    p = float(ceiling["score"].text.split("p ")[1].strip(")"))
    assert p == pytest.approx(2 / 24, abs=0.01)  # of all orders of 4 classes, its reverse is as strong
    assert ceiling["κ(M)"].text == NONE


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_tables_in_every_format(sweep, tmp_path, capsys):
    out = tmp_path / "out"
    command.main([str(sweep), "--output", str(out), "--no-figures", "--markdown", str(tmp_path / "R.md")])
    assert len(pd.read_csv(out / "results.csv")) == 6
    suffixes = {path.suffix for path in out.glob("1_*")}
    assert suffixes == {".md", ".tex", ".csv"}
    assert "6 completed" in capsys.readouterr().out
    text = (tmp_path / "R.md").read_text()
    assert text.startswith("# Results\n")
    assert "opt_kappa" in text


def test_a_second_call_leaves_nothing_of_the_first_and_all_that_is_not_its_own(sweep, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    make_run(other / "0", seed=4, protocol="authors")
    command.main([str(other), "--output", str(tmp_path / "expected")])
    command.main([str(sweep), "--output", str(out)])
    table, plot = min(out.glob("1_*.md")), min((out / "figures").glob("*.png"))
    table.write_text("edited by a reader")
    (out / "notes.md").write_text("a reader's")
    command.main([str(other), "--output", str(out)])
    expected, left = ({path.relative_to(top) for path in top.rglob("*.*")} for top in (tmp_path / "expected", out))
    assert left - expected == {Path("notes.md"), table.relative_to(out)}
    assert not plot.exists()
    outside = other / "0" / "result.json"
    with (out / ".immunization_results.sha256").open("a") as record:
        record.write(f"{hashlib.sha256(outside.read_bytes()).hexdigest()}  ../other/0/result.json\n")
    command.main([str(other), "--output", str(out), "--no-figures"])
    assert outside.exists()
    assert not (out / "figures").exists()


def test_figures_in_a_folder_of_their_own_stay(sweep, tmp_path):
    """A page may show those of other runs beside them."""
    figures, options = tmp_path / "images", ["--output", str(tmp_path / "out"), "--figures", str(tmp_path / "images")]
    command.main([str(sweep), *options])
    before = {path.name for path in figures.iterdir()}
    make_run(tmp_path / "other" / "0", seed=4, protocol="authors")
    command.main([str(tmp_path / "other"), *options])
    assert before
    assert before <= {path.name for path in figures.iterdir()}


@pytest.mark.filterwarnings("ignore:'immunization.results.__main__' found in sys.modules")
def test_the_command_names_a_missing_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["immunization.results", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^error: .*/none") as end:  # Python prints a text and exits with 1
        runpy.run_module("immunization.results", run_name="__main__")
    assert "\n" not in end.value.code


def test_results_of_failed_runs_alone(tmp_path, capsys):
    make_run(tmp_path / "runs" / "0", status="failed", error="no data")
    command.main([str(tmp_path / "runs"), "--output", str(tmp_path / "out")])
    assert "1 failed: no data" in capsys.readouterr().out


def test_attacks_that_only_some_runs_have_stand_in_the_title_by_name(tmp_path):
    names = ("adam", "lbfgs", "momentum", "scaled")
    for folder, chosen in (("plain", ()), ("audit", names)):
        path = make_run(tmp_path / folder) / "config.yaml"
        attacks = {name: {"_target_": f"immunization.attacks.{name}", "steps": 9} for name in chosen}
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"attack": attacks}))
    groups = settings(collect([tmp_path]))
    titles = {title(group, groups) for group in groups}
    plain = "digits, linear, protocol=one_vs_rest"
    assert titles == {plain, f"{plain}, attack.adam, attack.lbfgs, attack.momentum, 1 more"}
