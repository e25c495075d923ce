"""Who owns which block of the paged caches. Target and draft cache share one numbering."""

from __future__ import annotations

BLOCK_SIZE = 16
PADDING_BLOCK = 0
"""Absorbs what padding writes; never owned."""

_FREE = b"\x00"
_OWNED = b"\x01"


class BlockPool:
    """Hands out blocks so that a sequence's blocks lie behind each other where they can: attention then reads them in
    place. A sequence grows into the block behind its last; a new one starts in the middle of the widest gap, so that
    its neighbour can grow too."""

    def __init__(self, count: int) -> None:
        """``count`` includes the padding block."""
        self.total = count - 1
        self.free = count - 1
        self._map = bytearray(_OWNED + _FREE * (count - 1))

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """``count`` blocks, best right behind block ``after``; None, and nothing taken, when there are too few."""
        if count > self.free:
            return None
        taken: list[int] = []
        while len(taken) < count:
            last = taken[-1] if taken else after
            block = last + 1 if last is not None and self._is_free(last + 1) else self._gap(count - len(taken))
            self._map[block] = 1
            taken.append(block)
        self.free -= count
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self._map[block] == 1, f"block {block} is given back twice"
            assert block != PADDING_BLOCK, "the padding block has no owner"
            self._map[block] = 0
        self.free += len(blocks)

    def check(self, owned: list[int]) -> None:
        """The books balance: exactly the blocks in ``owned`` are taken, each once."""
        assert len(owned) == len(set(owned)) == self.used, "a block has two owners, or none gives it back"
        assert self._map.count(_FREE) == self.free, "a block is lost"

    def _is_free(self, block: int) -> bool:
        return block < len(self._map) and self._map[block] == 0

    def _gap(self, count: int) -> int:
        """Where a run starts: in the middle of the widest gap, or at its beginning when it is small."""
        widest = max(bytes(self._map).split(_OWNED), key=len)
        first = self._map.index(widest)
        middle = first + len(widest) // 2
        return middle if first > 1 and len(widest) - len(widest) // 2 >= count else first
