"""One generation: converts the token stream of one `Submit` into pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode_worker.engine.errors import EngineGone
from specdecode_worker.engine.ipc.messages import Tokens
from specdecode_worker.engine.ipc.token_streams import Stream
from specdecode_worker.server.errors import DeadlineExceeded, EngineFailed, QueueTimedOut
from specdecode_worker.server.responses import Choice, ChoicePiece, Statistics
from specdecode_worker.server.text.detokenizer import ChoiceDetokenizer, TextOptions
from specdecode_worker.server.text.prompts import Prompt
from specdecode_worker.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output options of one generation. Without ``generates`` only the echo of the prompt is returned."""

    text_options: TextOptions
    has_logprobs: bool = False
    """True when the engine returns log-probabilities, for the client or only to rank the choices of best_of."""
    generates: bool = True
    counts_prompt: bool = True
    """False for the further choices of a prompt, so that its tokens count once in the usage."""


class RequestObserver(Protocol):
    """Observer of one request: receives every message in order, then ``end``, which may be called more than once."""

    def process(self, tokens: Tokens) -> None:
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
        options: OutputOptions,
        *,
        observers: Sequence[RequestObserver],
        on_end: Callable[[], None],
        retry_after_seconds: Callable[[], int] = lambda: 1,
    ) -> None:
        self._stream = stream
        self._prompt = prompt
        self._echo = prompt.echo
        self._options = options
        first_offset = len(prompt.echo.text) if prompt.echo is not None else 0
        self._detokenizer = ChoiceDetokenizer(tokenizer, prompt.ids, options.text_options, first_offset=first_offset)
        self._observers = observers
        self._on_end: Callable[[], None] | None = on_end
        self._retry_after_seconds = retry_after_seconds
        self._last: Tokens | None = None

    @property
    def statistics(self) -> Statistics:
        """Token and speculation counts so far."""
        last = self._last
        return Statistics(
            prompt_tokens=len(self._prompt.ids),
            completion_tokens=self._detokenizer.count,
            cached_tokens=last.cached_tokens if last else 0,
            drafts=last.drafts if last else 0,
            draft_tokens=last.draft_tokens if last else 0,
            accepted=last.accepted if last else 0,
            counts_prompt=self._options.counts_prompt,
        )

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """Yield the pieces of the generation as they arrive.

        Raises:
            EngineFailed: The engine ended the request with an error, or it is gone.
            DeadlineExceeded: The deadline of the request passed before its end.
            QueueTimedOut: The request waited too long for a place in the batch.
        """
        try:
            async for tokens in self._stream:
                piece = self._convert(tokens)
                if piece.text or piece.scored or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return
        except EngineGone as error:
            raise EngineFailed(f"the engine is gone: {error}") from None

    async def whole(self) -> Choice:
        """Return the finished choice. Raises the same errors as ``pieces``."""
        pieces = [piece async for piece in self.pieces()]
        return Choice(
            text="".join(piece.text for piece in pieces),
            finish_reason=pieces[-1].finish_reason or "stop",
            statistics=self.statistics,
            scored=tuple(one for piece in pieces for one in piece.scored),
            mean_logprob=self._detokenizer.mean_logprob,
        )

    def close(self) -> None:
        """Free the slot in the engine and notify the observers. Further calls have no effect."""
        self._stream.close()
        for observer in self._observers:
            observer.end()
        if self._on_end is not None:
            self._on_end()
            self._on_end = None

    def _convert(self, tokens: Tokens) -> ChoicePiece:
        self._last = tokens
        for observer in self._observers:
            observer.process(tokens)
        if tokens.finish in ("error", "abort"):
            raise EngineFailed(tokens.error or "the engine ended this request")
        if tokens.finish == "deadline":
            raise DeadlineExceeded("the deadline of this request passed before it was complete; see X-Request-Timeout")
        if tokens.finish == "queue_timeout":
            raise QueueTimedOut(
                "this request waited too long for a place in the batch; try again later",
                retry_after_seconds=self._retry_after_seconds(),
            )
        if self._options.has_logprobs and len(tokens.logprobs) != len(tokens.tokens):
            raise EngineFailed("the engine returned no log-probabilities")
        echo = self._echoed(tokens)
        if not self._options.generates:
            return ChoicePiece(echo.text, "length", echo.scored)
        piece = self._detokenizer.push(tokens)
        return ChoicePiece(echo.text + piece.text, piece.finish_reason, echo.scored + piece.scored)

    def _echoed(self, tokens: Tokens) -> ChoicePiece:
        """Return the echoed prompt with the first message, and an empty piece afterwards."""
        echo, self._echo = self._echo, None
        if echo is None:
            return ChoicePiece("", None)
        if not self._options.text_options.logprobs:
            return ChoicePiece(echo.text, None)
        if len(tokens.prompt_logprobs) != len(self._prompt.ids) - 1:
            raise EngineFailed("the engine returned no log-probabilities of the prompt")
        return ChoicePiece(echo.text, None, echo.scored(self._prompt.ids, tokens.prompt_logprobs))
