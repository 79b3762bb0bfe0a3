"""The configurations of a multirun's jobs, composed once for all that differ in values alone."""

import pickle
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf


class SharedComposition:
    """`load_sweep_config` of a Hydra loader, which parses every YAML and merges all groups anew for every job.

    Here it is called once for the jobs of one shape: the same words in the same order, but for scalar values of keys
    that are no groups. The others get a copy with their own values, which is what the loader's merge ends with.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self.compose, self.groups_of = loader.load_sweep_config, loader.get_group_options
        self.parsed: dict[str, Word] = {}
        self.composed: dict[tuple[str, ...], bytes] = {}

    def __call__(self, master: DictConfig, words: Sequence[str]) -> DictConfig:
        """The configuration of the job with these overrides; errors are those of Hydra."""
        parsed = [self._parse(word) for word in words]
        # the options of groups are chosen before all values, wherever they stand
        keys = sorted(word.key for word in parsed if not word.chooses)
        twice = any(f"{key}.".startswith(f"{before}.") for before, key in pairwise(keys))  # the order decides
        if twice or any(re.match("hydra[./]", word.key) for word in parsed):
            return self.compose(master, list(words))
        shape = tuple(word.key if word.varies else text for text, word in zip(words, parsed, strict=True))
        if shape not in self.composed:
            config = self.compose(master, list(words))
            self.composed[shape] = pickle.dumps(config)
            return config
        config = pickle.loads(self.composed[shape])
        for word in parsed:
            if word.varies:
                OmegaConf.update(config, word.key, word.value)
        config.hydra.overrides.task = list(words)
        job = config.hydra.job
        rule = job.config.override_dirname
        named = sorted(word for word in words if word.partition("=")[0].lstrip("+~") not in rule.exclude_keys)
        job.override_dirname = rule.item_sep.join(named).replace("=", rule.kv_sep)
        return config

    def _parse(self, text: str) -> "Word":
        """Each word is parsed once."""
        if text not in self.parsed:
            (override,) = OverridesParser.create().parse_overrides([text])
            key, value = override.key_or_group, override.value()
            plain = not (override.is_delete() or override.is_add() or override.is_force_add())
            group = bool(self.groups_of(key))
            varies = plain and not group and override.package is None and isinstance(value, str | int | float | None)
            chooses = plain and group and isinstance(value, str | list)
            self.parsed[text] = Word(key, value, varies, chooses)
        return self.parsed[text]


class Word(NamedTuple):
    """An override: `varies` if its value may be a job's own, `chooses` if it names the option of a group."""

    key: str
    value: Any
    varies: bool
    chooses: bool
