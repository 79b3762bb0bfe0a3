"""Offline runs of W&B read back from the file that `wandb sync` uploads."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import Message

from immunization.runs.wandb_again import records


def kept(folder: Path, kind: str) -> list[Message]:
    """The records of one kind of the one run in `folder`; waits for the last, which W&B's service writes late."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20
    while True:
        found = [(record.WhichOneof("record_type"), record) for record in records(path)]
        if "exit" in dict(found) or time.monotonic() > deadline:
            return [getattr(record, name) for name, record in found if name == kind]
        time.sleep(0.05)


def values(items: Iterable[Message]) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def summary(folder: Path) -> dict:
    found = {}
    for update in kept(folder, "summary"):
        found |= values(update.update)
    return found
