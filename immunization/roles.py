"""Roles of tasks: a kind, `primary`, `harmful`, `benign` or `unseen`, and of further tasks `<kind>_<name>`."""

import re
from collections.abc import Sequence


def kind_of(role: str) -> str:
    """`harmful` for `harmful_5`."""
    return role.partition("_")[0]


def is_shown(role: str) -> bool:
    """Whether methods see the tasks of a role, and the preparation of the data is made from them."""
    return kind_of(role) in ("primary", "harmful")


def roles_of(kind: str, names: Sequence[object]) -> list[str]:
    """The roles of the tasks of one kind, the first of which has the plain one. Names are made safe and distinct."""
    texts = [re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip("-") or str(i) for i, name in enumerate(names, 1)]
    if len(set(texts)) < len(texts) or {"val", "test"} & set(texts):  # `harmful_val_x` is a split of `harmful`
        texts = [f"{text}-{i}" for i, text in enumerate(texts, 1)]
    return [kind, *(f"{kind}_{text}" for text in texts[1:])]
