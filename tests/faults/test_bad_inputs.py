"""What users get wrong, and what disks do to files: one line that says what to do, or a value computed again."""

import gzip
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_files import CSV, IMAGES, MNIST, NPZ, csv, image_pair, mnist, npz, table, with_nan, zeros
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import save_file

from immunization import Result
from immunization.__main__ import start
from immunization.results import run_figures
from immunization.runs.filenames import CHECKPOINT

pytestmark = [pytest.mark.slow, pytest.mark.trains]

QUICK = ("tracker=none", "evaluation=[rir]")
HOUSE = ("dataset=house_prices", "dataset.root={tmp}", "dataset.download=false", "method.epochs=1")


def broken_image(tmp: Path) -> None:
    image_pair(tmp)
    path = tmp / "h" / "train" / "class0" / "0.png"
    path.write_bytes(path.read_bytes()[:200])


def empty_class(tmp: Path) -> None:
    image_pair(tmp)
    shutil.rmtree(tmp / "p" / "train" / "class1")
    (tmp / "p" / "train" / "class1").mkdir()


def a_file(tmp: Path) -> None:
    (tmp / "file").touch()


def weights(tmp: Path, kind: str) -> None:
    image_pair(tmp)
    if kind == "text":
        (tmp / "w.safetensors").write_text("no weights")
    elif kind == "other":
        save_file({"a": torch.zeros(2)}, tmp / "w.safetensors")
    elif kind == "directory":
        (tmp / "w.safetensors").mkdir()


OPTIONS = [
    ("method=magic", "Could not (find|load) 'method/magic'.*available for method: clamp, closed_form, "),
    ("dataset=magic", "Could not (find|load) 'dataset/magic'"),
    ("model=magic", "Could not (find|load) 'model/magic'"),
    ("optimizer=magic", "Could not (find|load) 'optimizer/magic'"),
    ("scheduler=magic", "Could not (find|load) 'scheduler/magic'"),
    ("tracker=magic", "Could not (find|load) 'tracker/magic'"),
    ("experiment=magic", "Could not (find|load) 'experiment/magic'"),
    ("evaluation=[magic]", "Could not (find|load) 'evaluation/magic'"),
    ("launcher=magic", "Could not (find|load) 'launcher/magic'"),
    ("method=null", "give every group=... the name of an option"),
    ("method.lamda_P=1", "no key method.lamda_P"),
    ("sed=1", "no key sed"),
    ("seed", "seed|=(?s:.)*"),
    ("=1", "."),
    ("seed=[", "."),
    ("+method.nonsense=1", "does not take that key"),
    ("seed=-1", "seed must be an integer"),
    ("seed=1.5", "seed must be an integer"),
    ("seed=x", "seed must be an integer"),
    ("seed=null", "seed must be an integer"),
    ("seed=true", "seed must be an integer"),
    ("seed=99999999999999999999999", "seed"),
    ("device=tpu", "device must be one of auto, cpu, cuda, not 'tpu'"),
    ("dtype=float16", "dtype must be one of float64, float32, not 'float16'"),
    ("threads=0", "threads must be an integer of at least 1"),
    ("threads=many", "threads must be an integer of at least 1"),
    ("log_every=0", "log_every must be an integer"),
    ("figures=perhaps", "figures must be true or false"),
    ("resume=perhaps", "resume must be true or false"),
    ("deterministic=perhaps", "deterministic must be true or false"),
    ("checkpoint.every=0", "checkpoint.every must be an integer of at least 1"),
    ("checkpoint.seconds=-1", "checkpoint.seconds must be a finite number above 0"),
    ("checkpoint.minutes=1", "no key checkpoint.minutes"),
    ("tags=one", "tags must be a list"),
    ("trusted=one", "trusted must be a list"),
    ("dataset.primary=1", "choose different ones"),
    ("dataset.primary=10", "dataset.primary must be an integer of at least 0 and at most 9, not 10"),
    ("dataset.primary=x", "dataset.primary must be an integer of at least 0 and at most 9, not 'x'"),
    ("dataset.val_fraction=1", "dataset.val_fraction must be a number of at least 0 and below 1, not 1"),
    ("dataset.test_fraction=-0.1", "dataset.test_fraction must be a number of at least 0 and below 1, not -0.1"),
    ("dataset.max_samples=0", "dataset.max_samples"),
    ("dataset.protocol=magic", "dataset.protocol"),
    ("model.init=magic", "model.init"),
    ("method.epochs=-1", "method.epochs must be an integer of at least 0"),
    ("method.epochs=ten", "method.epochs must be an integer of at least 0, not 'ten'"),
    ("method.epochs=null", "method.epochs must be an integer of at least 0, not None"),
    ("method.lambda_P=-1", "method.lambda_P must be a finite number"),
    ("method.lambda_P=nan", "method.lambda_P must be a finite number"),
    ("method.lambda_H=inf", "method.lambda_H must be a finite number"),
    ("method.lambda_P=much", "method.lambda_P must be a finite number of at least 0, not 'much'"),
    ("method.batch_size=1", "method.batch_size must be an integer of at least 2, or null"),
    ("method.batch_size=100000", "method.batch_size=100000 is above"),
    ("method.precondition=magic", "method.precondition"),
    ("method.patience=0", "method.patience"),
    ("optimizer.lr=0", "optimizer.lr must be a finite number above 0"),
    ("optimizer.lr=nan", "optimizer.lr must be a finite number above 0"),
    ("optimizer.lr=fast", "optimizer.lr must be a finite number above 0"),
    ("optimizer.betas=[2,2]", "optimizer: Invalid beta"),
    ("method.power=7", "method.power must be an even number from 2 to 64 .*, or inf, not 7"),
    ("method.power=0", "method.power must be an even number"),
    ("method.power=-8", "method.power must be an even number"),
    ("method.power=nan", "method.power must be an even number"),
    ("method.power=smooth", "method.power must be an even number from 2 to 64 .*, or inf, not 'smooth'"),
    ("scheduler.T_max=2", "no key scheduler.T_max; choose a scheduler first"),
    (
        "scheduler={_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true, T_max: 1}",
        "ends before the 2",
    ),
    (
        "scheduler={_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 3}",
        "does not fit into the 2",
    ),
    ("scheduler={_target_: torch.optim.SGD, _partial_: true, lr: 3}", "scheduler"),
    ("method._target_=os.system", "not from a trusted package"),
    ("method._target_=immunization.methods.Magic", "Magic"),
    ("model=resnet18", "needs? images|needs model=linear"),
    ("hydra.run.dir=/proc/run", "/proc/run"),
    ("hydra.run.dir={tmp}/file/run", "hydra.run.dir="),
    ("objective=magic", "objective=magic: no chosen evaluation or attack measures that"),
]
"""One override after the good ones, and what is said."""

