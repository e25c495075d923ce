"""Paged KV cache: allocation of blocks, and the index of cached prefixes."""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import islice

# Index of full cache blocks by the hash of all tokens up to their end, with least-recently-used eviction order.
#
# The digest of a block is the hash of the digest of the block before it and of its own tokens, so that requests with
# the same prefix find the same blocks. Marks record which drafts have valid keys in a block. Owners are counted in
# `BlockPool`.


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached prefix of a request.

    ``blocks`` hold the keys of its first tokens. In the last ``drafted`` blocks the request's draft has valid keys too.
    ``has_state``: the target's hidden states at the prefix's last token, which drafts read, are cached as well.
    ``unowned`` of the blocks have no owner. ``indexed`` blocks of the text are in the index, whether reused or not.
    """

    blocks: Sequence[int] = ()
    drafted: int = 0
    has_state: bool = True
    unowned: int = 0
    indexed: int = 0


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

    def mark(self, block: int, *drafts: str) -> None:
        """Record that ``drafts`` have valid keys for the whole block. No effect on a block outside of the index."""
        entry = self._entries.get(block)
        if entry is not None:
            marks = entry.marks
            for draft in drafts:
                marks |= 1 << self._bits.setdefault(draft, len(self._bits))
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

    def _record_change(self, digest: bytes) -> None:
        self._changes.append(digest)
        self.version += 1


# Allocator of the blocks of the paged caches. Target and draft caches share one block numbering.
#
# A block is owned (by one request, or by several that share a prefix), cached (without an owner, kept for prefix reuse)
# or free.

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
