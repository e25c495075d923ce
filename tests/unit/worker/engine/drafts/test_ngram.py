"""Prompt lookup, compared with a search in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.drafts.lookup.ngram import lookup

VOCABULARY = 5


def searched(text: list[int], suffix: list[int], shortest: int) -> list[int]:
    """Return the tokens that followed the suffix or an end of it: the longest match first, then the latest."""
    best: dict[int, tuple[int, int]] = {}
    for at in range(len(text)):
        size = 0
        while size < len(suffix) and at - size - 1 >= 0 and text[at - size - 1] == suffix[-size - 1]:
            size += 1
        if size >= shortest:
            best[text[at]] = max(best.get(text[at], (0, 0)), (size, at))
    return sorted(best, key=lambda token: best[token], reverse=True)[:MAX_RANKS]


texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 5))
def test_lookup_equals_a_naive_search(cases: list[tuple[list[int], list[int]]], shortest: int, noise: int) -> None:
    longest = 4
    suffixes = [(suffix * longest)[-longest:] for _, suffix in cases]
    width = max(len(text) for text, _ in cases) + noise
    padded = torch.tensor([text + [3] * (width - len(text)) for text, _ in cases])
    known = torch.tensor([len(text) for text, _ in cases])
    proposals = lookup(padded, known, torch.tensor(suffixes), shortest, VOCABULARY)
    for row, (text, _), suffix in zip(proposals.tolist(), cases, suffixes, strict=True):
        assert [token for token in row if token >= 0] == searched(text, suffix, shortest)


@pytest.mark.parametrize("shortest", [1, 2])
def test_suffix_without_a_match_proposes_nothing(shortest: int) -> None:
    proposals = lookup(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([[7, 8]]), shortest, 9)
    assert proposals.unique().tolist() == [-1]
