"""Batches for tests of tree attention, and their expected values from a dense softmax.

The expected values follow the definition: a softmax over the keys that the path of each query names, for one query and
one head at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from specdecode_kernels.tree_attention import op
from specdecode_kernels.tree_attention.reference import CAUSAL

BLOCK = 4
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Sequence:
    """One sequence of a batch.

    ``parents`` are the parents of the rows after the prefix, starting with the root's -1, or None for a causal chunk of
    ``rows`` rows. ``queries`` are the rows that attend: all of them for the target, the newest level for a draft. The
    first ``start`` keys are hidden. ``slack`` is the difference between the host's bound and the actual number of keys.
    """

    prefix: int
    rows: int
    parents: tuple[int, ...] | None
    queries: tuple[int, ...]
    start: int = 0
    slack: int = 0

    @property
    def keys(self) -> int:
        """Number of keys, including the suffix rows up to the last query."""
        return self.prefix + (max(self.queries) + 1)

    def sees(self, row: int) -> list[int]:
        """Return the indices of the keys that suffix row ``row`` attends to, found by following its parents."""
        own = list(range(row + 1)) if self.parents is None else []
        while self.parents is not None and row >= 0:
            own.append(row)
            row = self.parents[row]
        return [key for key in (*range(self.prefix), *(self.prefix + r for r in sorted(own))) if key >= self.start]

    def ancestors(self, row: int) -> int:
        """Return the ancestor bit mask of a suffix row, as a signed int64."""
        if self.parents is None:
            return CAUSAL
        mask = sum(1 << (key - self.prefix) for key in replace(self, start=0).sees(row) if key >= self.prefix)
        return mask - (1 << 64) if mask >> 63 else mask


@dataclass(frozen=True)
class Case:
    """Sequences, the blocks that they own, and tensors. Every slot that no sequence has written holds garbage."""

    sequences: tuple[Sequence, ...]
    blocks: tuple[tuple[int, ...], ...]
    q_THD: Tensor
    cache_2NPKD: Tensor
    ancestors_T: Tensor

    @property
    def table_BM(self) -> Tensor:
        """Block table, padded with block 0."""
        most = max(map(len, self.blocks))
        return torch.tensor([[*owned, *[0] * (most - len(owned))] for owned in self.blocks])

    @property
    def prefix_B(self) -> Tensor:
        return torch.tensor([s.prefix for s in self.sequences])

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a sequence, including its suffix rows, gathered one by one."""
        s = self.sequences[b]
        slots = [(self.blocks[b][i // BLOCK], i % BLOCK) for i in range(s.prefix + s.rows)]
        k, v = (torch.stack([half[block, offset] for block, offset in slots]) for half in self.cache_2NPKD)
        return k, v


def make(
    sequences: tuple[Sequence, ...],
    *,
    kv: int,
    groups: int,
    scattered: bool,
    dtype: torch.dtype,
    seed: int = 0,
    size: int = 8,
    garbage: float = 30,
) -> Case:
    """Build a case. ``garbage`` scales the values in slots that must not be read."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(s.prefix + s.rows + s.slack) // BLOCK) for s in sequences]
    total = 1 + sum(needed)
    order = torch.randperm(total - 1, generator=generator) if scattered else torch.arange(total - 1)
    ends = list(accumulate(needed, initial=0))
    blocks = tuple(tuple((order[a:b] + 1).tolist()) for a, b in pairwise(ends))
    cache = garbage * torch.randn(2, total, BLOCK, kv, size, generator=generator).to(dtype)
    for s, owned in zip(sequences, blocks, strict=True):
        for i in range(s.prefix + s.rows):
            cache[:, owned[i // BLOCK], i % BLOCK] = torch.randn(2, kv, size, generator=generator)
    count = sum(len(s.queries) for s in sequences)
    q = 2 * torch.randn(count, kv * groups, size, generator=generator).to(dtype)
    return Case(sequences, blocks, q, cache, torch.tensor([s.ancestors(row) for s in sequences for row in s.queries]))


def prepare(case: Case, *, dense: bool = False, **more: Any) -> op.Prepared:
    """Return the operation's input for a case; ``more`` are further arguments of ``op.prepare``."""
    kv_heads, size = case.cache_2NPKD.shape[3:]
    return op.prepare(
        blocks=case.blocks,
        block_table_BM=case.table_BM,
        block_size=BLOCK,
        query_counts=[len(s.queries) for s in case.sequences],
        key_bounds=[s.keys + s.slack for s in case.sequences],
        prefix_len_B=case.prefix_B,
        ancestors_T=case.ancestors_T,
        key_starts=[s.start for s in case.sequences],
        dense=dense,
        groups=case.q_THD.shape[1] // kv_heads,
        dtype=case.q_THD.dtype,
        kv_heads=kv_heads,
        head_dim=size,
        **more,
    )


def by_definition(case: Case) -> Tensor:
    """Compute dense softmax attention in fp64, one query and one head at a time."""
    out, t = torch.zeros_like(case.q_THD), 0
    groups = case.q_THD.shape[1] // case.cache_2NPKD.shape[3]
    for b, s in enumerate(case.sequences):
        k, v = (x.double() for x in case.keys(b))
        for row in s.queries:
            seen = s.sees(row)
            for head in range(case.q_THD.shape[1]):
                scores = k[seen, head // groups] @ case.q_THD[t, head].double() / math.sqrt(k.shape[-1])
                out[t, head] = (scores.softmax(0) @ v[seen, head // groups]).to(out.dtype)
            t += 1
    return out


def close(actual: Tensor, wanted: Tensor) -> bool:
    """Return whether the values agree within the tolerance of their type."""
    tolerance = TOLERANCE[wanted.dtype]
    return torch.allclose(actual, wanted, atol=tolerance, rtol=tolerance)


def tree(prefix: int, *parents: int, start: int = 0, slack: int = 0) -> Sequence:
    """Return a sequence with a draft tree, given the parents of the nodes after the root."""
    return Sequence(prefix, len(parents) + 1, (-1, *parents), tuple(range(len(parents) + 1)), start, slack)


def chain(prefix: int, nodes: int, **fields: int) -> Sequence:
    """Return a sequence with a draft chain of ``nodes`` nodes after the root."""
    return tree(prefix, *range(nodes), **fields)


def chunk(prefix: int, rows: int, **fields: int) -> Sequence:
    """Return a sequence with a causal prefill chunk."""
    return Sequence(prefix, rows, None, tuple(range(rows)), **fields)


UGLY = {
    "one token, nothing before it": (tree(0),),
    "64 rows: the last ancestor is the sign bit": (chain(5, 63),),
    "64 leaves of one root": (tree(3, *[0] * 63),),
    "a chunk longer than a mask": (chunk(0, 90), tree(17, 0, 0, 1)),
    "prefixes that end on a block": (chain(BLOCK, 2), chain(2 * BLOCK, 0), chunk(3 * BLOCK, BLOCK)),
    "all kinds together": (chunk(7, 11), tree(0, 0, 0, 1, 1, 2), chain(13, 4, slack=5), tree(30), chunk(0, 1)),
    "a window that hides all of the prefix": (chain(9, 3, start=9), chain(9, 3, start=8), chain(9, 3)),
}
