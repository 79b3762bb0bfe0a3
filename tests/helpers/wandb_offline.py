"""Offline runs of W&B read back from the file that `wandb sync` uploads."""

import json
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.message import Message
from wandb.proto.wandb_internal_pb2 import Record

WITHOUT_ACCOUNT = dict.fromkeys(("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
"""What is not in the environment of somebody without an account."""


def records(path: Path) -> Iterator[Record]:
    """The records of a run-<id>.wandb file: LevelDB's log format after 7 bytes; a cut-off end is left out."""
    data, payload = path.read_bytes(), b""
    position, block, header = 7, 32768, 7
    while position + header <= len(data):
        if block - position % block < header:  # the rest of a block is too short for a header
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += header + length
        if position > len(data):  # still being written
            return
        payload += data[position - length : position]
        if kind in (1, 4):  # the whole record, or the last part of one
            yield Record.FromString(payload)
            payload = b""


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
