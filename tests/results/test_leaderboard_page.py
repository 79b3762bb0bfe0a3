"""leaderboard.html: one file that needs no other, with every row, what broke it, and the command that repeats it."""

import json
import re
from html import unescape

import pytest
from helpers.made_rows import SUITE, worth_run

from immunization.results.collect import collect
from immunization.results.leaderboard import BELOW, rows_below, sections, write
from immunization.results.rows import write as write_rows

EVIL = "<script>alert(1)</script>"


def page_of(folder, runs=()):
    """The page of all rows in `folder`, after those of `runs` were added."""
    if runs:
        write_rows(runs, folder / "rows")
    rows = collect(rows_below([folder / "rows"]))
    write(folder / "page.html", rows, sections(rows), "Leaderboard")
    return (folder / "page.html").read_text()


@pytest.fixture
def page(tmp_path):
    """Two tracks; in the first a row that keeps the primary task, one that does not, one that failed."""
    for seed in range(3):
        worth_run(tmp_path / f"a{seed}", "closed_form", {"5": 0.3, "all": None}, seed=seed)
    worth_run(tmp_path / "b", "forget", {"5": 0.6, "all": None}, lost=0.1, other=0.2)
    worth_run(tmp_path / "c", "imma", {}, status="failed", error=EVIL)
    worth_run(tmp_path / "d", "forget", {"5": 0.2}, track="vit", cost=None, protocol="vit")
    return page_of(tmp_path, [tmp_path])


def cells(page):
    """The texts of each row of each table."""
    found = []
    for table in re.findall(r"<tbody.*?</table>", page, re.S):
        rows = (re.findall(r"<td.*?</td>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S))
        found.append([[re.sub(r"<.*?>", "", cell) for cell in row] for row in rows])
    return found


def test_it_needs_nothing_else(page):
    links = re.findall(r'\b(?:src|href|xlink:href|action)="([^"]*)"', page)
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)|@import|<link|<iframe|fetch\(|import\(", page)
    assert "prefers-color-scheme: dark" in page
    assert "/home/me" not in page
    targets = {link[1:] for link in re.findall(r'<a href="([^"]*)"', page)}
    assert targets == set(re.findall(r'<details id="([^"]*)"', page))


def test_every_row_stands_in_its_track(page):
    cifar, vit = cells(page)
    assert [row[0] for row in cifar] == ["closed_form", BELOW, "forget", "imma"]
    assert cifar[0][1:5] == ["1", "3", "0.30 (0.20 to 0.40)", "undetermined"]
    assert cifar[0][5:] == ["0.770 → 0.770 ± 0.000", "0.950 → 0.951", "0.600 → 0.600", "0.500 → 0.500", "1", "probe"]
    assert cifar[2][5:9] == ["0.770 → 0.670", "0.950 → 0.950", "0.600 → 0.400", "0.500 → 0.400"]
    assert cifar[3][-1] == "failed"
    assert [row[0] for row in vit] == ["forget"]
    assert vit[0][-2:] == ["held", "nobody; closest: probe"]


def test_behind_a_row_stand_the_settings_that_broke_it_and_the_command(page):
    details = unescape(re.search(r"<summary>closed_form</summary>(.*?)</details>", page, re.S)[1])
    settings = [json.loads(text) for text in re.findall(r"<pre>(.*?)</pre>", details, re.S)]
    assert settings == [{"found": {"immunized": {"ridge": 0.125}}, "given": {"steps": 100}}] * 3
    command = "python launch.py --config-dir my_conf experiment=leaderboard/cifar method=closed_form seed=2"
    assert f'<pre class="command">{command}</pre>' in details
    assert "closed_form-2.json · code abc" in details


def test_what_runs_say_is_escaped(tmp_path):
    about = SUITE | {"attackers": {"probe": {EVIL: EVIL}}}
    worth_run(tmp_path / "a", EVIL.replace("/", ""), {"all": 0.5}, flags=[EVIL], about=about, dataset=EVIL, model=EVIL)
    worth_run(tmp_path / "b", "imma", {}, status="failed", error=EVIL)
    page = page_of(tmp_path, [tmp_path])
    assert page.count("<script") == 1
    assert "alert(1)" in page
