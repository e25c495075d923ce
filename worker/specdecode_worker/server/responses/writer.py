"""How a route writes its answers: the head that every object of one answer shares, and its choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specdecode_worker.server.responses.objects import Choice, Piece, Scored, Statistics
from specdecode_worker.server.responses.usage import metrics, usage
from specdecode_worker.server.text.token_bytes import Vocabulary

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer needs to know beyond its text."""

    request_id: str
    model: str
    fingerprint: str
    """Of the weights and this program: what else could change the text of a seeded request."""
    vocabulary: Vocabulary
    logprobs: bool
    """They were asked for."""


class Format:
    """One answer."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, head: Head) -> None:
        self._about = head
        self._created = int(time.time())

    @property
    def request_id(self) -> str:
        return self._about.request_id

    def whole(self, choices: Sequence[Choice], statistics: Sequence[Statistics] | None = None) -> Json:
        """The answer of a request that does not stream; ``statistics`` where more was generated than is shown."""
        took = [choice.statistics for choice in choices] if statistics is None else statistics
        return {
            **self._named(self.kind),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(took),
            "metrics": metrics(took),
        }

    def opening(self, index: int) -> Json | None:
        """The chunk before any text, if this route has one."""
        return None

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """What goes out for a piece of one choice; nothing while it cannot be told yet what it is."""
        raise NotImplementedError

    def closing(self, statistics: Sequence[Statistics]) -> Json:
        """The chunk with the usage of the whole stream."""
        return {
            **self._named(self.chunk_kind),
            "choices": [],
            "usage": usage(statistics),
            "metrics": metrics(statistics),
        }

    def _chunk(self, choice: Json) -> Json:
        return {**self._named(self.chunk_kind), "choices": [choice]}

    def _named(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self._about.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._about.model,
            "system_fingerprint": self._about.fingerprint,
        }

    def _choice(self, index: int, choice: Choice) -> Json:
        raise NotImplementedError

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        raise NotImplementedError
