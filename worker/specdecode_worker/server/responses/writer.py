"""Base of the response formatters: the fields that all objects of one response share, and event encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specdecode_worker.models.vocabulary.token_bytes import Vocabulary
from specdecode_worker.server.responses.objects import Choice, ChoicePiece, ScoredToken, Statistics
from specdecode_worker.server.responses.usage import metrics, usage

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """Return ``body`` encoded as one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Facts about the request that its response needs in addition to the text."""

    request_id: str
    model: str
    fingerprint: str
    """Fingerprint of the weights and the program, which can change the text of a seeded request."""
    vocabulary: Vocabulary
    logprobs: bool
    """True if the request asks for log-probabilities."""
    created: int = 0
    """Unix time of the response in seconds."""


class ResponseWriter:
    """Formatter of one response; each route has a subclass."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, context: ResponseContext) -> None:
        self._context = context

    @property
    def request_id(self) -> str:
        """Id of the request, without the prefix of the route."""
        return self._context.request_id

    @property
    def created(self) -> int:
        """Unix time of the response in seconds."""
        return self._context.created

    @property
    def holds_back_text(self) -> bool:
        """True if chunks can lack text whose meaning is uncertain."""
        return False

    def whole(self, choices: Sequence[Choice], statistics: Sequence[Statistics] | None = None) -> Json:
        """Return the response to a request that does not stream.

        Args:
            choices: The choices to return.
            statistics: Statistics of all generated choices, if they are more than the returned choices (best_of).
        """
        took = [choice.statistics for choice in choices] if statistics is None else statistics
        return {
            **self._named(self.kind),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(took),
            "metrics": metrics(took),
        }

    def opening(self, index: int) -> Json | None:
        """Return the chunk before any text; None if the route has none."""
        return None

    def chunks(self, index: int, piece: ChoicePiece) -> list[Json]:
        """Return the chunks for a piece of one choice; empty while its meaning is uncertain (text or tool call)."""
        raise NotImplementedError

    def closing(self, statistics: Sequence[Statistics]) -> Json:
        """Return the last chunk, which has the usage of the whole stream."""
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
            "id": f"{self.prefix}-{self._context.request_id}",
            "object": kind,
            "created": self._context.created,
            "model": self._context.model,
            "system_fingerprint": self._context.fingerprint,
        }

    def _choice(self, index: int, choice: Choice) -> Json:
        raise NotImplementedError

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        raise NotImplementedError
