"""Attacks on theta_I and on what it is compared with, turned into measures; the cheapest one that succeeds."""

import copy
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial

import torch
from tqdm import tqdm

from immunization.attacks import prices, reference, worth
from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.flags import PLACES, flags_of
from immunization.attacks.kept import KeptCurves, code_of
from immunization.attacks.numbered import changes
from immunization.attacks.outcome import Outcome, first, listed, never_finite, put_final, reached
from immunization.attacks.replay import found_settings
from immunization.attacks.victim import Inapplicable, Stage, Victim
from immunization.attacks.worth import Draw, Suite
from immunization.data.task import CONSTANT, Task
from immunization.evaluation.measures import SUFFIX, Measures, Role
from immunization.terminal import doing, progress_bar

log = logging.getLogger(__name__)

Found = dict[str, Mapping[Stage, AttackCurve]]
"""Curves by attack and stage; those of a reference are of the baseline only."""

SUFFIXES: dict[Stage, str] = SUFFIX | {"start": "_start"}

EXCESSES = {"1e-2": 1e-2, "1e-4": 1e-4}
"""Relative excess training losses to which steps are counted."""


def run_attacks(
    attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None = None, suite: Suite | None = None
) -> Measures:
    """Run `attacks` and measure each, under `attack/<name>/`, and the worst of them, under `attack/worst/`.

    An attack that does not apply to the model or the data has only `attack/<name>/final`, None with the reason. Attacks
    that `kept` holds are not run again. A reference, which does not use theta_I, is measured under
    `reference/<name>/`. Where the victim's task is not `harmful`, all these names carry its role,
    `attack_<role>/<name>/`, and so do the flags.
    """
    measures = _of_one_task(attacks, victim, kept, suite)
    return measures if victim.role == "harmful" else _named(measures, victim.role)


def _of_one_task(
    attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None, suite: Suite | None
) -> Measures:
    measures, outcomes, references = Measures(), [], {}
    untouched = {name for name, attack in attacks.items() if attack.untouched(victim)}
    few = _few(victim.task, suite)
    found_with: dict[tuple[int, int], Found] = {draw: {} for draws in few.values() for draw in draws}
    # those without the model first: where none applies, few images say nothing of what it is worth
    ordered = sorted(attacks.items(), key=lambda item: (not item[1].reference, item[1].partial is not None))
    bar, lines = progress_bar(ordered, bar_format="{desc} |{bar}|", leave=False), False
    for number, (name, attack) in enumerate(bar, 1):
        place = f"attack {number} of {len(attacks)}, {name}"
        try:
            if suite is not None and suite.theta_0 == "secret" and attack.needs_theta_0(victim):
                raise Inapplicable("it needs theta_0 itself, which attackers do not have: suite.theta_0=secret")
            curves = _run(name, attack, victim, kept, partial(_at, bar, place), name in untouched)
        except Inapplicable as error:
            measures.miss(str(error), f"{'reference' if attack.reference else 'attack'}/{name}/final")
            curves = None
        lines |= bool(curves and attack.reference and not attack.partial and curves["baseline"].scores is not None)
        for images, seed in found_with if lines else ():  # now, as what it reads of the net is not kept for long
            if seed and attack.trains:
                continue
            own, where = copy.copy(attack), f"{place}, {images} images a class, draw {seed + 1}"
            own.samples, own.seed = images, attack.seed + seed
            with suppress(Inapplicable):
                found = _run(f"{name}@{images}.{seed}", own, victim, kept, partial(_at, bar, where), name in untouched)
                found_with[images, seed][name] = found
        if curves is None:
            continue
        if settings := found_settings(attack.kind, curves):
            measures.about.setdefault("attackers", {})[name] = settings
        if attack.reference:
            references[name] = curves["baseline"]
            continue
        outcomes.append(Outcome(name, attack, victim.task.chance, curves))
        _curves(outcomes[-1], victim.task.measure_name, measures)
        _measure(outcomes[-1], measures)
    for flag, reason in flags_of(outcomes).items():
        measures.flag(flag, reason)
    measures.about["attacks_capped"] = [outcome.name for outcome in outcomes if outcome.capped]
    without = {name: curve for name, curve in references.items() if not attacks[name].partial}
    bar = prices.measure(outcomes, without, victim, measures)
    reference.measure(references, without, bar, victim.task.measure_name, measures)
    if suite is not None:
        measures.about["suite"] = {"version": suite.version, "theta_0": suite.theta_0}
        if changed := changes(attacks, suite.version, suite.most):
            measures.about["suite"]["changed"] = changed
        if kept and kept.baselines:
            measures.about["baselines_by"] = sorted(set(kept.baselines.made_by.values()))
    if begin := {name: attacks[name].partial for name in references if name not in without}:
        measures.about["drawn_anew"] = begin
    everything = {outcome.name: outcome.curves for outcome in outcomes}
    everything |= {name: {"baseline": curve} for name, curve in references.items()}
    if lines:
        _worth(attacks, victim, suite or Suite(version=""), everything, few, found_with, untouched, measures)
    return measures


