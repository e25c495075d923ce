"""Which steps share a graph: those of the same buckets. Topology, laws and lengths are data, and no part of a key."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.contract import MAX_NODES
from specdecode_worker.speculation.trees import Tree

NODES = MAX_NODES + 1
"""Of the widest tree, its root included: columns of the tables of trees."""
TOKENS_PER_ROW = (*range(1, 10), 12, 16, 24, 32, 48, NODES)
ROWS_PER_LEVEL = (1, 2, 4, 8, 16, 32, NODES)


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """``rows`` sequences of which each verifies, and lets its draft catch up with, at most ``tokens_per_row``; the
    draft makes ``passes``, behind the first over at most ``width`` nodes of each. ``cuts``: some law has top-k, top-p
    or min-p."""

    rows: int
    tokens_per_row: int
    passes: int = 0
    width: int = 0
    cuts: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def level_rows(self) -> int:
        return self.rows * self.width


def key_of(rows: int, trees: Sequence[Tree], longest_catch_up: int, *, cuts: bool) -> Key | None:
    """The key of a step of such trees in a bucket of ``rows``; None when a draft has more to catch up with than any
    graph holds."""
    tokens = at_least(max(longest_catch_up, *(tree.verified for tree in trees)), TOKENS_PER_ROW)
    passes = max(tree.drafted_depth for tree in trees)
    if tokens is None:
        return None
    widest = max((len(level) for tree in trees for level in tree.expanded[1:]), default=0)
    width = at_least(widest, ROWS_PER_LEVEL) if widest else 0
    assert width is not None, "no tree has more nodes"
    return Key(rows, tokens, passes, width, cuts)


def at_least(count: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds ``count``."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


def row_buckets(max_num_seqs: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for, rising: 1, 2, 4, and then every eighth, as vLLM has them, or those
    that are wanted; up to as many as may run."""
    usual = (1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs)
    return tuple(sorted({rows for rows in wanted or usual if 0 < rows <= max_num_seqs}))
