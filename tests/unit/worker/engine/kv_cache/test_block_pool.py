"""The block pool: no block has two owners, none is lost, and adjacent blocks are preferred."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.engine.kv_cache.block_pool import PADDING_BLOCK, BlockPool
from specdecode_worker.engine.kv_cache.prefix_index import extend_digests, root_digest

TURNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.booleans()), max_size=60)
"""Steps of a test case: (sequence, blocks to take, free all blocks instead)."""


@given(st.integers(2, 30), TURNS)
def test_every_block_has_one_owner_and_all_are_released(count: int, turns: list[tuple[int, int, bool]]) -> None:
    pool = BlockPool(count)
    owned: dict[int, list[int]] = {}
    for sequence, wanted, over in turns:
        mine = owned.setdefault(sequence, [])
        if over:
            pool.release(mine)
            owned[sequence] = []
            continue
        free = pool.free
        taken = pool.allocate(wanted, after=mine[-1] if mine else None)
        assert (taken is None) == (wanted > free), "blocks are refused only when there are too few"
        mine += taken or []
        everyone = [block for blocks in owned.values() for block in blocks]
        assert len(everyone) == len(set(everyone)) == pool.used
        assert all(PADDING_BLOCK < block < count for block in everyone)
        pool.check(everyone)
    for blocks in owned.values():
        pool.release(blocks)
    pool.check([])
    assert sorted(pool.allocate(count - 1) or []) == list(range(1, count)), "all of them can be taken again"


def test_a_refused_allocation_takes_no_block() -> None:
    pool = BlockPool(5)
    assert pool.allocate(5) is None
    assert (pool.free, pool.used) == (4, 0)


def test_a_sequence_grows_into_the_block_behind_its_last() -> None:
    pool = BlockPool(40)
    mine = pool.allocate(3)
    assert mine is not None
    mine += pool.allocate(2, after=mine[-1]) or []
    assert mine == list(range(mine[0], mine[0] + 5))


def test_a_new_sequence_leaves_its_neighbour_space_to_grow() -> None:
    pool = BlockPool(40)
    one, two = pool.allocate(2), pool.allocate(2)
    assert one is not None
    assert two is not None
    grown = pool.allocate(8, after=one[-1])
    assert grown == list(range(one[-1] + 1, one[-1] + 9))


def test_releasing_a_block_twice_raises() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(2)
    assert taken is not None
    pool.release(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(taken)


def test_the_padding_block_has_no_owner() -> None:
    with pytest.raises(AssertionError, match="padding block"):
        BlockPool(5).release([PADDING_BLOCK])


def test_check_detects_wrong_owner_counts() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(2)
    assert taken is not None
    for owned in ([], taken[:1], [*taken, taken[0]]):
        with pytest.raises(AssertionError, match="more owners than it knows of, or fewer"):
            pool.check(owned)


def digests(text: str) -> list[bytes]:
    """Return one digest for each letter, which covers all letters before it."""
    return [text[: i + 1].encode() for i in range(len(text))]


def hold(pool: BlockPool, text: str) -> list[int]:
    """Give a sequence one block per letter: cached blocks are shared, the others are taken and registered."""
    own = digests(text)
    blocks = pool.prefixes.find(own)
    pool.share(blocks)
    more = pool.allocate(len(own) - len(blocks), after=blocks[-1] if blocks else None)
    assert more is not None
    for i, block in enumerate(more, start=len(blocks)):
        pool.register(block, own[i], own[i - 1] if i else b"")
    return [*blocks, *more]


def known(pool: BlockPool, text: str) -> int:
    return len(pool.prefixes.find(digests(text)))


TEXTS = st.text("ab", min_size=1, max_size=6)


@given(st.integers(7, 20), st.lists(st.tuples(st.integers(0, 3), TEXTS, st.booleans()), max_size=60))
def test_owner_counts_of_shared_and_cached_blocks_stay_consistent(
    count: int, turns: list[tuple[int, str, bool]]
) -> None:
    pool = BlockPool(count)
    owned: dict[int, list[int]] = {}
    for sequence, text, over in turns:
        pool.release(owned.pop(sequence, []))
        if not over and len(text) <= pool.available:
            owned[sequence] = hold(pool, text)
            assert known(pool, text) == len(text)
        everyone = [block for blocks in owned.values() for block in blocks]
        pool.check(everyone)
        assert (pool.used, pool.total) == (len(set(everyone)), pool.free + pool.cached + pool.used)
    for blocks in owned.values():
        pool.release(blocks)
    pool.check([])
    assert pool.available == pool.total
    assert sorted(pool.allocate(count - 1) or []) == list(range(1, count)), "what is cached can be taken, all of it"


def test_a_shared_block_stays_until_both_owners_release_it() -> None:
    pool = BlockPool(10)
    one, two = hold(pool, "abc"), hold(pool, "abd")
    assert one[:2] == two[:2]
    assert (pool.used, pool.free) == (4, 5)
    pool.release(one)
    assert (pool.used, pool.cached) == (3, 1)
    pool.check(two)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(one)


def test_cached_blocks_are_not_evicted_while_free_blocks_remain() -> None:
    pool = BlockPool(8)
    pool.release(hold(pool, "abc"))
    assert pool.allocate(4) is not None
    assert known(pool, "abc") == 3
    assert pool.allocate(1) is not None
    assert known(pool, "abc") == 2, "the end first: without its beginning it could not be found"


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(7)
    for text in ("ab", "cd", "ef", "ab"):  # "ab" is used again
        pool.release(hold(pool, text))
    assert pool.free == 0
    left = []
    for _ in range(6):
        assert pool.allocate(1) is not None
        left.append([known(pool, text) for text in ("ab", "cd", "ef")])
    assert left == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_a_continuation_is_evicted_before_its_prefix() -> None:
    """A cached continuation is evicted before its prefix, even if the continuation was used more recently.

    Another owner computed its own copy of the prefix, so the cached prefix was not used when the continuation was.
    """
    pool = BlockPool(6)
    pool.release(hold(pool, "a"))
    own = pool.allocate(2)
    assert own is not None
    pool.register(own[0], b"a", b"")
    pool.register(own[1], b"ab", b"a")
    assert own[0] not in pool.prefixes, "the text has its block already"
    pool.release(own)
    assert known(pool, "ab") == 2
    pool.allocate(pool.free + 1)
    assert known(pool, "ab") == 1


def test_owned_blocks_are_not_evicted() -> None:
    pool = BlockPool(6)
    mine = hold(pool, "abc")
    pool.release(hold(pool, "d"))
    assert pool.allocate(3) is None
    assert pool.allocate(2) is not None
    assert known(pool, "abc") == 3
    assert known(pool, "d") == 0
    pool.release(mine)


def test_marks_are_stored_per_draft_and_removed_with_the_block() -> None:
    pool = BlockPool(5)
    blocks = hold(pool, "ab")
    index = pool.prefixes
    index.mark(blocks[0], "one")
    index.mark(blocks[1], "two")
    assert [index.is_marked(blocks[0], draft) for draft in ("one", "two", "three")] == [True, False, False]
    index.forget_marks("one")
    assert not index.is_marked(blocks[0], "one")
    assert index.is_marked(blocks[1], "two")
    pool.release(blocks)
    pool.allocate(4)
    assert not index.is_marked(blocks[1], "two")


def test_digests_depend_on_all_earlier_tokens_and_on_the_target() -> None:
    def of(tokens: list[int], salt: str = "t") -> list[bytes]:
        block_digests: list[bytes] = []
        extend_digests(block_digests, tokens, 1, root_digest(salt), 2)
        extend_digests(block_digests, tokens, len(tokens) // 2, root_digest(salt), 2)
        return block_digests

    text = [1, 2, 3, 4, 5, 6, 7]
    assert len(of(text)) == 3
    for i in range(6):
        other = [*text[:i], 9, *text[i + 1 :]]
        assert [a == b for a, b in zip(of(text), of(other), strict=True)] == [block < i // 2 for block in range(3)]
    assert not set(of(text)) & set(of(text, "another target"))
