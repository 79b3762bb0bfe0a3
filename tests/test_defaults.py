"""A default stands in the constructor and, for people to see, in the YAML: both say the same in every group."""

import inspect
import re
from collections import defaultdict
from functools import cache

import pytest
from helpers.options import OPTIONS, nodes
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from immunization.checks import check_arguments
from immunization.config import CONF, compose
from immunization.data.image_folders import open_task
from immunization.data.tables import dialect_of
from immunization.errors import ConfigError

COMPONENTS = ("attack", "dataset", "evaluation", "method", "model", "tracker")  # those of torch have torch's defaults
FILES = [CONF / group / f"{name}.yaml" for group, name in OPTIONS if group in COMPONENTS]
TARGETS = sorted({target for path in FILES for target in re.findall(r"_target_: ([\w.]+)", path.read_text())})


@cache
def options() -> dict[str, dict[str, DictConfig]]:
    """Every class that YAML files build -> option -> what the option says before a data set changes it."""
    found = defaultdict(dict)
    for (group, name), node in nodes().items():
        if node is not None and group in COMPONENTS:  # a composed method has the hyper-parameters of a data set
            own = compose([f"method={name}", "~hparams@_global_"]).method if group == "method" else node
            found[node._target_][f"{group}/{name}"] = own
    return found


def differing(target: str, node: DictConfig) -> dict[str, tuple[object, object]]:
    """Keys of `node` -> its value and the constructor's default, where there is one and it is another."""
    keys = inspect.signature(get_object(target)).parameters
    defaults = {name: key.default for name, key in keys.items() if key.default is not inspect.Parameter.empty}
    values = {key: value for key, value in OmegaConf.to_container(node, resolve=True).items() if value != "???"}
    both = {name: (values[name], default) for name, default in defaults.items() if name in values}
    both |= {name: (value, list(default)) for name, (value, default) in both.items() if isinstance(default, tuple)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("target", TARGETS)
def test_yaml_and_constructor_have_the_same_defaults(target, monkeypatch):
    """One option of each class; every other one of the same class is a variant, named for what it changes."""
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    found = {name: differing(target, node) for name, node in options()[target].items()}
    if (
        target == "immunization.data.image_folders"
    ):  # its mappings spell out the keys that null leaves at their defaults
        keys = inspect.signature(open_task).parameters
        for role in ("primary", "harmful", "benign", "unseen", "keep"):
            written, _ = found["dataset/image_folders"].pop(role)
            assert written == {name: keys[name].default for name in written}
    if target == "immunization.data.arrays":  # whose dialect null leaves at its default, too
        written, _ = found["dataset/arrays"].pop("csv")
        assert dialect_of(written) == dialect_of(None)
    assert {} in found.values(), found


def test_no_component_takes_a_seed_that_repeats_another():
    """Torch reads 32 bits of it: 2^32 would be 0 once more."""
    built = {target: get_object(target) for target in options()}
    seeds = [(target, key) for target, made in built.items() for key in inspect.signature(made).parameters]
    seeds = [(target, key) for target, key in seeds if key.endswith("seed")]
    assert len({target.split(".")[1] for target, _ in seeds}) == 3  # data, attacks, evaluations
    for target, key in seeds:
        check_arguments(built[target], {key: 2**32 - 1}, "group")
        with pytest.raises(ConfigError, match=rf"group\.{key} must be an integer of at least 0 and below 2\^32"):
            check_arguments(built[target], {key: 2**32}, "group")
