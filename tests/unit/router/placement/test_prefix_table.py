"""Tests of the table of expected cached prefixes."""

from __future__ import annotations

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.prefix_table import MAX_WORKERS_PER_CONVERSATION, PrefixTable


def affinity(number: int) -> Affinity:
    return Affinity("", "", number.to_bytes(8, "big"))


def turns(table: PrefixTable, worker: str, cached: list[int], *, number: int = 0) -> None:
    for index, tokens in enumerate(cached):
        table.record(
            affinity(number), worker, prompt_tokens=100 * (index + 1), cached_tokens=tokens, completion_tokens=50
        )


def test_prompt_and_answer_are_expected_at_the_next_turn() -> None:
    table = PrefixTable()
    assert table.expected(affinity(0)) == {}
    turns(table, "a", [0, 100, 200])
    assert 0 < 350 - table.expected(affinity(0))["a"] < 70  # blocks are cached whole, so a turn misses a few tokens
    assert table.expected(affinity(1)) == {}


def test_a_worker_that_evicts_is_expected_to_have_less() -> None:
    table = PrefixTable()
    for number in range(30):
        turns(table, "evicts", [0, 0], number=number)
        turns(table, "keeps", [0, 200], number=number)
    expected = table.expected(affinity(0))
    assert expected["evicts"] < 0.2 * expected["keeps"]


def test_a_first_request_says_nothing_about_eviction() -> None:
    table = PrefixTable()
    turns(table, "a", [0])
    assert table.expected(affinity(0)) == {"a": 150}


def test_memory_is_bounded() -> None:
    table = PrefixTable(max_conversations=10)
    for number in range(100):
        turns(table, "a", [0], number=number)
    assert len(table) == 10
    assert table.expected(affinity(0)) == {}
    for index in range(20):
        turns(table, f"w{index}", [0], number=99)
    assert len(table.expected(affinity(99))) == MAX_WORKERS_PER_CONVERSATION
    assert "w19" in table.expected(affinity(99))


def test_a_new_worker_of_the_name_starts_without_a_past() -> None:
    table = PrefixTable()
    for number in range(30):
        turns(table, "a", [0, 0], number=number)
    table.remove_worker("a")
    turns(table, "a", [0], number=99)
    assert table.expected(affinity(99)) == {"a": 150}
