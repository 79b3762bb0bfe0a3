"""Numbered suites of attackers, run on theta_I, the baseline and the references."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from tqdm import tqdm

from immunization.attacks import outcome, prices, worth
from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.blocks import what_is_read
from immunization.attacks.flags import PLACES, flags_of
from immunization.attacks.kept import KeptCurves
from immunization.attacks.outcome import Outcome
from immunization.attacks.recipes import found_settings
from immunization.attacks.victim import Victim
from immunization.attacks.worth import Curves, Draw
from immunization.checks import AtLeastOne, Component, Positive
from immunization.data.task import CONSTANT
from immunization.errors import Inapplicable
from immunization.evaluation.measures import Measures
from immunization.runs.records import Stage, of_role
from immunization.terminal import doing, progress_bar

log = logging.getLogger(__name__)

NUMBERED: dict[str, dict[str, str]] = {
    "standard-6": {
        "block_probe": "501fe470",
        "frozen_blocks": "c33a2359",
        "block_probe_renewed": "cdbdb3a6",
        "frozen_blocks_renewed": "faf9c269",
        "closed_form_probe": "258d0fd3",
        "whitened_probe": "95fa503b",
        "logistic_probe": "38207f26",
        "neighbours": "145c36ad",
        "read_weights": "d99d9b36",
        "spread": "4d83ced4",
        "rounded": "5ba6c1f3",
        "finetune_trained": "78cfbab0",
        "fresh_part": "a6d29471",
        "random_net": "d765c98f",
        "raw_inputs": "aeaef797",
    }
}
"""The suite that results are stated with, by version: each attack's `fingerprint`, so that no other passes for it."""

UNREAD = (
    "{:.0%} of the net's operations are done before what was changed begins, and attackers can read no block there: "
    "what they find without it says too little"
)
GAP = (
    "from {:.0%} to {:.0%} of the net's operations no module gives one output for each input, so that attackers can "
    "read no block there: what they find without it says too little"
)
"""Why the worth of a model of which attackers cannot read a large part is unknown."""

TRANSFERRED = {f"worth/{key}": f"transfer/{key}" for key in ("before", "after", "without", "lost")}
"""What of the worth of a model is measured of a benign task, and its name there."""


class Suite(Component, group="suite"):
    """A numbered list of attackers, in result.json and on every page; rows of different versions are never compared.

    Beside all of the attacker's images, worth is measured at each number of `images` of each class, with `draws` sets
    of them; attackers who train a net use the first draw only. `theta_0`: whether the attacker
    can have the net as it was before immunization, too; where it is public no defense takes anything away. `benign`:
    names of those who also learn the benign tasks, which shows what immunization costs honest users. `most`: images of
    each class that attackers train on; None: all there are. `minutes`: after so many of all attacks together none is
    begun; those left out are named, and the list is no longer that of its version. Raises ConfigError.
    """

    option = "attack/common/suite"

    version: str
    images: Sequence[AtLeastOne]
    draws: AtLeastOne
    theta_0: Literal["secret", "public"]
    benign: Sequence[str]
    most: AtLeastOne | None
    minutes: Positive | None

    def __post_init__(self) -> None:
        self.began: float | None = None

    def over(self) -> bool:
        """Whether `minutes` have passed since this was first asked."""
        self.began = time.monotonic() if self.began is None else self.began
        return self.minutes is not None and time.monotonic() - self.began >= 60 * self.minutes


def changes(attacks: Mapping[str, Attack], version: str, most: int | None = None) -> list[str]:
    """How attacks, on at most `most` images of each class, differ from a suite in `NUMBERED`; more of them do not."""
    known = NUMBERED.get(version, {})
    few = [f"with at most {most} images of each class"] if known and most else []
    missing = [f"without {name}" for name in known if name not in attacks]
    other = [name for name in known if name in attacks and fingerprint(attacks[name]) != known[name]]
    return few + missing + [f"another {name}" for name in other]


