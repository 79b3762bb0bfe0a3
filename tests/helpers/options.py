"""Every option of the YAML groups as it stands in a composed configuration, composed as seldom as can be."""

from functools import cache
from itertools import zip_longest

from omegaconf import DictConfig

from immunization.checks import CONF
from immunization.config import compose

SETUPS = ("experiment", "hparams", "hydra", "debug", "launcher", "sweeper", "sweeps")
"""Groups of values for other groups, without objects of their own."""

MULTIPLE = ("evaluation", "attack")
"""Groups of which a run takes several options."""

LISTS = ("probes", "quick", "standard", "nightly", "depth", "depth_vit")
"""Options that stand for several."""

OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in SETUPS and path.stem not in LISTS
)


@cache
def nodes() -> dict[tuple[str, str], DictConfig | None]:
    """(group, option) -> that option's own part of a configuration; each composition chooses one of every group."""
    groups = {group: [name for other, name in OPTIONS if other == group] for group, _ in OPTIONS}
    several = {group: groups.pop(group) for group in MULTIPLE}
    whole = compose([f"{group}=[{','.join(names)}]" for group, names in several.items()])
    found = {(group, name): whole[group][name] for group, names in several.items() for name in names}
    for names in zip_longest(*groups.values()):
        chosen = {group: name for group, name in zip(groups, names, strict=True) if name}
        config = compose([f"{group}={name}" for group, name in chosen.items()])
        found |= {(group, name): config[group] for group, name in chosen.items()}
    return found
