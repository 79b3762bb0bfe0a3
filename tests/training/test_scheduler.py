"""Schedulers of the learning rate: the rates a run takes, what does not fit it, and older folders."""

import math
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from helpers.images import loader
from helpers.runs import QUICK, outcome, resumed
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import LRScheduler

import immunization
from immunization import Result, run
from immunization.checks import CONF
from immunization.errors import ConfigError, DataError
from immunization.results.collect import collect
from immunization.results.settings import settings
from immunization.runs.tracker import history
from immunization.training.optimization import scheduler_of

pytestmark = pytest.mark.trains

OPTIONS = sorted({path.stem for path in CONF.glob("scheduler/*.yaml")} - {"default", "none"})
RATE = 1e-3


def rates(folder: Path) -> list[float]:
    return history(folder)["lr"]["y"]


def scheduled(overrides: list[str], steps: int = 20) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """An optimizer and its scheduler, from the YAML of the group and overrides as on the command line."""
    chosen, *changes = OverridesParser.create().parse_overrides(overrides)
    config = OmegaConf.create({"scheduler": OmegaConf.load(CONF / "scheduler" / f"{chosen.value()}.yaml")})
    for change in changes:
        OmegaConf.update(config, change.key_or_group, change.value())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    return optimizer, scheduler_of(OmegaConf.to_container(config), optimizer, steps)


