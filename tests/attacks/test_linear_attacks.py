"""Attacks on a linear map: steps against theory, tuning, precision, what cannot be attacked."""

import math

import pytest
import torch
from helpers.matrices import gaussian, orthonormal
from helpers.options import OPTIONS
from helpers.victims import classes, noisy_classes, quadratic, victim_of

from immunization import run
from immunization.attacks import (
    LBFGS,
    Adam,
    BlockProbe,
    ClosedFormProbe,
    ConjugateGradients,
    LinearProbe,
    LogisticProbe,
    Momentum,
    Rounded,
    Undo,
    Victim,
    WhitenedProbe,
    run_attacks,
)
from immunization.attacks.altered import rounded
from immunization.config import build, compose
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.evaluation import Comparison
from immunization.methods.decoys import discriminants
from immunization.methods.linear_map import probe_of_inputs
from immunization.models import Linear
from immunization.models.fold import LinearMap
from immunization.runs.result import Result
from immunization.runs.verdict import verdict

pytestmark = pytest.mark.trains

ATTACKS = [name for group, name in OPTIONS if group == "attack"]
NETS = {name for name in ATTACKS if "finetune" in name or "lora" in name}
NETS |= {"scratch", "sgrc", "fresh_part", "distilled", "pruned"}
NETS |= {
    "block_probe",
    "block_probe_renewed",
    "frozen_blocks",
    "frozen_blocks_renewed",
    "fresh_from",
    "layer_probe",
    "layer_probe_renewed",
    "random_net",
    "raw_inputs",
    "tile_probe",
    "tile_probe_renewed",
}


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in NETS])
def test_every_attack_learns_a_well_conditioned_task(name):
    attack = build(compose([f"attack=[{name}]"]), f"attack.{name}")
    attack.steps = min(attack.steps, 64)
    measures = run_attacks({name: attack}, victim_of(classes(), orthonormal(6, 6, seed=3)))
    values = {key.rpartition("/")[2]: value for key, value in measures.metrics.items() if f"/{name}/" in key}
    assert values["final"] == pytest.approx(values["final_baseline"], abs=0.03)
    assert values["final"] > 0.95
    assert values["steps"] <= 16
    assert values["steps_ratio"] <= 2
    assert values["flops"] > 0
    assert measures.metrics["attack/worst/successful"] == 1
    assert "attack_succeeds" in measures.flags
    assert not {"attacks_capped", "attacks_diverged", "attacks_at_chance"} & set(measures.flags)


@pytest.mark.parametrize("kappa", [100.0, 400.0])
def test_gradient_descent_needs_about_kappa_steps_and_whitening_one(kappa):
    """Loss shrinks by ((kappa - 1) / (kappa + 1))^2 a step: 2.3 kappa steps to 1e-4 (grid: a factor of 2^(1/4))."""
    victim = victim_of(*quadratic(kappa))
    attacks = {"gd": LinearProbe(), "whitened": WhitenedProbe(), "cg": ConjugateGradients(), "ridge": ClosedFormProbe()}
    values = run_attacks(attacks, victim).metrics
    assert 2.3 * kappa <= values["attack/gd/steps_to_1e-4"] <= 1.25 * 2.31 * kappa
    assert values["attack/gd/steps_to_1e-4_baseline"] == 1
    assert values["attack/gd/kappa"] == pytest.approx(kappa)
    assert values["attack/gd/steps_ratio_predicted"] == pytest.approx(kappa)
    assert values["attack/cg/steps_ratio_predicted"] == pytest.approx(kappa**0.5)
    assert values["attack/whitened/steps_to_1e-4"] == 1
    assert values["attack/whitened/kappa"] == pytest.approx(1)
    assert values["attack/ridge/steps_to_1e-4"] == 1
    assert values["attack/cg/steps_to_1e-4"] == 2  # as many as there are eigenvalues


def test_a_rotation_takes_the_shortcut_from_diagonal_attackers():
    task, theta = quadratic(400.0)
    rotation = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64) / 2**0.5
    attacks = {"columns": LinearProbe(scaling="columns")}
    plain = run_attacks(attacks, victim_of(task, theta)).metrics["attack/columns/steps_to_1e-4"]
    rotated = run_attacks(attacks, victim_of(task, theta @ rotation)).metrics["attack/columns/steps_to_1e-4"]
    assert plain == 1
    assert rotated > 400


