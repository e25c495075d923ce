"""Redaction hooks of the kind that a user might write, including faulty ones."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from specdecode_worker.capture import Record


def without_opening(record: Record) -> Record:
    return msgspec.structs.replace(record, opening="")


def odd_ones(record: Record) -> Record | None:
    return record if record.sampling.seed % 2 else None


def failing(record: Record) -> Record:
    raise RuntimeError(f"a secret: {record.tokens}")


def wrong(record: Record) -> Any:
    return {"tokens": record.tokens}


def spoiling(record: Record) -> Record:
    return msgspec.structs.replace(record, task=object())  # type: ignore[arg-type]


HELD = threading.Event()
"""Set while the hook `hanging` returns."""
HELD.set()


def hanging(record: Record) -> Record:
    HELD.wait(60)
    return record


def ending(record: Record) -> Record:
    raise SystemExit(f"a secret: {record.tokens}")
