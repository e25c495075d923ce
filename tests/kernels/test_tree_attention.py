"""Tree attention: op against reference, both against a dense softmax over the keys that each query's path names.

Slots that nobody may read hold large values, so a single key too many shows. What must be caught is planted at the
end: a wrong ancestor bit, a swapped block, a prefix or a window that is off by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.tree_attention.op import Prepared, attend, prepare
from specdecode_kernels.tree_attention.reference import CAUSAL, tree_attention

BLOCK = 4
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Sequence:
    """``parents`` of the rows behind the prefix, the root's -1 first, or None for a causal chunk of ``rows`` rows.
    ``queries`` are the rows that ask: all of them for the target, the newest level for a draft. The first ``start``
    keys are hidden; ``slack`` is how far the host's bound lies above the keys that there are."""

    prefix: int
    rows: int
    parents: tuple[int, ...] | None
    queries: tuple[int, ...]
    start: int = 0
    slack: int = 0

    @property
    def keys(self) -> int:
        return self.prefix + (max(self.queries) + 1)

    def sees(self, row: int) -> list[int]:
        """Indices of the keys that suffix row ``row`` attends to, by following its parents."""
        own = list(range(row + 1)) if self.parents is None else []
        while self.parents is not None and row >= 0:
            own.append(row)
            row = self.parents[row]
        return [key for key in (*range(self.prefix), *(self.prefix + r for r in sorted(own))) if key >= self.start]

    def ancestors(self, row: int) -> int:
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
        most = max(map(len, self.blocks))
        return torch.tensor([[*owned, *[0] * (most - len(owned))] for owned in self.blocks])

    @property
    def prefix_B(self) -> Tensor:
        return torch.tensor([s.prefix for s in self.sequences])

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a sequence, its suffix rows included, gathered one by one."""
        s = self.sequences[b]
        slots = [(self.blocks[b][i // BLOCK], i % BLOCK) for i in range(s.prefix + s.rows)]
        k, v = (torch.stack([half[block, offset] for block, offset in slots]) for half in self.cache_2NPKD)
        return k, v


def make(
    sequences: tuple[Sequence, ...], *, kv: int, groups: int, scattered: bool, dtype: torch.dtype, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(s.prefix + s.rows + s.slack) // BLOCK) for s in sequences]
    total = 1 + sum(needed)
    order = torch.randperm(total - 1, generator=generator) if scattered else torch.arange(total - 1)
    ends = list(accumulate(needed, initial=0))
    blocks = tuple(tuple((order[a:b] + 1).tolist()) for a, b in pairwise(ends))
    size = 8
    cache = 30 * torch.randn(2, total, BLOCK, kv, size, generator=generator, dtype=dtype)
    for s, owned in zip(sequences, blocks, strict=True):
        for i in range(s.prefix + s.rows):
            cache[:, owned[i // BLOCK], i % BLOCK] = torch.randn(2, kv, size, generator=generator, dtype=dtype)
    count = sum(len(s.queries) for s in sequences)
    q = 2 * torch.randn(count, kv * groups, size, generator=generator, dtype=dtype)
    return Case(sequences, blocks, q, cache, torch.tensor([s.ancestors(row) for s in sequences for row in s.queries]))


def prepared(case: Case, *, dense: bool = False, groups: int | None = None, one_by_one: bool = True) -> Prepared:
    return prepare(
        blocks=case.blocks,
        block_table_BM=case.table_BM,
        block_size=BLOCK,
        query_counts=[len(s.queries) for s in case.sequences],
        key_bounds=[s.keys + s.slack for s in case.sequences],
        prefix_len_B=case.prefix_B,
        ancestors_T=case.ancestors_T,
        key_starts=[s.start for s in case.sequences],
        dense=dense,
        groups=groups or case.q_THD.shape[1] // case.cache_2NPKD.shape[3],
        dtype=case.q_THD.dtype,
        one_by_one=one_by_one,
    )


def by_op(case: Case, *, dense: bool = False) -> Tensor:
    """Sequence by sequence, as on a CPU; and all at once, as elsewhere, which must be the same."""
    alone, together = (
        attend(case.q_THD, case.cache_2NPKD, prepared(case, dense=dense, one_by_one=one_by_one))
        for one_by_one in (True, False)
    )
    assert close(alone, together)
    return alone


def by_reference(case: Case) -> Tensor:
    """The suffix is handed over apart from the cache; hidden whole blocks are left out of the table."""
    kept = [case.keys(b) for b in range(len(case.sequences))]
    suffixes = [(k[s.prefix :], v[s.prefix :]) for s, (k, v) in zip(case.sequences, kept, strict=True)]
    lengths = [s.rows for s in case.sequences]
    counts = [len(s.queries) for s in case.sequences]
    assert all(s.start % BLOCK == 0 and s.start <= s.prefix for s in case.sequences)
    table = torch.stack([row.roll(-s.start // BLOCK) for s, row in zip(case.sequences, case.table_BM, strict=True)])
    return tree_attention(
        case.q_THD,
        case.cache_2NPKD,
        table,
        torch.tensor([s.prefix - s.start for s in case.sequences]),
        torch.tensor(list(accumulate(counts, initial=0))),
        torch.cat([k for k, _ in suffixes]),
        torch.cat([v for _, v in suffixes]),
        torch.tensor(list(accumulate(lengths, initial=0))[:-1]),
        torch.tensor(lengths),
        case.ancestors_T,
    )


def by_definition(case: Case) -> Tensor:
    """Dense softmax attention in fp64, one query and one head at a time."""
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


def close(found: Tensor, wanted: Tensor) -> bool:
    tolerance = TOLERANCE[wanted.dtype]
    return torch.allclose(found, wanted, atol=tolerance, rtol=tolerance)


def tree(prefix: int, *parents: int, start: int = 0, slack: int = 0) -> Sequence:
    return Sequence(prefix, len(parents) + 1, (-1, *parents), tuple(range(len(parents) + 1)), start, slack)


def chain(prefix: int, nodes: int, **fields: int) -> Sequence:
    return tree(prefix, *range(nodes), **fields)


def chunk(prefix: int, rows: int, **fields: int) -> Sequence:
    return Sequence(prefix, rows, None, tuple(range(rows)), **fields)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prefix = draw(st.integers(0, 19))
    rows = draw(st.integers(1, 9))
    if draw(st.booleans()):
        return chunk(prefix, rows, slack=draw(st.integers(0, 3)))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, rows)))
    newest = draw(st.integers(0, rows - 1)) if draw(st.booleans()) else 0  # a draft asks for its newest rows only
    start = draw(st.integers(0, prefix))
    return Sequence(prefix, rows, parents, tuple(range(newest, rows)), start, draw(st.integers(0, 3)))


CASES = st.builds(
    make,
    st.lists(sequences(), min_size=1, max_size=4).map(tuple),
    kv=st.integers(1, 3),
    groups=st.sampled_from((1, 2, 3, 4)),
    scattered=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    seed=st.integers(0, 999),
)


def with_starts(case: Case, start: Callable[[Sequence], int]) -> Case:
    return replace(case, sequences=tuple(replace(s, start=start(s)) for s in case.sequences))


@settings(max_examples=80, deadline=None)
@given(CASES)
def test_op_is_dense_softmax_over_what_each_path_names(case: Case) -> None:
    assert close(by_op(case), by_definition(case))


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_reference_is_dense_softmax_and_op_is_the_reference(case: Case) -> None:
    """The reference knows no window: whole hidden blocks are the same as a shorter table."""
    case = with_starts(case, lambda s: s.start // BLOCK * BLOCK)
    found = by_reference(case)
    assert close(found, by_definition(case))
    assert close(by_op(case), found)


UGLY = {
    "one token, nothing before it": (tree(0),),
    "64 rows: the last ancestor is the sign bit": (chain(5, 63),),
    "64 leaves of one root": (tree(3, *[0] * 63),),
    "a chunk longer than a mask": (chunk(0, 90), tree(17, 0, 0, 1)),
    "prefixes that end on a block": (chain(BLOCK, 2), chain(2 * BLOCK, 0), chunk(3 * BLOCK, BLOCK)),
    "all kinds together": (chunk(7, 11), tree(0, 0, 0, 1, 1, 2), chain(13, 4, slack=5), tree(30), chunk(0, 1)),
    "a window that hides all of the prefix": (chain(9, 3, start=9), chain(9, 3, start=8), chain(9, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
@pytest.mark.parametrize("name", UGLY)
def test_ugly_shapes(name: str, scattered: bool, dtype: torch.dtype) -> None:
    case = make(UGLY[name], kv=2, groups=3, scattered=scattered, dtype=dtype)
    wanted = by_definition(case)
    assert close(by_op(case), wanted)
    if all(s.start % BLOCK == 0 for s in case.sequences):
        assert close(by_reference(case), wanted)


@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_hosts_word_that_all_is_seen_changes_nothing(batch: int, scattered: bool) -> None:
    """Single tokens, and the one newest node of a chain: no mask is needed, and none is made."""
    newest = Sequence(6, 3, (-1, 0, 1), (2,), start=2)
    case = make((newest, tree(11), tree(3))[:batch], kv=2, groups=2, scattered=scattered, dtype=torch.float64)
    assert close(by_op(case, dense=True), by_definition(case))
    runs = prepared(case, dense=True).runs
    assert all(run.mask is None for run in runs)
    assert scattered or all(isinstance(run.rows, slice) for run in runs), "what lies behind each other is not copied"


def test_a_draft_asks_from_behind_the_rows_it_wrote_before() -> None:
    """The reference's causal queries are the last rows of a longer suffix."""
    whole = make((chunk(5, 6),), kv=1, groups=2, scattered=True, dtype=torch.float64)
    last = replace(
        whole,
        sequences=(Sequence(5, 6, None, (4, 5)),),
        q_THD=whole.q_THD[4:],
        ancestors_T=whole.ancestors_T[4:],
    )
    assert close(by_reference(last), by_definition(last))


