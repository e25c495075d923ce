"""Index of full cache blocks by the hash of all tokens up to their end, with least-recently-used eviction order.

The digest of a block is the hash of the digest of the block before it and of its own tokens, so that requests with the
same prefix find the same blocks. Marks record which drafts have valid keys in a block. Owners are counted in
block_pool.py.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import islice

_MOST_STALE = 8
"""Number of entries of the heap of ends that are not needed, beyond the number of blocks without an owner."""
MOST_CHANGES = 1024
"""Number of the latest changes that the index remembers, about 40 kB."""


def root_digest(salt: str) -> bytes:
    """Return the parent digest of the first block of every text. ``salt`` identifies the target."""
    return blake2b(salt.encode(), digest_size=16).digest()


def salted_root(root: bytes, salt: str) -> bytes:
    """Return the parent digest of the first block of a text with the salt of a request; ``root`` without a salt."""
    return blake2b(root + salt.encode(), digest_size=16).digest() if salt else root


def extend_digests(digests: list[bytes], tokens: Sequence[int], count: int, root: bytes, block_size: int) -> None:
    """Append digests of full blocks of ``tokens`` to ``digests`` until there are ``count``.

    Args:
        digests: Digests of the first blocks, extended in place; these are not computed again.
        tokens: Tokens of the request.
        count: Number of full blocks to cover.
        root: Parent digest of the first block.
        block_size: Tokens per block.
    """
    for block in range(len(digests), count):
        packed = array("q", tokens[block * block_size : (block + 1) * block_size]).tobytes()
        digests.append(blake2b((digests[-1] if digests else root) + packed, digest_size=16).digest())


@dataclass(slots=True)
class _Entry:
    """Index entry of one block: its digest, that of the block before, and a bit mask of marks."""

    digest: bytes
    parent: bytes
    marks: int = 0


class PrefixIndex:
    """Mapping from digests to blocks.

    A block without an owner stays in the index until a request finds it again or it is evicted.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._unowned: OrderedDict[int, int] = OrderedDict()
        """Blocks without an owner, the least recently used first, with the number of their release."""
        self._releases = 0
        self._ends: list[tuple[int, int]] = []
        """Heap of the blocks without an owner and without an indexed successor, by the number of their release.

        It may hold blocks that have an owner or a successor again; `eviction_candidate` drops them.
        """
        self._children: Counter[bytes] = Counter()
        self._bits: dict[str, int] = {}
        self._changes: deque[bytes] = deque(maxlen=MOST_CHANGES)
        self.version = 0
        """Number of changes so far, of any entry: added, dropped, marked, or with an owner or without one."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @property
    def unowned_count(self) -> int:
        """Number of blocks without an owner."""
        return len(self._unowned)

    def is_unowned(self, block: int) -> bool:
        """Return whether the block is in the index and has no owner."""
        return block in self._unowned

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest indexed prefix of ``digests``."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def changes_since(self, version: int) -> Iterable[bytes] | None:
        """Return the digests of the entries that changed since a ``version``; None if too many to remember did."""
        count = self.version - version
        return islice(reversed(self._changes), count) if count <= len(self._changes) else None

    def holder(self, digest: bytes) -> int | None:
        """Return the block that is registered for ``digest``, or None."""
        return self._blocks.get(digest)

    def add(self, block: int, digest: bytes, parent: bytes) -> None:
        """Register an owned block under ``digest``; ``parent`` is the digest of the block before."""
        assert digest not in self._blocks, "two blocks hold the same text"
        assert block not in self._entries, f"block {block} holds a text already"
        self._blocks[digest] = block
        self._entries[block] = _Entry(digest, parent)
        self._children[parent] += 1
        self._record_change(digest)

    def drop(self, block: int) -> None:
        """Remove a block from the index."""
        entry = self._entries.pop(block)
        del self._blocks[entry.digest]
        self._unowned.pop(block, None)
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            before = self._blocks.get(entry.parent)
            if before is not None and before in self._unowned:
                heappush(self._ends, (self._unowned[before], before))
        self._record_change(entry.digest)

    def mark_unowned(self, block: int) -> None:
        """Record that the block lost its last owner, as the most recently used one."""
        digest = self._entries[block].digest
        self._releases += 1
        self._unowned[block] = self._releases
        if digest not in self._children:
            heappush(self._ends, (self._releases, block))
            if len(self._ends) > 2 * len(self._unowned) + _MOST_STALE:
                self._ends = [(release, block) for block, release in self._unowned.items() if self._is_end(block)]
        self._record_change(digest)

    def mark_owned(self, block: int) -> None:
        """Record that a block without an owner has an owner again."""
        del self._unowned[block]
        self._record_change(self._entries[block].digest)

    def eviction_candidate(self) -> int:
        """Return the block to evict: the least recently used one without an indexed successor.

        If all have successors, it is the least recently used one. That happens when the owner of a successor computed
        the blocks before it for itself.
        """
        while self._ends:
            release, block = self._ends[0]
            if self._unowned.get(block) == release and self._is_end(block):
                return block
            heappop(self._ends)
        return next(iter(self._unowned))

    def _is_end(self, block: int) -> bool:
        """Return whether no indexed block follows a block."""
        return self._entries[block].digest not in self._children

    def mark(self, block: int, draft: str) -> None:
        """Record that ``draft`` has valid keys for the whole block. No effect on a block outside of the index."""
        entry = self._entries.get(block)
        if entry is not None:
            marks = entry.marks | 1 << self._bits.setdefault(draft, len(self._bits))
            if marks != entry.marks:
                entry.marks = marks
                self._record_change(entry.digest)

    def is_marked(self, block: int, draft: str) -> bool:
        """Return whether the block carries the mark of ``draft``."""
        entry, bit = self._entries.get(block), self._bits.get(draft)
        return entry is not None and bit is not None and bool(entry.marks >> bit & 1)

    def forget_marks(self, draft: str) -> None:
        """Remove the marks of ``draft`` from all blocks, because its keys are no longer in the cache."""
        bit = self._bits.get(draft)
        if bit is not None:
            for entry in self._entries.values():
                entry.marks &= ~(1 << bit)
            self._changes.clear()
            self.version += 1

    def check(self) -> None:
        """Check that the tables of the index are consistent."""
        assert {entry.digest: block for block, entry in self._entries.items()} == self._blocks, "a digest is astray"
        assert self._children == Counter(entry.parent for entry in self._entries.values()), "a child is miscounted"
        assert self._unowned.keys() <= self._entries.keys(), "a block without an owner holds no text"

    def _record_change(self, digest: bytes) -> None:
        self._changes.append(digest)
        self.version += 1
