"""Audits: a checkpoint as it stands, validity, transfer, and the report."""

import sys

import pytest
import torch
import yaml
from helpers.made_runs import make_run
from helpers.terminals import Terminal
from helpers.victims import classes, victim_of

from immunization import run
from immunization.attacks import AttackCurve, LinearProbe, run_attacks
from immunization.errors import ConfigError
from immunization.results.page import audit
from immunization.terminal import where

pytestmark = pytest.mark.trains


def test_a_checkpoint_is_audited_as_it_stands(tmp_path):
    """Without a checkpoint a model is immunized first; with one the same theta is measured, and nothing is trained."""
    options = ["experiment=audit", "tracker=none", "figures=false", "attack=[linear_probe,scaled,strip]"]
    options += [f"attack.{name}.steps=1024" for name in ("linear_probe", "scaled", "strip")]
    first = run([*options, "method.epochs=60", "optimizer.lr=2e-2"], folder=tmp_path / "first")
    again = run([*options, f"model.checkpoint={tmp_path / 'first'}"], folder=tmp_path / "again")
    assert (first.method, again.method) == ("learning_curve", "unmodified")
    for name in ("rir", "attack/linear_probe/area", "attack/worst/flops", "primary/head_accuracy"):
        assert again.metrics[name] == pytest.approx(first.metrics[name], rel=1e-9)
    page = (tmp_path / "again" / "report.html").read_text()
    assert "attacks on checkpoint first" in page
    assert "It does not hold: 2 of 3 attacks" in page
    assert "fewer than 3 seeds" in page
    assert "the cheapest, scaled, takes" in again.verdict[0]
    assert again.verdict[-3] == "Not learned within the budget: by linear_probe."
    with pytest.raises(ConfigError, match=r"theta of shape \(64, 64\) does not fit"):
        run([*options, "dataset.common_range=true", f"model.checkpoint={tmp_path / 'first'}"], folder=tmp_path / "bad")


def test_the_report_of_an_audit_whose_benign_classes_are_a_list(tmp_path):
    """As those of digits_deep are."""
    metrics = {"attack/gd/final": 0.9, "attack/gd/final_baseline": 0.9}
    folder = make_run(tmp_path / "run", measures=metrics)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["dataset"]["benign"] = [7, 8, 9]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    audit(folder)
    assert "attacks on condition_number" in (folder / "report.html").read_text()


def test_an_attack_says_which_of_how_many_it_is_and_on_what(monkeypatch, capsys):
    victim, seen, real = victim_of(classes(), torch.eye(6)), [], LinearProbe.run

    def noted(attack: LinearProbe, *arguments) -> AttackCurve:
        seen.append(where())
        return real(attack, *arguments)

    monkeypatch.setattr(LinearProbe, "run", noted)
    run_attacks({"first": LinearProbe(steps=4), "second": LinearProbe(steps=4)}, victim)
    assert seen == [
        f"attack {n} on {on}" for n in ("1 of 2, first", "2 of 2, second") for on in ("the baseline", "theta_I")
    ]
    assert where() == "at work"
    assert capsys.readouterr() == ("", "")  # no terminal


def test_a_terminal_shows_the_attack_that_is_run(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    run_attacks({"first": LinearProbe(steps=4)}, victim_of(classes(), torch.eye(6)))
    assert "attack 1 of 1, first on theta_I |" in sys.stderr.getvalue()