def cosine(t: float, steps: float) -> float:
    return (1 + math.cos(math.pi * t / steps)) / 2


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        (["scheduler=cosine"], lambda t: cosine(t, 20)),
        (["scheduler=cosine", "scheduler.eta_min=5e-4"], lambda t: 0.5 + cosine(t, 20) / 2),
        (["scheduler=linear"], lambda t: 1 - t / 20),
        (["scheduler=warmup"], lambda t: 0.01 + 0.99 * min(t, 2) / 2),
        (["scheduler=warmup_cosine"], lambda t: 0.01 + 0.99 * t / 2 if t < 2 else cosine(t - 2, 18)),
        (
            ["scheduler=warmup_cosine", "scheduler.milestones=[5]"],
            lambda t: 0.01 + 0.198 * t if t < 5 else cosine(t - 5, 15),
        ),
        (["scheduler=step"], lambda t: 0.5 ** (t // 5)),
        (["scheduler=step", "scheduler.step_size=7"], lambda t: 0.5 ** (t // 7)),
        (["scheduler=multistep"], lambda t: 0.1 ** ((t >= 10) + (t >= 15))),
        (["scheduler=multistep", "scheduler.milestones=[1,19]"], lambda t: 0.1 ** ((t >= 1) + (t >= 19))),
        (["scheduler=exponential"], lambda t: 0.99**t),
    ],
)
def test_the_rate_of_every_step(overrides, rate):
    optimizer, scheduler = scheduled(overrides)
    for t in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE * rate(t), rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_mini_batches_count_as_steps(tmp_path):
    run(
        [*QUICK, "scheduler=cosine", "method.epochs=3", "method.batch_size=10", f"optimizer.lr={RATE}"], folder=tmp_path
    )
    taken = rates(tmp_path)
    assert len(taken) > 3
    assert taken == pytest.approx([RATE * cosine(t, len(taken)) for t in range(len(taken))], rel=1e-12)


def test_the_rate_is_the_one_that_is_taken(tmp_path):
    """Gradient descent that goes hardly anywhere, so that the gradient stays: the way is the sum of the rates."""
    options = [*QUICK, "method.hold_primary=null", "optimizer=sgd", "optimizer.lr=1e-9", "method.epochs=8"]
    far = {}
    for name in ("none", "cosine"):
        run([*options, f"scheduler={name}"], folder=tmp_path / name)
        far[name] = immunization.load(tmp_path / name).theta.detach() - torch.eye(64, dtype=torch.float64)
    share = sum(cosine(t, 8) for t in range(8)) / 8
    assert 1e-8 < far["none"].norm() < 1e-6
    torch.testing.assert_close(far["cosine"], share * far["none"], rtol=1e-4, atol=1e-14)


def test_without_a_scheduler_nothing_is_logged_that_was_not_before(tmp_path):
    for name in ("default", "none"):
        run([*QUICK, "method=r_ill_only", "method.epochs=3", f"scheduler={name}"], folder=tmp_path / name)
    assert outcome(tmp_path / "default") == outcome(tmp_path / "none")
    assert "lr" not in history(tmp_path / "none")


def test_a_plateau_is_seen_in_the_loss(tmp_path):
    """A rate that changes nothing: the first loss is the lowest, and every third one after it is one too many."""
    options = [*QUICK, "method=opt_kappa", "method.epochs=12", "scheduler=plateau", "scheduler.patience=2"]
    run([*options, "optimizer.lr=1e-300"], folder=tmp_path / "flat")
    assert rates(tmp_path / "flat") == pytest.approx(
        [1e-300 * 0.5 ** max(0, (t - 1) // 3) for t in range(12)], rel=1e-12
    )
    run([*options, "scheduler.patience=12"], folder=tmp_path / "patient")
    assert rates(tmp_path / "patient") == [1e-3] * 12


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_option_fits_every_training(option, steps):
    optimizer, scheduler = scheduled([f"scheduler={option}"], steps)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*[1.0] if option == "plateau" else ())


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        (
            "cosine",
            "scheduler.T_max=19",
            "scheduler.T_max=19 ends before the 20 steps of the training; give 1.0 for all",
        ),
        ("cosine", "scheduler.T_max=0.5", "scheduler.T_max=0.5 ends before the 20 steps"),
        ("cosine", "scheduler.T_max=21", "scheduler.T_max=21: does not fit into the 20 steps of the training; lower"),
        ("cosine", "scheduler.T_max=0", "scheduler.T_max=0: expected a number of steps, an integer above 0, or a"),
        ("cosine", "scheduler.T_max=1.5", "scheduler.T_max=1.5: expected"),
        ("cosine", "scheduler.T_max=nan", "scheduler.T_max=nan: expected"),
        ("cosine", "scheduler.T_max=true", "scheduler.T_max=True: expected"),
        ("cosine", "scheduler.eta_min=low", "scheduler.eta_min must be a finite number of at least 0, not 'low'"),
        ("warmup_cosine", "scheduler.schedulers.1.eta_min=-1", "scheduler.schedulers[1].eta_min must be a finite"),
        ("exponential", "scheduler.gamma=nan", "scheduler.gamma must be a finite number of at least 0"),
        ("plateau", "scheduler.min_lr=[-1]", "scheduler.min_lr must be a finite number of at least 0"),
        ("cosine", "+scheduler.gamma=3", "unexpected keyword argument 'gamma'"),
        ("cosine", "scheduler._target_=os.system", "not from a trusted package"),
        ("cosine", "scheduler._partial_=false", "missing 1 required positional argument: 'optimizer'"),
        ("warmup", "scheduler.total_iters=30", "scheduler.total_iters=30: does not fit into the 20 steps"),
        ("step", "scheduler.step_size=50", "scheduler.step_size=50: does not fit"),
        ("multistep", "scheduler.milestones=[5,20]", "scheduler.milestones[1]=20: does not fit into the 20"),
        (
            "multistep",
            "scheduler.milestones=[5,5]",
            "scheduler.milestones=[5, 5]: each value must be larger than the one before it",
        ),
        ("multistep", "scheduler.milestones=[0.9,10]", "each value must be larger than the one before it"),
        ("multistep", "scheduler.milestones=5", "scheduler.milestones=5: must be a list"),
        ("linear", "scheduler.start_factor=0", "scheduler: Starting multiplicative factor"),
        ("warmup_cosine", "scheduler.milestones=[5,9]", "scheduler.milestones: give one entry fewer than scheduler"),
        ("warmup_cosine", "scheduler.schedulers.0.total_iters=3", "schedulers[0].total_iters=3: does not fit into the"),
        ("warmup_cosine", "scheduler.schedulers.1.T_max=17", "schedulers[1].T_max=17 ends before the 18 steps"),
        ("warmup_cosine", "scheduler.schedulers.1._target_=os.system", "schedulers[1]._target_=os.system: not from"),
    ],
)
def test_what_does_not_fit_is_refused(option, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        scheduled([f"scheduler={option}", change])
    assert "\n" not in str(caught.value)


def test_a_run_refuses_it_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"scheduler\.T_max=21: does not fit into the 20 steps of the training"):
        run([*QUICK, "method.epochs=20", "scheduler=cosine", "scheduler.T_max=21"], folder=tmp_path)
    assert Result.read(tmp_path).status == "failed"
    assert len(history(tmp_path)["rir"]["x"]) == 1  # theta_0


def torchs(name: str, **arguments: object) -> dict:
    return {"_target_": f"torch.optim.{name}", "_partial_": True, **arguments}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (torchs("lr_scheduler.OneCycleLR", max_lr=1.0, total_steps=9), "scheduler.total_steps=9 ends before the 20"),
        (torchs("lr_scheduler.OneCycleLR", max_lr=1.0, epochs=2, steps_per_epoch=5), "give scheduler.total_steps=1.0"),
        (torchs("Rprop", lr=0.1), "torch.optim.Rprop: not from a trusted package (torch.optim.lr_scheduler)"),
        (torchs("lr_scheduler.Optimizer"), "expected a subclass of torch.optim.lr_scheduler.LRScheduler"),
        (
            {"_target_": "torch.nn.Identity", "_partial_": True},
            "torch.nn.Identity: not from a trusted package (torch.optim.lr_scheduler)",
        ),
        ({"T_max": 1.0}, "scheduler names no class: choose scheduler=<option>"),
        (
            torchs("lr_scheduler.SequentialLR", milestones=[5], schedulers=["cosine", "linear"]),
            "scheduler.schedulers[0]='cosine': a scheduler is a mapping",
        ),
    ],
)
def test_what_is_no_scheduler_of_this_training(node, message):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheduler_of({"scheduler": node}, optimizer, 20)


