"""Tree attention kernel, interpreted, against a dense softmax over the keys on each query's path.

Slots that must not be read hold NaN, and so does every output before it is written, so one key too many or one row too
few shows. The same check must detect bugs planted in copies of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.rope_cache.reference import Scales
from specdecode_kernels.tree_attention import kernel, plan
from specdecode_worker.engine import memory
from support.kernels.attention_cases import BLOCK, UGLY, Case, Sequence, by_definition, chain, chunk, close, make, tree
from support.kernels.interpreted import Plant

pytestmark = pytest.mark.usefixtures("poisoned", "small_blocks")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use blocks of 16 keys and a device of sixteen processors, so that short texts are cut and merged too."""
    set_blocks(monkeypatch, 16)
    monkeypatch.setattr(plan, "processors", lambda _: 16)
    monkeypatch.setattr(plan, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(plan, "_PIECES_AT_ONCE", 8)
    return


def set_blocks(patch: pytest.MonkeyPatch, keys: int) -> None:
    patch.setattr(plan, "BLOCK_N", keys)
    patch.setattr(kernel, "BLOCK_N", keys)


def planned(case: Case, *, padding_queries: int = 0, padding_rows: int = 0, of: ModuleType = plan) -> plan.Plan:
    """Build the plan of a batch that ends with sequences without keys and with padding queries."""
    counts = [len(s.queries) for s in case.sequences] + [0] * padding_rows
    starts = [s.start for s in case.sequences] + [0] * padding_rows
    made: plan.Plan = of.plan(
        query_start=torch.tensor(list(accumulate(counts, initial=0))),
        prefix_len_B=torch.cat((case.prefix_B, torch.full((padding_rows,), 3))),
        key_start_B=torch.tensor(starts),
        ancestors_T=torch.cat((case.ancestors_T, torch.ones(padding_queries, dtype=torch.int64))),
        block_table_BM=torch.cat((case.table_BM, torch.zeros(padding_rows, case.table_BM.shape[1], dtype=torch.int64))),
        block_size=BLOCK,
        groups=case.q_THD.shape[1] // case.cache_2NPKD.shape[3],
        kv_heads=case.cache_2NPKD.shape[3],
    )
    return made


def attended(case: Case, *, padding_queries: int = 0, padding_rows: int = 0, of: ModuleType = kernel) -> Tensor:
    q_THD = torch.nn.functional.pad(case.q_THD, (0, 0, 0, 0, 0, padding_queries), value=torch.nan)
    out: Tensor = of.attend(
        q_THD, case.cache_2NPKD, planned(case, padding_queries=padding_queries, padding_rows=padding_rows)
    )
    assert (out[len(case.q_THD) :] == 0).all(), "padding yields zeros"
    return out[: len(case.q_THD)]


def make_case(sequences: tuple[Sequence, ...], **fields: object) -> Case:
    wanted = {"kv": 2, "groups": 3, "scattered": True, "dtype": torch.float32, "garbage": torch.nan, "size": 16}
    return make(sequences, **(wanted | fields))  # type: ignore[arg-type]


LENGTHS = {
    f"{keys} keys before {what}": (build(keys),)
    for keys in (0, 1, 7, 63, 100)
    for what, build in {
        "a token": tree,
        "a chain": lambda keys: chain(keys, 3),
        "a tree": lambda keys: tree(keys, 0, 0, 1, 1, 2, 5),
        "a chunk": lambda keys: chunk(keys, 19),
    }.items()
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str) -> None:
    case = make_case(LENGTHS[name])
    assert close(attended(case), by_definition(case))


@pytest.mark.parametrize("name", UGLY)
def test_irregular_shapes(name: str) -> None:
    case = make_case(UGLY[name], kv=1)
    assert close(attended(case, padding_queries=5, padding_rows=2), by_definition(case))


MIXED = (chunk(7, 21), tree(70, 0, 0, 1, 1, 2), chain(130, 4, start=21), tree(30), tree(0), chain(61, 2, start=61))


@pytest.mark.parametrize("keys", [16, 64])
@pytest.mark.parametrize(("kv", "groups"), [(1, 1), (3, 1), (1, 5), (2, 4), (1, 16)])
def test_heads_and_blocks(kv: int, groups: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch, keys)
    case = make_case(MIXED, kv=kv, groups=groups)
    assert close(attended(case, padding_queries=3, padding_rows=1), by_definition(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_head_dimensions(size: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED[1:4], kv=1, groups=4, size=size, dtype=dtype)
    assert close(attended(case), by_definition(case))


@pytest.mark.parametrize("has_fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_cache_in_fp8(dtype: torch.dtype, has_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are the numbers times their scales, also from their bits, and in tiles that are cut in chunks."""
    monkeypatch.setattr(dispatch, "has_fp8", lambda _: has_fp8)
    case, scales = make_case(MIXED, groups=2, dtype=dtype), Scales(0.5, 2.0)
    stored = replace(case, cache_2NPKD=(case.cache_2NPKD * 2).to(torch.float8_e4m3fn))
    k, v = stored.cache_2NPKD.to(dtype)

    def with_scales(key: float, value: float) -> Tensor:
        return by_definition(replace(case, cache_2NPKD=torch.stack((k * key, v * value))))

    actual = kernel.attend(stored.q_THD, stored.cache_2NPKD, planned(stored), scales)
    assert close(actual, with_scales(scales.key, scales.value))
    assert not close(actual, with_scales(scales.key, 1.0))
    assert not close(actual, with_scales(1.0, scales.value))


def test_plan_splits_only_the_long_sequence() -> None:
    """One long text in a batch of short ones is cut into many pieces; the short ones are not cut."""
    case = make_case((tree(400), *[tree(5)] * 6))
    pieces = planned(case).pieces_WF
    used = pieces[pieces[:, 2] > 0]
    assert [(used[:, 0] == b).sum() for b in range(7)] == [6, 1, 1, 1, 1, 1, 1]
    assert (used[:, 5] - 16 * used[:, 4]).max() == 5 * 16


def test_the_budget_of_memory_knows_the_sizes_of_pieces() -> None:
    assert memory.TILE_ROWS == plan.TILE_ROWS
    assert memory.SPARE_PIECES == 160 * plan.WAVES, "the largest GPUs have 160 multiprocessors"


def test_query_without_visible_keys_yields_zeros() -> None:
    output = attended(make_case((tree(4, 0, start=5),)))  # the window hides even the row of the root
    assert (output[0] == 0).all()
    assert torch.isfinite(output).all()


def bushy(prefix: int, nodes: int, **fields: int) -> Sequence:
    """Return a sequence with a draft tree of ``nodes`` nodes, root included, three children a node."""
    return tree(prefix, *((node - 1) // 3 for node in range(1, nodes)), **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("nodes", [17, 21, 32, 33, 60, 64])
def test_trees_of_many_nodes(nodes: int, dtype: torch.dtype) -> None:
    """Up to 32 nodes of four heads are one tile, so their keys are read once; more are two tiles."""
    case = make_case((bushy(90, nodes),), kv=1, groups=4, dtype=dtype)
    pieces = planned(case).pieces_WF
    assert pieces[pieces[:, 2] > 0, 1].unique().numel() == -(-nodes // 32)
    assert close(attended(case), by_definition(case))


def test_trees_of_many_nodes_in_a_mixed_batch() -> None:
    case = make_case((bushy(70, 40), tree(130), bushy(0, 64), chunk(33, 50), chain(20, 5, start=9)), kv=2, groups=4)
    assert close(attended(case, padding_queries=9, padding_rows=1), by_definition(case))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 5, 21], ids=["16 rows", "32 rows", "128 rows"])
def test_more_chunks_than_are_merged_at_a_time(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "processors", lambda _: 100)
    case = make_case((bushy(16 * 75, nodes),), kv=1, groups=4)
    assert planned(case).pieces_WF[:, 7].max() > 64
    assert close(attended(case), by_definition(case))


@pytest.mark.parametrize("nodes", [5, 21])
def test_a_row_does_not_depend_on_the_others(nodes: int) -> None:
    """The queries of other rows change no bit of a row, also where chunks are merged."""
    case = make_case((bushy(130, nodes),), kv=1, groups=4)
    others = case.q_THD.clone()
    others[torch.arange(nodes) != 3] *= -3
    assert torch.equal(attended(case)[3], attended(replace(case, q_THD=others))[3])


def test_a_long_sequence_fills_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """129 blocks are 15 pieces of 9 on 132 processors for 8 heads: 17 pieces of 8 would need two rounds."""
    monkeypatch.setattr(plan, "processors", lambda _: 132)
    monkeypatch.setattr(plan, "BLOCK_N", 64)
    zero = torch.zeros(1, dtype=torch.int64)
    pieces = plan.plan(
        query_start=torch.tensor([0, 1]),
        prefix_len_B=zero + 8192,
        key_start_B=zero,
        ancestors_T=zero + 1,
        block_table_BM=torch.zeros(1, 600, dtype=torch.int64),
        block_size=16,
        groups=4,
        kv_heads=8,
    ).pieces_WF
    used = pieces[pieces[:, 2] > 0]
    assert len(used) == 15
    assert (used[:, 5] - 64 * used[:, 4]).max() == 9 * 64


def test_queries_may_be_part_of_a_wider_tensor() -> None:
    """Queries may be part of a wider tensor, as after a joined projection of queries, keys and values."""
    case = make_case(MIXED)
    wide = torch.full((len(case.q_THD), 10, 16), torch.nan)
    wide[:, 2:8] = case.q_THD
    output = kernel.attend(wide[:, 2:8], case.cache_2NPKD, planned(case))
    assert close(output, by_definition(case))


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prefix, rows = draw(st.integers(0, 90)), draw(st.integers(1, 20))
    if draw(st.booleans()):
        return chunk(prefix, rows)
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, rows)))
    newest = draw(st.integers(0, rows - 1)) if draw(st.booleans()) else 0
    return Sequence(prefix, rows, parents, tuple(range(newest, rows)), draw(st.integers(0, prefix)))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(sequences(), min_size=1, max_size=5).map(tuple),
    st.integers(1, 2),
    st.sampled_from((1, 2, 3, 4, 7)),
    st.integers(0, 6),
)
def test_random_batches(batch: tuple[Sequence, ...], kv: int, groups: int, padding: int) -> None:
    case = make_case(batch, kv=kv, groups=groups)
    assert close(attended(case, padding_queries=padding, padding_rows=padding % 2), by_definition(case))


# With slack, a bug that reads too far still reads existing memory, which holds NaN.
SMALL = (tree(48, 0, 0, 1, slack=96), chunk(3, 9, slack=96), chain(76, 2, start=21, slack=96))
BUGS: dict[str, tuple[str, str]] = {
    "a bit of the path too far": (">> bit_N[None, :]) & 1", ">> (bit_N[None, :] + 1)) & 1"),
    "siblings are seen": ("tl.where((ancestors_M == 0)[:, None], causal, on_path)", "causal | on_path"),
    "a chunk sees no own row": ("behind_N[None, :] <= own_row_M", "behind_N[None, :] < own_row_M"),
    "a chunk sees one row ahead": ("behind_N[None, :] <= own_row_M", "behind_N[None, :] <= 1 + own_row_M"),
    "the window is late": ("(key_N >= start)", "(key_N > start)"),
    "the window is not masked": ("(block * BLOCK_N < start) | ", ""),
    "the prefix ends a block late": ("((block + 1) * BLOCK_N > prefix)", "(block * BLOCK_N > prefix)"),
    "the row behind the tree is read": ("_highest_bit(anyone) + 1", "_highest_bit(anyone) + 2"),
    "the last row of the tree is not read": ("_highest_bit(anyone) + 1", "_highest_bit(anyone)"),
    "the keys of a block are those of the next": ("_pages(table, begin,", "_pages(table, begin + 1,"),
    "the address of the next block is old": ("_pages(table, block + 1,", "_pages(table, block,"),
    "a chunk is merged without its weight": ("weight_RC[:, :, None] * part_RCD", "part_RCD"),
    "the weights of the chunks are not summed": ("sum_R * shrink_R + tl.sum(weight_RC, 1)", "tl.sum(weight_RC, 1)"),
    "merged chunks are not rescaled": ("acc_RD * shrink_R[:, None]", "acc_RD"),
    "no chunks are merged": ("range(chunk * ROWS,", "range(rows * G,"),
    "the logarithm is base 2": (" * 0.6931471805599453)", ")"),
    "a sum is not rescaled": ("sum_MS * shrink_M[:, None]", "sum_MS"),
    "the first chunk is not merged": ("(start + c < chunks)", "((start + c < chunks) & (start + c > 0))"),
    "values are another head's": ("v_NPKD + head.to(tl.int64)", "v_NPKD + 0 * head.to(tl.int64)"),
}
PLAN_BUGS: dict[str, tuple[str, str]] = {
    "a run is a block short": ("tl.minimum((from_W + run) * KEYS,", "tl.minimum((from_W + run - 1) * KEYS,"),
    "the second tile begins late": (
        "// tl.maximum(chunks_W, 1), 0) * tile",
        "// tl.maximum(chunks_W, 1), 0) * (tile + 1)",
    ),
    "a sequence takes its neighbour's pieces": ("(ends_B[None, :] <= w[:, None])", "(ends_B[None, :] < w[:, None])"),
    "the suffix is left out": ("prefix_B + tl.where(causal_B, count_B, ROWS)", "prefix_B"),
}


LARGE = (bushy(130, 60, slack=96),)
LARGE_BUGS: dict[str, tuple[str, str]] = {
    "all pieces merge the first rows": ("row_R = row + tl.arange", "row_R = row - chunk * ROWS + tl.arange"),
    "a program takes the rows of the first": ("tl.program_id(2) * BLOCK_M", "0"),
    "the programs of a tile share a part": (
        "* kv_heads + head) * TILE_M + m",
        "* kv_heads + head) * TILE_M + m % BLOCK_M",
    ),
}
"""Bugs of tiles of more than 64 rows."""


def differs_from_reference(run: Callable[[Case], Tensor], sequences: tuple[Sequence, ...] = SMALL) -> bool:
    case = make_case(sequences, groups=4)
    wanted = by_definition(case)
    try:
        return not close(run(case), wanted)
    except AssertionError:  # padding queries did not yield zeros
        return True


def test_unmodified_kernel_passes_the_bug_check(plant: Plant) -> None:
    mutant = plant(kernel, "kernel", "kernel")
    mutant.BLOCK_N, mutant.CHUNKS = 16, 1
    assert not differs_from_reference(lambda case: attended(case, of=mutant))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    mutant = plant(kernel, *BUGS[bug])
    mutant.BLOCK_N, mutant.CHUNKS = 16, 1
    assert differs_from_reference(lambda case: attended(case, of=mutant))


@pytest.mark.parametrize("bug", LARGE_BUGS)
def test_bugs_planted_for_large_tiles_are_detected(bug: str, plant: Plant) -> None:
    assert not differs_from_reference(attended, LARGE)
    mutant = plant(kernel, *LARGE_BUGS[bug])
    mutant.BLOCK_N = 16
    assert differs_from_reference(lambda case: attended(case, of=mutant), LARGE)


@pytest.mark.parametrize("bug", PLAN_BUGS)
def test_bugs_planted_in_the_plan_are_detected(bug: str, plant: Plant) -> None:
    mutant = plant(plan, *PLAN_BUGS[bug])
    mutant.BLOCK_N, mutant.LEAST_BLOCKS, mutant.processors = 16, 1, lambda _: 16
    assert differs_from_reference(lambda case: kernel.attend(case.q_THD, case.cache_2NPKD, planned(case, of=mutant)))
