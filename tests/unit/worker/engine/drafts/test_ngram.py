"""Prompt lookup, compared with a search in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import MAX_RANKS, TreeShape
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import Row
from specdecode_worker.drafts.lookup import NgramDrafter, lookup
from specdecode_worker.sampling.trees import forest_of, tree_of
from support.worker.small_engine import request

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


def drafter_of(shortest: int) -> NgramDrafter:
    state = DeviceState(1, 8, torch.float32, torch.device("cpu"))
    return NgramDrafter(state, VOCABULARY, shortest, 5, host_is_current=True)


@given(st.lists(texts, min_size=1, max_size=6), st.integers(1, 5))
def test_a_request_is_ready_if_its_last_tokens_occurred_before(growth: list[list[int]], shortest: int) -> None:
    drafter, one = drafter_of(shortest), request("one", [])
    for tokens in growth:
        one.tokens += tokens
        text = one.tokens
        earlier = [text[i : i + shortest] for i in range(len(text) - shortest)]
        assert drafter.ready(one) == (text[-shortest:] in earlier)
    del one
    assert not drafter._known


class CountedText(list[int]):
    """Text that counts the tokens read from it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_step_reads_a_few_tokens_of_a_long_text() -> None:
    drafter, one = drafter_of(2), request("one", [])
    one.tokens = text = CountedText(range(5000))
    assert not drafter.ready(one)
    text.read = 0
    for token in range(100):
        text.append(5000 + token)
        assert not drafter.ready(one)
    assert text.read <= 100 * 2 * 2


def test_the_host_reads_nothing_of_a_step_that_looks_tokens_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would wait for all that is queued, and no step would be launched ahead."""
    drafter, one, tree = drafter_of(1), request("one", [1, 2, 1]), tree_of(TreeShape.chain(2))
    one.slot, one.cached = 0, 2
    drafter._state.admit(0, one.tokens)
    drafter._state.set_length(0, one.cached)
    forest: Any = forest_of((tree,), torch.device("cpu"))
    expand: Any = drafter.begin([Row(one, 3, tree)], forest, None)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("the host waits"))
        ranked = expand(0, forest.levels[0])
    assert ranked[0, 0] == 2
