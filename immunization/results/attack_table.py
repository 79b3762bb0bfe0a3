"""The section on attacks of a report: what each attack reached, flags, and the verdict in words."""

from __future__ import annotations

from immunization.results.settings import Setting
from immunization.results.tables import Cell, Table
from immunization.runs.result import attack_names, verdict


def attacks(setting: Setting, name: str, heading: str) -> Table | None:
    """One row an attack, medians over the runs of the setting; None where nothing was attacked."""
    results = [run.result for run in setting.runs]
    names = list(dict.fromkeys(attack for result in results for attack in attack_names(result)))
    if not names:
        return None
    columns = {
        "baseline": "final_baseline",
        "immunized": "final",
        "steps, baseline": "steps_baseline",
        "steps, immunized": "steps",
        "steps ratio": "steps_ratio",
        "by Eq. 2": "steps_ratio_predicted",
        "area, baseline": "area_baseline",
        "area, immunized": "area",
        "operations, baseline": "cost_baseline",
        "operations, immunized": "cost",
    }
    medians = {attack: [setting.median(f"attack/{attack}/{key}") for key in columns.values()] for attack in names}
    rows = [[Cell(attack), *map(Cell.of, values)] for attack, values in medians.items()]
    kept = [0, *(i for i in range(1, len(columns) + 1) if any(row[i].value is not None for row in rows))]
    header = ["attack", *columns]
    notes = [
        *verdict(results),
        "Held-out measure where the attacker's validation split says to stop; steps to 90 % of the way from chance to "
        "the baseline's best under the same attack, never reached counting as all; their ratio, and what condition "
        "numbers alone predict (Eq. 2: steps grow as kappa, for conjugate gradients as its root); area under the curve "
        "over the logarithm of steps; operations until one bar for all attacks, 90 % of the best of the baseline.",
        *_flags(setting),
    ]
    return Table(
        name,
        f"{heading}: attacks on {setting.label}",
        [header[i] for i in kept],
        [[row[i] for i in kept] for row in rows],
        notes,
    )


def _flags(setting: Setting) -> list[str]:
    """Every flag of the runs with the reason of the first, and how many runs have it."""
    reasons: dict[str, list[str]] = {}
    for run in setting.runs:
        for flag in run.result.flags:
            reasons.setdefault(flag, []).append(run.result.reasons.get(flag, "no reason given"))
    if len({run.result.seed for run in setting.runs}) < 3:
        reasons["few_seeds"] = ["fewer than 3 seeds: nothing is known of the spread of these figures"]
    runs = len(setting.runs)
    counted = {flag: f" in {len(texts)} of {runs} runs" if runs > 1 else "" for flag, texts in reasons.items()}
    return [f"Flag {flag}{counted[flag]}: {texts[0]}." for flag, texts in reasons.items()]
