"""The block pool, on accelerators and on CPUs: no block has two owners, none is lost, the right ones are evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.core.kv_cache import (
    PADDING_BLOCK,
    BlockPool,
    PrefixIndex,
    extend_digests,
    root_digest,
)
from support.worker.accounts import check_blocks, free_blocks


def digests(text: str) -> list[bytes]:
    """Return one digest for each letter, which covers all letters before it."""
    return [text[: i + 1].encode() for i in range(len(text))]


class ModelPool:
    """Sets and lists that say what a pool must do: which blocks are free, owned and cached, and what is evicted."""

    def __init__(self, count: int) -> None:
        self.free = set(range(1, count))
        self.owners = Counter[int]()
        self.texts: dict[int, bytes] = {}
        self.cached: list[int] = []
        """Blocks without an owner that hold a text, the least recently used one first."""

    def take(self, taken: Sequence[int]) -> None:
        """Check blocks that a pool has handed out, after the evictions that they needed."""
        while len(self.free) < len(taken):
            self.evict(self.evicted_next())
        assert set(taken) <= self.free, "a block was handed out that is not free"
        assert len(set(taken)) == len(taken), "a block was handed out twice"
        self.free -= set(taken)
        self.owners.update(taken)

    def evicted_next(self) -> int:
        parents = {text[:-1] for text in self.texts.values()}
        return next((block for block in self.cached if self.texts[block] not in parents), self.cached[0])

    def evict(self, block: int) -> None:
        self.cached.remove(block)
        del self.texts[block]
        self.free.add(block)

    def found(self, text: str) -> list[int]:
        holders = {own: block for block, own in self.texts.items()}
        blocks = []
        for digest in digests(text):
            if digest not in holders:
                break
            blocks.append(holders[digest])
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                (self.cached.append if block in self.texts else self.free.add)(block)

    def share(self, blocks: Sequence[int]) -> None:
        self.cached = [block for block in self.cached if block not in blocks]
        self.owners.update(blocks)


@pytest.mark.parametrize("contiguous", [False, True])
@given(st.integers(2, 30), st.integers(0, 10**9))
def test_the_pool_does_what_the_model_says(contiguous: bool, count: int, seed: int) -> None:
    """Sequences take, share, publish and release blocks at random."""
    pool = BlockPool(count, contiguous=contiguous)
    random, model = Random(seed), ModelPool(pool.total + 1)
    sequences: list[tuple[list[int], str]] = []
    for _ in range(80):
        match random.choice(("begin", "grow", "grow", "end", "evict")):
            case "begin":  # a text of which the pool may know the beginning; its last letters are not published yet
                text = "".join(random.choices("ab", k=random.randint(0, 6)))
                found = pool.prefixes.find(digests(text))
                assert found == model.found(text), "another prefix is reused"
                pool.share(found)
                model.share(found)
                sequences.append((list(found), text[: len(found)]))
            case "grow" if sequences:
                blocks, text = random.choice(sequences)
                wanted = random.randint(0, 5)
                taken = pool.allocate(wanted, after=blocks[-1] if blocks else None, room=random.randint(0, 9))
                assert (taken is None) == (wanted > len(model.free) + len(model.cached)), "blocks are refused in vain"
                if taken is None:
                    continue
                model.take(taken)
                sequences.remove((blocks, text))
                blocks = blocks + taken
                grown = text + "".join(random.choices("ab", k=random.randint(0, len(blocks) - len(text))))
                for i in range(len(text), len(grown)):
                    digest = grown[: i + 1].encode()
                    pool.register(blocks[i], digest, digest[:-1])
                    if digest not in model.texts.values():
                        model.texts[blocks[i]] = digest
                sequences.append((blocks, grown))
            case "end" if sequences:
                blocks, _ = sequences.pop(random.randrange(len(sequences)))
                pool.release(blocks)
                model.release(blocks)
            case "evict" if model.cached:
                block = random.choice(model.cached)
                pool.evict(block)
                model.evict(block)
        check_blocks(pool, [block for blocks, _ in sequences for block in blocks])
        assert (pool.free, pool.cached) == (len(model.free), len(model.cached))
        assert {block for block in range(pool.total + 1) if block in pool.prefixes} == model.texts.keys()
        assert set(free_blocks(pool)) == model.free
    for blocks, _ in sequences:
        pool.release(blocks)
    check_blocks(pool, [])


def test_a_sequence_grows_into_the_block_behind_its_last() -> None:
    pool = BlockPool(40, contiguous=True)
    mine = pool.allocate(3)
    mine += pool.allocate(2, after=mine[-1]) or []
    assert mine == list(range(mine[0], mine[0] + 5))


def test_a_new_sequence_leaves_its_neighbour_space_to_grow() -> None:
    pool = BlockPool(40, contiguous=True)
    one, two = pool.allocate(2), pool.allocate(2)
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


def hold(pool: BlockPool, text: str) -> list[int]:
    """Give a sequence one block per letter: cached blocks are shared, the others are taken and registered."""
    own = digests(text)
    blocks = pool.prefixes.find(own)
    pool.share(blocks)
    more = pool.allocate(len(own) - len(blocks), after=blocks[-1] if blocks else None)
    for i, block in enumerate(more, start=len(blocks)):
        pool.register(block, own[i], own[i - 1] if i else b"")
    return [*blocks, *more]


def test_an_eviction_does_not_search_a_long_prefix_whose_continuation_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cached prefix is the least recently used text, and none of its 500 blocks can be evicted yet."""
    pool = BlockPool(2000)
    cached = hold(pool, "a" * 500)
    own = pool.allocate(501)
    pool.register(own[-1], b"a" * 501, b"a" * 500)
    pool.release(cached)
    while pool.free:
        pool.release(hold(pool, f"{pool.free:05d}"))
    looked_at: list[int] = []
    is_end = PrefixIndex._is_end
    monkeypatch.setattr(PrefixIndex, "_is_end", lambda self, block: (looked_at.append(block), is_end(self, block))[1])
    assert pool.allocate(128) is not None
    assert len(looked_at) < 1000
    assert len(pool.prefixes.find(digests("a" * 501))) == 501


def test_blocks_that_are_used_again_and_again_do_not_fill_the_index() -> None:
    pool = BlockPool(20)
    for _ in range(1000):
        pool.release(hold(pool, "abc"))
    assert len(pool.prefixes._ends) < 20
    check_blocks(pool, [])


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