@pytest.mark.parametrize("how", ["relearn", "strip"])
def test_a_map_that_is_taken_back_leaves_the_baseline(how):
    task, theta = quadratic(1e6)
    values = run_attacks({"undo": Undo(how=how)}, victim_of(task, theta)).metrics
    assert values["attack/undo/steps"] == values["attack/undo/steps_baseline"] == 1
    assert values["attack/undo/kappa"] == pytest.approx(values["attack/undo/kappa_baseline"], rel=1e-6)


def test_quasi_newton_and_adam_come_between():
    victim = victim_of(*quadratic(1e4))
    attacks = {"gd": LinearProbe(), "lbfgs": LBFGS(), "adam": Adam(rates=[10.0, 100.0])}
    values = run_attacks(attacks, victim).metrics
    assert values["attack/gd/steps_to_1e-4"] is None
    assert values["attack/lbfgs/steps_to_1e-4"] < 20
    assert values["attack/adam/steps_to_1e-4"] < 2048


def test_closed_form_is_ridge_regression():
    task = classes()
    attack = ClosedFormProbe(ridges=[0.1])
    curve = attack.run(victim_of(task, torch.eye(6, dtype=torch.float64)), "immunized")
    x, y = task.train.x, task.targets(task.train.y)
    largest = torch.linalg.matrix_norm(x, 2) ** 2
    w = torch.linalg.solve(x.T @ x + 0.1 * largest * torch.eye(6, dtype=torch.float64), x.T @ y)
    assert curve.test.tolist() == [task.measure(task.test.x @ w, task.test.y).item()]
    least = (y - x @ torch.linalg.lstsq(x, y).solution).square().sum()
    excess = ((x @ w - y).square().sum() - least) / (y.square().sum() - least)
    assert curve.excess[0].item() == pytest.approx(excess.item(), rel=1e-9)


def test_an_attack_that_diverges_is_no_defense():
    victim = victim_of(*quadratic(10.0))
    measures = run_attacks({"momentum": Momentum(rates=[50.0], steps=256), "gd": LinearProbe(steps=256)}, victim)
    assert measures.metrics["attack/momentum/final"] is None
    assert "diverged at every learning rate tried: 50" in measures.reasons["attack/momentum/final"]
    assert "momentum on theta_I at learning rate 50" in measures.reasons["attacks_diverged"]
    assert "attack/momentum/steps_ratio" not in measures.metrics
    assert measures.metrics["attack/worst/attacks"] == 1
    tuned = run_attacks({"momentum": Momentum(rates=[0.3, 50.0], steps=256)}, victim)
    assert tuned.metrics["attack/momentum/setting"] == 0.3
    assert "attacks_diverged" in tuned.flags


def test_the_setting_is_chosen_on_validation_rows():
    """More directions than noisy rows can tell apart: without a ridge the probe learns the noise."""
    x = gaussian(250, 40, seed=2)
    y = x[:, 0] + gaussian(250, seed=3)
    task = Task("noisy", *(Split(x[rows], y[rows]) for rows in (slice(50), slice(50, 150), slice(150, 250))))
    victim = victim_of(task, torch.eye(40, dtype=torch.float64))
    ridges = [0, 0.01, 0.1, 1.0, 10.0]
    scores = {ridge: ClosedFormProbe(ridges=[ridge]).run(victim, "immunized").val.item() for ridge in ridges}
    chosen = ClosedFormProbe(ridges=ridges).run(victim, "immunized")
    assert chosen.setting == max(scores, key=scores.__getitem__) > 0
    assert chosen.final > ClosedFormProbe(ridges=[0]).run(victim, "immunized").final


def test_few_shot_attackers_have_as_many_rows_of_each_class():
    task = classes()
    rows = LinearProbe(samples=4).rows(task)
    assert torch.bincount(task.train.y[rows]).tolist() == [4, 4, 4]
    assert torch.equal(rows, LinearProbe(samples=4).rows(task))
    assert not torch.equal(rows, LinearProbe(samples=4, seed=1).rows(task))
    few = LinearProbe(samples=4).run(victim_of(task, torch.eye(6, dtype=torch.float64)), "immunized")
    assert few.flops[0] == 12 * (2 * 6 * 6) + 4 * 12 * 6 * 3


