"""One generation: converts the token stream of one `Submit` into pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode_worker.engine.errors import EngineGone
from specdecode_worker.engine.ipc.messages import Sampling, Tokens
from specdecode_worker.engine.ipc.token_streams import Stream
from specdecode_worker.server.errors import DeadlineExceeded, EngineFailed, EngineLost, QueueTimedOut
from specdecode_worker.server.responses import Choice, ChoicePiece, Statistics
from specdecode_worker.server.streams.choice_output import ChoiceOutput, split


class RequestObserver(Protocol):
    """Observer of one request: receives every message in order, then ``end``, which may be called more than once."""

    def process(self, tokens: Tokens) -> None:
        """Process one message of the request."""
        ...

    def end(self, *, moved: bool = False) -> None:
        """Process the end of the request. ``moved``: another worker continues it."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """Part of the output of a generation: tokens that the engine sent, and the piece that they add."""

    index: int
    """Number of output tokens before these."""
    count: int
    """Number of the tokens that belong to the output; the others are behind a stop string."""
    tokens: Tokens
    piece: ChoicePiece


class Generation:
    """One choice for one prompt. Call ``close`` in every case, because it frees the slot in the engine."""

    def __init__(
        self,
        stream: Stream | None,
        output: ChoiceOutput,
        sampling: Sampling,
        *,
        observers: Sequence[RequestObserver],
        on_end: Callable[[], None],
        retry_after_seconds: Callable[[], int] = lambda: 1,
        replayed: Sequence[ChoicePiece] = (),
    ) -> None:
        """Connect the parts.

        Args:
            stream: Tokens of the engine; None for a choice that an earlier attempt has finished.
            output: Converter of the tokens.
            sampling: Sampling parameters of the choice.
            observers: Observers of the request.
            on_end: Called once at the end.
            retry_after_seconds: Expected wait after a time-out in the queue.
            replayed: Pieces of an earlier attempt on another worker.
        """
        self._stream = stream
        self._output = output
        self.sampling = sampling
        self.replayed = replayed
        self._observers = observers
        self._on_end: Callable[[], None] | None = on_end
        self._retry_after_seconds = retry_after_seconds

    @property
    def output(self) -> ChoiceOutput:
        """Converter of the tokens, with the counts so far."""
        return self._output

    @property
    def statistics(self) -> Statistics:
        """Token and speculation counts so far."""
        return self._output.statistics

    async def outputs(self, *, one_by_one: int = 0) -> AsyncIterator[Output]:
        """Yield the output as it arrives, also parts that do not change the response yet.

        Args:
            one_by_one: Number of output tokens up to which one part is yielded for every token. Later ones have one for
                every message of the engine.

        Raises:
            EngineFailed: The engine ended the request with an error, or it is gone.
            DeadlineExceeded: The deadline of the request passed before its end.
            QueueTimedOut: The request waited too long for a place in the batch.
        """
        if self._stream is None:
            return
        try:
            async for message in self._stream:
                self._observe(message)
                for tokens in split(message) if self._output.length < one_by_one else (message,):
                    index = self._output.length
                    piece = self._output.push(tokens)
                    yield Output(index, self._output.length - index, tokens, piece)
                    if piece.finish_reason:
                        return
        except EngineGone as error:
            raise EngineLost(f"the engine is gone: {error}") from None

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """Yield the pieces that change the response, as they arrive. Raises the same errors as ``outputs``."""
        async for output in self.outputs():
            if output.piece.is_shown:
                yield output.piece

    async def whole(self) -> Choice:
        """Return the finished choice. Raises the same errors as ``outputs``."""
        return self.choice([piece async for piece in self.pieces()])

    def choice(self, pieces: Sequence[ChoicePiece]) -> Choice:
        """Return the finished choice, with the pieces of this attempt after those of earlier ones."""
        every = [*self.replayed, *pieces]
        return Choice(
            text="".join(piece.text for piece in every),
            finish_reason=every[-1].finish_reason or "stop",
            statistics=self.statistics,
            scored=tuple(one for piece in every for one in piece.scored),
            mean_logprob=self._output.mean_logprob,
        )

    def close(self, *, moved: bool = False) -> None:
        """Free the slot in the engine and notify the observers. Further calls have no effect.

        Args:
            moved: Another worker continues the request.
        """
        if self._stream is not None:
            self._stream.close()
        for observer in self._observers:
            observer.end(moved=moved)
        self._observers = ()
        if self._on_end is not None:
            self._on_end()
            self._on_end = None

    def _observe(self, tokens: Tokens) -> None:
        """Pass a message to the observers. Raise the error with which the engine ended the request, if it did."""
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
