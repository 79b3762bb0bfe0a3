"""Options and values of the YAML groups with their comments, for `--help` and for messages."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf, errors
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from immunization.checks import CONF, SWEEPS, read_yaml
from immunization.errors import ConfigError

WIDTH, COLUMN = 118, 26


def options(group: str) -> tuple[str, list[str]]:
    """`group`, or the closest one above it that exists, and its options, those of --config-dir included."""
    given = re.search(r"(?:^|\0)(?:--config-dir|-cd)[=\0]([^\0]+)", "\0".join(sys.argv[1:]))
    folders = [CONF, SWEEPS.parent, *([Path(given[1])] if given else [])]
    while group:
        if known := {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}:
            return group, sorted(known)
        group = group.rpartition("/")[0]
    return group, []


@contextmanager
def explaining() -> Iterator[None]:
    """Inside, what Hydra or OmegaConf refuse is a ConfigError with the remedy."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explained(error)) from error


def explained(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf in one line, with the remedy where it names none."""
    cause = error.__cause__
    if isinstance(cause, errors.ConfigKeyError | errors.ConfigAttributeError) and cause.parent_node is not None:
        keys = ", ".join(str(key) for key in cause.parent_node if not str(key).startswith("_"))
        group, _, name = str(cause.full_key).rpartition(".")
        remedy = f"allowed here are {keys}" if keys else f"choose a {group} first"
        if not (keys or (CONF / group).is_dir()):  # a mapping of anything, which the configuration leaves empty
            remedy = f"if it is right, +{cause.full_key}=<value> adds it"
        if cause.full_key in ("attack", "evaluation"):  # of those none was chosen: the message has the whole key
            whole = re.search(rf"'{cause.full_key}\.(\w+)", str(error))
            group, name = str(cause.full_key), whole[1] if whole else ""
        if group == "suite" and not keys:
            remedy = "choose a numbered suite first, such as attack=[standard]"
        elif group in ("attack", "evaluation") and name in options(group)[1]:
            chosen = [] if cause.full_key == group else [key for key in cause.parent_node if key != name]
            remedy = f"choose it first, {group}=[{','.join(map(str, [*chosen, name]))}]"
        having = [path.stem for path in sorted((CONF / group).glob("*.yaml")) if f"\n{name}: " in text_of(path)]
        also = f"; {group}={' and '.join(having)} {'has' if len(having) == 1 else 'have'} it" if having else ""
        if "arguments" in cause.parent_node:
            also += f"; one of timm.create_model goes to +{group}.arguments.{name}=<value>"
        return f"there is no key {cause.full_key}; {remedy}{also}"
    first = str(error).partition("\n")[0]
    if "'hydra/launcher/" in str(error):
        return f"{first}: install hydra-joblib-launcher, hydra-submitit-launcher or hydra-ray-launcher"
    if told := re.match(r"Error resolving interpolation '(.*?)', possible interpolation keys: (.*)", first):
        group = min(set(re.findall(r"\$\{(\w+)\}", told[1])) - set(told[2].split(", ")), default=told[1])
        return f"{group} takes the name of one option, {group}=<option>, and no list"
    if isinstance(error, MissingConfigException):
        above, _, name = str(error.missing_cfg_file).rpartition("/")
        group, known = options(above)
        known = known or list(error.options or ())
        close = get_close_matches(name, known)
        meant = f"; did you mean {' or '.join(close)}" if close else ""
        also = f"; available for {group or above}: {', '.join(known)}" if known else ""
        return first.removeprefix("In 'config': ").rstrip(".") + meant + also
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return (
            f"{error.override}: Hydra cannot read it; a value with = , ( ) {{ }} or letters beyond ASCII, as the "
            f"folder of a job has, needs two pairs of quotes: \"{key}='{value}'\""
        )
    if isinstance(error, InterpolationResolutionError | MissingMandatoryValue):
        told, _, of_a_resolver = first.partition(" raised while resolving interpolation: ")
        if told == "Recursive interpolation detected":
            told = "its value leads back to itself"
        remedy = "" if isinstance(error, MissingMandatoryValue) else "; look at the values with ${...}"
        return of_a_resolver or f"{error.full_key}: {told}{remedy}"
    return " ".join((f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error)).split())


def text_of(path: Path) -> str:
    """The YAML of an option and of the common options that it inherits."""
    text = path.read_text()
    return text + "".join(text_of(path.parent / f"{name}.yaml") for name in re.findall(r"([\w/]+)@_here_", text))


def groups() -> str:
    """An entry for each group, its default marked; options in folders below a group stand behind its own."""
    pairs = [pair for entry in read_yaml("config")["defaults"] if isinstance(entry, dict) for pair in entry.items()]
    pairs.sort(key=lambda pair: pair[0] == "scheduler")  # it stands first in config.yaml for what it asks of the others
    return "\n".join(_entry(group, _listed(group, chosen)) for group, chosen in pairs if not {" ", "@"} & {*group})


def _listed(group: str, chosen: str | list[str] | None) -> str:
    below = sorted((CONF / group).glob("*/")) if group == "experiment" else []  # the others' are for no user
    folders = [group, *(f"{group}/{path.name}" for path in below)]
    found = [f"{folder}/{name}" for folder in folders for name in options(folder)[1]]
    names = [name.removeprefix(f"{group}/") for name in found]
    defaults = chosen if isinstance(chosen, list) else [chosen]
    return ", ".join(f"{name}*" if name in defaults else name for name in names)


def values() -> str:
    """An entry for each value at the top of config.yaml, with its comment."""
    entries, above = [], ""
    block = (CONF / "config.yaml").read_text().partition("\nname:")[2].partition("\nhydra:")[0].strip()
    for line in f"name:{block}".splitlines():
        indent, key, value, comment = re.fullmatch(r"( *)(\w+): *(.*?)(?: *# (.*))?", line).groups()
        name = f"{above}.{key}" if indent else key
        above = above if indent else key
        if value:
            entries.append(_entry(name if "${" in value else f"{name}={value}", comment))
    return "\n".join(entries)


def _entry(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"{name:<{COLUMN - 2}}  ", subsequent_indent=" " * COLUMN)


OmegaConf.register_new_resolver("usage_folder", lambda: str(CONF), replace=True)
OmegaConf.register_new_resolver("usage_groups", groups, replace=True)
OmegaConf.register_new_resolver("usage_values", values, replace=True)
