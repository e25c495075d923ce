"""Drafts that are looked up in earlier text, without a network: in the prompt (ngram) or in a suffix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.batch import Row
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.base import DraftContext, Drafter, DraftMethod, Expand
from specdecode_worker.drafts.suffix_index import Occurrence, RequestText, SuffixStore, following, rank
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Forest, Level, Tree

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
        self._known: dict[str, _KnownRuns] = {}

    def ready(self, request: Request) -> bool:
        """Return whether the last ``shortest`` tokens occur earlier in the text. Always True if the host is behind.

        Only tokens that are new since the last call are read, so that a step costs the same whatever the text's length.
        """
        if not self._host_is_current:
            return True
        tokens, size = request.tokens, self._shortest
        known = self._known.setdefault(request.id, _KnownRuns())
        while known.count < len(tokens) - size:
            known.runs.add(tuple(tokens[known.count : known.count + size]))
            known.count += 1
        return tuple(tokens[-size:]) in known.runs

    def record_end(self, request: Request) -> None:
        """Drop what is stored for a request that ends."""
        self._known.pop(request.id, None)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Do nothing; a lookup needs the text alone."""

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Return the function that looks tokens up in the text of each request."""
        if not forest.levels:
            return None
        slots_B = to_device([row.request.slot for row in rows], self._state.length_S.device)
        length_B = self._state.length_S[slots_B]
        most = max(row.request.cached_bound for row in rows) + 1

        def expand(depth: int, level: Level) -> Tensor:
            text_RP = self._state.tokens_SP[slots_B[level.batch_R], :most]
            suffix_RN = self._suffixes(forest.trees, level, slots_B, length_B)
            return lookup(text_RP, length_B[level.batch_R] + 1, suffix_RN, self._shortest, self._vocab_size)

        return expand

    def _suffixes(self, trees: tuple[Tree, ...], level: Level, slots_B: Tensor, length_B: Tensor) -> Tensor:
        """Return the last tokens up to each node, [R, longest]. Positions before the text repeat its first token."""
        back = [
            _path_to(trees[b], node, self._longest)
            for b, node in zip(level.batch_R.tolist(), level.node_R.tolist(), strict=True)
        ]
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
        self._texts: dict[str, RequestText] = {}

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
            nodes = list(zip(level.batch_R.tolist(), level.node_R.tolist(), strict=True))
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
        self._texts.pop(request.id, None)
        answer = request.tokens[len(request.submit.prompt) :]
        if answer:
            self._store.add(request.submit.cache_salt, answer)

    def _text(self, request: Request) -> RequestText:
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = RequestText(self._store, request.submit.cache_salt)
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


def _ngram(_: None, context: DraftContext) -> NgramDrafter:
    shortest, longest = context.config.prompt_lookup_min, context.config.prompt_lookup_max
    return NgramDrafter(context.state, context.vocab_size, shortest, longest, host_is_current=context.host_is_current)


def _suffix(_: None, context: DraftContext) -> SuffixDrafter:
    return SuffixDrafter(context.state, SuffixStore(), host_is_current=context.host_is_current)


METHODS = (DraftMethod("ngram", _ngram), DraftMethod("suffix", _suffix))
