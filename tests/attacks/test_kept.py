"""An audit that is killed between two attacks goes on with the next one, and ends with the same result."""

import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import victims
from helpers.matrices import gaussian, orthonormal
from helpers.processes import ended, in_a_child, wait_for
from helpers.repository import ROOT
from torch import Tensor

from immunization import Result, run
from immunization.attacks import (
    Attack,
    AttackCurve,
    BlockProbe,
    ClosedFormProbe,
    ConjugateGradients,
    FineTune,
    FrozenBlocks,
    KeptCurves,
    LinearProbe,
    Victim,
    WhitenedProbe,
    run_attacks,
)
from immunization.attacks.kept import read_curves
from immunization.compute.keys import PACKAGE
from immunization.config import compose
from immunization.errors import ConfigError
from immunization.evaluation import Comparison
from immunization.experiment import assemble, resolve
from immunization.runs import files
from immunization.runs.filenames import ATTACKS

QUICK = ["tracker=none", "figures=false", "evaluation=[rir]", "method=closed_form", "dataset.max_samples=60"]
AUDIT = [*QUICK, "attack=[closed_form_probe,whitened_probe,conjugate_gradients,linear_probe]", "resume=true"]
AUDIT += ["attack.conjugate_gradients.steps=64", "attack.linear_probe.steps=64"]


