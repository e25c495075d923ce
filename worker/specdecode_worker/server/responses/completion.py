"""Responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode_worker.server.responses.logprobs import completion_logprobs
from specdecode_worker.server.responses.objects import Choice, ChoicePiece, ScoredToken
from specdecode_worker.server.responses.writer import Json, ResponseWriter


class CompletionWriter(ResponseWriter):
    """Formatter of text completion objects."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def chunks(self, index: int, piece: ChoicePiece) -> list[Json]:
        """Return one chunk for a piece."""
        return [self._chunk(self._text(index, piece.text, piece.scored, piece.finish_reason))]

    def _choice(self, index: int, choice: Choice) -> Json:
        return self._text(index, choice.text, choice.scored, choice.finish_reason)

    def _text(self, index: int, text: str, scored: Sequence[ScoredToken], finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(scored), "finish_reason": finish_reason}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return completion_logprobs(scored, self._context.vocabulary) if self._context.logprobs else None
