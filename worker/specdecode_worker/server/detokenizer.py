"""Incremental detokenization of one choice, with stop strings and log-probabilities.

Tokens are processed one by one even if a step returns several, so that the text and the token counts are equal to
those of decoding without speculation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.core.messages import Logprobs, Tokens
from specdecode_worker.server.responses import ChoicePiece, ScoredToken
from specdecode_worker.server.tokenizer import StopFinder, Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Text options of a request."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Minimum number of output tokens; stop strings that end in the text of these tokens are ignored."""
    logprobs: bool = False


class ChoiceDetokenizer:
    """Converter of the tokens of one choice into text pieces.

    ``first_offset`` is the number of characters that precede the output in the text that the client receives: the
    length of an echoed prompt, else 0.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], options: TextOptions, *, first_offset: int = 0
    ) -> None:
        self._options = options
        self._text = tokenizer.detokenizer(prompt, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopFinder(options.stops, shows_stop=options.include_stop)
        self._decoded = self._shown = first_offset
        self._unsent: deque[ScoredToken] = deque()
        self._logprob_sum = 0.0
        self.count = 0
        """Number of tokens so far. A stop token counts although its text is not returned."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token; 0 without tokens or without log-probabilities."""
        return self._logprob_sum / self.count if self.count else 0.0

    def push(self, tokens: Tokens) -> ChoicePiece:
        """Return the piece that ``tokens`` add. A piece that reaches a stop string has a finish reason."""
        text = ""
        for i, token in enumerate(tokens.tokens):
            self.count += 1
            logprobs = tokens.logprobs[i] if tokens.logprobs else None
            self._logprob_sum += logprobs.logprob if logprobs is not None else 0.0
            ends = tokens.finish == "stop" and i == len(tokens.tokens) - 1
            if ends and not self._options.include_stop:
                break
            text += self._push_token(token, logprobs)
            if self._stops.matched is not None:
                return self._piece(text, "stop")
        if tokens.finish is None:
            return self._piece(text, None)
        text += self._search(self._text.flush())
        text += self._stops.flush()
        return self._piece(text, "stop" if self._stops.matched is not None else tokens.finish)

    def _push_token(self, token: int, logprobs: Logprobs | None) -> str:
        if self._options.logprobs:
            self._unsent.append(ScoredToken(token, self._decoded, logprobs))
        return self._search(self._text.push(token))

    def _search(self, text: str) -> str:
        self._decoded += len(text)
        return self._stops.push(text, may_end=self.count > self._options.min_tokens)

    def _piece(self, text: str, finish_reason: str | None) -> ChoicePiece:
        """Build a piece with ``text`` and the scored tokens that begin in the text returned so far.

        A token that begins behind a stop string is never returned.
        """
        self._shown += len(text)
        send_all = finish_reason is not None and self._stops.matched is None
        sendable = []
        while self._unsent and (send_all or self._unsent[0].offset < self._shown):  # offsets never decrease
            sendable.append(self._unsent.popleft())
        return ChoicePiece(text, finish_reason, tuple(sendable))
