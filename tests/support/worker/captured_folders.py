"""Folders of captured records for tests, also with records that the target would not produce."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from specdecode_worker.capture import Record
from specdecode_worker.capture.records import encode
from specdecode_worker.capture.segments import Retention, SegmentWriter


def write(folder: Path, records: Sequence[Record]) -> Path:
    segments = SegmentWriter(folder, Retention(1e12, 2**24))
    for record in records:
        segments.append(encode(record))
    segments.close()
    return folder


def noise(records: Sequence[Record]) -> list[Record]:
    """Return the records with random tokens as answers."""
    generator = torch.Generator().manual_seed(0)

    def spoiled(record: Record) -> Record:
        out = torch.randint(0, 250, (record.output_length,), generator=generator).tolist()
        return msgspec.structs.replace(record, tokens=(*record.tokens[: record.prompt_length], *out))

    return [spoiled(record) for record in records]