def test_rounded_weights():
    x = gaussian(20, 20, seed=0)

    def to(precision):
        return rounded(LinearMap(x.clone()), precision).theta.detach()

    assert torch.equal(to("float32"), x.float().double())
    assert ((to("bfloat16") - x).abs() <= 2.0**-8 * x.abs()).all()
    assert len(to("int8_per_tensor").unique()) <= 255
    assert (to("int8_per_tensor") - x).abs().max() <= x.abs().max() / 254 * (1 + 1e-9)
    assert ((to("int4") - x).abs() <= x.abs().amax(0) / 14 * (1 + 1e-9)).all()  # outputs are columns
    assert max(len(column.unique()) for column in to("int3").T) <= 7 < len(to("int3").unique())
    task, theta = quadratic(1e6)
    rotation = orthonormal(2, 2, seed=5)
    coarse = LinearProbe(precision="int8_per_tensor").run(victim_of(task, theta @ rotation), "immunized")
    assert coarse.kappa != pytest.approx(1e6, rel=0.1)
    assert LinearProbe(precision="int8_per_tensor").run(victim_of(task, theta), "baseline").kappa == pytest.approx(1)


def test_an_attacker_who_rounds_brings_back_what_was_squeezed():
    task = noisy_classes(dim=40, rows=300)
    basis = torch.linalg.qr(discriminants(probe_of_inputs(task), 0.1)).Q
    squeezed = torch.eye(40).double() - (1 - 1e-4) * basis @ basis.T
    victim = victim_of(task, squeezed @ orthonormal(40, 40, seed=3))

    def steps(attack, stage):
        curve = attack.run(victim, stage)
        there = curve.val >= 0.9 * curve.val.max()
        return curve.steps[there.int().argmax()].item() if curve.val.max() > 0.5 else math.inf

    exact, coarse = LinearProbe(steps=1024), Rounded(steps=1024, formats=["int8", "int4"])
    assert steps(exact, "immunized") > 20 * steps(coarse, "immunized")
    assert steps(coarse, "baseline") == steps(exact, "baseline")  # the map of theta_0 is I, which every format holds
    found, alone = coarse.run(victim, "immunized"), LinearProbe(steps=1024, precision="int4").run(victim, "immunized")
    assert found.setting == 4
    assert found.others > 0
    for name in ("val", "test", "excess", "flops"):  # formats descend side by side
        assert torch.equal(getattr(found, name), getattr(alone, name))


def test_a_start_other_than_the_baseline_is_attacked_too():
    pair = TaskPair("known", classes(), classes())
    torch.manual_seed(0)
    model = Linear(pair, init="random")
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    model.extractor.theta.data.mul_(2)
    victim = Victim(model, Comparison(pair, model), start)
    values = run_attacks({"linear_probe": LinearProbe()}, victim).metrics
    assert values["attack/linear_probe/steps_start"] == values["attack/linear_probe/steps"]
    assert values["attack/linear_probe/kappa_start"] != values["attack/linear_probe/kappa_baseline"]


def test_without_validation_rows_the_attacker_holds_back_training_rows():
    task = classes()
    theta = torch.logspace(0, -1, 6, dtype=torch.float64).diag()
    held = torch.arange(80) % 15 < 3  # the first of five of each class
    empty = Split(task.val.x[:0], task.val.y[:0])
    bare = victim_of(Task("bare", task.train, empty, task.test, classes=3), theta)
    split = Task("split", task.train.take(~held), task.train.take(held), task.test, classes=3)
    attacks = {"gd": LinearProbe(steps=64), "closed": ClosedFormProbe(samples=5)}
    found, expected = (run_attacks(attacks, victim).metrics for victim in (bare, victim_of(split, theta)))
    for name in ("gd", "closed"):
        for key in ("final", "steps", "cost", "final_baseline"):
            assert found[f"attack/{name}/{key}"] == expected[f"attack/{name}/{key}"]