LR = "_target_: torch.optim.lr_scheduler"
CHAINED = (
    f"{LR}.ChainedScheduler, schedulers: [{{{LR}.CosineAnnealingLR, _partial_: true, T_max: 1.0}}, "
    f"{{{LR}.ExponentialLR, _partial_: true, gamma: 0.9}}]"
)


@pytest.mark.parametrize(
    "node",
    [
        f"{LR}.OneCycleLR, max_lr: 1.0e-9, total_steps: 1.0, cycle_momentum: false",
        f"{LR}.CosineAnnealingWarmRestarts, T_0: 0.25",
        f"{LR}.PolynomialLR, total_iters: 1.0, power: 2.0",
        f"{LR}.ConstantLR, factor: 0.5, total_iters: 0.3",
        f"{LR}.CyclicLR, base_lr: 1.0e-10, max_lr: 1.0e-9, step_size_up: 0.5, step_size_down: 3, cycle_momentum: false",
        CHAINED,
    ],
    ids=lambda node: node.split(",")[0].rpartition(".")[2],
)
def test_any_other_scheduler_of_torch_needs_only_a_yaml(node):
    """It steps to the end, and goes on from its state where that was cut."""
    config = yaml.safe_load(f"scheduler: {{_partial_: true, {node}}}")

    def taken(cut: int | None = None) -> list[float]:
        rates, state = [], None
        for t in range(9):
            if t in (0, cut):
                optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-9)
                scheduler = scheduler_of(config, optimizer, 9)
                if state:
                    optimizer.load_state_dict(state[0])
                    scheduler.load_state_dict(state[1])
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            state = optimizer.state_dict(), scheduler.state_dict()
        return rates

    assert taken(cut=5) == taken()
    assert len(set(taken())) > 1


