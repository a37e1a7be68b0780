"""Reading what a run has logged from the files of its loggers."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

LOGGERS = Path(__file__).parents[2] / "configs" / "loggers"


OPTIONS = ("--methods.fot", "FOT", "--schedule.evaluate_every", "2")


def records_of(path: Path) -> list[Record]:
    """Read all records of a ``.wandb`` file; wait up to a minute until wandb's own process has written the last."""
    deadline = time.monotonic() + 60
    while True:
        records = list(wandb_records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.2)


def history(records: list[Record]) -> list[dict[str, Any]]:
    """The logged steps as key -> value."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_records(path: Path) -> Iterator[Record]:
    """The records of a ``.wandb`` file: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes."""
    data, position, collected = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            return  # still being written
        collected += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(collected)
            collected = b""
