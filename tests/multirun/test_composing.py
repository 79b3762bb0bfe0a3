"""Configurations composed once for many jobs are those that Hydra composes for each."""

import pickle

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

import immunization.config  # noqa: F401  # its resolvers
from immunization.checks import CONF
from immunization.multirun.composing import SharedComposition


@pytest.fixture
def loader(monkeypatch):
    monkeypatch.setattr(GlobalHydra.instance(), "hydra", None)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield GlobalHydra.instance().hydra.config_loader


@pytest.fixture
def master(loader):
    return loader.load_configuration("config", ["hydra.sweep.dir=jobs"], RunMode.MULTIRUN)


JOBS = (
    ("method.lambda_P=0.5", "seed=1", "name=a"),
    ("method.lambda_P=1e-3", "seed=2", "name='b c'"),
    ("method.lambda_P=null", "seed=0x3", "name=true"),
    ("method.lambda_P=${seed}", "seed=3", "name=${dataset.name}_x"),
    ("seed=3", "method.lambda_P=2", "name=c"),
    ("method=imma", "seed=1", "tracker=none"),
    ("method=imma", "seed=2", "tracker=none"),
    ("method=identity", "seed=2", "tracker=none"),
    ("tags=[a]", "seed=2"),
    ("tags=[a,b]", "seed=3"),
    ("dataset=mnist", "dataset.harmful=4", "pair=1-2", "optimizer.lr=0.1"),
    ("dataset=mnist", "dataset.harmful=7", "pair=1-3", "optimizer.lr=0.2"),
    ("method=imma", "method.weight=0.5", "seed=1"),
    ("method=imma", "method.weight=2", "seed=2"),
    ("method.weight=0.7", "method=imma", "seed=2"),
    ("method.weight=0.9", "method=imma", "seed=3"),
    ("method=imma", "method=identity", "seed=1"),
    ("method=imma", "method.lambda_P=2", "seed=1"),
    ("method=identity", "++method={epochs: 3}", "method.epochs=4"),
    ("method=identity", "++method={epochs: 3}", "method.epochs=5"),
    ("optimizer@optimizer=sgd", "optimizer.lr=0.1"),
    ("optimizer@optimizer=sgd", "optimizer.lr=0.2"),
    ("+dataset.new=1", "seed=1"),
    ("method.lambda_H=1", "++method.lambda_H=7"),
    ("method.lambda_H=2", "++method.lambda_H=7"),
    ("optimizer.lr=0.3", "++optimizer={lr: 0.1}"),
    ("optimizer.lr=0.4", "++optimizer={lr: 0.1}"),
    ("hydra.job.name=a", "seed=1"),
    ("hydra.job.name=b", "seed=2"),
    ("~optimizer.lr", "seed=5"),
    (),
    (),
)


def test_the_configurations_are_those_of_hydra(loader, master):
    shared = SharedComposition(loader)
    told = []
    for words in JOBS:
        answers = []
        for compose in (loader.load_sweep_config, shared):
            try:
                answers.append(OmegaConf.to_container(compose(master, list(words))))
            except HydraException as error:
                answers.append(str(error))
        assert answers[0] == answers[1], words
        told.append(type(answers[0]))
    assert told.count(str) == 5


def test_jobs_that_differ_in_values_are_composed_once(loader, master, monkeypatch):
    calls = []
    compose = loader.load_sweep_config
    monkeypatch.setattr(loader, "load_sweep_config", lambda *given: calls.append(given) or compose(*given))
    shared = SharedComposition(loader)
    for seed in range(20):
        assert shared(master, [f"seed={seed}", f"method.lambda_P={seed / 7}"]).seed == seed
    assert len(calls) == 1
    for weight in range(1, 20):
        assert shared(master, ["method=imma", f"method.weight={weight}"]).method.weight == weight
    assert len(calls) == 2


def test_it_travels_to_the_processes_of_launchers(loader, master):
    shared = SharedComposition(loader)
    shared(master, ["seed=1"])
    assert pickle.loads(pickle.dumps(shared))(master, ["seed=2"]).seed == 2
