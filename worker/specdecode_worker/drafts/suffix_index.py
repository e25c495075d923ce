"""Suffixes of texts, by which suffix decoding finds continuations."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Index of all suffixes of a text: where did the last tokens occur before, and what followed?
#
# SuffixDecoding (Oliaro et al., arXiv 2411.04975) drafts from suffix trees: the node that matches the end of the text
# has the continuations seen before as children, with their counts. The index answers the same question without storing
# the tree. Each position is chained to the previous one with the same last SHORTEST tokens (as in LZ77 compressors),
# and a chain is compared with the text on demand. Memory per token is then constant, and the oldest tokens can be
# dropped.

SHORTEST = 2
"""Least length of a match, in tokens. One token alone says too little; two is also the default of prompt lookup."""
LONGEST = 24
"""Largest length of a match that is counted, in tokens (depth of the suffix tree in vLLM)."""
MOST_OCCURRENCES = 32
"""Most occurrences that are compared for one match, the latest first. It bounds the time of a look-up."""
END = -1
"""Mark between two texts. No match crosses it."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Earlier occurrence of the last tokens: the position behind it in ``index``, and the length of the match."""

    index: SuffixIndex
    position: int
    length: int

    @property
    def token(self) -> int:
        """Token that followed, or END."""
        return self.index.token(self.position)

    def next(self) -> Occurrence:
        """Return the occurrence that includes the token that followed."""
        return Occurrence(self.index, self.position + 1, self.length + 1)


class SuffixIndex:
    """Index of texts of at most ``capacity`` tokens together; the oldest tokens are dropped first.

    Positions count from the first token ever, so they stay valid when tokens are dropped.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens, self._earlier = array("q"), array("q")
        """Token at each position, and the position of the previous pair equal to the one that ends there."""
        self._last: dict[int, int] = {}
        """Position at which each pair of tokens ended last, by the key of the pair."""
        self._end = 0
        """Number of tokens so far, including dropped ones."""

    def __len__(self) -> int:
        return len(self._tokens)

    def token(self, position: int) -> int:
        """Return the token at a position, or END behind the last token and for dropped ones."""
        if not self._end - len(self._tokens) <= position < self._end:
            return END
        return self._tokens[position % self._capacity]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        new, room = list(tokens), max(self._capacity - self._end, 0)
        self._append_all(new[:room])
        for token in new[room:]:
            self._append(token)

    def end_text(self) -> None:
        """End the text; what is appended next belongs to another one."""
        self._append(END)

    def matches(self, suffix: Sequence[int]) -> list[Occurrence]:
        """Return earlier occurrences of the end of ``suffix``, the latest first, at most MOST_OCCURRENCES."""
        occurrences: list[Occurrence] = []
        if len(suffix) < SHORTEST:
            return occurrences
        position, first = self._last.get(_key(suffix[-2], suffix[-1]), -1), self._end - len(self._tokens)
        for _ in range(MOST_OCCURRENCES):
            if position - 1 < first:
                break
            if self.token(position + 1) != END:
                occurrences.append(Occurrence(self, position + 1, self._length(suffix, position + 1)))
            position = self._earlier[position % self._capacity]
        return occurrences

    def _append_all(self, tokens: list[int]) -> None:
        """Append tokens for which there is room. Prompts can be long, so this loop is short."""
        last, earlier, previous = self._last, self._earlier, self.token(self._end - 1)
        for position, token in enumerate(tokens, self._end):
            key = previous << 32 | token
            earlier.append(last.get(key, -1) if previous != END else -1)
            if previous != END:
                last[key] = position
            previous = token
        self._tokens.extend(tokens)
        self._end += len(tokens)

    def _append(self, token: int) -> None:
        """Append a token or END, in the place of the oldest token if there is no room."""
        previous, place = self.token(self._end - 1), self._end % self._capacity
        if self._end < self._capacity:
            self._tokens.append(token)
            self._earlier.append(-1)
        else:
            self._drop_first()
            self._tokens[place], self._earlier[place] = token, -1
        if token != END and previous != END:
            key = _key(previous, token)
            self._earlier[place] = self._last.get(key, -1)
            self._last[key] = self._end
        self._end += 1

    def _drop_first(self) -> None:
        """Remove the oldest pair from the keys, if it did not occur again. Its first token is about to be replaced."""
        first = self._end - self._capacity
        key = _key(self.token(first), self.token(first + 1))
        if self._last.get(key) == first + 1:
            del self._last[key]

    def _length(self, suffix: Sequence[int], position: int) -> int:
        """Return how many of the last tokens of ``suffix``, at most LONGEST, are those before ``position``."""
        most = min(LONGEST, len(suffix))
        for back in range(1, most + 1):
            if self.token(position - back) != suffix[-back]:
                return back - 1
        return most


def rank(occurrences: Iterable[Occurrence]) -> list[int]:
    """Return the tokens that followed, best first: the longest match, then the most frequent, then the first one."""
    counts: dict[int, tuple[int, int]] = {}
    for occurrence in occurrences:
        length, count = counts.get(occurrence.token, (0, 0))
        if occurrence.length > length:
            counts[occurrence.token] = (occurrence.length, 1)
        elif occurrence.length == length:
            counts[occurrence.token] = (length, count + 1)
    return sorted(counts, key=lambda token: counts[token], reverse=True)


def following(occurrences: Iterable[Occurrence], token: int) -> list[Occurrence]:
    """Return the occurrences that go on with ``token``, moved behind it, without those that end there."""
    moved = (occurrence.next() for occurrence in occurrences if occurrence.token == token)
    return [occurrence for occurrence in moved if occurrence.token != END]


def _key(first: int, second: int) -> int:
    return first << 32 | second


# Texts that suffix decoding drafts from: each request's own text, and earlier answers, separated by tenant.

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
