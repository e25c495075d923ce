"""KV compaction on a GPU: all layers, keys and values in one launch, in place (README.md)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_MOST_ELEMENTS = 8192
"""Maximum elements of a program's tile (its pairs by a run of columns), held in registers between read and write."""


@triton.jit(do_not_specialize=["source_S", "target_S", "pairs"])
def _keep_kernel(
    cache,
    source_S,
    target_S,
    layer_stride,
    half_stride,
    block_stride,
    position_stride,
    pairs,
    width,
    PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Move one group of pairs in one half of one layer and one run of columns: all reads come before all writes."""
    group = tl.program_id(1).to(tl.int64)
    layer, half = (tl.program_id(0) // 2).to(tl.int64), tl.program_id(0) % 2
    s = tl.arange(0, BLOCK_S)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    source = tl.load(source_S + group * pairs + s, mask=s < pairs, other=0)
    target = tl.load(target_S + group * pairs + s, mask=s < pairs, other=0)
    moves = (s < pairs) & (source != target)
    if tl.max(moves.to(tl.int32), 0) == 0:
        return
    rows = cache + layer * layer_stride + half * half_stride
    inside = moves[:, None] & (column < width)[None, :]
    from_S = (source // PAGE) * block_stride + (source % PAGE) * position_stride
    to_S = (target // PAGE) * block_stride + (target % PAGE) * position_stride
    values = tl.load(rows + from_S[:, None] + column[None, :], mask=inside)
    # A row may be the source of one pair and the target of another, handled by different threads.
    tl.debug_barrier()
    tl.store(rows + to_S[:, None] + column[None, :], values, mask=inside)


def kv_keep(cache_L2NPKD: Tensor, source_slots: Tensor, target_slots: Tensor, group: int) -> None:
    """Move cache rows in place as `reference.kv_keep` does.

    The pairs form consecutive groups of ``group`` pairs (one per sequence). Pairs may overlap within a group, not
    across groups. Rows of K * D must be contiguous.
    """
    if not len(source_slots):
        return
    layers, _, _, page, heads, size = cache_L2NPKD.shape
    width = heads * size
    assert cache_L2NPKD.stride()[4:] == (size, 1), "rows of K * D must be contiguous"
    assert len(source_slots) == len(target_slots), "every source has a target"
    assert len(source_slots) % group == 0, "groups are equally long"
    block_s = triton.next_power_of_2(group)
    block_c = max(min(triton.next_power_of_2(width), _MOST_ELEMENTS // block_s), 1)
    _keep_kernel[(layers * 2, len(source_slots) // group, triton.cdiv(width, block_c))](
        cache_L2NPKD,
        source_slots.contiguous(),
        target_slots.contiguous(),
        *cache_L2NPKD.stride()[:4],
        group,
        width,
        PAGE=page,
        BLOCK_S=block_s,
        BLOCK_C=block_c,
        num_warps=4,
    )