def victim_of(theta: Tensor, noise: float = 0.0) -> Victim:
    """A linear model with the given theta [4, 4] on a regression whose targets are off by `noise`."""
    x = orthonormal(60, 4, seed=0)
    return victims.victim_of(victims.regression(x, x.sum(1) + noise * gaussian(60, seed=1)), theta)


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Names of the classes of all attacks that are run, in order."""
    names: list[str] = []
    for kind in (ClosedFormProbe, ConjugateGradients, LinearProbe, WhitenedProbe):

        def spied(self, victim, stage, kind=kind, taken=kind.run):
            if stage == "immunized":
                names.append(kind.__name__)
            return taken(self, victim, stage)

        monkeypatch.setattr(kind, "run", spied)
    return names


@pytest.fixture
def stages(monkeypatch) -> list[str]:
    """The stages on which attacks are run, in order."""
    seen: list[str] = []
    for kind in (LinearProbe, WhitenedProbe):

        def spied(self, victim, stage, taken=kind.run):
            seen.append(stage)
            return taken(self, victim, stage)

        monkeypatch.setattr(kind, "run", spied)
    return seen


def content_of(folder: Path) -> dict:
    """What must not depend on interruptions: the whole result but for the clock."""
    content = Result.read(folder).as_dict()
    del content["seconds"]
    return content


def test_a_killed_audit_goes_on_with_the_next_attack(tmp_path, ran):
    folder = tmp_path / "run"
    kept = folder / ATTACKS

    def hangs_in_the_third() -> None:
        ConjugateGradients.run = lambda *_: time.sleep(600)
        run(AUDIT, folder=folder)

    child = in_a_child(hangs_in_the_third)
    wait_for(lambda: kept.exists() and b"immunized/whitened_probe" in kept.read_bytes())
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    run(AUDIT, folder=folder)
    assert ran == ["ConjugateGradients", "LinearProbe"]
    assert not (folder / ATTACKS).exists()
    ran.clear()
    run(AUDIT, folder=tmp_path / "whole")
    assert len(ran) == 4
    assert content_of(folder) == content_of(tmp_path / "whole")


def test_without_resume_no_attack_that_is_done_is_thrown_away(tmp_path, ran, monkeypatch):
    def fails(self, victim, stage):
        raise KeyboardInterrupt

    with monkeypatch.context() as inside:
        inside.setattr(ConjugateGradients, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            run(AUDIT, folder=tmp_path)
    assert (tmp_path / ATTACKS).exists()
    assert any("closed_form_probe" in name for name in read_curves(tmp_path / ATTACKS))
    with pytest.raises(
        ConfigError, match=r"holds an interrupted run \(attacks\.safetensors\); resume=true continues it"
    ):
        run([*AUDIT, "resume=false"], folder=tmp_path)
    assert (tmp_path / ATTACKS).exists()


def attacked(path: Path, victim: Victim, attacks: Mapping[str, Attack], settings: Mapping[str, object]) -> dict:
    """Measures of a suite that keeps its curves in a file."""
    return vars(run_attacks(attacks, victim, KeptCurves(path, settings, victim)))


def test_curves_hold_for_one_configuration_one_map_and_one_task(tmp_path, ran):
    theta, path = torch.diag(torch.tensor([1.0, 0.5, 0.3, 0.1], dtype=torch.float64)), tmp_path / ATTACKS
    attacks = {"whitened": WhitenedProbe(steps=8), "gd": LinearProbe(steps=8)}
    settings = {"whitened": {"steps": 8, "ridges": [0, 1e-14]}, "gd": {"steps": 8}}
    first = attacked(path, victim_of(theta), attacks, settings)
    assert first == vars(run_attacks(attacks, victim_of(theta)))
    ran.clear()
    assert attacked(path, victim_of(theta), attacks, settings) == first
    assert ran == []
    attacked(path, victim_of(theta), attacks, settings | {"gd": {"steps": 9}})
    assert ran == ["LinearProbe"]
    for other in (victim_of(2 * theta), victim_of(theta, noise=1e-9)):
        ran.clear()
        attacked(path, other, attacks, settings)
        assert ran == ["WhitenedProbe", "LinearProbe"]


def test_a_curve_comes_back_as_it_was(tmp_path):
    """Also with NaN, with one tensor in two places, with kappa as a tensor, and with hits, which are kept as bits."""
    values = torch.tensor([0.5, torch.nan], dtype=torch.float64)
    curve = AttackCurve(
        *(torch.tensor([1, 2]), 10.0 * torch.tensor([1, 2]), values, values, None, values[0], 1e-300, (3.0,)),
        **{"epochs": {1: 0, 3: 1}, "finals": (0.25, 0.5), "scores": gaussian(2, 11, seed=0) > 0},
    )
    victim = victim_of(torch.eye(4, dtype=torch.float64))
    attack, other = LinearProbe(), AttackCurve.of_guessing(victim.task)

    def kept(name, run):
        return KeptCurves(tmp_path / ATTACKS, {"it": {}, "other": {}}, victim)(name, attack, "immunized", run)

    kept("it", lambda: curve)
    back = kept("it", lambda: pytest.fail("it is kept"))
    for name, value in vars(curve).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(back, name), value, rtol=0, atol=0, equal_nan=True)
        else:
            assert getattr(back, name) == value
    assert kept("other", lambda: other) is other


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"", lambda content: content[::-1]])
def test_a_damaged_file_is_as_good_as_none(tmp_path, ran, damage):
    path, victim = tmp_path / ATTACKS, victim_of(torch.eye(4, dtype=torch.float64))
    first = attacked(path, victim, {"gd": LinearProbe()}, {"gd": {}})
    path.write_bytes(damage(path.read_bytes()))
    ran.clear()
    assert attacked(path, victim, {"gd": LinearProbe()}, {"gd": {}}) == first
    assert ran == ["LinearProbe"]


def with_baselines(root: Path, victim: Victim, settings: Mapping[str, object] | None = None) -> dict:
    """Measures of two attacks in a run folder of its own, which shares baselines with others below `root`."""
    attacks = {"whitened": WhitenedProbe(steps=8), "gd": LinearProbe(steps=8)}
    settings = settings or {name: {"_target_": name} for name in attacks}
    path = root / f"{len(list(root.glob('*.pt')))}.pt"
    return vars(run_attacks(attacks, victim, KeptCurves(path, settings, victim, root / "baselines")))


def test_the_baseline_is_attacked_once_for_all_maps(tmp_path, stages):
    one, other = torch.eye(4, dtype=torch.float64), torch.diag(torch.tensor([1.0, 0.5, 0.3, 0.1], dtype=torch.float64))
    alone = vars(run_attacks({"whitened": WhitenedProbe(steps=8), "gd": LinearProbe(steps=8)}, victim_of(other)))
    stages.clear()
    with_baselines(tmp_path, victim_of(one))
    assert stages.count("baseline") == 2
    stages.clear()
    assert with_baselines(tmp_path, victim_of(other)) == alone
    assert "baseline" not in stages
    assert stages.count("immunized") == 2


def test_theta_I_is_attacked_while_another_process_is_at_work_on_the_baseline(tmp_path, stages):
    victim = victim_of(torch.diag(torch.tensor([1.0, 0.5, 0.3, 0.1], dtype=torch.float64)))
    expected = with_baselines(tmp_path, victim)
    for path in (tmp_path / "baselines").glob("*.safetensors"):
        path.unlink()
    stages.clear()
    with ThreadPoolExecutor() as pool:
        with ExitStack() as held:
            for lock in (tmp_path / "baselines" / ".locks").iterdir():
                held.enter_context(files.locked(lock))
            found = pool.submit(with_baselines, tmp_path, victim)
            wait_for(lambda: stages == ["immunized"])
        assert found.result() == expected
    assert stages == ["immunized", "baseline", "baseline", "immunized"]


def test_a_kept_baseline_is_of_one_attack_and_one_task(tmp_path, stages, monkeypatch):
    theta = torch.eye(4, dtype=torch.float64)
    monkeypatch.setenv("HOME", str(tmp_path))
    with_baselines(tmp_path, victim_of(theta))
    for victim, settings, expected in (
        (victim_of(theta, noise=1e-9), None, 2),
        (victim_of(theta), {"whitened": {"_target_": "whitened"}, "gd": {"_target_": "gd", "steps": 9}}, 1),
        (victim_of(theta), {"whitened": {}, "gd": {"replay": str(tmp_path / "found.json")}}, 2),
        (victim_of(theta), {"whitened": {}, "gd": {"replay": "~/found.json"}}, 1),  # of another content
    ):
        stages.clear()
        with (tmp_path / "found.json").open("a") as file:
            file.write("{}")
        with_baselines(tmp_path, victim, settings)
        assert stages.count("baseline") == expected
    for path in (tmp_path / "baselines").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    stages.clear()
    with_baselines(tmp_path, victim_of(theta))
    assert stages.count("baseline") == 2


@pytest.mark.parametrize(
    ("module", "attacked_again"), [("results/plot.py", 0), ("methods/forget.py", 0), ("theory/spectrum.py", 2)]
)
def test_only_code_that_decides_an_attack_throws_baselines_away(tmp_path, monkeypatch, stages, module, attacked_again):
    package = shutil.copytree(PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("immunization.compute.keys.PACKAGE", package)
    victim = victim_of(torch.eye(4, dtype=torch.float64))
    with_baselines(tmp_path, victim)
    stages.clear()
    with (package / module).open("a") as file:
        file.write("# edited\n")
    with_baselines(tmp_path, victim)
    assert stages.count("baseline") == attacked_again


def test_a_resumed_audit_takes_nothing_that_other_code_measured(tmp_path, monkeypatch, stages):
    victim, attack = victim_of(torch.eye(4, dtype=torch.float64)), WhitenedProbe(steps=8)
    for source, attacked_again in (("this code", True), ("this code", False), ("other code", True)):
        monkeypatch.setattr("immunization.compute.keys.source", lambda *_, source=source: source)
        stages.clear()
        attacked(tmp_path / "kept.pt", victim, {"it": attack}, {"it": {}})
        assert bool(stages) is attacked_again


def shared(root: Path, victim: Victim) -> list[tuple[Path, str]]:
    """Where curves of its baseline are kept for other runs and machines."""
    return KeptCurves(root / ATTACKS, {}, victim, root / "kept", root / "published.safetensors").shared


def test_a_kept_baseline_is_of_one_trained_part(tmp_path):
    """An attack on what was trained is another one where another part was, also behind the same weights."""
    images = victims.colored_pair(tmp_path)
    some = [
        victims.net_victim(images, lambda model: None, "test_resnet", part) for part in ("layer4", "layer4", "layer3")
    ]
    keys = [shared(tmp_path, victim) for victim in some]
    assert keys[0] == keys[1] == keys[2]
    for attack in (FineTune(scope="trained"), FrozenBlocks()):
        beside = [attack.beside(victim) for victim in some]
        assert beside[0] == beside[1] != beside[2]
    assert {attack.beside(victim) for victim in some for attack in (BlockProbe(), FrozenBlocks(scope="layer4"))} == {()}


def test_a_map_behind_the_features_is_none_of_the_baseline(tmp_path):
    images = victims.colored_pair(tmp_path)
    some = [victims.net_victim(images, lambda model: None, "test_resnet", part) for part in ("fold", "layer4")]
    fold, layer4 = (shared(tmp_path, victim) for victim in some)
    assert fold == layer4
    for attack in (BlockProbe(), ClosedFormProbe(), FineTune(scope="trained")):
        fold, layer4 = (attack.beside(victim) for victim in some)
        assert (fold == layer4) is not attack.trains


def test_published_curves_hold_for_every_machine_and_one_suite_net_and_set_of_images(tmp_path, monkeypatch):
    root, images = tmp_path / "published.safetensors", victims.colored_pair(tmp_path)

    def attacked_with(victim: Victim, version: str) -> bool:
        """Whether the baseline had to be attacked."""
        attacked, attack = [], ClosedFormProbe()

        def run() -> AttackCurve:
            attacked.append(True)
            return attack.run(victim, "baseline")

        path = tmp_path / f"{len(list(tmp_path.glob('*.own')))}.own"
        kept = KeptCurves(path, {"it": {}}, victim, published=root, version=version)
        kept("it", attack, "baseline", run)
        assert kept.makers == {"here"}
        return bool(attacked)

    monkeypatch.setattr("immunization.runs.environment.maker", lambda device: "here")
    victim = victims.net_victim(images, lambda model: None, "test_resnet", "layer4")
    assert attacked_with(victim, "standard-3")
    monkeypatch.setattr("immunization.compute.keys.source", lambda *_: "other code")
    monkeypatch.setattr("immunization.runs.environment.arithmetic", lambda device: ("another machine",))
    assert not attacked_with(victim, "standard-3")
    assert attacked_with(victim, "standard-4")
    other = victims.net_victim(images, lambda model: None, "test_resnet", "layer4")
    shown = other.images("train")[0]
    shown[0, 0, 0, 0] += 1
    assert attacked_with(other, "standard-3")


def test_published_curves_need_a_numbered_suite(tmp_path):
    with pytest.raises(ConfigError, match="published has the curves of a numbered suite"):
        run([*QUICK, f"published={tmp_path}"], folder=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((ROOT / "leaderboard/baselines").glob("*.safetensors")), ids=lambda path: path.stem
)
def test_published_curves_are_what_this_code_measures(path, data_dir, tmp_path):
    """Three of each track; on another processor a few of the test rows may be rounded to the other side."""
    chosen = [f"experiment=leaderboard/{path.stem}", "method=identity", f"data_root={data_dir}", f"cache={tmp_path}"]
    experiment = resolve(compose(chosen))
    parts = assemble(experiment)
    model = parts.model.for_measurement()
    victim = Victim(model, Comparison(parts.pair, model, parts.start), parts.start)
    version = experiment.suite.version
    published = KeptCurves(tmp_path / "own", experiment.settings["attack"], victim, published=path, version=version)
    for name, samples, draw in (("closed_form_probe", 10, 0), ("whitened_probe", 20, 4), ("neighbours", 5, 1)):
        attack = experiment.attack[name]
        attack.samples, attack.seed = samples, draw
        curve = attack.run(victim, "baseline")
        missing = partial(pytest.fail, "it is not published")
        kept = published(f"{name}@{samples}.{draw}", attack, "baseline", missing)
        torch.testing.assert_close(kept.flops, curve.flops)
        torch.testing.assert_close(kept.test, curve.test, rtol=0, atol=0.01)
        assert (kept.scores != curve.scores).double().mean() < 0.01


OWN = """
from immunization.attacks import ClosedFormProbe


