"""Settings that a search found, written for others and given again."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from immunization.attacks.base import AttackCurve
from immunization.attacks.recipe import Recipe
from immunization.attacks.victim import Stage
from immunization.checks import check_arguments
from immunization.errors import ConfigError


def found_settings(kind: str, curves: Mapping[Stage, AttackCurve]) -> dict[str, Any] | None:
    """The settings found for each stage, and what they reach with each seed; None where nothing was searched for."""
    found = {
        stage: curve.found | {"validation": curve.val.max().item(), "finals": list(curve.finals)}
        for stage, curve in curves.items()
        if curve.found is not None
    }
    return {"attack": kind, **found} if found else None


def read_recipes(path: str, kind: str, parts: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by stage from a file that an attack of class `kind` wrote; raises ConfigError for any other."""
    try:
        content = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"attack.*.replay={path} cannot be read: {error}") from error
    if not isinstance(content, dict) or "attack" not in content or len(content) < 2:
        raise ConfigError(f"attack.*.replay={path} holds no settings; give the attack_<name>.json of a search")
    if content["attack"] != kind:
        raise ConfigError(f"attack.*.replay={path} holds settings of {content['attack']}, and not of {kind}")
    return {stage: _recipe(found, path, parts) for stage, found in content.items() if stage != "attack"}


def _recipe(found: object, path: str, parts: Sequence[str]) -> Recipe:
    values = found.get("recipe") if isinstance(found, dict) else None
    try:
        check_arguments(Recipe, values or {}, f"attack.*.replay={path}: recipe")
        recipe = Recipe(**(values or {}))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"attack.*.replay={path}: {error}; it was edited, or written by another version") from error
    if recipe.part not in parts:
        raise ConfigError(f"attack.*.replay={path} trains {recipe.part}; this attack trains {' or '.join(parts)}")
    return recipe
