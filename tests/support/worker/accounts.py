"""Checks that slots and cache blocks are accounted for, between any two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specdecode_worker.core.kv_cache import BlockPool, FreeList, PrefixIndex
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.scheduler import Scheduler


def check_engine(engine: Engine) -> None:
    check_scheduler(engine._scheduler)


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that every slot is owned or free and that every block is owned, cached or free."""
    check_blocks(scheduler._pool, [block for request in scheduler.running for block in request.blocks])
    assert len(scheduler._slots) + len(scheduler.running) == scheduler._limits.max_num_seqs, "a slot is lost"


def check_blocks(pool: BlockPool, owned: Sequence[int]) -> None:
    """Check that every block is free, cached, or occurs in ``owned`` as often as it has owners."""
    _check_index(pool.prefixes)
    owners, blocks = Counter(owned), range(1, pool.total + 1)
    assert all(pool._owners[block] == owners[block] for block in range(pool.total + 1)), (
        "a block has more owners than it knows of, or fewer"
    )
    assert len(owners) == pool.used, "a block is owned and cached"
    taken = set(owners) | {block for block in blocks if pool.prefixes.is_unowned(block)}
    free = free_blocks(pool)
    assert set(blocks) - set(free) == taken, "a block is lost"
    assert len(set(free)) == len(free) == pool.free, "free blocks are miscounted"


def free_blocks(pool: BlockPool) -> list[int]:
    """Return all blocks that hold nothing."""
    free = pool._free
    return free._stack if isinstance(free, FreeList) else [block for block, taken in enumerate(free._map) if not taken]


def _check_index(index: PrefixIndex) -> None:
    assert {entry.digest: block for block, entry in index._entries.items()} == index._blocks, "a digest is astray"
    assert index._children == Counter(entry.parent for entry in index._entries.values()), "a child is miscounted"
    assert index._unowned.keys() <= index._entries.keys(), "a block without an owner holds no text"
