"""conf/attack: options that inherit, choices of several, and defaults that constructor and YAML state alike."""

import inspect

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from immunization.config import CONF, build, compose

FILES = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONF / "attack").glob("*.yaml")}
HEIRS = {name: content for name, content in FILES.items() if "defaults" in content}
WHOLE = OmegaConf.to_container(compose([f"attack=[{','.join(sorted(FILES))}]"]).attack)


def test_all_options_together_are_those_asked_for():
    assert sorted(WHOLE) == sorted(FILES)
    assert len(HEIRS) == 14


@pytest.mark.parametrize("name", HEIRS)
def test_an_heir_is_the_option_it_inherits_from_with_its_own_keys(name):
    own = dict(HEIRS[name])
    base = own.pop("defaults")[0].removesuffix("@_here_")
    assert own
    assert WHOLE[name] == WHOLE[base] | own != WHOLE[base]
    alone = OmegaConf.to_container(compose([f"attack=[{name}]"]).attack)
    assert alone == {name: WHOLE[name]}


def test_the_command_line_changes_one_of_two_relatives():
    config = compose(["attack=[lora,lora_sgd]", "attack.lora_sgd.steps=3", "attack.lora_sgd.rates=[1.0]"])
    assert (config.attack.lora.steps, config.attack.lora_sgd.steps) == (64, 3)
    assert build(config, "attack.lora_sgd").settings == [1.0]
    assert build(config, "attack.lora").settings == [0.001, 0.01, 0.1]


@pytest.mark.parametrize("name", sorted(set(FILES) - set(HEIRS)))
def test_constructor_and_yaml_state_the_same_defaults(name):
    parameters = inspect.signature(get_object(WHOLE[name]["_target_"])).parameters.values()
    stated = {p.name: list(p.default) if isinstance(p.default, tuple) else p.default for p in parameters}
    assert {key: value for key, value in WHOLE[name].items() if key != "_target_"} == stated
