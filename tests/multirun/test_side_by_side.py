"""Jobs that are trained side by side are, bit for bit, what each of them is alone; those of IMMA up to rounding."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from immunization.__main__ import start
from immunization.config import compose
from immunization.experiment import assemble, resolve
from immunization.methods import ConditionNumber
from immunization.multirun.ahead import Prepared

pytestmark = pytest.mark.trains

QUICK = ("tracker=none", "method.epochs=30", "evaluation=[rir,definition,primary]")
ROWS = "dataset.max_samples=60"
ALONE = "checkpoint.every=1000000"
"""More steps than there are: nothing is written, but a run with checkpoints of its own is trained alone."""


@pytest.fixture
def multirun(tmp_path, monkeypatch, capsys):
    """Run jobs into a folder, also where some fail; what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")

    def run(folder: str, *arguments: str) -> str:
        rows = () if any(word.startswith("dataset.max_samples=") for word in arguments) else (ROWS,)
        monkeypatch.setattr(sys, "argv", ["launch.py", "-m", *QUICK, *rows, *arguments, f"hydra.sweep.dir={folder}"])
        GlobalHydra.instance().clear()
        with suppress(SystemExit):  # of failed jobs
            start()
        return capsys.readouterr().out

    return run


def of(folder: str, *names: str) -> dict[str, tuple[object, ...]]:
    """What runs left that must agree, by the number of the job."""
    found = {}
    for path in sorted(Path(folder).glob("*/result.json")):
        result = json.loads(path.read_text())
        kept = [path.parent / name for name in ("immunized.safetensors", "metrics.jsonl")]
        said = {key: result[key] for key in ("status", "error", "metrics", "flags")}
        found[path.parent.name.partition("_")[0]] = (said, *[p.read_bytes() if p.exists() else None for p in kept])
    return found


class Stepping(ConditionNumber):
    """One's own step, which may not take stacks."""

    def step(self, model, primary, harmful):
        return super().step(model, primary, harmful)


class Failing(ConditionNumber):
    """One that says it takes stacks, and does not."""

    side_by_side = ("lambda_H",)

    def step(self, model, primary, harmful):
        if primary.x.ndim > 2:
            raise RuntimeError("no stacks")
        return super().step(model, primary, harmful)


