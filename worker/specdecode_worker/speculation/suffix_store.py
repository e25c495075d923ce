"""Texts that suffix decoding drafts from: each request's own text, and earlier answers, separated by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.speculation.suffix_index import LONGEST, Occurrence, SuffixIndex

MOST_TEXT_TOKENS = 8_192
"""Most tokens of a running request that are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixBounds:
    """Bounds of the stored answers. A token takes about 100 bytes."""

    tenant_tokens: int = 65_536
    """Most tokens of one tenant's answers; the oldest are dropped first."""
    tokens: int = 262_144
    """Most tokens of all tenants; the tenant that was used least recently is dropped first."""


class SuffixStore:
    """Earlier answers by tenant. Answers of one tenant are never drafted for another one."""

    def __init__(self, bounds: SuffixBounds | None = None) -> None:
        self._bounds = bounds or SuffixBounds()
        self._by_salt: OrderedDict[str, SuffixIndex] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Number of tokens stored."""
        return sum(map(len, self._by_salt.values()))

    def add(self, salt: str, answer: Sequence[int]) -> None:
        """Store an answer of the tenant with this salt."""
        index = self._by_salt.setdefault(salt, SuffixIndex(self._bounds.tenant_tokens))
        self._by_salt.move_to_end(salt)
        index.extend(answer[-self._bounds.tenant_tokens + 1 :])
        index.end_text()
        while self.tokens > self._bounds.tokens and len(self._by_salt) > 1:
            self._by_salt.popitem(last=False)

    def matches(self, salt: str, suffix: Sequence[int]) -> list[Occurrence]:
        """Return occurrences of the end of ``suffix`` in earlier answers of this tenant."""
        index = self._by_salt.get(salt)
        return index.matches(suffix) if index is not None else []


class RequestText:
    """Text of one running request, indexed as it grows, with the occurrences of its end.

    Only the last MOST_TEXT_TOKENS tokens are searched. This bounds the time to index a long prompt, which takes half a
    microsecond a token.
    """

    def __init__(self, store: SuffixStore, salt: str) -> None:
        """Start with an empty text of a request with this salt."""
        self.length = 0
        """Number of tokens read so far."""
        self._store, self._salt, self._index = store, salt, SuffixIndex(MOST_TEXT_TOKENS)
        self._last: list[int] = []
        self._occurrences: list[Occurrence] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if tokens:
            self._index.extend(tokens[-MOST_TEXT_TOKENS:])
            self.length += len(tokens)
            self._last = [*self._last, *tokens][-LONGEST:]
            self._occurrences = None

    def matches(self) -> list[Occurrence]:
        """Return earlier occurrences of the end of the text: those in the text itself, then those in the store."""
        if self._occurrences is None:
            self._occurrences = [*self._index.matches(self._last), *self._store.matches(self._salt, self._last)]
        return self._occurrences