DATA = [
    (None, NPZ, "pair.npz"),
    (lambda tmp: npz(tmp, harmful_x=with_nan()), NPZ, "holds 1 NaN"),
    (lambda tmp: npz(tmp, primary_y=np.zeros(40, int)), NPZ, "one class only"),
    (lambda tmp: npz(tmp, primary_x=np.ones((40, 3))), NPZ, r"constant .* \(rank 0\)"),
    (lambda tmp: npz(tmp, primary_x=np.zeros((0, 3)), primary_y=np.zeros(0, int)), NPZ, "primary_x"),
    (lambda tmp: npz(tmp, primary_x=np.ones(40)), NPZ, "primary_x"),
    (lambda tmp: npz(tmp, primary_y=np.arange(39) % 2), NPZ, "primary"),
    (lambda tmp: npz(tmp, harmful_x=np.random.default_rng(0).normal(size=(40, 4))), NPZ, "different numbers|columns"),
    (lambda tmp: npz(tmp, harmful_y=None), NPZ, "harmful_y"),
    (lambda tmp: npz(tmp, harmful_x=np.array([["a"] * 3] * 40)), NPZ, "pair.npz cannot be read .* numbers"),
    (lambda tmp: npz(tmp, harmful_x=np.full((40, 3), np.inf)), NPZ, "inf"),
    (lambda tmp: (tmp / "pair.npz").write_bytes(b""), NPZ, "pair.npz"),
    (lambda tmp: (tmp / "pair.npz").mkdir(), NPZ, "pair.npz"),
    (lambda tmp: csv(tmp, table(header="a,b,price")), CSV, "lacks the column target"),
    (lambda tmp: csv(tmp, table(first="near,0,0")), CSV, "'near' is not a finite number"),
    (lambda tmp: csv(tmp, table()[:-14]), CSV, "2 fields, the header has 3"),
    (lambda tmp: csv(tmp, ""), CSV, "harmful.csv"),
    (lambda tmp: csv(tmp, b"\xff\xfe\x00bad"), CSV, "harmful.csv"),
    (None, MNIST, "does not exist: put"),
    (lambda tmp: mnist(tmp, "train-images-idx3-ubyte.gz", gzip.compress(zeros(60, 28, 28))[:-9]), MNIST, "truncated"),
    (lambda tmp: mnist(tmp, "t10k-labels-idx1-ubyte.gz", gzip.compress(zeros(60)[:-5])), MNIST, "truncated"),
    (lambda tmp: mnist(tmp, "t10k-labels-idx1-ubyte.gz", b"no gzip"), MNIST, "t10k-labels"),
    (None, HOUSE, "train.csv does not exist"),
    (lambda tmp: (tmp / "train.csv").write_text("Id,MSZoning\n1,RL\n"), HOUSE, "lacks the columns"),
    (None, IMAGES, r"dataset\.primary_root: folder .*/p not found"),
    (broken_image, IMAGES, r"class0/0\.png"),
    (empty_class, IMAGES, "class1: the class folder is empty"),
    (image_pair, (*IMAGES, "dataset.on_bad_image=magic"), "dataset.on_bad_image"),
    (image_pair, (*IMAGES, "model.name=magic_net"), "timm has no such model"),
    (image_pair, (*IMAGES, "model.trainable=stage9", "method=condition_number", "method.batch_size=4"), "stage9"),
    (image_pair, (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), r"model\.checkpoint: .* not found"),
    (lambda tmp: weights(tmp, "text"), (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), "w.safetensors"),
    (lambda tmp: weights(tmp, "other"), (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), "does not fit"),
    (lambda tmp: weights(tmp, "directory"), (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), "w.safetensors"),
]
"""What lies in the folder, the overrides, and what is said."""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, count):
    """Runs the command line on overrides that cannot work, and returns the one line it says."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(run_figures, "draw", lambda result, folder: [])
    monkeypatch.chdir(tmp_path)

    def call(*overrides: str) -> str:
        run_folder = tmp_path / "run"
        arguments = [*QUICK, f"hydra.run.dir={run_folder}", *(o.replace("{tmp}", str(tmp_path)) for o in overrides)]
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as end:
            start()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert isinstance(end.value.code, str), captured.err
        said = end.value.code
        assert said.startswith("error: ")
        assert "Traceback" not in said
        if (run_folder / "result.json").exists() and "run itself is complete" not in said:
            result = Result.read(run_folder)
            assert result.status == "failed"
            assert result.error in said
        count["bad inputs"] += 1
        return said

    return call


@pytest.mark.parametrize(("override", "message"), OPTIONS, ids=[override for override, _ in OPTIONS])
def test_options(override, message, refused, tmp_path):
    a_file(tmp_path)
    own = ["scheduler=none"] if override.startswith(("scheduler.", "scheduler={")) else []  # not the data set's
    said = refused("dataset.max_samples=20", "method.epochs=2", *own, override)
    assert re.search(message, said), said
    assert "\n" not in said


@pytest.mark.parametrize(("prepare", "overrides", "message"), DATA, ids=range(len(DATA)))
def test_data(prepare, overrides, message, refused, tmp_path):
    if prepare is not None:
        prepare(tmp_path)
    said = refused(*overrides)
    assert re.search(message, said), said
    assert "\n" not in said


def test_there_are_at_least_sixty():
    assert len(OPTIONS) + len(DATA) >= 60
    assert len({override for override, _ in OPTIONS}) == len(OPTIONS)


# --- Processes --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_fills_up(tmp_path, count):
    """A real one, of 16 to 160 KiB: whatever was written before is intact, and the run goes on where there is room."""
    import subprocess

    from helpers.runs import QUICK, outcome

    from immunization import run
    from immunization.errors import ConfigError

    disk = tmp_path / "disk"
    disk.mkdir()
    run([*QUICK, "method.epochs=9"], folder=tmp_path / "whole")
    for size in (16, 48, 96, 160):
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], check=False)
        if mounted.returncode:
            pytest.skip("this container may not mount")
        try:
            with pytest.raises(ConfigError, match=r"No space left on device; make room there"):
                run([*QUICK, "method.epochs=9", "checkpoint.every=3"], folder=disk / "run")
            if (disk / "run" / CHECKPOINT).exists():
                shutil.copytree(disk / "run", tmp_path / f"moved{size}")
                run([*QUICK, "method.epochs=9", "resume=true"], folder=tmp_path / f"moved{size}")
                assert outcome(tmp_path / f"moved{size}") == outcome(tmp_path / "whole")
        finally:
            subprocess.run(["umount", disk], check=True)
        count["full disks"] += 1