def test_a_query_that_sees_nothing_yields_zeros() -> None:
    case = make((tree(0, 0),), kv=1, groups=1, scattered=False, dtype=torch.float64)
    blind = replace(case, ancestors_T=torch.tensor([1 << 5, 3]))  # bit 5 names no row
    assert (by_reference(blind)[0] == 0).all()
    assert close(by_reference(blind)[1], by_definition(case)[1])


def _ancestor_bit(case: Case) -> Case:
    """The second leaf sees its sibling too."""
    flipped = case.ancestors_T.clone()
    flipped[2] ^= 1 << 1
    return replace(case, ancestors_T=flipped)


def _swapped_block(case: Case) -> Case:
    """A block of the prefix and one that the suffix begins in: within the prefix, order does not matter."""
    (a, b, c, *more), *rest = case.blocks
    return replace(case, blocks=((c, b, a, *more), *rest))


def _short_prefix(case: Case) -> Case:
    """The last committed key is taken for the root's row."""
    return replace(case, sequences=tuple(replace(s, prefix=s.prefix - 1) for s in case.sequences))


def _causal_tree(case: Case) -> Case:
    return replace(case, ancestors_T=torch.full_like(case.ancestors_T, CAUSAL))


def _late_window(case: Case) -> Case:
    return with_starts(case, lambda s: s.start + 1)


@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
@pytest.mark.parametrize("plant", [_ancestor_bit, _swapped_block, _short_prefix, _causal_tree, _late_window])
def test_planted_bugs_are_seen(plant: Callable[[Case], Case], scattered: bool) -> None:
    case = make((tree(9, 0, 0, 1, 2), chain(6, 2)), kv=2, groups=2, scattered=scattered, dtype=torch.float32)
    wanted = by_definition(case)
    assert close(by_op(case), wanted)
    assert not close(by_op(plant(case)), wanted)
    if plant is not _late_window:
        assert not close(by_reference(plant(case)), wanted)