GRIDS = {
    "lambdas": ("method.lambda_P=0.1,1", "method.lambda_H=3,30", "seed=0"),
    "seeds": ("seed=0,1,2,3", "method.lambda_H=1,2"),
    "the ratio is held": ("method.lambda_P=0.1,1", "method.lambda_H=3,30", "method.hold_primary=0.3"),
    "R_ill alone": ("method=r_ill_only", "seed=0,1,2,3", "dataset.max_samples=20"),
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_file_has_the_bytes_of_a_job_alone(multirun, grid):
    said = multirun("together", *grid)
    assert "jobs that differ in numbers alone are trained side by side" in said
    assert "side by side" not in multirun("alone", *grid, ALONE)
    together, alone = of("together"), of("alone")
    assert len(together) == len(alone) > 2
    assert together == alone


def test_the_gradient_of_a_loss_in_a_stack_has_the_bits_of_a_job_alone():
    task = assemble(resolve(compose(QUICK), QUICK)).pair.primary

    def gradient(logits, y):
        leaf = logits.clone().requires_grad_()
        return torch.autograd.grad(task.loss(leaf, y).sum(), leaf)[0]

    torch.manual_seed(0)
    for rows in range(1, 34):  # any number left over behind the vectors of a processor
        logits, y = torch.randn(50, rows, 1, dtype=torch.float64), (torch.randn(50, rows) > 0).double()
        assert torch.equal(gradient(logits, y), torch.stack([gradient(*own) for own in zip(logits, y, strict=True)]))


ATTACKERS = {
    "weights and rates": ("method.weight=0.5,1", "method.inner_lr=0.05,0.1"),
    "seeds and random heads": (
        "seed=0,1",
        "method.weight=1,2",
        "method.head_start=random",
        "method.inner_steps=2",
        "method.cap=0.7",
    ),
    "one head, first order": ("method.head_lr=0.2,0.5", "method.heads=shared", "method.mode=first_order"),
}


@pytest.mark.parametrize("grid", ATTACKERS.values(), ids=ATTACKERS)
def test_imma_has_the_metrics_of_a_job_alone(multirun, grid):
    said = multirun("together", "method=imma", *grid)
    assert "jobs that differ in numbers alone are trained side by side" in said
    multirun("alone", "method=imma", *grid, ALONE)
    together, alone = of("together"), of("alone")
    assert together.keys() == alone.keys()
    for number, (said_alone, *_) in alone.items():
        assert together[number][0]["metrics"] == pytest.approx(said_alone["metrics"], rel=1e-10, nan_ok=True)


def test_a_job_that_diverges_says_so_and_leaves_the_others_as_they_are(multirun):
    grid = ("method.balance=false", "method.lambda_P=1,1e305,2", "seed=0")
    multirun("together", *grid)
    multirun("alone", *grid, ALONE)
    together, alone = of("together"), of("alone")
    assert together == alone
    statuses = [said["status"] for said, *_ in together.values()]
    assert statuses.count("failed") == 1
    assert "diverged" in together["1"][0]["error"]


def test_jobs_that_are_there_are_not_trained_again(multirun):
    multirun("jobs", "seed=0", "method.lambda_H=1,2")
    said = multirun("jobs", "seed=0", "method.lambda_H=1,2,3,4", "resume=true")
    assert said.count("completed before") == 2
    assert "2 jobs that differ in numbers alone are trained side by side" in said
    assert {said["status"] for said, *_ in of("jobs").values()} == {"completed"}


def test_jobs_that_cannot_be_stacked_are_trained_alone(multirun):
    own = (f"method._target_={__name__}.Failing", f"trusted=[{__name__}]", "method.lambda_H=1,2", "seed=0")
    multirun("jobs", *own)
    assert {said["status"] for said, *_ in of("jobs").values()} == {"completed"}
    assert any("RuntimeError: no stacks" in path.read_text() for path in Path("jobs").glob("*/run.log"))


def test_each_log_has_the_warnings_of_its_own_job(multirun):
    multirun("jobs", "method.max_accuracy_drop=0.5", "method.lambda_H=1,2,3", "seed=0")
    logs = [path.read_text() for path in Path("jobs").glob("*/run.log")]
    assert [text.count("max_accuracy_drop has little effect") for text in logs] == [1, 1, 1]
    assert all("side by side with 2 other jobs" in text for text in logs)


def test_an_audit_in_a_multirun_reads_the_data_of_the_run(multirun):
    multirun("made", "seed=5", "dataset.primary=3", "dataset.harmful=8")
    (folder,) = Path("made").glob("0_*")
    multirun("audits", "immunize=false", f"model.checkpoint='{folder}'", "method.lambda_H=1,2")
    audits = [json.loads(path.read_text()) for path in Path("audits").glob("*/result.json")]
    made = json.loads((folder / "result.json").read_text())
    assert [(own["status"], own["seed"]) for own in audits] == [("completed", 5)] * 2
    assert [own["metrics"]["rir"] for own in audits] == pytest.approx([made["metrics"]["rir"]] * 2, rel=1e-9)


def test_a_job_that_is_wrong_fails_alone(multirun):
    multirun("jobs", "dataset.harmful=1,0,2,3")  # 0 is the primary class
    statuses = {number: said["status"] for number, (said, *_) in of("jobs").items()}
    assert statuses == {"0": "completed", "1": "failed", "2": "completed", "3": "completed"}


def test_methods_of_one_sweep_are_kept_apart(multirun):
    said = multirun("jobs", "method=condition_number,r_ill_only,identity,imma", "seed=0,1")
    assert {said["status"] for said, *_ in of("jobs").values()} == {"completed"}
    assert said.count("side by side") <= 2


@pytest.mark.parametrize(
    "words",
    [
        ("method.batch_size=16",),
        ("method=learning_curve",),
        ("method=identity",),
        ("model.bias=true", "method.precondition=ridge"),
        ("debug=one_step",),
        ("method.epochs=0",),
        ("checkpoint.every=10",),
        ("immunize=false",),
        ("method.precondition=ridge",),
        ("dtype=float32",),
        ("dataset.common_range=true",),  # of other widths the bytes would differ
        (f"method._target_={__name__}.Stepping", f"trusted=[{__name__}]"),
    ],
)
def test_what_is_trained_alone(words):
    def kind(*overrides: str) -> object:
        experiment = resolve(compose(["tracker=none", "dataset.max_samples=40", *overrides]))
        return Prepared(experiment, assemble(experiment)).kind

    assert kind("seed=1") is not None
    assert kind(*words) is None
