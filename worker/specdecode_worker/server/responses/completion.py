"""Responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode_worker.server.responses.logprobs import completion_logprobs
from specdecode_worker.server.responses.objects import Choice, Piece, Scored
from specdecode_worker.server.responses.writer import Format, Json


class CompletionFormat(Format):
    """Formatter of text completion objects."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """Return one chunk for a piece."""
        return [self._chunk(self._text(index, piece.text, piece.scored, piece.finish_reason))]

    def _choice(self, index: int, choice: Choice) -> Json:
        return self._text(index, choice.text, choice.scored, choice.finish_reason)

    def _text(self, index: int, text: str, scored: Sequence[Scored], finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(scored), "finish_reason": finish_reason}

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        return completion_logprobs(scored, self._about.vocabulary) if self._about.logprobs else None
