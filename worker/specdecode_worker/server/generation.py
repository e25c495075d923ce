"""One answer: tokens of the engine become text, up to a stop string.

Tokens are taken one by one even when a step brings several, so that text and token counts are what plain decoding
would give.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from specdecode_worker.engine.client import Stream
from specdecode_worker.engine.errors import EngineGone
from specdecode_worker.engine.messages import Tokens
from specdecode_worker.server.answers import Choice, Statistics
from specdecode_worker.server.errors import EngineFailed
from specdecode_worker.server.stops import StopFinder
from specdecode_worker.server.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text; ``finish_reason`` closes the answer."""

    text: str
    finish_reason: str | None


class Generation:
    """The answer to one prompt. Close it, read to the end or not: it frees the engine's slot."""

    def __init__(
        self,
        stream: Stream,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        observe: Callable[[Tokens], None],
    ) -> None:
        self._stream = stream
        self._text = tokenizer.detokenizer(prompt)
        self._stops = StopFinder(tuple(stops))
        self._observe = observe
        self._prompt_tokens = len(prompt)
        self._completion_tokens = 0
        self._last: Tokens | None = None

    @property
    def statistics(self) -> Statistics:
        last = self._last
        return Statistics(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=last.cached_tokens if last else 0,
            drafts=last.drafts if last else 0,
            draft_tokens=last.draft_tokens if last else 0,
            accepted=last.accepted if last else 0,
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises EngineFailed when the engine gives up or dies."""
        try:
            async for tokens in self._stream:
                piece = self._take(tokens)
                if piece.text or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return
        except EngineGone as error:
            raise EngineFailed(f"the engine is gone: {error}") from None

    async def whole(self) -> Choice:
        """Raises as ``pieces`` does."""
        text, finish_reason = "", "stop"
        async for piece in self.pieces():
            text += piece.text
            finish_reason = piece.finish_reason or finish_reason
        return Choice(text, finish_reason, self.statistics)

    def close(self) -> None:
        """May be called twice."""
        self._stream.close()

    def _take(self, tokens: Tokens) -> Piece:
        self._last = tokens
        self._observe(tokens)
        if tokens.finish in ("error", "abort"):
            raise EngineFailed(tokens.error or "the engine ended this request")
        # A stop token ends the answer and is counted, but is no part of the text.
        shown = tokens.tokens[:-1] if tokens.finish == "stop" else tokens.tokens
        text = ""
        for token in shown:
            self._completion_tokens += 1
            text += self._stops.push(self._text.push(token))
            if self._stops.found is not None:
                return Piece(text, "stop")
        if tokens.finish is None:
            return Piece(text, None)
        self._completion_tokens += len(tokens.tokens) - len(shown)
        return self._finish(text, tokens.finish)

    def _finish(self, text: str, finish_reason: str) -> Piece:
        text += self._stops.push(self._text.flush())
        if self._stops.found is not None:
            return Piece(text, "stop")
        return Piece(text + self._stops.flush(), finish_reason)
