"""Which blocks hold which text: full blocks by the hash of all tokens up to their end, the least recently used first.

A block is told apart by the hash of (the block before it, its tokens), so that two requests that begin alike find each
other's blocks. Drafts leave a mark on blocks that hold valid keys of theirs too. Who owns a block is blocks.py's.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


def root_digest(salt: str) -> bytes:
    """What the first block of a text follows; ``salt`` names the target whose keys these are."""
    return blake2b(salt.encode(), digest_size=16).digest()


def extend_digests(digests: list[bytes], tokens: Sequence[int], count: int, root: bytes, block_size: int) -> None:
    """Appends the digests of the next full blocks of ``tokens``, until there are ``count``. Each is made once."""
    for block in range(len(digests), count):
        packed = array("q", tokens[block * block_size : (block + 1) * block_size]).tobytes()
        digests.append(blake2b((digests[-1] if digests else root) + packed, digest_size=16).digest())


@dataclass(slots=True)
class _Entry:
    digest: bytes
    parent: bytes
    marks: int = 0


class PrefixIndex:
    """Blocks by digest. A block that nobody owns rests here until it is found again or its place is needed."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()
        self._children: Counter[bytes] = Counter()
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @property
    def resting(self) -> int:
        """Blocks that nobody owns."""
        return len(self._resting)

    def rests(self, block: int) -> bool:
        return block in self._resting

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known beginning."""
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def holder(self, digest: bytes) -> int | None:
        return self._blocks.get(digest)

    def add(self, block: int, digest: bytes, parent: bytes) -> None:
        assert digest not in self._blocks, "two blocks hold the same text"
        assert block not in self._entries, f"block {block} holds a text already"
        self._blocks[digest] = block
        self._entries[block] = _Entry(digest, parent)
        self._children[parent] += 1

    def drop(self, block: int) -> None:
        entry = self._entries.pop(block)
        del self._blocks[entry.digest]
        self._resting.pop(block, None)
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]

    def rest(self, block: int) -> None:
        """Its last owner is gone."""
        self._resting[block] = None

    def wake(self, block: int) -> None:
        """It has an owner again."""
        del self._resting[block]

    def oldest(self) -> int:
        """The block to do without: the one that rests longest of those that nothing known continues.

        Where all are continued (by a text whose owner computed the beginning for itself) it is the oldest of all.
        """
        for block in self._resting:
            if self._entries[block].digest not in self._children:
                return block
        return next(iter(self._resting))

    def mark(self, block: int, draft: str) -> None:
        """``draft`` has written valid keys of its own for all of the block. Nothing for a block that is not known."""
        entry = self._entries.get(block)
        if entry is not None:
            entry.marks |= 1 << self._bits.setdefault(draft, len(self._bits))

    def is_marked(self, block: int, draft: str) -> bool:
        entry, bit = self._entries.get(block), self._bits.get(draft)
        return entry is not None and bit is not None and bool(entry.marks >> bit & 1)

    def forget_marks(self, draft: str) -> None:
        """The keys of ``draft`` are gone, or its cache is another's now."""
        bit = self._bits.get(draft)
        if bit is not None:
            for entry in self._entries.values():
                entry.marks &= ~(1 << bit)

    def check(self) -> None:
        """The index agrees with itself."""
        assert {entry.digest: block for block, entry in self._entries.items()} == self._blocks, "a digest is astray"
        assert self._children == Counter(entry.parent for entry in self._entries.values()), "a child is miscounted"
        assert self._resting.keys() <= self._entries.keys(), "a block rests that holds no text"
