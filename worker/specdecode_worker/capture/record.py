"""One served request as it is kept: token ids and how they were chosen, enough to choose them again. No text.

On disk a record is msgpack, a map by field name; readers ignore fields that they do not know.
"""

from __future__ import annotations

import hashlib

import msgspec

from specdecode_worker.engine.ipc.messages import Sampling


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` are prompt and answer; the answer starts at ``prompt_length``."""

    tokens: tuple[int, ...]
    prompt_length: int
    sampling: Sampling
    """With its seed; log-probabilities that the client wanted are left out."""
    target: str
    """Hash of the target's weights."""
    task: str
    time_seconds: float
    """Unix time at which the answer ended."""
    opening: str
    """``opening_of`` the conversation: its turns have the same, and fall into the same split."""
    share: float = 1.0
    """Of such requests that were captured: this record stands for 1/share of them."""

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length


def opening_of(text: str) -> str:
    """16 hex digits of SHA-256 over the opening user text, apart from how its whitespace is spread."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)


def encoded(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decoded(body: bytes) -> Record:
    """Raises msgspec.DecodeError, ValidationError among them."""
    return _DECODER.decode(body)
