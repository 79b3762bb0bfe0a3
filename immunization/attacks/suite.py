"""Attacks on theta_I and on what it is compared with, turned into measures; the cheapest one that succeeds."""

import copy
import logging
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from tqdm import tqdm

from immunization.attacks import prices, reference, worth
from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.flags import PLACES, flags_of
from immunization.attacks.kept import KeptCurves, code_of
from immunization.attacks.numbered import changes
from immunization.attacks.outcome import Outcome, first, listed, never_finite, put_final, reached
from immunization.attacks.replay import found_settings
from immunization.attacks.victim import Inapplicable, Victim
from immunization.attacks.worth import Draw, Suite
from immunization.data.task import CONSTANT, Task
from immunization.evaluation.measures import Measures
from immunization.runs.records import Role, Stage, of_role
from immunization.terminal import doing, progress_bar

log = logging.getLogger(__name__)

Found = dict[str, Mapping[Stage, AttackCurve]]
"""Curves by attack and stage; those of a reference are of the baseline only."""

EXCESSES = {"1e-2": 1e-2, "1e-4": 1e-4}
"""Relative excess training losses to which steps are counted."""


def run_attacks(
    attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None = None, suite: Suite | None = None
) -> Measures:
    """Run `attacks` and measure each, and the worst of them, as the attack `WORST`, on the victim's task.

    An attack that does not apply to the model or the data has only `final`, None with the reason. Attacks that `kept`
    holds are not run again. A reference, which does not use theta_I, is measured on the stage `reference`. Names of
    flags and curves, and keys of `about`, carry the task's role, unless it is `harmful`.
    """
    role, measures = victim.role, Measures()
    ran = _run_all(attacks, victim, kept, suite)
    outcomes, references = [], {}
    for name, curves in ran.curves.items():
        attack = attacks[name]
        if isinstance(curves, Inapplicable):
            stage = "reference" if attack.reference else "immunized"
            measures.miss(str(curves), "final", task=role, stage=stage, attack=name)
            continue
        if settings := found_settings(attack.kind, curves):
            measures.about.setdefault(of_role("attackers", role), {})[name] = settings
        if attack.reference:
            references[name] = curves["baseline"]
        else:
            outcomes.append(Outcome(name, attack, victim.task.chance, curves))
            _curves(outcomes[-1], victim, measures)
            _measure(outcomes[-1], role, measures)
    for flag, reason in flags_of(outcomes).items():
        measures.flag(of_role(flag, role), reason)
    about = {"attacks_capped": [outcome.name for outcome in outcomes if outcome.capped]}
    without = {name: curve for name, curve in references.items() if not attacks[name].partial}
    threshold = prices.measure(outcomes, without, victim, measures)
    reference.measure(references, without, threshold, role, victim.task.measure_name, measures)
    if suite is not None:
        about["suite"] = {"version": suite.version, "theta_0": suite.theta_0}
        if changed := changes(attacks, suite.version, suite.most):
            about["suite"]["changed"] = changed
        if kept and kept.baselines:
            about["baselines_by"] = sorted(set(kept.baselines.made_by.values()))
    if partly := {name: attacks[name].partial for name in references if name not in without}:
        about["drawn_anew"] = partly
    measures.about |= {of_role(key, role): value for key, value in about.items()}
    if ran.measures_worth:
        _worth(attacks, victim, suite or Suite(version=""), ran, measures)
    return measures


@dataclass
class _Ran:
    """The curves of every attack, or why it does not apply, and those with few images by number of images and draw.

    Attacks that are `untouched` use nothing that immunization changed. Worth can be measured once there is the curve of
    an attacker without the model, which says what each test row adds.
    """

    untouched: set[str]
    curves: dict[str, Mapping[Stage, AttackCurve] | Inapplicable]
    few: dict[int, dict[int, Found]]
    measures_worth: bool = False

    @property
    def whole(self) -> Found:
        return {name: curves for name, curves in self.curves.items() if not isinstance(curves, Inapplicable)}


