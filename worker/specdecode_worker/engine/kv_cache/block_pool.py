"""Who owns which block of the paged caches. Target and draft caches share one numbering.

A block is owned (by one request, or by several that begin alike), cached (nobody's, kept for who comes next), or free.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from specdecode_worker.engine.kv_cache.prefix_index import PrefixIndex

BLOCK_SIZE = 16
PADDING_BLOCK = 0
"""Absorbs what padding writes; never owned."""

_FREE = b"\x00"
_TAKEN = b"\x01"
_GAPS = re.compile(rb"\x00+")


def blocks_for(keys: int) -> int:
    """Blocks that hold so many keys."""
    return -(-keys // BLOCK_SIZE)


class BlockPool:
    """Hands out blocks so that a sequence's blocks lie behind each other where they can: attention then reads them in
    place. A sequence grows into the block behind its last; a new one starts in the middle of the widest gap, so that
    its neighbour can grow too. Cached blocks are given up when free ones run out, never before."""

    def __init__(self, count: int) -> None:
        """``count`` includes the padding block."""
        self.total = count - 1
        self.free = count - 1
        self.prefixes = PrefixIndex()
        self._map = bytearray(_TAKEN + _FREE * (count - 1))
        self._owners = [0] * count

    @property
    def cached(self) -> int:
        return self.prefixes.resting

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        """Blocks that somebody owns."""
        return self.total - self.available

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int] | None:
        """``count`` blocks, best right behind block ``after``; None, and nothing taken, when there are too few.

        ``room`` is how many the sequence will come to need, for a good place to start.
        """
        if count > self.available:
            return None
        while self.free < count:
            self.let_go(self.prefixes.oldest())
        taken: list[int] = []
        while len(taken) < count:
            last = taken[-1] if taken else after
            if last is not None and self._is_free(last + 1):
                block = last + 1
            else:
                block = self._gap(max(count, room) - len(taken))
            self._map[block] = 1
            self._owners[block] = 1
            self.free -= 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for blocks that the index has found."""
        for block in blocks:
            if not self._owners[block]:
                self.prefixes.wake(block)
            self._owners[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One owner less. The last ones of a text rest before those that they continue, and so go before them."""
        for block in reversed(blocks):
            assert block != PADDING_BLOCK, "the padding block has no owner"
            assert self._owners[block] > 0, f"block {block} is given back twice"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self.prefixes:
                self.prefixes.rest(block)
            else:
                self._free(block)

    def register(self, block: int, digest: bytes, parent: bytes) -> None:
        """The owned ``block`` now holds the text of ``digest``, and nobody will write to it again. Where another block
        holds it already, that one stays known."""
        assert self._owners[block] > 0, f"block {block} has no owner"
        if self.prefixes.holder(digest) is None:
            self.prefixes.add(block, digest, parent)

    def let_go(self, block: int) -> None:
        """Forgets what a resting block holds."""
        assert self.prefixes.rests(block), f"block {block} is no cached one"
        self.prefixes.drop(block)
        self._free(block)

    def check(self, owned: Sequence[int]) -> None:
        """The books balance: every block is free, cached, or in ``owned`` as often as it has owners."""
        self.prefixes.check()
        owners = Counter(owned)
        assert all(self._owners[block] == owners[block] for block in range(self.total + 1)), (
            "a block has more owners than it knows of, or fewer"
        )
        assert len(owners) == self.used, "a block is owned and cached"
        taken = set(owners) | {block for block in range(1, self.total + 1) if self.prefixes.rests(block)}
        assert {block for block in range(1, self.total + 1) if self._map[block]} == taken, "a block is lost"
        assert self._map.count(_FREE) == self.free, "free blocks are miscounted"

    def _free(self, block: int) -> None:
        self._map[block] = 0
        self.free += 1

    def _is_free(self, block: int) -> bool:
        return block < len(self._map) and self._map[block] == 0

    def _gap(self, count: int) -> int:
        """Where a run starts: in the middle of the widest gap, or at its beginning when it is small."""
        if self.free == 1:
            return self._map.index(0)
        first, end = max((gap.span() for gap in _GAPS.finditer(self._map)), key=lambda span: span[1] - span[0])
        middle = (first + end) // 2
        return middle if first > 1 and end - middle >= count else first