def _few(task: Task, suite: Suite | None) -> dict[int, list[tuple[int, int]]]:
    """The draws, images of each class and seed, at each number of images at which the suite measures worth."""
    if suite is None or not task.classes:
        return {}
    enough = {images: len(task.few(images, 0)) < len(task.train) for images in suite.images}
    return {images: [(images, seed) for seed in range(suite.draws) if enough[images]] for images in suite.images}


def _worth(
    attacks: Mapping[str, Attack],
    victim: Victim,
    suite: Suite,
    everything: Found,
    few: Mapping[int, Sequence[tuple[int, int]]],
    found_with: Mapping[tuple[int, int], Found],
    untouched: Container[str],
    measures: Measures,
) -> None:
    """What the model is worth with all of the attacker's images, and with as few as the suite says."""
    task, public = victim.task, suite.theta_0 == "public"
    guess = torch.full((len(task.test),), task.chance, dtype=torch.float64)
    draw = _draw(attacks, everything, untouched)
    if draw.before:
        worth.measure([draw], guess, "", measures, public)
    else:
        measures.miss("no attacker with the model ran", "worth/theta_0", "worth/lost", "worth/removed")
    for images, places in few.items():
        first = found_with[places[0]] if places else {}  # who trains a net has this draw alone
        draws, reason = [_draw(attacks, {**first, **found_with[place]}, untouched) for place in places], ""
        if not draws:
            reason = f"no class of the harmful task has more than {images} training images"
        elif not any(draw.before for draw in draws):
            reason = "no attacker takes so few images"
        if reason:
            measures.miss(reason, f"worth/theta_0_{images}", f"worth/removed_{images}")
        else:
            worth.measure(draws, guess, f"_{images}", measures, public)


def _draw(attacks: Mapping[str, Attack], found: Found, untouched: Container[str]) -> Draw:
    """Those curves that say what each test row adds."""

    def some(stage: Stage, wanted: Callable[[str], bool]) -> dict[str, AttackCurve]:
        curves = {name: own[stage] for name, own in found.items() if wanted(name)}
        return {name: curve for name, curve in curves.items() if curve.scores is not None}

    before, after = (some(stage, lambda name: not attacks[name].reference) for stage in ("baseline", "immunized"))
    without = some("baseline", lambda name: attacks[name].reference and not attacks[name].partial)
    part = some("baseline", lambda name: attacks[name].partial)
    left = [curve for name, curve in (before | part).items() if name in untouched]
    groups = (list(group.values()) for group in (before, after, without))
    return Draw(*groups, left, {name: [curve] for name, curve in part.items()})


def _named(measures: Measures, role: Role) -> Measures:
    """`measures` under the names of a further task: `attack_<role>/`, `reference_<role>/`, `<flag>_<role>`."""

    def name(old: str) -> str:
        group, slash, rest = old.partition("/")
        return f"{group}_{role}{slash}{rest}"

    return Measures(
        {name(old): value for old, value in measures.metrics.items()},
        {name(old): reason for old, reason in measures.reasons.items()},
        {name(old): curve for old, curve in measures.curves.items()},
        [name(old) for old in measures.flags],
        about={name(old): value for old, value in measures.about.items()},
    )


@contextmanager
def _at(bar: tqdm, attack: str, stage: Stage) -> Iterator[None]:
    """Inside, the bar and `where` say which attack is run on which stage."""
    what = f"{attack} on {PLACES[stage]}"
    bar.set_description_str(what)
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
    def others() -> dict[Stage, AttackCurve]:
        """Those that are not the baseline's; before it where another process is at work on that one."""
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
        baseline = shared(name, attack.beside(victim) + code, attack_baseline, others) if shared else attack_baseline()
    curves = dict.fromkeys(("baseline", *stages), baseline) | others()
    if kept:
        kept.put(name, curves, code)
    return curves


