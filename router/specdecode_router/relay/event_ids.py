"""Ids of server-sent events: what a router needs to send the rest of a stream, so that no router has to remember it.

An id has two parts, joined by a period. The first one is the same in all ids of a stream (``StreamIdentity``). The
second one is the position behind the event (``EventPosition``), and is readable: ``o1`` after one opening event,
``12,7`` after 12 tokens of the first choice and 7 of the second one, ``12+1,7`` after one of several events of the
first choice's next step, and ``12,9e1`` after one event behind all tokens.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

import msgspec

from specdecode_worker.contract.internal_stream import Open

MAX_ID_LENGTH = 4096
_VERSION = 1
_DIGEST_BYTES = 8
_MAX_CREATED = 2**53
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_POSITION = re.compile(r"o(\d{1,5})|(\d{1,8}(?:\+\d{1,4})?(?:,\d{1,8}(?:\+\d{1,4})?)*)(?:e(\d{1,4}))?")


def is_valid_request_id(text: str) -> bool:
    """Return whether an id that a client sent can be used in responses, logs and ids of events."""
    return _REQUEST_ID.fullmatch(text) is not None


class StreamIdentity(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Facts that make a stream the same on every router and worker."""

    version: int = _VERSION
    request_id: str
    created: int
    """Unix time of the response in seconds."""
    seed: int
    """Seed where the body has none."""
    request_digest: bytes
    """Digest of the client's request, from ``request_digest``."""
    start_digest: bytes = b""
    """Digest of how the worker understood it, from ``start_digest``; empty before the first worker has answered."""

    def encode(self) -> str:
        """Return the first part of the ids."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).rstrip(b"=").decode()


@dataclass(frozen=True, slots=True)
class EventPosition:
    """Events of a stream that a client has received."""

    opening: int | None = None
    """Events before the first token; None if the client has all of them."""
    choices: tuple[tuple[int, int], ...] = ()
    """Tokens of each choice whose events the client has, and the number of events of its next step with events."""
    closing: int = 0
    """Events behind all tokens."""

    def encode(self) -> str:
        """Return the second part of an id."""
        if self.opening is not None:
            return f"o{self.opening}"
        choices = ",".join(f"{tokens}+{events}" if events else f"{tokens}" for tokens, events in self.choices)
        return f"{choices}e{self.closing}" if self.closing else choices

    @property
    def delivered(self) -> tuple[int, ...] | None:
        """Tokens of each choice whose events the client has; None if it has none."""
        return None if self.opening is not None else tuple(tokens for tokens, _ in self.choices)


def parse_event_id(text: str) -> tuple[StreamIdentity, EventPosition]:
    """Return the parts of an id. Raises ValueError if it is none."""
    identity, _, position = text.partition(".")
    match = _POSITION.fullmatch(position)
    if match is None or len(text) > MAX_ID_LENGTH:
        raise ValueError("it is no id of an event")
    try:
        packed = base64.b64decode(identity + "=" * (-len(identity) % 4), altchars=b"-_", validate=True)
        made = msgspec.msgpack.decode(packed, type=StreamIdentity)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise ValueError("it is no id of an event") from None
    if not is_valid_request_id(made.request_id) or not 0 <= made.created < _MAX_CREATED:
        raise ValueError("it is no id of an event")
    if made.version != _VERSION:
        raise ValueError("it is an id of another version of the router")
    if match[1] is not None:
        return made, EventPosition(opening=int(match[1]))
    choices = (one.partition("+") for one in match[2].split(","))
    counts = tuple((int(tokens), int(events or 0)) for tokens, _, events in choices)
    return made, EventPosition(choices=counts, closing=int(match[3] or 0))


def request_digest(route: str, fields: dict[str, object], tenant: str) -> bytes:
    """Return the digest of a client's request. The order of its fields makes no difference."""
    return _digest(msgspec.json.encode([route, tenant, fields], order="sorted"))


def start_digest(opened: Open) -> bytes:
    """Return the digest of everything that the text of a stream depends on."""
    return _digest(msgspec.msgpack.encode((opened.compatibility_key, opened.prompts, opened.choices)))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
