"""Tree attention: op against reference, both against a dense softmax over the keys on each query's path.

Slots that must not be read hold large values, so that one key too many shows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.tree_attention.op import attend
from specdecode_kernels.tree_attention.reference import tree_attention
from support.kernels.attention_cases import (
    BLOCK,
    UGLY,
    Case,
    Sequence,
    by_definition,
    chunk,
    close,
    make,
    prepare,
    tree,
)


def by_op(case: Case, *, dense: bool = False) -> Tensor:
    return attend(case.q_THD, case.cache_2NPKD, prepare(case, dense=dense))


def by_reference(case: Case) -> Tensor:
    """Run the reference, which takes the suffix separately from the cache; completely hidden blocks leave the table."""
    keys_and_values = [case.keys(b) for b in range(len(case.sequences))]
    suffixes = [(k[s.prefix :], v[s.prefix :]) for s, (k, v) in zip(case.sequences, keys_and_values, strict=True)]
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


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prefix = draw(st.integers(0, 19))
    rows = draw(st.integers(1, 9))
    if draw(st.booleans()):
        return chunk(prefix, rows, slack=draw(st.integers(0, 3)))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, rows)))
    newest = draw(st.integers(0, rows - 1)) if draw(st.booleans()) else 0  # a draft's queries are its newest rows only
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


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(CASES)
def test_op_and_reference_equal_dense_softmax_over_each_path(case: Case) -> None:
    """The reference has no window; hiding whole blocks equals a shorter table."""
    assert close(by_op(case), by_definition(case))
    aligned = replace(case, sequences=tuple(replace(s, start=s.start // BLOCK * BLOCK) for s in case.sequences))
    assert close(by_reference(aligned), by_definition(aligned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
@pytest.mark.parametrize("name", UGLY)
def test_irregular_shapes(name: str, scattered: bool, dtype: torch.dtype) -> None:
    case = make(UGLY[name], kv=2, groups=3, scattered=scattered, dtype=dtype)
    wanted = by_definition(case)
    assert close(by_op(case), wanted)
    if all(s.start % BLOCK == 0 for s in case.sequences):
        assert close(by_reference(case), wanted)


@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
@pytest.mark.parametrize("batch", [1, 3])
def test_dense_flag_does_not_change_the_output(batch: int, scattered: bool) -> None:
    """Single tokens and the newest node of a chain see every key, so no mask is needed and none is made."""
    newest = Sequence(6, 3, (-1, 0, 1), (2,), start=2)
    case = make((newest, tree(11), tree(3))[:batch], kv=2, groups=2, scattered=scattered, dtype=torch.float64)
    assert close(by_op(case, dense=True), by_definition(case))
    runs = prepare(case, dense=True).runs
    assert all(run.mask is None for run in runs)
    assert scattered or all(isinstance(run.rows, slice) for run in runs), "what lies behind each other is not copied"


def test_queries_may_be_the_last_rows_of_a_longer_suffix() -> None:
    """The reference's causal queries are the last rows of a longer suffix."""
    whole = make((chunk(5, 6),), kv=1, groups=2, scattered=True, dtype=torch.float64)
    last = replace(
        whole,
        sequences=(Sequence(5, 6, None, (4, 5)),),
        q_THD=whole.q_THD[4:],
        ancestors_T=whole.ancestors_T[4:],
    )
    assert close(by_reference(last), by_definition(last))


def test_query_without_visible_keys_yields_zeros() -> None:
    case = make((tree(0, 0),), kv=1, groups=1, scattered=False, dtype=torch.float64)
    blind = replace(case, ancestors_T=torch.tensor([1 << 5, 3]))  # bit 5 is no existing row
    assert (by_reference(blind)[0] == 0).all()
    assert close(by_reference(blind)[1], by_definition(case)[1])
