"""Records: every flat name of a result comes from one, and is read back into the same one."""

import json
import math
from pathlib import Path

import pytest

from immunization import run
from immunization.runs.records import Record, Records, flat, from_flat, of_role
from immunization.runs.result import Result

ROWS = Path(__file__).parents[2] / "leaderboard" / "rows"
NAMES = {  # one of each family, in the order in which they were introduced
    "rir": Record("rir", 1.0, "harmful", split="train"),
    "rir_harmful_8": Record("rir", 1.0, "harmful_8", split="train"),
    "worst/ratio_harmful": Record("ratio", 1.0, "worst", split="train"),
    "ratio_primary_theta0": Record("ratio", 1.0, "primary", "start", "train"),
    "authors/rir_theta0": Record("authors/rir", 1.0, "harmful", "start", "train"),
    "kappa_unseen_a.b-1_baseline": Record("kappa", 1.0, "unseen_a.b-1", "baseline", "train"),
    "test/kappa_primary_baseline": Record("kappa", 1.0, "primary", "baseline", "test"),
    "definition/rir_kept": Record("definition/rir_kept", 1.0),
    "primary/head_accuracy_baseline": Record("head_accuracy", 1.0, "primary", "baseline", "test"),
    "steps_ratio/primary": Record("steps_ratio", 1.0, "primary", split="test"),
    "worst/rfd": Record("rfd", 1.0, "worst", split="test"),
    "deployment/accuracy_int8_baseline": Record("deployment/accuracy_int8", 1.0, stage="baseline"),
    "other_classes/called_primary_enlarged": Record("other_classes/called_primary_enlarged", 1.0),
    "selectivity/layer4.0/lost": Record("selectivity/layer4.0/lost", 1.0),
    "attack/adam/steps_to_1e-2_start": Record("steps_to_1e-2", 1.0, "harmful", "start", attack="adam"),
    "attack_harmful_8/worst/bar": Record("bar", 1.0, "harmful_8", attack="worst"),
    "reference_unseen/random_net/cost": Record("cost", 1.0, "unseen", "reference", attack="random_net"),
    "worth/theta_0": Record("worth/theta_0", 1.0, "harmful"),
    "worth_unseen/theta_0_20": Record("worth/theta_0", 1.0, "unseen", images=20),
    "ceiling/rir": Record("ceiling/rir", 1.0),
    "ceiling/worth_attained_5": Record("ceiling/worth_attained", 1.0, "harmful", images=5),
    "ceiling_harmful_8/partial_half_5": Record("ceiling/partial_half", 1.0, "harmful_8", images=5),
    "transfer_benign/before_5": Record("transfer/before", 1.0, "benign", images=5),
    "my_thing": Record("my_thing", 1.0),
}


def test_every_family_has_the_name_that_it_always_had():
    metrics = dict.fromkeys(NAMES, 1.0)
    assert flat(Records(NAMES.values())) == (metrics, {})
    assert list(from_flat(metrics, {}).values()) == list(NAMES.values())


@pytest.mark.parametrize("path", sorted(ROWS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_committed_row_is_read_into_records_that_give_its_metrics(path):
    content = json.loads(path.read_text())
    metrics, reasons = content["metrics"], {k: why for k, why in content["reasons"].items() if k in content["metrics"]}
    records = from_flat(metrics, reasons)
    again = Records(map(Record.from_dict, json.loads(json.dumps([record.as_dict() for record in records.values()]))))
    assert flat(records) == flat(again) == (metrics, reasons)

    def values(names):  # the ends of an interval follow their value, which they did not always
        return [name for name in names if not name.startswith("interval/")]

    assert values(flat(records)[0]) == values(metrics)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("steps_ratio/harmful", ("interval/steps_ratio/harmful_low", "interval/steps_ratio/harmful_high")),
        ("worth/theta_0_5", ("worth/theta_0_low_5", "worth/theta_0_high_5")),
    ],
)
def test_an_interval_is_part_of_its_record(name, ends):
    metrics = {name: 0.5, ends[0]: 0.25, ends[1]: None}
    records = from_flat(metrics, reasons := {ends[1]: "the value is not finite (inf)"})
    (record,) = records.values()
    assert (record.value, record.low) == (0.5, 0.25)
    assert math.isnan(record.high)
    assert Record.from_dict(record.as_dict()).as_dict() == record.as_dict()
    assert flat(records) == (metrics, reasons)
    metrics, reasons = dict.fromkeys(metrics), dict.fromkeys(metrics, "nobody knows")
    assert flat(from_flat(metrics, reasons)) == (metrics, reasons)


def test_a_withheld_number_is_not_the_value():
    metrics, reasons = {"rir": None, "undetermined/rir": 3.0, "undetermined/mine": 1.0}, {"rir": "unbounded"}
    records = from_flat(metrics, reasons)
    assert records.value("rir", task="harmful") is None
    assert records.get("rir", task="harmful").undetermined == 3.0
    assert flat(records) == (metrics, reasons)


def test_a_record_is_found_by_what_it_is_of():
    records = Records([Record("ratio", 2.0, "harmful", split="train"), Record("ratio", 3.0, "harmful", split="test")])
    assert records.value("ratio", task="harmful") == records.value("ratio", task="harmful", split="train") == 2.0
    assert [record.value for record in records.where(measure="ratio", task="harmful")] == [2.0, 3.0]
    assert records.get("ratio", task="primary") is records.value("ratio") is None
    records.add(Record("ratio", 4.0, "harmful", split="train"))
    assert [record.value for record in records.values()] == [4.0, 3.0]
    assert [of_role("attack_succeeds", role) for role in ("harmful", "unseen")] == [
        "attack_succeeds",
        "attack_succeeds_unseen",
    ]


@pytest.mark.trains
def test_a_run_folder_of_either_schema_is_read_into_the_records_that_were_made(tmp_path):
    """Of two harmful tasks and a benign one, attacked."""
    options = ["method=opt_kappa", "method.epochs=2", "dataset.harmful=[1,7]", "tracker=none", "figures=false"]
    made = run([*options, "attack=[closed_form_probe]"], folder=tmp_path)
    content = json.loads((tmp_path / "result.json").read_text())
    assert list(content["metrics"].items()) == list(flat(made.records)[0].items())
    assert {measure: content["reasons"][measure] for measure, value in content["metrics"].items() if value is None} == (
        flat(made.records)[1]
    )
    read = Result.read(tmp_path)
    assert read.records == made.records
    assert read.verdict == content["verdict"] == made.verdict != []
    first = {key: value for key, value in content.items() if key not in ("records", "verdict", "sha256")}
    (tmp_path / "result.json").write_text(json.dumps(first | {"schema": 1}))
    old = Result.read(tmp_path)
    assert old.records == made.records
    assert old.verdict == made.verdict
