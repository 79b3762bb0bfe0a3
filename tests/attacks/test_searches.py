"""Attackers that search for their settings or replay them, and the line of reference: the net from random weights."""

import copy
import json
from typing import ClassVar

import pytest
import torch
from helpers.runs import DEEP
from helpers.victims import colors_behind_a_map
from torch import nn

from immunization import run
from immunization.attacks import FineTune, KeptCurves, LoRA, Scratch, run_attacks
from immunization.attacks.altered import redrawn
from immunization.attacks.base import areas
from immunization.attacks.recipes import Budget, Recipe
from immunization.attacks.tuning import Tuner
from immunization.errors import ConfigError, Inapplicable
from immunization.models.chain import Network
from immunization.runs.interpretation import attack_names

pytestmark = pytest.mark.trains
SMALL = {"steps": 2, "batch_size": 24}


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return colors_behind_a_map(tmp_path_factory.mktemp("images"), size=16)


@pytest.fixture
def trained(monkeypatch) -> list:
    """Every recipe that is trained, with its budget, seed and course."""
    calls, train = [], Tuner.train

    def spied(self, recipe, budget, seed, *watch):
        course = train(self, recipe, budget, seed, *watch)
        calls.append((recipe, budget, seed, course))
        return course

    monkeypatch.setattr(Tuner, "train", spied)
    return calls


def test_a_search_is_never_weaker_than_the_fixed_grids_within_their_operations(net, trained):
    attack = FineTune(search=3, seeds=2, **SMALL)
    known = attack.known_recipes()
    assert {(r.part, r.optimizer, r.rate) for r in known} == {
        (part, optimizer, rate)
        for part in ("last", "full")
        for optimizer, rates in {"sgd": (0.003, 0.03, 0.3), "adamw": (1e-4, 1e-3, 0.01)}.items()
        for rate in rates
    }
    curve = attack.run(net, "immunized")
    tried, chance = list(trained), net.task.chance
    assert [recipe for recipe, *_ in tried[:12]] == known
    assert len(tried) == 12 + 3 + 1  # the winner once more, with another seed
    assert {seed for *_, seed, _ in tried[:-1]} == {0}
    assert tried[-1][2] == 1
    for _, budget, _, course in tried:
        assert course.spent <= budget.flops[-1] * (1 + 1e-9)
    best = areas(curve.val[None], chance)
    whole = [course.val for *_, course in tried if len(course.val) == len(curve.val)]
    assert best == areas(torch.tensor(whole, dtype=torch.float64), chance).max()
    for optimizer, rates in attack.fixed_rates.items():
        fixed = FineTune(scope="full", optimizer=optimizer, rates=rates, **SMALL).run(net, "immunized")
        assert best >= areas(fixed.val[None], chance)
        assert torch.equal(fixed.flops, curve.flops)
    assert curve.found["trials"] == 15
    assert len(curve.finals) == 2


class Few(FineTune):
    """Tries a sixth of the known settings before it searches."""

    fixed_rates: ClassVar = {"sgd": (0.03,), "adamw": ()}


def test_a_search_is_the_same_again_and_its_settings_give_its_curve(net, tmp_path):
    attacks = {"it": Few(scope="last", search=2, seeds=2, **SMALL)}
    first, again = (run_attacks(attacks, net) for _ in range(2))
    assert vars(first) == vars(again)
    settings = first.about["attackers"]["it"]
    file = tmp_path / "attack_it.json"
    file.write_text(json.dumps(settings))
    replayed = run_attacks({"it": Few(scope="last", replay=str(file), seeds=2, **SMALL)}, net)
    assert replayed.metrics == first.metrics
    assert replayed.curves == first.curves
    for stage in net.stages:
        assert replayed.about["attackers"]["it"][stage]["recipe"] == settings[stage]["recipe"]
    assert first.metrics["attack/it/final_lowest"] <= first.metrics["attack/it/final_highest"]


def test_adapters_are_searched_too(net):
    curve = LoRA(rank=2, rates=[0.01], search=1, seeds=1, steps=2, batch_size=8).run(net, "baseline")
    assert curve.found["trials"] == 6 + 1
    assert curve.found["recipe"]["part"] == "full"


SETTINGS = {"recipe": {"rate": 0.1, "optimizer": "sgd", "batch_size": 8, "part": "full", "weight_decay": 0.0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"attack": "LoRA of rank 8", "baseline": SETTINGS}, "settings of LoRA of rank 8, and not of"),
        ({"baseline": SETTINGS}, "holds no settings; give"),
        ([], "holds no settings; give"),
        ({"attack": "FineTune"}, "holds no settings; give"),
        ({"attack": "FineTune", "baseline": {}}, "missing 5 required positional arguments"),
        ({"attack": "FineTune", "baseline": SETTINGS}, "trains full; this attack trains head or last"),
        (
            {"attack": "FineTune", "baseline": {"recipe": SETTINGS["recipe"] | {"rate": -1.0}}},
            "recipe.rate must be a finite number of at least 0, not -1.0",
        ),
        ({"attack": "FineTune", "baseline": {"recipe": SETTINGS["recipe"] | {"size": 3}}}, "unexpected keyword"),
    ],
)
def test_files_that_cannot_be_replayed_are_refused_in_one_line(content, message, tmp_path):
    file = tmp_path / "attack_it.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as refused:
        FineTune(scope="last", replay=str(file))
    assert "\n" not in str(refused.value)
    assert str(file) in str(refused.value)