def test_a_scheduler_in_one_goes_through_a_checkpoint_of_a_run(tmp_path, monkeypatch, cut):
    options = ["method=r_ill_only", "method.epochs=9", "optimizer=sgd", "optimizer.lr=1e-9"]
    whole, again = resumed([*QUICK, *options, f"scheduler={{_partial_: true, {CHAINED}}}"], tmp_path, monkeypatch, cut)
    assert whole == again
    assert len(set(rates(tmp_path / "whole"))) > 1


def test_methods_without_steps_ignore_schedulers(tmp_path):
    options = [*QUICK, "method=closed_form", "scheduler=cosine", "scheduler.T_max=7"]
    assert run(options, folder=tmp_path).status == "completed"


def without_the_group(folder: Path) -> None:
    """The configuration of a run folder as it was before there were schedulers."""
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    del config["scheduler"]
    path.write_text(yaml.safe_dump(config))


def test_a_completed_run_from_before_schedulers_is_the_one_without(tmp_path):
    options = [*QUICK, "method=r_ill_only", "method.epochs=2"]
    run(options, folder=tmp_path / "old")
    without_the_group(tmp_path / "old")
    before = outcome(tmp_path / "old")
    run([*options, "resume=true"], folder=tmp_path / "old")
    assert outcome(tmp_path / "old") == before
    with pytest.raises(ConfigError, match=r"another configuration \(scheduler: None -> .*CosineAnnealingLR"):
        run([*options, "scheduler=cosine", "resume=true"], folder=tmp_path / "old")


def test_runs_with_and_without_a_scheduler_are_compared_in_one_table(tmp_path):
    for name, options in {"old": [], "new": ["seed=1"], "cosine": ["scheduler=cosine"]}.items():
        run([*QUICK, "method=r_ill_only", "method.epochs=2", *options], folder=tmp_path / name)
    without_the_group(tmp_path / "old")
    (group,) = settings(collect([tmp_path]))
    labels = {len(setting.runs): setting.label for setting in group}
    assert labels.keys() == {1, 2}
    assert "scheduler=CosineAnnealingLR" in labels[1]
    assert "scheduler=None" in labels[2]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", pretrained=False, num_classes=4).eval()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("learning_curve", {"epochs": 3}),
        (
            "condition_number",
            {"epochs": 1, "batch_size": 16, "smoothing": 0.1, "trainable": "layer4", "augmented": True},
        ),
    ],
)
def test_immunize_takes_a_scheduler(net, method, options):
    def head(**more):
        return immunization.immunize(net, loader(4, 0), loader(3, 1), method, **options, **more).fc

    plain, again, scheduled = (
        torch.cat([p.flatten() for p in head(**more).parameters()])
        for more in ({}, {"scheduler": "exponential", "scheduler__gamma": 1.0}, {"scheduler": "cosine"})
    )
    assert torch.equal(plain, again)
    assert not torch.equal(plain, scheduled)


def test_mistakes_in_the_scheduler_of_immunize(net):
    both = loader(4, 0), loader(3, 1)
    with pytest.raises(ConfigError, match=r"scheduler\.T_max=5: does not fit into the 2 steps"):
        immunization.immunize(net, *both, epochs=2, scheduler="cosine", scheduler__T_max=5)
    with pytest.raises(ConfigError, match="no option 'scheduler__gamma'; there are T_max, eta_min"):
        immunization.immunize(net, *both, scheduler="cosine", scheduler__gamma=5)
    with pytest.raises(ConfigError, match="no option 'scheduler__gamma'; there are none"):
        immunization.immunize(net, *both, scheduler__gamma=5)
    options = {"method": "condition_number", "trainable": "layer4", "augmented": True, "scheduler": "cosine"}
    with pytest.raises(DataError, match="the harmful loader has no length"):
        immunization.immunize(net, loader(4, 0), Endless(), **options)
    immunization.immunize(net, loader(4, 0), Endless(), **options | {"scheduler": "none", "epochs": 1})


class Endless:
    """Batches of which nobody knows the number."""

    def __iter__(self):
        return iter(loader(3, 1))
