"""Suffix index and store: matches equal those of a search of the whole text; bounds; separation of tenants."""

from __future__ import annotations

import random

import pytest

from specdecode_worker.drafts import lookup
from specdecode_worker.drafts.lookup import (
    END,
    LONGEST,
    SHORTEST,
    RequestText,
    SuffixIndex,
    SuffixStore,
    following,
    rank,
)


def searched(text: list[int], suffix: list[int], capacity: int) -> list[tuple[int, int]]:
    """Return (position, length) of all matches in the last ``capacity`` tokens of a text, the latest first."""
    first, matches = max(0, len(text) - capacity), []
    for position in range(len(text) - 1, first, -1):
        length = 0
        while (
            length < min(LONGEST, len(suffix))
            and position - 1 - length >= first
            and text[position - 1 - length] == suffix[-1 - length]
        ):
            length += 1
        if length >= SHORTEST and text[position] != END:
            matches.append((position, length))
    return matches


@pytest.mark.parametrize("capacity", [3, 5, 8, 17, 100])
def test_matches_equal_those_of_a_search(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_OCCURRENCES", 1000)
    chosen = random.Random(capacity)
    for _ in range(40):
        index, text = SuffixIndex(capacity), list[int]()
        for _ in range(50):
            token = chosen.choice((END, 0, 1, 1, 2, 2, 3))
            if token == END:
                index.end_text()
                text.append(END)
            else:
                new = [token] * chosen.choice((1, 1, 1, 2, 6))
                index.extend(new)
                text += new
            last = [chosen.randint(0, 3) for _ in range(4)] if chosen.random() < 0.5 else text[-6:]
            suffix = last[len(last) - last[::-1].index(END) :] if END in last else last
            matches = [(one.position, one.length) for one in index.matches(suffix)]
            assert matches == searched(text, suffix, capacity)
        assert len(index) == min(capacity, len(text))


def test_only_the_end_of_a_long_text_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_TEXT_TOKENS", 10)
    text = RequestText(SuffixStore(), "")
    text.extend([1, 2, 3, *range(50, 60), 1, 2])
    assert text.matches() == []
    text.extend([3, 1, 2])
    assert text.length == 18
    assert rank(text.matches()) == [3]


def test_long_matches_and_many_occurrences_are_bounded() -> None:
    index = SuffixIndex(10_000)
    index.extend([7] * 500)
    matches = index.matches([7] * 100)
    assert len(matches) <= lookup.MOST_OCCURRENCES
    assert {one.length for one in matches} == {LONGEST}


def test_memory_of_dropped_tokens_is_freed() -> None:
    index = SuffixIndex(50)
    index.extend(range(5000))
    assert len(index) == 50
    assert len(index._last) <= 50


def test_continuations_are_ranked_by_length_then_count_then_order() -> None:
    index = SuffixIndex(100)
    for text in ([1, 2, 3, 8], [9, 2, 3, 6], [9, 2, 3, 5], [9, 2, 3, 5], [4, 2, 3, 6]):
        index.extend(text)
        index.end_text()
    assert rank(index.matches([1, 2, 3])) == [8, 6, 5]
    assert rank(index.matches([9, 2, 3])) == [5, 6, 8]


def test_children_follow_the_path_to_their_node() -> None:
    index = SuffixIndex(100)
    index.extend([1, 2, 3, 4, 5])
    index.end_text()
    index.extend([1, 2, 3, 6])
    index.end_text()
    root = index.matches([1, 2])
    assert rank(root) == [3]
    behind = following(root, 3)
    assert sorted(rank(behind)) == [4, 6]
    assert rank(following(behind, 4)) == [5]
    assert following(behind, 6) == [], "the text ends there"
    assert following(root, 9) == []


def test_answers_of_one_tenant_are_not_drafted_for_another() -> None:
    store = SuffixStore()
    store.add("one", [1, 2, 3])
    text, other = RequestText(store, "one"), RequestText(store, "two")
    for request in (text, other):
        request.extend([5, 1, 2])
    assert rank(text.matches()) == [3]
    assert other.matches() == []
    store.add("two", [1, 2, 4])
    assert rank(RequestText(store, "one").matches()) == []
    assert rank(store.matches("two", [1, 2])) == [4]


def test_no_match_crosses_two_answers() -> None:
    store = SuffixStore()
    store.add("", [1, 2])
    store.add("", [3, 4])
    assert store.matches("", [1, 2]) == []
    assert store.matches("", [2, 3]) == []


def test_store_is_bounded_by_tenant_and_in_total() -> None:
    store = SuffixStore(tenant_tokens=10, most_tokens=25)
    store.add("one", range(100))
    assert store.tokens == 10
    assert rank(store.matches("one", [97, 98])) == [99]
    for tenant in ("two", "three"):
        store.add(tenant, range(100))
        store.matches("one", [97, 98])
    assert store.tokens <= 25
    assert store.matches("one", [97, 98]) == [], "answers were added for it least recently"
    assert rank(store.matches("three", [97, 98])) == [99]


def test_text_of_a_request_is_searched_before_the_store() -> None:
    store = SuffixStore()
    store.add("", [1, 2, 9])
    text = RequestText(store, "")
    text.extend([1, 2, 8, 0, 1, 2])
    assert rank(text.matches()) == [8, 9]
    text.extend([])
    text.extend([9, 5])
    assert text.length == 8
    assert text.matches() == []
