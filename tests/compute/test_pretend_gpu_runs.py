"""Runs of linear models on a pretended GPU: nothing lands on a wrong device, and the results are the CPU's."""

import sys
from pathlib import Path

import pytest
from helpers.both_devices import agree, run_on_both
from helpers.houses import write_table
from helpers.pretend_gpu import pretended_gpu
from helpers.runs import DEEP, resumed
from omegaconf import OmegaConf

import launch

pytestmark = pytest.mark.trains

SMALL = ("dataset.max_samples=40", "tracker=none", "figures=false")
SHORT = (*SMALL, "evaluation=[rir]", "method.epochs=2")
LINEAR = ("condition_number", "r_ill_only", "opt_kappa", "imma", "learning_curve", "closed_form", "identity")
RELEASED = ("method=released_condition_number", "method.batch_size=16")
QUICK_OPTIONS = [
    ("method.batch_size=16", "optimizer=nesterov", "scheduler=plateau", "model.bias=true", "method.precondition=ridge"),
    ("method=learning_curve", "method.targets=auto", "method.max_condition=100"),
    ("dtype=float32", "deterministic=true"),
]
MORE_OPTIONS = [
    ("method=opt_kappa", "method.form=log"),
    ("method=imma", "method.head_start=random"),
    ("method=closed_form", "method.max_condition=100"),
    *[(f"method.{option}",) for option in ("power=inf", "precondition=pinv", "precondition=none", "balance=false")],
    *[(f"method.{option}",) for option in ("patience=1", "max_accuracy_drop=0.5", "smoothing=0.1")],
    *[("method=r_ill_only", f"method.{option}") for option in ("normalize=true", "precondition=ridge", "rank=full")],
    *[("method=opt_kappa", f"method.form={form}") for form in ("reciprocal_log", "reciprocal_loglog")],
    *[("method=opt_kappa", f"method.{option}") for option in ("conditioning=authors", "batch_size=16", "power=8")],
    ("method=opt_kappa", "method.form=log", "method.rate=null"),
    *[("method=imma", f"method.{option}") for option in ("mode=first_order", "heads=shared", "cap=1")],
    ("method=imma", "method.heads=fixed", "method.head_start=random"),
    *[("method=learning_curve", f"method.{option}") for option in ("targets=baseline", "centered=true")],
    *[("method=learning_curve", f"method.{option}") for option in ("rotate=false", "horizon=[1,10]", "patience=1")],
    *[("method=closed_form", f"method.{option}") for option in ("ridge=0.001", "spread=step", "rotate=false")],
    *[(f"model.init={init}",) for init in ("orthogonal", "random")],
    *[(f"scheduler={name}",) for name in ("cosine", "exponential", "linear", "multistep", "step", "warmup")],
    *[("optimizer=sgd",), ("scheduler=warmup_cosine",), ("dataset.common_range=true",)],
]
ATTACKS = ("linear_probe", "momentum", "adam", "adamw", "lbfgs", "conjugate_gradients", "preconditioned", "scaled")
ATTACKS += ("adam_scaled", "lbfgs_scaled", "whitened_probe", "logistic_probe", "undo")
DIRECT = ("closed_form_probe", "strip", "weights_float32", "weights_bfloat16", "weights_int8")


@pytest.mark.parametrize("method", LINEAR)
def test_every_method(tmp_path, method):
    epochs = [] if method in ("closed_form", "identity") else ["method.epochs=3"]
    leak = ["evaluation.leak.labels=[1]", "evaluation.leak.draws=1"]
    agree(*run_on_both([*SMALL, "log_every=1", f"method={method}", *epochs, *leak], tmp_path)[:2])


def test_the_released_code_s_method(tmp_path):
    """Kinks (`power=inf`) turn the last bits into others: two steps."""
    agree(*run_on_both([*SHORT, *RELEASED], tmp_path)[:2])


@pytest.mark.parametrize("options", QUICK_OPTIONS, ids=" ".join)
def test_options(tmp_path, options):
    """`dtype=float32` included: both devices round alike, as the same routines compute on both."""
    agree(*run_on_both([*SHORT, *options], tmp_path)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("options", MORE_OPTIONS, ids=" ".join)
def test_more_options(tmp_path, options):
    agree(*run_on_both([*SHORT, *options], tmp_path)[:2])


def test_house_prices(tmp_path):
    write_table(tmp_path)
    options = ["dataset=house_prices", f"dataset.root={tmp_path}", "dataset.download=false", "method=learning_curve"]
    agree(*run_on_both([*SHORT[1:], *options], tmp_path)[:2])


def attacked(names: tuple[str, ...], folder: Path) -> None:
    steps = [f"attack.{name}.steps=8" for name in names if name not in DIRECT]
    cpu, gpu, _ = run_on_both([*SHORT, "method=learning_curve", f"attack=[{','.join(names)}]", *steps], folder)
    agree(cpu, gpu)
    assert all(f"attack/{name}/final" in gpu.metrics for name in names)


def test_attacks_on_a_linear_map(tmp_path):
    attacked(("linear_probe", "adam_scaled", "whitened_probe", "undo"), tmp_path)


@pytest.mark.slow
def test_every_attack_on_a_linear_map(tmp_path):
    attacked((*ATTACKS, *DIRECT), tmp_path)


def test_a_resumed_run(tmp_path, monkeypatch, cut):
    with pretended_gpu() as seen:
        whole, again = resumed([*SHORT, "log_every=1", "method.epochs=6", "device=cuda"], tmp_path, monkeypatch, cut)
    assert seen["to_cpu"]
    assert again == whole


@pytest.mark.parametrize(
    "options",
    [
        (*SHORT[:-1], "method=ntl"),
        *(pytest.param((*DEEP, f"method={m}"), marks=pytest.mark.slow) for m in ("forget", "encoderlock")),
    ],
    ids=lambda options: options[-1],
)
def test_resumed_runs_of_methods_that_keep_tensors(tmp_path, monkeypatch, cut, options):
    own = ["method.epochs=2", "method.batch_size=20", "device=cuda"]
    with pretended_gpu():
        whole, again = resumed([*options, *own], tmp_path, monkeypatch, cut, at=3, every=2)
    assert again == whole


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch.py", *SHORT, "device=cuda", f"hydra.run.dir={tmp_path}"])
    with pretended_gpu() as seen:
        launch.start()
    assert "RIR" in capsys.readouterr().out
    assert OmegaConf.load(tmp_path / "environment.json").device == "cuda:0"
    assert seen["to_cpu"]
