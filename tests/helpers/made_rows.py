"""Run folders of a track of the leaderboard, with made-up numbers."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml
from helpers.made_runs import make_run

SUITE = {"suite": {"version": "standard-1", "theta_0": "secret"}}
ATTACKS = {"probe": {"steps": 100}, "tuned": {"steps": 64, "search": 20}}


def track_run(folder, method="identity", seed=0, *more, track="cifar", suite="standard-1", **changes) -> Path:
    """A run of a track as its multirun leaves it, with `more` overrides."""
    about = {"about": {"suite": {"version": suite, "theta_0": "secret"}}}
    made = make_run(folder, method, seed, **about | changes)
    overrides = [f"experiment=leaderboard/{track}", f"method={method}", f"seed={seed}", *more]
    (made / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    command = f"/usr/bin/python /home/me/launch.py -m --config-dir my_conf {overrides[0]} method={method},clamp"
    environment = {"command": command, "git": {"commit": "abc", "dirty": False}, "platform": "Linux"}
    (made / "environment.json").write_text(json.dumps(environment))
    config = yaml.safe_load((made / "config.yaml").read_text())
    (made / "config.yaml").write_text(yaml.safe_dump(config | {"attack": ATTACKS, "suite": {"version": suite}}))
    return made


def worth_run(
    folder,
    method,
    removed: Mapping[str, float | None],
    lost=0.0,
    seed=0,
    cost: float | None = 100.0,
    other=0.0,
    **changes,
) -> Path:
    """A run in which so much worth is `removed` from attackers with 5, 20 or `all` images.

    The own head has `lost` accuracy on the primary task, and `other` on other classes.
    """
    measures = {"primary/head_accuracy_baseline": 0.77, "primary/head_accuracy": 0.77 - lost}
    measures |= {"other_classes/accuracy_baseline": 0.6, "other_classes/accuracy": 0.6 - other}
    measures |= {"transfer_benign/before_5": 0.5, "transfer_benign/after_5": 0.5 - lost}
    for images, share in removed.items():
        end = "" if images == "all" else f"_{images}"
        measures[f"worth/before{end}"] = 0.9
        ends = {"": 0.0, "_low": -0.1, "_high": 0.1}
        for side, more in ends.items():
            measures[f"worth/removed{side}{end}"] = None if share is None else share + more
    measures |= {"attack/worst/bar": 0.8, "attack/worst/fine_tuned": 1.0}
    for name, paid in {"probe": cost, "tuned": None}.items():
        measures |= {f"attack/{name}/final": 0.9 if paid else 0.6, f"attack/{name}/cost": paid}
        measures |= {f"attack/{name}/final_baseline": 0.95, f"attack/{name}/cost_baseline": 100.0}
    about = {"suite": {"version": changes.get("suite", "standard-1"), "theta_0": "secret"}}
    changes.setdefault("about", about | {"attackers": {"probe": {"immunized": {"ridge": 0.125}}}})
    return track_run(folder, method, seed, measures=measures, **changes)
