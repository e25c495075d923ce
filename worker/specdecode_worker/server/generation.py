"""One generation: converts the token stream of one `Submit` into pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode_worker.engine.errors import EngineGone
from specdecode_worker.engine.ipc.engine_client import Stream
from specdecode_worker.engine.ipc.messages import Tokens
from specdecode_worker.server.errors import EngineFailed
from specdecode_worker.server.responses import Choice, Piece, Statistics
from specdecode_worker.server.text.detokenizer import AnswerReader, Reading
from specdecode_worker.server.text.prompts import Prompt
from specdecode_worker.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Wish:
    """Output options of one generation. Without ``answers`` only the echo of the prompt is returned."""

    reading: Reading
    scored: bool = False
    """True when the engine returns log-probabilities, for the client or only to rank the choices of best_of."""
    answers: bool = True
    counts_prompt: bool = True
    """False for the further choices of a prompt, so that its tokens count once in the usage."""


class Watcher(Protocol):
    """Observer of one request: receives every message in order, then ``end``, which may be called more than once."""

    def take(self, tokens: Tokens) -> None:
        """Process one message of the request."""
        ...

    def end(self) -> None:
        """Process the end of the request."""
        ...


class Generation:
    """One choice for one prompt. Call ``close`` in every case, because it frees the slot in the engine."""

    def __init__(
        self,
        stream: Stream,
        tokenizer: Tokenizer,
        prompt: Prompt,
        wish: Wish,
        *,
        watchers: Sequence[Watcher],
        ended: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._prompt = prompt
        self._echo = prompt.echo
        self._wish = wish
        first_offset = len(prompt.echo.text) if prompt.echo is not None else 0
        self._reader = AnswerReader(tokenizer, prompt.ids, wish.reading, first_offset=first_offset)
        self._watchers = watchers
        self._ended: Callable[[], None] | None = ended
        self._last: Tokens | None = None

    @property
    def statistics(self) -> Statistics:
        """Token and speculation counts so far."""
        last = self._last
        return Statistics(
            prompt_tokens=len(self._prompt.ids),
            completion_tokens=self._reader.count,
            cached_tokens=last.cached_tokens if last else 0,
            drafts=last.drafts if last else 0,
            draft_tokens=last.draft_tokens if last else 0,
            accepted=last.accepted if last else 0,
            counts_prompt=self._wish.counts_prompt,
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of the generation as they arrive.

        Raises:
            EngineFailed: The engine ended the request with an error, or it is gone.
        """
        try:
            async for tokens in self._stream:
                piece = self._take(tokens)
                if piece.text or piece.scored or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return
        except EngineGone as error:
            raise EngineFailed(f"the engine is gone: {error}") from None

    async def whole(self) -> Choice:
        """Return the finished choice. Raises EngineFailed under the same conditions as ``pieces``."""
        found = [piece async for piece in self.pieces()]
        return Choice(
            text="".join(piece.text for piece in found),
            finish_reason=found[-1].finish_reason or "stop",
            statistics=self.statistics,
            scored=tuple(one for piece in found for one in piece.scored),
            mean_logprob=self._reader.mean_logprob,
        )

    def close(self) -> None:
        """Free the slot in the engine and notify the watchers. Further calls have no effect."""
        self._stream.close()
        for watcher in self._watchers:
            watcher.end()
        if self._ended is not None:
            self._ended()
            self._ended = None

    def _take(self, tokens: Tokens) -> Piece:
        self._last = tokens
        for watcher in self._watchers:
            watcher.take(tokens)
        if tokens.finish in ("error", "abort"):
            raise EngineFailed(tokens.error or "the engine ended this request")
        if self._wish.scored and len(tokens.logprobs) != len(tokens.tokens):
            raise EngineFailed("the engine told no log-probabilities")
        echo = self._echoed(tokens)
        if not self._wish.answers:
            return Piece(echo.text, "length", echo.scored)
        piece = self._reader.take(tokens)
        return Piece(echo.text + piece.text, piece.finish_reason, echo.scored + piece.scored)

    def _echoed(self, tokens: Tokens) -> Piece:
        """Return the echoed prompt with the first message, and an empty piece afterwards."""
        echo, self._echo = self._echo, None
        if echo is None:
            return Piece("", None)
        if not self._wish.reading.logprobs:
            return Piece(echo.text, None)
        if len(tokens.prompt_logprobs) != len(self._prompt.ids) - 1:
            raise EngineFailed("the engine told no log-probabilities of the prompt")
        return Piece(echo.text, None, echo.scored(self._prompt.ids, tokens.prompt_logprobs))