def fingerprint(attack: Attack) -> str:
    """Of its class and options."""
    text = json.dumps([type(attack).__name__, attack.options], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_attacks(
    attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None = None, suite: Suite | None = None
) -> Measures:
    """Run `attacks` and measure each, and the worst of them, as the attack `WORST`, on the victim's task.

    An attack that does not apply to the model or the data has only `final`, None with the reason. Attacks that `kept`
    holds are not run again. A reference, which does not use theta_I, is measured on the stage `reference`. Names of
    flags and curves, and keys of `about`, carry the task's role, unless it is `harmful`.
    """
    role, measures = victim.role, Measures()
    run = _Run(attacks, victim, kept, suite)
    run.run_all()
    outcomes, references = [], {}
    for name, curves in run.curves.items():
        attack = attacks[name]
        if isinstance(curves, Inapplicable):
            stage: Stage = "reference" if attack.reference else "immunized"
            measures.miss(str(curves), "final", task=role, stage=stage, attack=name)
            continue
        if settings := found_settings(attack.kind, curves):
            measures.about.setdefault(of_role("attackers", role), {})[name] = settings
        if attack.reference:
            references[name] = curves["baseline"]
        else:
            outcomes.append(Outcome(name, attack, victim.task.chance, curves, victim.task.majority))
            outcome.put(outcomes[-1], role, victim.task.measure_name, measures)
    for flag, reason in flags_of(outcomes).items():
        measures.flag(of_role(flag, role), reason)
    if fixed := victim.model.fixed:
        left_out = [name for name, curves in run.curves.items() if isinstance(curves, Inapplicable)]
        measures.flag(of_role("only_run", role), f"{fixed}. Left out: {', '.join(left_out) or 'none'}")
    partial = {name: part for name in references if (part := attacks[name].partial)}
    without_model = {name: curve for name, curve in references.items() if name not in partial}
    bar = prices.measure(outcomes, without_model, victim, measures)
    prices.measure_references(references, without_model, bar, victim, measures)
    measures.about[of_role("attacks_capped", role)] = [each.name for each in outcomes if each.capped]
    if suite is not None:
        changed = changes(attacks, suite.version, suite.most)
        if run.late:
            changed.append(f"without what suite.minutes={suite.minutes:g} left no time for: {', '.join(run.late)}")
            measures.flag(of_role("suite_cut_short", role), f"suite.minutes={suite.minutes:g}: {', '.join(run.late)}")
        measures.about[of_role("suite", role)] = {
            "version": suite.version,
            "theta_0": suite.theta_0,
            **({"changed": changed} if changed else {}),
        }
        if kept and kept.shared:
            measures.about[of_role("baselines_by", role)] = sorted(kept.makers)
    if partial:
        measures.about[of_role("drawn_anew", role)] = partial
    if read := run.read:
        measures.about["blocks"] = read
        first = read["changed"] and not read["before"]
        if run.measures_worth and (first or "unread" in read):
            why = UNREAD.format(read["changed"]) if first else GAP.format(*read["unread"])
            measures.flag(of_role("blocks_unread", role), why)
            measures.miss(why, "worth/theta_0", "worth/lost", "worth/removed", task=role)
            return measures
    if run.measures_worth:
        run.put_worth(measures)
    return measures


def run_transfer(attacks: Mapping[str, Attack], victim: Victim, kept: KeptCurves | None, suite: Suite) -> Measures:
    """What immunization costs honest users: those of `attacks` that `suite.benign` names learn a benign task.

    `transfer_<role>/before`, `/after` and `/without` are the best accuracies with theta_0, with theta_I and without the
    model, `/lost` is before less after, with its interval; `_<n>` stands for n images of each class. Who has a model
    may do without it, but nobody has theta_0 in place of theta_I. None, with the reason, where nothing is measured.
    """
    suite = copy.copy(suite)
    suite.theta_0 = "secret"
    own = {n: attack for n, attack in attacks.items() if n in suite.benign or (attack.reference and not attack.partial)}
    measured, measures = run_attacks(own, victim, kept, suite), Measures()
    late = of_role("suite_cut_short", victim.role)
    if late in measured.flags:
        measures.flag(late, measured.flags[late])
    for record in measured.records.where(task=victim.role):
        if (measure := TRANSFERRED.get(record.measure)) is not None:
            measures.add(replace(record, measure=measure))
    if not measures.records:
        why = measured.flags.get(late, "no attacker learns the task without the model")
        measures.miss(why, "transfer/lost", task=victim.role)
    return measures


@dataclass
class _Run:
    """The curves of every attack, or why it does not apply, and those with few images by number of images and draw."""

    attacks: Mapping[str, Attack]
    victim: Victim
    kept: KeptCurves | None
    suite: Suite | None
    curves: dict[str, Curves | Inapplicable] = field(default_factory=dict)
    few: dict[int, dict[int, dict[str, Curves]]] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.untouched = {name for name, attack in self.attacks.items() if attack.untouched(self.victim)}
        suite, task = self.suite, self.victim.task
        if suite is not None and task.classes:
            for images in suite.images:
                enough = len(task.few(images, 0)) < len(task.train)
                self.few[images] = {draw: {} for draw in range(suite.draws) if enough}

    @property
    def whole(self) -> dict[str, Curves]:
        """The curves with all of the attacker's images."""
        return {name: curves for name, curves in self.curves.items() if not isinstance(curves, Inapplicable)}

    @property
    def read(self) -> dict[str, Any]:
        """What those can read who read blocks of the net, nothing where they do not apply; {} without them."""
        readers = {name for name, attack in self.attacks.items() if attack.reads_blocks and not attack.reference}
        if not readers or not self.victim.model.deep:
            return {}
        read = what_is_read(self.victim.network("immunized"))
        return read if readers & self.whole.keys() else read | {"depth": {}, "before": []}

    @property
    def measures_worth(self) -> bool:
        """Whether there is the curve of an attacker without the model that says what each test row adds."""
        curves = (c["baseline"] for n, c in self.whole.items() if (a := self.attacks[n]).reference and not a.partial)
        return any(curve.scores is not None for curve in curves)

    def run_all(self) -> None:
        """Run all attacks, those without the model first: where none applies, few images tell nothing of its worth."""
        ordered = sorted(self.attacks.items(), key=lambda item: (not item[1].reference, item[1].partial is not None))
        progress = progress_bar(ordered, bar_format="{desc} |{bar}|", leave=False)
        for number, (name, attack) in enumerate(progress, 1):
            where = f"attack {number} of {len(ordered)}, {name}"
            if self.suite is not None and self.suite.over():
                self.late.append(name)
                self.curves[name] = Inapplicable(f"suite.minutes={self.suite.minutes:g} were over")
                continue
            try:
                self.curves[name] = self.stages(name, attack, progress, where)
            except Inapplicable as error:
                self.curves[name] = error
            if not self.measures_worth:
                continue
            for images, draws in self.few.items():  # now, as what it reads of the net is not kept for long
                for draw, curves in draws.items():
                    if draw and attack.trains:
                        continue
                    if self.suite is not None and self.suite.over():
                        self.late.append(f"{name} with {images} images, draw {draw + 1}")
                        continue
                    own, of_draw = copy.copy(attack), f"{where}, {images} images a class, draw {draw + 1}"
                    own.samples, own.seed = images, attack.seed + draw
                    with suppress(Inapplicable):
                        curves[name] = self.stages(name, own, progress, of_draw, f"@{images}.{draw}")

    def stages(self, name: str, attack: Attack, progress: tqdm, where: str, draw: str = "") -> Curves:
        """The curves of an attack on every stage; of a reference, which is the same for all, on the baseline's net.

        One that is untouched by immunization has the same curve on every stage, and so has any where theta_I is the
        baseline. Raises Inapplicable.
        """
        victim, task = self.victim, self.victim.task
        if self.suite is not None and self.suite.theta_0 == "secret" and attack.needs_theta_0(victim):
            raise Inapplicable("it needs theta_0 itself, which attackers do not have: suite.theta_0=secret")
        if reason := victim.comparison.no_test(victim.role):
            raise Inapplicable(reason)
        if task.constant:
            raise Inapplicable(CONSTANT.format(victim.role))

        def measured(stage: Stage, meanwhile: Callable[[], object] = lambda: None) -> AttackCurve:
            def run() -> AttackCurve:
                try:
                    return attack.run(victim, stage)
                except Inapplicable as error:
                    if stage == "baseline" or victim.model.fixed:
                        raise
                    # it applies to the baseline: there is nothing left to learn from
                    log.info("attack %s guesses on %s: %s", name + draw, PLACES[stage], error)
                    return AttackCurve.of_guessing(task)

            with _shown(progress, f"{where} on {PLACES[stage]}"):
                return self.kept(name + draw, attack, stage, run, meanwhile) if self.kept else run()

        others: list[Stage] = [] if attack.reference or name in self.untouched else list(victim.stages)
        others = [s for s in others if s != "baseline" and not (s == "immunized" and victim.unchanged())]

        @cache
        def other_curves() -> dict[Stage, AttackCurve]:
            return {stage: measured(stage) for stage in others}

        baseline = measured("baseline", other_curves)
        stages: list[Stage] = ["baseline", *([] if attack.reference else victim.stages)]
        return dict.fromkeys(stages, baseline) | other_curves()

    def put_worth(self, measures: Measures) -> None:
        """What the model is worth with all of the attacker's images, and with as few as the suite says."""
        task, role, public = self.victim.task, self.victim.role, bool(self.suite and self.suite.theta_0 == "public")
        guess = torch.full((len(task.test),), task.chance, dtype=torch.float64)
        whole = Draw.of(self.attacks, self.whole, self.untouched)
        worth.measure([whole], guess, None, role, measures, public, len(task.val))
        for images, of_draws in self.few.items():
            first = of_draws.get(0, {})  # who trains a net has this draw alone
            draws = [Draw.of(self.attacks, {**first, **curves}, self.untouched) for curves in of_draws.values()]
            worth.measure(draws, guess, images, role, measures, public, len(task.val))


@contextmanager
def _shown(progress: tqdm, what: str) -> Iterator[None]:
    """Inside, the progress bar and `where` say which attack is run on which stage."""
    progress.set_description_str(what)
    with doing(lambda: what):
        yield