def _run_all(attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None, suite: Suite | None) -> _Ran:
    """Run attackers without the model first: where none applies, few images do not say what the model is worth."""
    untouched = {name for name, attack in attacks.items() if attack.untouched(victim)}
    ran = _Ran(untouched, {}, _few(victim.task, suite))
    ordered = sorted(attacks.items(), key=lambda item: (not item[1].reference, item[1].partial is not None))
    progress = progress_bar(ordered, bar_format="{desc} |{bar}|", leave=False)
    for number, (name, attack) in enumerate(progress, 1):
        place = f"attack {number} of {len(attacks)}, {name}"
        try:
            if suite is not None and suite.theta_0 == "secret" and attack.needs_theta_0(victim):
                raise Inapplicable("it needs theta_0 itself, which attackers do not have: suite.theta_0=secret")
            curves = _run(name, attack, victim, kept, partial(_at, progress, place), name in untouched)
            without_model = attack.reference and not attack.partial
            ran.measures_worth |= without_model and curves["baseline"].scores is not None
            ran.curves[name] = curves
        except Inapplicable as error:
            ran.curves[name] = error
        if not ran.measures_worth:
            continue
        for images, draws in ran.few.items():  # now, as what it reads of the net is not kept for long
            for seed, curves_with in draws.items():
                if seed and attack.trains:
                    continue
                own, where = copy.copy(attack), f"{place}, {images} images a class, draw {seed + 1}"
                own.samples, own.seed, at = images, attack.seed + seed, partial(_at, progress, where)
                with suppress(Inapplicable):
                    curves_with[name] = _run(f"{name}@{images}.{seed}", own, victim, kept, at, name in untouched)
    return ran


def _few(task: Task, suite: Suite | None) -> dict[int, dict[int, Found]]:
    """For each number of images of each class at which the suite measures worth, the seeds of draws, without curves."""
    if suite is None or not task.classes:
        return {}
    enough = {images: len(task.few(images, 0)) < len(task.train) for images in suite.images}
    return {images: {seed: {} for seed in range(suite.draws) if enough[images]} for images in suite.images}


def _worth(attacks: Mapping[str, Attack], victim: Victim, suite: Suite, ran: _Ran, measures: Measures) -> None:
    """What the model is worth with all of the attacker's images, and with as few as the suite says."""
    task, role, public = victim.task, victim.role, suite.theta_0 == "public"
    guess = torch.full((len(task.test),), task.chance, dtype=torch.float64)
    draw = _draw(attacks, ran.whole, ran.untouched)
    if draw.before:
        worth.measure([draw], guess, None, role, measures, public)
    else:
        reason = "no attacker with the model ran"
        measures.miss(reason, "worth/theta_0", "worth/lost", "worth/removed", task=role)
    for images, by_seed in ran.few.items():
        first, reason = by_seed.get(0, {}), ""  # who trains a net has this draw alone
        draws = [_draw(attacks, {**first, **curves}, ran.untouched) for curves in by_seed.values()]
        if not draws:
            reason = f"no class of the harmful task has more than {images} training images"
        elif not any(draw.before for draw in draws):
            reason = "no attacker takes so few images"
        if reason:
            measures.miss(reason, "worth/theta_0", "worth/removed", task=role, images=images)
        else:
            worth.measure(draws, guess, images, role, measures, public)


def _draw(attacks: Mapping[str, Attack], curves: Found, untouched: Container[str]) -> Draw:
    """Those curves that say what each test row adds."""

    def some(stage: Stage, wanted: Callable[[str], bool]) -> dict[str, AttackCurve]:
        chosen = {name: own[stage] for name, own in curves.items() if wanted(name)}
        return {name: curve for name, curve in chosen.items() if curve.scores is not None}

    before, after = (some(stage, lambda name: not attacks[name].reference) for stage in ("baseline", "immunized"))
    without = some("baseline", lambda name: attacks[name].reference and not attacks[name].partial)
    part = some("baseline", lambda name: attacks[name].partial)
    left = [curve for name, curve in (before | part).items() if name in untouched]
    groups = (list(group.values()) for group in (before, after, without))
    return Draw(*groups, left, {name: [curve] for name, curve in part.items()})


@contextmanager
def _at(progress: tqdm, attack: str, stage: Stage) -> Iterator[None]:
    """Inside, the progress bar and `where` say which attack is run on which stage."""
    what = f"{attack} on {PLACES[stage]}"
    progress.set_description_str(what)
    with doing(lambda: what):
        yield