def _curves(outcome: Outcome, measure_name: str, measures: Measures) -> None:
    """The test measure against steps and against compute, and the excess training loss."""
    for stage, curve in outcome.curves.items():
        prefix, place = f"attack/{outcome.name}", SUFFIXES[stage].replace("_", "/")
        steps, flops = curve.steps.tolist(), curve.flops.tolist()
        measures.curves[f"{prefix}/{measure_name}{place}"] = {"x": steps, "y": curve.test.tolist()}
        measures.curves[f"{prefix}/compute{place}"] = {"x": flops, "y": curve.test.tolist()}
        if curve.excess is not None:
            measures.curves[f"{prefix}/excess{place}"] = {"x": steps, "y": curve.excess.tolist()}


def _measure(outcome: Outcome, measures: Measures) -> None:
    """What one attack reached on every stage, and theta_I against the baseline."""
    prefix, values = f"attack/{outcome.name}", measures.metrics
    for stage in outcome.curves:
        _measure_stage(outcome, stage, measures)
    if outcome.failed:
        return
    measures.put(f"{prefix}/gap", outcome.before.final - outcome.after.final)
    if outcome.at_chance or outcome.blind:
        reason = "the attack stays at chance on the baseline too: it says nothing"
        if not outcome.at_chance:
            reason = "the attack finds nothing to learn from with theta_I: it guesses"
        measures.miss(reason, *(f"{prefix}/{key}" for key in ("steps", "flops", "steps_ratio")))
        return
    for stage, curve in outcome.curves.items():
        place = reached(curve, outcome.bar)
        place = -1 if place is None else place  # an attack that never gets there counts with all its steps
        measures.put(f"{prefix}/steps{SUFFIXES[stage]}", curve.steps[place].item())
        measures.put(f"{prefix}/flops{SUFFIXES[stage]}", curve.flops[place].item())
    measures.put(f"{prefix}/steps_ratio", values[f"{prefix}/steps"] / values[f"{prefix}/steps_baseline"])
    _sgrc(outcome, measures)
    if outcome.attack.order is not None:
        predicted = (outcome.after.kappa / outcome.before.kappa) ** outcome.attack.order
        measures.put(f"{prefix}/steps_ratio_predicted", predicted)


def _sgrc(outcome: Outcome, measures: Measures) -> None:
    """SGRC: the share of the baseline's test measure that immunization takes, after so many epochs of the attack."""
    for epochs, place in (outcome.before.epochs or {}).items():
        without, immunized = (curve.test[place].item() for curve in (outcome.before, outcome.after))
        name = f"attack/{outcome.name}/sgrc_{epochs}"
        if without > 0:
            measures.put(name, (without - immunized) / without)
        else:
            measures.miss("the attack gets nothing right with the baseline", name)


def _measure_stage(outcome: Outcome, stage: Stage, measures: Measures) -> None:
    """What one attack reached on one stage, whatever it reached on the others."""
    curve, prefix, suffix = outcome.curves[stage], f"attack/{outcome.name}", SUFFIXES[stage]
    if curve.setting is not None:
        measures.put(f"{prefix}/setting{suffix}", curve.setting)
    measures.put(f"{prefix}/diverged{suffix}", bool(curve.diverged))
    if curve.kappa is not None:
        measures.put(f"{prefix}/kappa{suffix}", curve.kappa)
    if never_finite(curve):
        reason = f"diverged at every {outcome.attack.setting_name} tried: {listed(curve.diverged)}"
        measures.miss(reason, *(f"{prefix}/{key}{suffix}" for key in ("final", "area", "steps", "flops")))
        return
    put_final(curve, prefix, suffix, measures)
    measures.put(f"{prefix}/area{suffix}", curve.test.clamp(min=outcome.chance).mean().item())
    if curve.excess is None:
        return
    for label, excess in EXCESSES.items():
        if (place := first(curve.excess <= excess)) is None:
            measures.miss(f"not within {curve.steps[-1]} steps", f"{prefix}/steps_to_{label}{suffix}")
        else:
            measures.put(f"{prefix}/steps_to_{label}{suffix}", curve.steps[place].item())
