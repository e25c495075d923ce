"""Record of one served request: its token ids and sampling parameters, enough to replay it. It holds no text.

On disk a record is a msgpack map by field name. Readers ignore unknown fields.
"""

from __future__ import annotations

import hashlib

import msgspec

from specdecode_worker.engine.ipc.messages import Sampling


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One served request.

    ``tokens`` are the prompt followed by the output, which starts at index ``prompt_length``.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    sampling: Sampling
    """Sampling parameters with the seed, without the log-probabilities that the client requested."""
    target: str
    """Hash of the target's weights."""
    task: str
    time_seconds: float
    """Unix time at which the output ended."""
    opening: str
    """`opening_hash` the conversation.

    All turns of a conversation share it, so that they are assigned to the same split.
    """
    share: float = 1.0
    """Share of such requests that were captured: this record represents 1/share of them."""
    user: str = ""
    """Hash of the request's field ``user`` (`subject_keys`); empty without one. Records are deleted by it."""
    permitted: bool = False
    """True if the client expressly permitted the capture. Other records are deleted when consent becomes OptIn."""

    @property
    def output_length(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_length


def opening_hash(text: str) -> str:
    """Return 16 hex digits of the SHA-256 of the first user text.

    Differences in white space do not change it.
    """
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


class Stamp(msgspec.Struct, frozen=True):
    """Fields of a record by which it is deleted. Reading them is faster than decoding the record."""

    time_seconds: float
    user: str = ""
    permitted: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)
_STAMP_DECODER = msgspec.msgpack.Decoder(Stamp)


def encode(record: Record) -> bytes:
    """Return the msgpack encoding of a record."""
    return _ENCODER.encode(record)


def decode(body: bytes) -> Record:
    """Decode a record. Raise msgspec.DecodeError, or its subclass ValidationError, if the bytes are invalid."""
    return _DECODER.decode(body)


def decode_stamp(body: bytes) -> Stamp:
    """Decode the stamp of an encoded record. Raise msgspec.MsgspecError if the bytes are invalid."""
    return _STAMP_DECODER.decode(body)
