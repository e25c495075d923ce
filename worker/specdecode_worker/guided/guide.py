"""Position of one request in its grammar, with the mask of what may follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

# Errors of guided decoding.


class GrammarRefused(Exception):
    """Error for a grammar that cannot be used; the message says why."""


def library_message(message: str) -> str:
    """Return the first line of a message of the library, or a short text that it announces. Its context can be long."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").strip().splitlines()]
    if not lines:
        return "the grammar cannot be used"
    return " ".join(lines[:4] if lines[0].endswith(":") else lines[:1])[:500]


# Guide of one request: its position in the grammar, and the tokens that the grammar allows next.

Mask = NDArray[np.uint32]
"""Allowed tokens as bits: token t is bit t % 32 of word t // 32."""

MOST_FORCED = 16
"""Most tokens that are drafted from the grammar in one step. Each is verified by the target like any drafted token."""


class Guide:
    """Position of one request in its grammar.

    The position follows the emitted tokens. ``mask`` looks at the tokens of a tree path behind it and returns. Only an
    end-of-text token is allowed once the grammar is complete and cannot continue; ``ended`` is then set by that token.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_tokens: Sequence[int],
        vocab_size: int,
        *,
        min_tokens: int = 0,
        blocked: Sequence[int] = (),
    ) -> None:
        """Start at the position of ``matcher``, which the guide owns from now on.

        Args:
            matcher: Compiled grammar.
            end_tokens: Token ids that end an answer.
            vocab_size: Number of token ids of the model.
            min_tokens: Number of answer tokens before which ``blocked`` tokens are not allowed, unless the grammar
                allows no other token.
            blocked: Those tokens.
        """
        self.ended = False
        self.error = ""
        """Reason why the grammar cannot be followed any further; empty if there is none."""
        self._matcher, self._end_tokens = matcher, frozenset(end_tokens)
        self._words, self._vocab_size = (vocab_size + 31) // 32, vocab_size
        self._emitted, self._min_tokens = 0, min_tokens
        self._blocked = _bits(blocked, self._words) if min_tokens else None
        self._padding = ~_bits(range(vocab_size, self._words * 32), self._words)
        self._forced: tuple[int, ...] | None = None

    def advance(self, tokens: Iterable[int]) -> None:
        """Move behind emitted tokens. Tokens after the end of the grammar are ignored."""
        for token in tokens:
            if self.ended or self.error:
                return
            self._forced = None
            self._emitted += 1
            with self._failing_alone():
                self._take(token)

    def mask(self, path: Sequence[int] = ()) -> Mask | None:
        """Return the tokens allowed behind ``path``, the tokens of a tree path from the present position.

        Return None if the path itself is not allowed: no token behind it can ever be emitted.
        """
        if self.ended or self.error:
            return None
        mask = None
        with self._failing_alone():
            # A copy, because masks after a rollback of llguidance 1.9.1 can allow tokens that it then refuses.
            matcher = self._matcher.deep_copy() if path else self._matcher
            mask = self._compute(matcher, len(path)) if self._enters(matcher, path) else None
        return mask

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that follow for certain, at most MOST_FORCED: those of the only possible next bytes.

        The model may still write the same bytes with other tokens; verification decides.
        """
        if self._forced is None:
            self._forced = ()
            with self._failing_alone():
                if not (self.ended or self.error or self._matcher.is_stopped()):
                    self._forced = tuple(self._matcher.compute_ff_tokens()[:MOST_FORCED])
        return self._forced

    @contextlib.contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Turn a failure of the library into ``error``, so that it ends this request alone."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            self.error = library_message(str(error))

    def _take(self, token: int) -> None:
        """Move behind an emitted token, or set ``ended`` or ``error``."""
        if token in self._end_tokens and self._matcher.is_accepting():
            self.ended = True
        elif self._matcher.try_consume_tokens([token]) != 1:
            problem = self._matcher.get_error()
            self.error = library_message(problem) if problem else f"the grammar does not allow the token {token} here"

    def _enters(self, matcher: LLMatcher, path: Sequence[int]) -> bool:
        """Move a matcher behind a path. Return False if the path is not allowed; end tokens never are."""
        if any(token in self._end_tokens for token in path):
            return False
        return not path or matcher.try_consume_tokens(list(path)) == len(path)

    def _compute(self, matcher: LLMatcher, depth: int) -> Mask | None:
        """Compute the mask at a matcher's position, ``depth`` tokens behind the emitted ones."""
        mask = np.zeros(self._words, dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        mask &= self._padding
        if matcher.is_error() or not mask.any():
            problem = matcher.get_error() or "the grammar allows none of the model's tokens here"
            self.error = library_message(problem)
            return None
        if self._blocked is not None and self._emitted + depth < self._min_tokens:
            rest = mask & ~self._blocked
            return rest if rest.any() else mask
        return mask


def _bits(tokens: Iterable[int], words: int) -> Mask:
    """Return the mask with the bits of these tokens."""
    mask = np.zeros(words, dtype=np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask
