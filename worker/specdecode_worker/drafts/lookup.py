"""Drafts that are looked up in earlier text, without a network: in the prompt (ngram) or in a suffix tree."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import Request, Row
from specdecode_worker.drafts.base import DraftContext, Drafter, Expand
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Forest, Level, Tree, rows_at

# Drafter of the method ngram: prompt lookup (Saxena, 2023; method "ngram" of vLLM).
#
# For each node, it searches the text for the longest earlier occurrence of the node's last tokens, drafted tokens
# included, and proposes the token that followed. Of equally long matches the latest wins; other continuations become
# siblings. The search runs on the device, since the host's copy of the text may lag.


@dataclass(slots=True)
class _KnownRuns:
    """All runs of ``shortest`` tokens in the text of a request that end before its last token, about 100 bytes each."""

    count: int = 0
    runs: set[tuple[int, ...]] = field(default_factory=set)


class NgramDrafter(Drafter):
    """Drafter of the method ngram. It has no weights and no cache, and never needs to catch up."""

    needs_passes = False

    def __init__(
        self, state: DeviceState, vocab_size: int, shortest: int, longest: int, *, host_is_current: bool
    ) -> None:
        """Create a drafter.

        Args:
            state: Device state of the running requests.
            vocab_size: Vocabulary size of the target.
            shortest: Minimum length of a match, in tokens.
            longest: Maximum length of a match, in tokens.
            host_is_current: True if the host knows every token before the next step, that is, no step is launched
                ahead. The host can then detect a request without a match, which decodes plainly instead of verifying
                an empty proposal.
        """
        self._state, self._vocab_size = state, vocab_size
        self._shortest, self._longest = shortest, longest
        self._host_is_current = host_is_current
        self._known: WeakKeyDictionary[Request, _KnownRuns] = WeakKeyDictionary()

    @classmethod
    def of(cls, _: None, context: DraftContext) -> Self:
        """Create the drafter of a configuration."""
        shortest, longest = context.config.prompt_lookup_min, context.config.prompt_lookup_max
        return cls(context.state, context.vocab_size, shortest, longest, host_is_current=context.host_is_current)

    def ready(self, request: Request) -> bool:
        """Return whether the last ``shortest`` tokens occur earlier in the text. Always True if the host is behind.

        Only tokens that are new since the last call are read, so that a step costs the same whatever the text's length.
        """
        if not self._host_is_current:
            return True
        tokens, size = request.tokens, self._shortest
        known = self._known.setdefault(request, _KnownRuns())
        while known.count < len(tokens) - size:
            known.runs.add(tuple(tokens[known.count : known.count + size]))
            known.count += 1
        return tuple(tokens[-size:]) in known.runs

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Return the function that looks tokens up in the text of each request."""
        if not forest.levels:
            return None
        slots_B = to_device([row.request.slot for row in rows], self._state.length_S.device)
        length_B = self._state.length_S[slots_B]
        most = max(row.request.cached_bound for row in rows) + 1

        def expand(depth: int, level: Level) -> Tensor:
            text_RP = self._state.tokens_SP[slots_B[level.batch_R], :most]
            suffix_RN = self._suffixes(forest.trees, depth, level, slots_B, length_B)
            return lookup(text_RP, length_B[level.batch_R] + 1, suffix_RN, self._shortest, self._vocab_size)

        return expand

    def _suffixes(self, trees: Sequence[Tree], depth: int, level: Level, slots_B: Tensor, length_B: Tensor) -> Tensor:
        """Return the last tokens up to each node, [R, longest]. Positions before the text repeat its first token."""
        # The nodes are not read from the level, for which the host would wait on an accelerator.
        back = [_path_to(trees[b], node, self._longest) for b, node in rows_at(trees, depth)]
        offset_RN = to_device(back, length_B.device)
        index_RN = (length_B[level.batch_R, None] + offset_RN).clamp(min=0)
        return self._state.tokens_SP[slots_B[level.batch_R, None], index_RN]


def _path_to(tree: Tree, node: int, count: int) -> list[int]:
    """Return the offsets from the root's index of the last ``count`` tokens up to a node, in order of the text."""
    path = []
    while node > 0:
        path.append(node)
        node = tree.parents[node]
    path += [-i for i in range(count)]
    return path[:count][::-1]


def lookup(text_RP: Tensor, known_R: Tensor, suffix_RN: Tensor, shortest: int, vocab_size: int) -> Tensor:
    """Return the tokens that followed earlier occurrences of the suffix, longest match first, then latest.

    Args:
        text_RP: Text of each row, [rows, positions].
        known_R: Number of committed tokens of each text; later positions are ignored.
        suffix_RN: Suffix to search for, [rows, longest match].
        shortest: Minimum length of a match, in tokens.
        vocab_size: Vocabulary size of the target.

    Returns:
        [R, MAX_RANKS] token ids, -1 where there are no more matches.
    """
    rows, length = text_RP.shape
    longest = suffix_RN.shape[1]
    position_P = torch.arange(length, device=text_RP.device)
    matched_RP = torch.zeros(rows, length, dtype=torch.int64, device=text_RP.device)
    going_RP = torch.ones(rows, length, dtype=torch.bool, device=text_RP.device)
    for back in range(longest):  # matched_RP[r, p]: number of tokens before position p equal to the suffix
        before_RP = text_RP.roll(back + 1, dims=1)
        going_RP &= (before_RP == suffix_RN[:, longest - 1 - back, None]) & (position_P > back)
        matched_RP += going_RP
    usable_RP = (matched_RP >= shortest) & (position_P < known_R[:, None])
    score_RP = torch.where(usable_RP, matched_RP * length + position_P, 0)
    best_RV = torch.zeros(rows, vocab_size, dtype=torch.int64, device=text_RP.device)
    best_RV.scatter_reduce_(1, torch.where(usable_RP, text_RP, 0), score_RP, "amax")
    best = best_RV.topk(min(MAX_RANKS, vocab_size), dim=1)
    return torch.where(best.values > 0, best.indices, -1)


# Drafter of the method suffix: suffix decoding (Oliaro et al., arXiv 2411.04975; method "suffix" of vLLM).
#
# Prompt lookup sees the text of one request. Suffix decoding also sees earlier answers of the same tenant, and prefers
# the most frequent continuation of the longest match, as agents and editors repeat themselves. The children of a tree
# node are the continuations of the occurrences that agree with the path to it.


class SuffixDrafter(Drafter):
    """Drafter of the method suffix. It has no weights, and its answers are stored in host memory, within bounds."""

    needs_passes = False

    def __init__(self, state: DeviceState, store: SuffixStore, *, host_is_current: bool) -> None:
        """Create a drafter.

        Args:
            state: Device state of the running requests.
            store: Earlier answers.
            host_is_current: True if the host knows every token before the next step, that is, no step is launched
                ahead. A request without a match then decodes plainly.
        """
        self._state, self._store = state, store
        self._host_is_current = host_is_current
        self._texts: WeakKeyDictionary[Request, RequestText] = WeakKeyDictionary()

    @classmethod
    def of(cls, _: None, context: DraftContext) -> Self:
        """Create a drafter without earlier answers."""
        return cls(context.state, SuffixStore(), host_is_current=context.host_is_current)

    def ready(self, request: Request) -> bool:
        """Return whether the end of the text occurred before. Always True if the host is behind."""
        if not self._host_is_current:
            return True
        text = self._text(request)
        text.extend(request.tokens[text.length :])
        return bool(text.matches())

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Index the chunks, so that a long prompt is not indexed in one step."""
        for row in rows:
            text = self._text(row.request)
            text.extend(row.request.tokens[text.length : row.start + row.count])

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Return the function that proposes tokens after earlier occurrences of the ends of the texts."""
        if not forest.levels:
            return None
        drafting = [b for b, tree in enumerate(forest.trees) if tree.expanded]
        self._read_texts([rows[b].request for b in drafting])
        occurrences: dict[tuple[int, int], list[Occurrence]] = {
            (b, 0): self._text(rows[b].request).matches() for b in drafting
        }
        slots_B = to_device([row.request.slot for row in rows], self._state.length_S.device)

        def expand(depth: int, level: Level) -> Tensor:
            nodes = rows_at(forest.trees, depth)
            if depth:
                slots_R = slots_B[level.batch_R]
                tokens_R = self._state.tokens_SP[slots_R, self._state.length_S[slots_R] + level.node_R]
                for (b, node), token in zip(nodes, tokens_R.tolist(), strict=True):
                    before = occurrences[b, forest.trees[b].parents[node]]
                    occurrences[b, node] = following(before, token) if before else []
            ranked = [rank(occurrences[node])[:MAX_RANKS] for node in nodes]
            padded = [tokens + [-1] * (MAX_RANKS - len(tokens)) for tokens in ranked]
            return to_device(padded, self._state.length_S.device)

        return expand

    def record_end(self, request: Request) -> None:
        """Store the answer of a request that ends."""
        answer = request.tokens[len(request.submit.prompt) :]
        if answer:
            self._store.add(request.submit.cache_salt, answer)

    def _text(self, request: Request) -> RequestText:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = RequestText(self._store, request.submit.cache_salt)
        return text

    def _read_texts(self, requests: Sequence[Request]) -> None:
        """Append the tokens that the device has and the index lacks. On an accelerator this waits for the last step."""
        if not requests:
            return
        slots_B = to_device([request.slot for request in requests], self._state.length_S.device)
        for request, length in zip(requests, self._state.length_S[slots_B].tolist(), strict=True):
            text = self._text(request)
            if text.length <= length:
                text.extend(self._state.tokens_SP[request.slot, text.length : length + 1].tolist())


# Suffixes of texts, by which suffix decoding finds continuations.

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


class SuffixStore:
    """Earlier answers by tenant. Answers of one tenant are never drafted for another one."""

    def __init__(self, tenant_tokens: int = 65_536, most_tokens: int = 262_144) -> None:
        """Create an empty store. A token takes about 100 bytes.

        Args:
            tenant_tokens: Most tokens of one tenant's answers; the oldest are dropped first.
            most_tokens: Most tokens of all tenants; the tenant that was used least recently is dropped first.
        """
        self._tenant_tokens, self._most_tokens = tenant_tokens, most_tokens
        self._by_salt: OrderedDict[str, SuffixIndex] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Number of tokens stored."""
        return sum(map(len, self._by_salt.values()))

    def add(self, salt: str, answer: Sequence[int]) -> None:
        """Store an answer of the tenant with this salt."""
        index = self._by_salt.setdefault(salt, SuffixIndex(self._tenant_tokens))
        self._by_salt.move_to_end(salt)
        index.extend(answer[-self._tenant_tokens + 1 :])
        index.end_text()
        while self.tokens > self._most_tokens and len(self._by_salt) > 1:
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
