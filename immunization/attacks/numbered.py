"""The attacks of the suite that results are stated with, so that a changed one does not pass for it."""

import hashlib
import json
from collections.abc import Mapping

from immunization.attacks.base import Attack

NUMBERED: dict[str, dict[str, str]] = {
    "standard-4": {
        "block_probe": "501fe470",
        "frozen_blocks": "c33a2359",
        "block_probe_renewed": "cdbdb3a6",
        "frozen_blocks_renewed": "faf9c269",
        "closed_form_probe": "258d0fd3",
        "whitened_probe": "95fa503b",
        "logistic_probe": "38207f26",
        "neighbours": "145c36ad",
        "finetune_trained": "78cfbab0",
        "fresh_part": "a6d29471",
        "random_net": "d765c98f",
        "raw_inputs": "aeaef797",
    }
}
"""By version, each attack's `fingerprint`."""


def changes(attacks: Mapping[str, Attack], version: str, most: int | None = None) -> list[str]:
    """How attacks, on at most `most` images of each class, differ from a suite in `NUMBERED`; more of them do not."""
    known = NUMBERED.get(version, {})
    few = [f"with at most {most} images of each class"] if known and most else []
    missing = [f"without {name}" for name in known if name not in attacks]
    other = [name for name in known if name in attacks and fingerprint(attacks[name]) != known[name]]
    return few + missing + [f"another {name}" for name in other]


def fingerprint(attack: Attack) -> str:
    """Of its class and options."""
    text = json.dumps([type(attack).__name__, attack.options], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
