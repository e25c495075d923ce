"""Allocator of the blocks of the paged caches. Target and draft caches share one block numbering.

A block is owned (by one request, or by several that share a prefix), cached (without an owner, kept for prefix reuse)
or free.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from specdecode_worker.engine.kv_cache.prefix_index import PrefixIndex

BLOCK_SIZE = 16
"""Number of tokens per block."""
PADDING_BLOCK = 0
"""Block that absorbs the writes of padding; it is never owned."""

_FREE = b"\x00"
_TAKEN = b"\x01"
_GAPS = re.compile(rb"\x00+")


def blocks_for(keys: int) -> int:
    """Return the number of blocks that hold ``keys`` keys."""
    return -(-keys // BLOCK_SIZE)


class FreeList:
    """Stack of the free blocks of a pool, for devices whose attention reads block tables. A block takes O(1)."""

    def __init__(self, count: int) -> None:
        """Start with all blocks but the padding block. ``count`` includes that one."""
        self._stack = list(range(count - 1, PADDING_BLOCK, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Remove and return ``count`` blocks, those added last first; ``after`` and ``room`` make no difference."""
        stack = self._stack
        return [stack.pop() for _ in range(count)]

    def add(self, block: int) -> None:
        """Add a block that is no longer used."""
        self._stack.append(block)

    def blocks(self) -> list[int]:
        """Return all free blocks."""
        return list(self._stack)


class FreeGaps:
    """Map of the free blocks of a pool that keeps the blocks of a sequence contiguous where possible, for CPUs.

    Attention on a CPU reads contiguous blocks in place, without a copy. A sequence grows into the block after its last
    one. A new sequence starts in the middle of the widest gap, so that the sequence before the gap can grow too. The
    search for that gap takes time in proportion to the number of blocks, which is small beside a step on a CPU.
    """

    def __init__(self, count: int) -> None:
        """Start with all blocks but the padding block. ``count`` includes that one."""
        self._free = count - 1
        self._map = bytearray(_TAKEN + _FREE * (count - 1))

    def __len__(self) -> int:
        return self._free

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Remove and return ``count`` blocks; arguments as of `BlockPool.allocate`."""
        taken: list[int] = []
        while len(taken) < count:
            last = taken[-1] if taken else after
            if last is not None and self._is_free(last + 1):
                block = last + 1
            else:
                block = self._gap(max(count, room) - len(taken))
            self._map[block] = 1
            self._free -= 1
            taken.append(block)
        return taken

    def add(self, block: int) -> None:
        """Add a block that is no longer used."""
        self._map[block] = 0
        self._free += 1

    def blocks(self) -> list[int]:
        """Return all free blocks."""
        return [block for block, taken in enumerate(self._map) if not taken]

    def _is_free(self, block: int) -> bool:
        return block < len(self._map) and self._map[block] == 0

    def _gap(self, count: int) -> int:
        """Return the block where a run of ``count`` blocks starts.

        This is the middle of the widest gap if the run fits after it, else the beginning of that gap. A gap at the
        start of the pool has no sequence before it that could grow, so that it is used from its beginning.
        """
        if self._free == 1:
            return self._map.index(0)
        first, end = max((gap.span() for gap in _GAPS.finditer(self._map)), key=lambda span: span[1] - span[0])
        middle = (first + end) // 2
        return middle if first > 1 and end - middle >= count else first


class BlockPool:
    """Reference-counted block allocator. Cached blocks are evicted only when no free block is left."""

    def __init__(self, count: int, *, contiguous: bool = False) -> None:
        """Start with all blocks free.

        Args:
            count: Number of blocks, including the padding block.
            contiguous: Keep the blocks of a sequence contiguous where possible, as attention on a CPU reads them.
        """
        self.total = count - 1
        self.prefixes = PrefixIndex()
        self._free = FreeGaps(count) if contiguous else FreeList(count)
        self._owners = [0] * count

    @property
    def free(self) -> int:
        """Number of blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks without an owner that are kept for prefix reuse."""
        return self.prefixes.unowned_count

    @property
    def available(self) -> int:
        """Number of blocks that can be taken: free and cached ones."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        """Number of blocks with an owner."""
        return self.total - self.available

    def allocate(self, count: int, after: int | None = None, room: int = 0) -> list[int] | None:
        """Take ``count`` blocks; return None, and take none, if fewer are available.

        Args:
            count: Number of blocks.
            after: Block that the new blocks should directly follow, if possible.
            room: Number of blocks that the sequence is expected to need, used to choose where it starts.
        """
        if count > self.available:
            return None
        while self.free < count:
            self.evict(self.prefixes.eviction_candidate())
        taken = self._free.take(count, after, room)
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks that were found in the prefix index."""
        for block in blocks:
            if not self._owners[block]:
                self.prefixes.mark_owned(block)
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner from blocks; blocks without owners become cached if the index holds them, else free.

        The blocks are processed in reverse, so that the end of a text is evicted before its beginning.
        """
        for block in reversed(blocks):
            assert block != PADDING_BLOCK, "the padding block has no owner"
            assert self._owners[block] > 0, f"block {block} is given back twice"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self.prefixes:
                self.prefixes.mark_unowned(block)
            else:
                self._free.add(block)

    def register(self, block: int, digest: bytes, parent: bytes) -> None:
        """Add a full block to the prefix index; the block must have an owner and must not be written again.

        If another block is already registered for the same text, that block stays registered.

        Args:
            block: Number of the block.
            digest: Digest of all tokens up to the end of the block.
            parent: Digest of the block before.
        """
        assert self._owners[block] > 0, f"block {block} has no owner"
        if self.prefixes.holder(digest) is None:
            self.prefixes.add(block, digest, parent)

    def evict(self, block: int) -> None:
        """Evict a cached block: remove it from the prefix index and free it."""
        assert self.prefixes.is_unowned(block), f"block {block} is no cached one"
        self.prefixes.drop(block)
        self._free.add(block)

    def check(self, owned: Sequence[int]) -> None:
        """Check that every block is free, cached, or occurs in ``owned`` as often as it has owners."""
        self.prefixes.check()
        owners = Counter(owned)
        assert all(self._owners[block] == owners[block] for block in range(self.total + 1)), (
            "a block has more owners than it knows of, or fewer"
        )
        assert len(owners) == self.used, "a block is owned and cached"
        taken = set(owners) | {block for block in range(1, self.total + 1) if self.prefixes.is_unowned(block)}
        free = self._free.blocks()
        assert set(range(1, self.total + 1)) - set(free) == taken, "a block is lost"
        assert len(set(free)) == len(free) == self.free, "free blocks are miscounted"
