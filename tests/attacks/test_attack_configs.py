"""conf/attack: options that inherit, choices of several, and defaults that constructor and YAML state alike."""

import hashlib
import json

import pytest
from omegaconf import OmegaConf

from immunization.attacks.suite import changes
from immunization.checks import CONF
from immunization.config import build, compose
from immunization.errors import ConfigError
from immunization.runs.interpretation import SUITES as NUMBERS
from immunization.runs.interpretation import newer

READ = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONF / "attack").glob("*.yaml")}
SEVERAL = {name for name, content in READ.items() if "defaults" in content and "_here_" not in str(content["defaults"])}
SUITES = {"quick", "standard", "nightly"}
FILES = {name: content for name, content in READ.items() if name not in SEVERAL}
HEIRS = {name: content for name, content in FILES.items() if "common/" not in str(content.get("defaults", "common/"))}
WHOLE = OmegaConf.to_container(compose([f"attack=[{','.join(sorted(FILES))}]"]).attack)


def test_all_options_together_are_those_asked_for():
    assert sorted(WHOLE) == sorted(FILES)


def test_one_option_may_stand_for_several():
    assert {"probes", "depth", "depth_vit"} | SUITES == SEVERAL
    probes, nightly = (set(compose([f"attack=[{name}]"]).attack) for name in ("probes", "nightly"))
    assert {name for name in FILES if name.endswith("probe")} <= probes | nightly <= set(FILES)
    assert compose(["attack=[probes,lora]", "attack.adam.steps=3"]).attack.adam.steps == 3
    assert set(compose(["attack=[probes,lora]"]).attack) == probes | {"lora"}


def _numbered(name):
    content = compose([f"attack=[{name}]"])
    numbered = {key: OmegaConf.to_container(content[key], resolve=True) for key in ("attack", "suite")}
    came_later = {"benign": [], "minutes": None, "most": None}  # at these values they change nothing
    numbered["suite"] = {key: value for key, value in numbered["suite"].items() if came_later.get(key, ...) != value}
    return numbered


@pytest.mark.parametrize(
    ("name", "version", "digest"),
    [("standard", "standard-6", "a51f69971c96a02a"), ("depth", "depth-4", "01da4e6de63746fe")],
)
def test_a_numbered_suite_is_never_changed(name, version, digest):
    """Whoever changes an attacker, its settings or the list gives the suite another number, and this test its hash."""
    numbered = _numbered(name)
    found = hashlib.sha256(json.dumps(numbered, sort_keys=True).encode()).hexdigest()
    assert (numbered["suite"]["version"], found[:16]) == (version, digest)


def test_a_changed_suite_says_in_what():
    def attacks(*overrides):
        config = compose([*overrides])
        return {name: build(config, f"attack.{name}") for name in config.attack}

    assert not changes(attacks("attack=[standard,adam]"), "standard-6")
    others = attacks("attack=[standard]", "attack.fresh_part.epochs=[1]", "~attack.neighbours")
    assert changes(others, "standard-6") == ["without neighbours", "another fresh_part"]
    assert changes(attacks("attack=[standard]"), "standard-6", 5) == ["with at most 5 images of each class"]
    assert not changes(others, "mine-1", 5)


@pytest.mark.parametrize("name", ["quick", "standard", "nightly", "depth", "depth_vit"])
def test_every_key_of_a_suite_can_be_set(name):
    suite = build(compose([f"attack=[{name}]", "suite.benign=[block_probe]", "suite.most=3"]), "suite")
    assert (suite.benign, suite.most) == (["block_probe"], 3)


def test_pages_know_the_numbers_of_the_suites():
    """Rows and runs of an earlier number are marked by them."""
    written = [CONF / "experiment" / f"{name}.yaml" for name in ("forget_blocks", "forget_curves")]
    files = [*(CONF / "attack" / f"{name}.yaml" for name in sorted(SEVERAL - {"probes"})), *written]
    versions = {OmegaConf.load(path).suite.version for path in files}
    assert versions == {f"{name}-{number}" for name, number in NUMBERS.items()}
    assert [newer(suite) for suite in ("standard-3", "standard-6", "depth-vit-2", "mine-1", "")] == [
        "standard-6", "", "depth-vit-3", "", ""]  # fmt: skip


def test_suites_grow_from_quick_to_nightly():
    quick, standard, nightly = map(_numbered, ("quick", "standard", "nightly"))
    assert (nightly["suite"]["version"], quick["suite"]["version"]) == ("nightly-8", "quick-7")
    assert quick["attack"].keys() < standard["attack"].keys() < nightly["attack"].keys()


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


def test_options_of_an_attack_that_is_not_chosen_are_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"attack.adam has options and no _target_: choose it \(attack=\[...,adam\]"):
        build(compose(["attack=[linear_probe]", "+attack.adam.steps=3"]), "attack.adam")


def test_settings_that_cannot_be_are_refused_by_their_key():
    with pytest.raises(
        ConfigError, match=r"^attack\.adam\.rates: learning rates must be numbers of at least 0, not \[\]"
    ):
        build(compose(["attack=[adam]", "attack.adam.rates=[]"]), "attack.adam")


@pytest.mark.parametrize("value", ["null", "3"])
def test_what_is_no_attack_is_refused_by_its_name(value):
    with pytest.raises(ConfigError, match=r"has no _target_: to do without adam, leave it out of attack=\[...\]"):
        build(compose(["attack=[adam]", f"attack.adam={value}"]), "attack.adam")
