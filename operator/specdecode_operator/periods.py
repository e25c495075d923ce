"""Offsets of deployments within a period, so that what recurs for all of them is spread over it. Pure."""

from __future__ import annotations

import zlib

from specdecode_operator.types import Key


def offset_of(key: Key, period: float) -> float:
    """Return the offset of a deployment within ``period``, in seconds: a hash of its key, the same after a restart."""
    return period * zlib.crc32("/".join(key).encode()) / 2**32