def _run(
    name: str,
    attack: Attack,
    victim: Victim,
    kept: KeptCurves | None,
    at: Callable[[Stage], AbstractContextManager[None]],
    untouched: bool,
) -> dict[Stage, AttackCurve]:
    """The curves of an attack on every stage; of a reference, which is the same for all, on the baseline's net.

    One that is `untouched` by immunization has the same curve on every stage, and so has any where theta_I is the
    baseline.
    """
    if reason := victim.comparison.no_test(victim.role):
        raise Inapplicable(reason)
    if victim.task.constant:
        raise Inapplicable(CONSTANT.format(victim.role))
    code = code_of(attack)
    if kept and (curves := kept.get(name, code)) is not None:
        return curves
    run, shared = partial(attack.run, victim), kept.baselines if kept else None
    stages = ("baseline",) if attack.reference else victim.stages

    @cache
    def of_other_stages() -> dict[Stage, AttackCurve]:
        """Curves of stages that are not the baseline; run first where another process is at work on the baseline."""
        found = {}
        for stage in stages:
            if stage == "baseline" or untouched or (stage == "immunized" and victim.unchanged()):
                continue
            with at(stage):
                try:
                    found[stage] = run(stage)
                except Inapplicable as error:  # applies to the baseline: there is nothing left to learn from
                    log.info("attack %s guesses on %s: %s", name, PLACES[stage], error)
                    found[stage] = AttackCurve.of_guessing(victim.task)
        return found

    attack_baseline = partial(run, "baseline")
    with at("baseline"):
        baseline = (
            shared(name, attack.beside(victim) + code, attack_baseline, of_other_stages)
            if shared
            else attack_baseline()
        )
    curves = dict.fromkeys(("baseline", *stages), baseline) | of_other_stages()
    if kept:
        kept.put(name, curves, code)
    return curves


def _curves(outcome: Outcome, victim: Victim, measures: Measures) -> None:
    """The test measure against steps and against compute, and the excess training loss."""
    for stage, curve in outcome.curves.items():
        prefix = f"{of_role('attack', victim.role)}/{outcome.name}"
        steps = curve.steps.tolist()
        measures.curve(f"{prefix}/{victim.task.measure_name}", steps, curve.test, stage)
        measures.curve(f"{prefix}/compute", curve.flops.tolist(), curve.test, stage)
        if curve.excess is not None:
            measures.curve(f"{prefix}/excess", steps, curve.excess, stage)


def _measure(outcome: Outcome, role: Role, measures: Measures) -> None:
    """What one attack reached on every stage, and theta_I against the baseline."""
    of = {"task": role, "attack": outcome.name}
    for stage in outcome.curves:
        _measure_stage(outcome, measures, stage=stage, **of)
    if outcome.failed:
        return
    measures.put("gap", outcome.before.final - outcome.after.final, **of)
    if outcome.at_chance or outcome.blind:
        reason = "the attack stays at chance on the baseline too: it says nothing"
        if not outcome.at_chance:
            reason = "the attack finds nothing to learn from with theta_I: it guesses"
        measures.miss(reason, "steps", "flops", "steps_ratio", **of)
        return
    steps = {}
    for stage, curve in outcome.curves.items():
        place = reached(curve, outcome.bar)
        place = -1 if place is None else place  # an attack that never gets there counts with all its steps
        steps[stage] = curve.steps[place].item()
        measures.put("steps", steps[stage], stage=stage, **of)
        measures.put("flops", curve.flops[place].item(), stage=stage, **of)
    measures.put("steps_ratio", steps["immunized"] / steps["baseline"], **of)
    for epochs, place in (outcome.before.epochs or {}).items():
        # SGRC: the share of the baseline's test measure that immunization takes, after so many epochs of the attack
        without, immunized = (curve.test[place].item() for curve in (outcome.before, outcome.after))
        if without > 0:
            measures.put(f"sgrc_{epochs}", (without - immunized) / without, **of)
        else:
            measures.miss("the attack gets nothing right with the baseline", f"sgrc_{epochs}", **of)
    if outcome.attack.order is not None:
        predicted = (outcome.after.kappa / outcome.before.kappa) ** outcome.attack.order
        measures.put("steps_ratio_predicted", predicted, **of)


def _measure_stage(outcome: Outcome, measures: Measures, stage: Stage, **of: Any) -> None:
    """What one attack reached on one stage, whatever it reached on the others."""
    curve, of = outcome.curves[stage], of | {"stage": stage}
    if curve.setting is not None:
        measures.put("setting", curve.setting, **of)
    measures.put("diverged", bool(curve.diverged), **of)
    if curve.kappa is not None:
        measures.put("kappa", curve.kappa, **of)
    if never_finite(curve):
        reason = f"diverged at every {outcome.attack.setting_name} tried: {listed(curve.diverged)}"
        measures.miss(reason, "final", "area", "steps", "flops", **of)
        return
    put_final(curve, measures, **of)
    measures.put("area", curve.test.clamp(min=outcome.chance).mean().item(), **of)
    for label, excess in EXCESSES.items() if curve.excess is not None else ():
        if (place := first(curve.excess <= excess)) is None:
            measures.miss(f"not within {curve.steps[-1]} steps", f"steps_to_{label}", **of)
        else:
            measures.put(f"steps_to_{label}", curve.steps[place].item(), **of)
