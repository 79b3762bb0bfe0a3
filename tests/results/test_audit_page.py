"""The page of an audit: the verdict first, then who was audited, the figure, the table and short notes."""

import hashlib
import re

import pytest
from helpers.made_runs import make_run
from matplotlib.colors import to_hex

from immunization.results import page
from immunization.results.attack_figures import HELD, LEARNED, attack_costs
from immunization.results.collect import collect
from immunization.results.page import audit_of
from immunization.results.settings import settings

ATTACKS = {"slow": (0.60, 5e8), "close": (0.90, 3e7), "quick": (0.97, 2e6)}


@pytest.fixture
def folder(tmp_path):
    """Three attacks, one held, one at the bar on few rows, one that clearly learns the task."""
    measures, curves = {"attack/worst/bar": 0.89, "attack/worst/final": 0.97, "attack/worst/test_rows": 72}, {}
    for name, (final, cost) in ATTACKS.items():
        measures |= {f"attack/{name}/final": final, f"attack/{name}/final_baseline": 0.95}
        measures |= {f"attack/{name}/steps": 8192.0, f"attack/{name}/steps_ratio": 800.0}
        measures |= {f"attack/{name}/cost": cost if final > 0.89 else None, f"attack/{name}/cost_baseline": 1e6}
        for kind in ("accuracy", "compute"):
            curves[f"attack/{name}/{kind}"] = {"x": [1.0, cost], "y": [0.5, final]}
    about = {"classes": {"primary": 0, "harmful": 1}, "rows": {"harmful": {"train": 220, "val": 72, "test": 72}}}
    about["attacks_capped"] = ["slow"]
    made = make_run(tmp_path / "run", measures=measures, curves=curves, about=about)
    (made / "immunized.safetensors").write_bytes(b"weights")
    return made


def setting_of(folder):
    ((setting,),) = settings(collect([folder]))
    return setting


def test_the_page_begins_with_the_verdict(folder):
    page.audit(folder)
    text = (folder / "report.html").read_text().partition("</style>")[2]
    parts = [
        '<h1 class="verdict">It does not hold: 2 of 3 attacks learn the harmful task; the cheapest, quick, takes 2 ',
        "Audit run",
        f"SHA-256 {hashlib.sha256(b'weights').hexdigest()[:12]}",
        "primary class 0, harmful class 1; harmful rows: 220 train, 72 val, 72 test; seed 0",
        "With 72 test rows the result of close is open",
        "<svg",
        ">learned</button>",
        "Operations: until the attacker reaches the bar",
        "Flag <code>few_seeds</code>",
        "docs/flags.md",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.count("It does not hold") == 1


def test_the_table_marks_successes_and_caps(folder):
    made = audit_of(setting_of(folder), "x", "Digits")
    rows = {row[0].text: dict(zip(made.table.header, row, strict=True)) for row in made.table.rows}
    assert [rows[name]["learned"].text for name in ATTACKS] == ["○ no", "● yes ?", "● yes"]
    assert [rows[name]["learned"].strong for name in ATTACKS] == [False, True, True]
    assert [rows[name]["steps ratio"].text for name in ATTACKS] == ["> 800", "800", "800"]
    assert [row[0].text for row in made.table.rows] == ["quick", "close", "slow"]
    assert [row["steps, immunized"].text for row in rows.values()] == ["8,192", "8,192", "> 8,192"]
    assert rows["close"]["95 % interval"].text == "0.81 to 0.95"
    assert made.table.header[:4] == ["attack", "learned", "immunized", "95 % interval"]
    assert sum(len(note) for note in made.notes) < 500


def test_the_checkpoint_is_named_without_its_place(folder, tmp_path):
    (run,) = collect([folder]).runs
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "immunized.safetensors").write_bytes(b"audited")
    run.config["model"]["checkpoint"] = str(tmp_path / "other")
    ((setting,),) = settings(collect([folder]))
    setting.runs = [run]
    subject = audit_of(setting, "x", "Digits").subject
    assert f"checkpoint other/immunized.safetensors, SHA-256 {hashlib.sha256(b'audited').hexdigest()[:12]}" in subject
    assert str(tmp_path) not in subject


def test_the_figure_shows_costs_before_and_after(folder):
    plot = attack_costs(setting_of(folder), "x")
    (ax,) = plot.figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["slow", "close", "quick"]
    ends = [line for line in ax.lines if line.get_marker() in "s>" and len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in ends] == [5e8, 3e7, 2e6]
    assert [to_hex(line.get_color()).upper() for line in ends] == [HELD, LEARNED, LEARNED]
    assert [line.get_marker() for line in ends] == ["s", ">", ">"]
    starts = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    assert starts == [1e6] * 3
    assert "#000000" not in plot.svg()  # text takes the color of the page, dark or light
    assert "pair 0→1, 1 seed, n = 1 run" in plot.figure.get_suptitle()


def test_flags_are_links_inside_of_a_copy_of_the_repository(folder, monkeypatch):
    monkeypatch.setattr(page, "flags_page", lambda path: "../docs/flags.md")
    page.audit(folder)
    assert re.search(r'href="\.\./docs/flags\.md#few_seeds"', (folder / "report.html").read_text())