def test_what_cannot_be_attacked_says_why():
    task = classes()
    empty, one = (Split(task.val.x[:n], task.val.y[:n]) for n in (0, 1))
    eye = torch.eye(6, dtype=torch.float64)
    measures = run_attacks({"gd": LinearProbe()}, victim_of(Task("t", one, empty, task.test, 3), eye))
    assert measures.metrics["attack/gd/final"] is None
    assert "no val split" in measures.reasons["attack/gd/final"]
    noise = Task("noise", *(Split(part.x, part.y[torch.randperm(80)]) for part in (task.train, task.val, task.test)), 3)
    measures = run_attacks({"gd": LinearProbe()}, victim_of(noise, eye))
    assert "gd" in measures.reasons["attacks_at_chance"]
    assert measures.metrics["attack/worst/final"] is None


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (lambda: LinearProbe(steps=0), "steps must be an integer of at least 1"),
        (lambda: LinearProbe(samples=0), "samples must be an integer of at least 1, or null"),
        (lambda: LinearProbe(scaling="rows"), "scaling must be one of none, columns, standard"),
        (lambda: Adam(rates=[]), r"attack\.\*\.rates: learning rates must be numbers"),
        (
            lambda: LogisticProbe(strengths=[0.0, 1.0]),
            r"strengths must be a list of which each is a finite number above 0",
        ),
        (lambda: BlockProbe(ridges=[0.0]), r"ridges must be a list of which each is a finite number above 0"),
        (lambda: Undo(how="guess"), "how must be one of relearn, strip"),
    ],
)
def test_wrong_settings_are_named(attack, message):
    with pytest.raises(ConfigError, match=message):
        attack()


def test_a_run_with_attacks(tmp_path):
    chosen = "attack=[linear_probe,closed_form_probe]"
    options = ["method=learning_curve", "method.epochs=60", "optimizer.lr=2e-2", "tracker=none", "figures=false"]
    result = run([*options, chosen], folder=tmp_path)
    assert result.seconds["attack"] > 0
    assert result.metrics["attack/linear_probe/steps_ratio"] > 100
    assert result.metrics["attack/closed_form_probe/steps_ratio"] == 1
    assert result.metrics["attack/worst/final"] == result.metrics["attack/closed_form_probe/final"]
    assert "closed_form_probe reaches accuracy" in result.reasons["attack_succeeds"]
    curve = result.curves["attack/linear_probe/accuracy"]
    assert curve["x"][-1] == 8192
    assert len(curve["x"]) == len(curve["y"]) == len(result.curves["attack/linear_probe/compute/baseline"]["x"])


def test_the_verdict_where_nothing_succeeds():
    victim = victim_of(*quadratic(1e9))
    measures = run_attacks({"gd": LinearProbe(steps=4)}, victim)
    result = Result(0, "d", "m", "unmodified", "completed")
    result.take(measures)
    assert measures.metrics["attack/worst/flops"] is None
    assert "None of 1 attacks learns the harmful task" in result.verdict[0]
    assert "no proof" in result.verdict[0]
    several = verdict([result, result])
    assert several == ["In 0 of 2 runs an attack learns a harmful task."]
    assert Result(0, "d", "m", "unmodified").verdict == []


def test_centering_is_no_way_out_of_a_centered_map(tmp_path):
    """Without `centered` one large common direction hides the task, and subtracting the mean undoes it."""
    options = ["method=learning_curve", "tracker=none", "figures=false", "attack=[linear_probe,scaled]"]
    options += ["evaluation=[primary,learning_curves]", "method.epochs=60", "optimizer.lr=2e-2"]
    plain = run(options, folder=tmp_path / "plain").metrics
    centered = run([*options, "method.centered=true"], folder=tmp_path / "centered").metrics
    assert plain["attack/scaled/steps_ratio"] < 100
    assert centered["attack/scaled/steps_ratio"] > 1000
    assert centered["attack/linear_probe/steps_ratio"] > 500
    assert centered["steps_ratio/primary"] <= 1


def test_labels_that_are_all_equal_are_no_task_to_attack(tmp_path):
    """The authors' MNIST protocol: a constant answer is right."""
    options = [
        "method=identity",
        "dataset.protocol=authors",
        "tracker=none",
        "attack=[closed_form_probe,logistic_probe]",
    ]
    result = run(options, tmp_path)
    for name in ("closed_form_probe", "logistic_probe"):
        assert result.metrics[f"attack/{name}/final"] is None
        assert "there is nothing to learn" in result.reasons[f"attack/{name}/final"]
    assert "attack_succeeds" not in result.flags