def test_other_bad_input_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ConfigError, match=r"search and attack\.\*\.replay are both given"):
        FineTune(search=2, replay="x.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        FineTune(replay=str(tmp_path / "none.json"))


def test_nothing_is_spent_beyond_the_budget_and_schedules_end_with_it():
    budget = Budget([1, 2, 4, 8], 10.0)
    assert budget.steps(0.0, 10.0) == [1, 2, 4, 8]
    assert budget.steps(5.0, 20.0) == [0, 0, 1, 3]
    recipe = Recipe(0.5, "sgd", 8, "head", 0.0)
    assert [recipe.rate_at(step, 4) for step in range(1, 5)] == [0.5] * 4
    linear = Recipe(0.5, "sgd", 8, "head", 0.0, "linear", 0.2)
    assert [linear.rate_at(step, 10) for step in (1, 2, 3, 10)] == pytest.approx([0.25, 0.5, 0.5, 0.5 / 8])
    cosine = Recipe(1.0, "sgd", 8, "head", 0.0, "cosine")
    assert [cosine.rate_at(step, 4) for step in (1, 3)] == pytest.approx([1.0, 0.5])


def tuner_of(victim, stage="baseline") -> Tuner:
    splits = {split: victim.images(split) for split in ("train", "val", "test")}
    return Tuner(victim.task, splits, lambda part: victim.network(stage), FineTune().adapt)


def test_what_a_recipe_says_is_done(net):
    tuner, (x, _) = tuner_of(net), net.images("train")
    plain = Recipe(0.01, "sgd", 8, "full", 0.0, standardize=True)
    opened = tuner.open(plain, 0)
    with torch.no_grad():
        features = (opened.network(x) - opened.shift) * opened.scale
    assert features.mean(0).abs().max() < 1e-4
    deviation = features.std(0, correction=0)
    assert ((deviation - 1).abs().minimum(deviation) < 1e-3).all()  # 0 where a unit is dead
    assert (deviation > 0.5).any()
    assert opened.flops > 0
    for batchnorm in ("train", "eval"):
        opened = tuner.open(recipe := Recipe(0.01, "sgd", 8, "last", 0.0, batchnorm=batchnorm), 0)
        tuner.loss(opened, recipe, *(part[:8] for part in tuner.splits["train"]))
        norms = [m for m in opened.network.part("last")[0].modules() if isinstance(m, nn.BatchNorm2d)]
        assert norms
        assert all(m.training == (batchnorm == "train") for m in norms)
    parts = {
        part: len(tuner.open(Recipe(0.01, "sgd", 8, part, 0.0), 0).parameters) for part in ("head", "last", "full")
    }
    assert parts["head"] == 2 < parts["last"] < parts["full"]


def counted_by_hand(network: Network, images: torch.Tensor, outputs: int, trained: set) -> float:
    """Operations of a forward and backward pass: 2 for every product of a convolution, a linear layer and the head.

    Backward, each layer with something to train below it passes the gradient on, and each trained one takes its own.
    """
    layers, hooks = [], []

    def note(module, inputs, output):
        per_output = module.weight[0].numel() * 2.0
        layers.append((output.numel() * per_output, id(module.weight) in trained))

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        features = network(images)
    for hook in hooks:
        hook.remove()
    layers.append((2.0 * features.numel() * outputs, True))
    total, below = 0.0, False
    for operations, own in layers:
        total += operations * (1 + own + below)
        below = below or own
    return total


@pytest.mark.parametrize("part", ["head", "last", "full"])
@pytest.mark.parametrize("stage", ["baseline", "immunized"])
def test_operations_are_those_of_a_count_by_hand(net, part, stage):
    tuner, network = tuner_of(net, stage), net.network(stage)
    trained = {id(parameter) for parameter in FineTune().adapt(network, part)[0]}
    images = net.images("train")[0][:8]
    by_hand = counted_by_hand(network, images, net.task.outputs, trained)
    assert tuner.step_cost(Recipe(0.1, "sgd", 8, part, 0.0)) == pytest.approx(by_hand, rel=0.05)


def test_scratch_is_a_line_of_reference_and_no_attack(tmp_path):
    """Scratch uses no weights; its cost is what the cheapest attack is divided by."""
    net = colors_behind_a_map(tmp_path)
    attacks = {
        "tune": FineTune(scope="full", optimizer="adamw", rates=[3e-3], steps=16, batch_size=24),
        "scratch": Scratch(optimizer="adamw", rates=[3e-3], steps=32, batch_size=24),
    }
    measures = run_attacks(attacks, net)
    values = measures.metrics
    assert not any(key.startswith("attack/scratch/") for key in values)
    assert values["attack/worst/attacks"] == 1
    assert values["reference/scratch/final"] > 0.9
    for name, cost in (("", "flops"), ("_baseline", "flops_baseline")):
        ratio = values[f"attack/worst/{cost}"] / values["reference/scratch/cost"]
        assert values[f"attack/worst/cost_over_scratch{name}"] == pytest.approx(ratio)
    weights = dict(net.network("baseline").named_parameters())
    anew = dict(redrawn(net.network("baseline")).named_parameters())
    assert all(not torch.equal(p, anew[name]) for name, p in weights.items() if p.ndim > 1)


def test_scratch_changes_no_figure_of_an_attack(net):
    attacks = {
        "tune": FineTune(scope="last", optimizer="adamw", rates=[1e-2], **SMALL),
        "scratch": Scratch(optimizer="adamw", rates=[3e-3], **SMALL),
    }
    values = run_attacks(attacks, net).metrics
    own = {key: value for key, value in values.items() if "scratch" not in key and not key.startswith("worth/")}
    assert run_attacks({"tune": attacks["tune"]}, net).metrics == own


def test_a_reference_that_does_not_learn_says_so(net):
    attacks = {
        "tune": FineTune(scope="full", optimizer="adamw", rates=[3e-3], steps=16, batch_size=24),
        "scratch": Scratch(rates=[0.0], **SMALL),
    }
    measures = run_attacks(attacks, net)
    assert "did not reach" in measures.reasons["reference/scratch/cost"]
    assert measures.reasons["attack/worst/cost_over_scratch"] == "no reference learns the task"


def test_a_net_that_nobody_can_draw_has_no_scratch(net):
    network = net.network("baseline")
    network.whole.net.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(Inapplicable, match=r"no initializer is known for the weights whole\.net\.extra"):
        redrawn(network)


def test_sgrc_is_the_share_of_accuracy_that_immunization_takes(net):
    attack = FineTune(scope="full", optimizer="adamw", rates=[3e-3], epochs=[2, 1], batch_size=24)
    measures = run_attacks({"it": attack}, net)
    curves = [measures.curves[f"attack/it/accuracy{stage}"] for stage in ("/baseline", "")]
    steps = {epochs: -(-epochs * tuner_of(net).rows // 24) for epochs in (1, 2)}
    for epochs in (1, 2):
        place = curves[0]["x"].index(steps[epochs])
        without, immunized = (curve["y"][place] for curve in curves)
        assert measures.metrics[f"attack/it/sgrc_{epochs}"] == pytest.approx((without - immunized) / without)
    assert curves[0]["x"][-1] == steps[2]


def test_a_run_that_searched_leaves_settings_that_another_run_takes(tmp_path):
    options = [*DEEP, *(f"attack.full_finetune.{key}" for key in ("steps=4", "batch_size=16", "seeds=1", "scope=last"))]
    attack = "attack=[full_finetune,scratch]"
    scratch = ["attack.scratch.steps=2", "attack.scratch.rates=[1e-6]"]  # far below the bar, which both others reach
    first = run([attack, *options, *scratch, "attack.full_finetune.search=1"], folder=tmp_path / "first")
    file = tmp_path / "first" / "attack_full_finetune.json"
    assert json.loads(file.read_text()) == first.about["attackers"]["full_finetune"]
    assert attack_names(first) == ["full_finetune"]
    assert first.metrics["reference/scratch/final"] is not None
    again = run([attack, *options, *scratch, f"attack.full_finetune.replay={file}"], folder=tmp_path / "again")
    known = [key for key in first.metrics if key.startswith("attack/") and "searched" not in key]
    assert [again.metrics[key] for key in known] == [first.metrics[key] for key in known]
    paid = [result.metrics["attack/worst/flops_searched_baseline"] for result in (again, first)]
    assert paid[0] < paid[1]


def test_the_baseline_and_scratch_are_trained_once_for_all_maps_behind_a_net(net, tmp_path, monkeypatch):
    victim = copy.deepcopy(net)
    attacks = {"tune": FineTune(rates=[0.01], **SMALL), "scratch": Scratch(rates=[0.01], **SMALL)}
    settings = {name: {"_target_": name} for name in attacks}
    seen: list[str] = []

    def spied(self, victim, stage, taken=FineTune.run):
        seen.append(stage)
        return taken(self, victim, stage)

    monkeypatch.setattr(FineTune, "run", spied)

    def measured(path: str) -> dict:
        seen.clear()
        kept = KeptCurves(tmp_path / path, settings, victim, tmp_path / "baselines")
        return vars(run_attacks(attacks, victim, kept))

    measured("first.pt")
    assert sorted(seen) == ["baseline", "baseline", "immunized"]
    victim.model.extractor.theta.data.mul_(2)
    second = measured("second.pt")
    assert seen == ["immunized"]
    assert second == vars(run_attacks(attacks, victim))
    next(victim.model.base.net.parameters()).data.mul_(1.1)
    measured("third.pt")
    assert sorted(seen) == ["baseline", "baseline", "immunized"]