class Mine(ClosedFormProbe):
    said = {said!r}
"""


def test_an_edited_attack_of_ones_own_keeps_no_curve(tmp_path, monkeypatch):
    """Neither of an audit, nor of a baseline, nor of a published one; those of this package keep theirs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    victim = victims.net_victim(victims.colored_pair(tmp_path), lambda model: None, "test_resnet", "layer4")
    folders = tmp_path / "baselines", tmp_path / "published.safetensors"

    def attacked_with(said: str, stages: list[str]) -> None:
        (tmp_path / "mine.py").write_text(OWN.format(said=said))
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        attack = importlib.import_module("mine").Mine()
        run_own = attack.run
        attack.run = lambda victim, stage: stages.append(stage) or run_own(victim, stage)
        kept = KeptCurves(tmp_path / ATTACKS, {"it": {"_target_": "mine.Mine"}}, victim, *folders, version="standard-3")
        run_attacks({"it": attack}, victim, kept)

    seen: list[list[str]] = [[], [], [], []]
    for stages, said in zip(seen, ("a", "a", "edited", "edited"), strict=True):
        attacked_with(said, stages)
    assert [stages.count("baseline") for stages in seen] == [1, 0, 1, 0]
    assert len(read_curves(folders[1])) == 2


def test_a_curve_that_cannot_be_kept_is_measured_all_the_same(tmp_path, monkeypatch, caplog):
    victim = victim_of(torch.eye(4, dtype=torch.float64))
    expected = with_baselines(tmp_path / "kept", victim)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "baselines").write_text("a file where the folder should be")
    assert with_baselines(tmp_path / "none", victim) == expected
    assert "is not kept" in caplog.text
