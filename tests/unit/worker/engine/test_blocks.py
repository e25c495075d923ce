"""The block pool: no block has two owners, none is lost, and neighbours lie beside each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.engine.blocks import PADDING_BLOCK, BlockPool

TURNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.booleans()), max_size=60)
"""(sequence, blocks wanted, give all back instead)."""


@given(st.integers(2, 30), TURNS)
def test_every_block_has_one_owner_and_all_come_back(count: int, turns: list[tuple[int, int, bool]]) -> None:
    pool = BlockPool(count)
    owned: dict[int, list[int]] = {}
    for sequence, wanted, over in turns:
        mine = owned.setdefault(sequence, [])
        if over:
            pool.give_back(mine)
            owned[sequence] = []
            continue
        free = pool.free
        taken = pool.take(wanted, after=mine[-1] if mine else None)
        assert (taken is None) == (wanted > free), "blocks are refused only when there are too few"
        mine += taken or []
        everyone = [block for blocks in owned.values() for block in blocks]
        assert len(everyone) == len(set(everyone)) == pool.used
        assert all(PADDING_BLOCK < block < count for block in everyone)
        pool.check(everyone)
    for blocks in owned.values():
        pool.give_back(blocks)
    pool.check([])
    assert sorted(pool.take(count - 1) or []) == list(range(1, count)), "all of them can be taken again"


def test_a_refusal_takes_nothing() -> None:
    pool = BlockPool(5)
    assert pool.take(5) is None
    assert (pool.free, pool.used) == (4, 0)


def test_a_sequence_grows_into_the_block_behind_its_last() -> None:
    pool = BlockPool(40)
    mine = pool.take(3)
    assert mine is not None
    mine += pool.take(2, after=mine[-1]) or []
    assert mine == list(range(mine[0], mine[0] + 5))


def test_a_new_sequence_leaves_its_neighbour_room_to_grow() -> None:
    pool = BlockPool(40)
    one, two = pool.take(2), pool.take(2)
    assert one is not None
    assert two is not None
    grown = pool.take(8, after=one[-1])
    assert grown == list(range(one[-1] + 1, one[-1] + 9))


def test_giving_back_twice_is_caught() -> None:
    pool = BlockPool(5)
    taken = pool.take(2)
    assert taken is not None
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(taken)


def test_the_padding_block_has_no_owner() -> None:
    with pytest.raises(AssertionError, match="padding block"):
        BlockPool(5).give_back([PADDING_BLOCK])


def test_books_that_do_not_balance_are_caught() -> None:
    pool = BlockPool(5)
    taken = pool.take(2)
    assert taken is not None
    for owned in ([], taken[:1], [*taken, taken[0]]):
        with pytest.raises(AssertionError, match="two owners"):
            pool.check(owned)
