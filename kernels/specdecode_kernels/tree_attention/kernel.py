"""Tree attention on a GPU: one launch over the pieces of a plan (plan.py); the last piece of a cut tile merges it.

Keys and values, including those of the tree, are read from the paged cache; see README.md. Tensor suffixes as in
reference.py; W pieces of a plan, G query heads per key-value head, M rows of a tile, N keys of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.tree_attention.plan import BLOCK_N, FIELDS, Plan

_STAGES = 5
"""Pipeline stages: block addresses come from the block table and take two stages, so five keep two blocks in flight."""
_WIDE_STAGES = 1
"""Stages of fp32: a GPU of compute capability 8.9 has 99 KiB of shared memory for a program."""
_CHUNKS_AT_ONCE = 4
"""Number of chunks that a program merges at a time if its tile has 16 rows. Larger tiles take fewer, for registers."""


@triton.jit
def _read(head, row_N, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [N, BLOCK_D] rows of one head."""
    if D == BLOCK_D:
        return tl.load(head + row_N[:, None] + d[None, :])
    else:
        return tl.load(head + row_N[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)


@triton.jit
def _softmax_step(scores_MN, v_ND, acc_MD, sum_M, top_M, PRECISION: tl.constexpr):
    """Add one block of keys to the running softmax and return (weighted values, sum of weights, maximum).

    All three are rescaled to the new maximum. A row that has not seen a key yet keeps a maximum of -inf and sums of
    zero.
    """
    new_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    weights_MN = tl.math.exp2(scores_MN - finite_M[:, None])
    shrink_M = tl.math.exp2(top_M - finite_M)
    acc_MD = acc_MD * shrink_M[:, None]
    acc_MD = tl.dot(weights_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
    return acc_MD, sum_M * shrink_M + tl.sum(weights_MN, 1), new_M


@triton.jit
def _visible(key_N, prefix, start, ancestors_M, own_row_M, real_M):
    """Return a mask [M, N] of the keys that each row sees.

    A row sees the prefix from ``start`` on and the suffix rows on the query's path or, if causal, up to its own.
    """
    behind_N = key_N - prefix
    bit_N = tl.minimum(tl.maximum(behind_N, 0), 63).to(tl.int64)
    on_path = (((ancestors_M[:, None] >> bit_N[None, :]) & 1) == 1) & (behind_N < 64)[None, :]
    causal = behind_N[None, :] <= own_row_M[:, None]
    suffix = tl.where((ancestors_M == 0)[:, None], causal, on_path)
    return ((behind_N < 0)[None, :] | suffix) & (key_N >= start)[None, :] & real_M[:, None]


@triton.jit
def _merged(
    part_WKMD,
    lse_WKM,
    first_M,
    chunks,
    stride,
    real_M,
    d,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return the values [M, D] of a tile, each chunk weighted by its log-sum-exp.

    Other programs wrote the chunks, so they are read around the L1 cache.
    """
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for chunk in range(chunks):
        lse_M = tl.load(lse_WKM + first_M + chunk * stride, mask=real_M, other=float("-inf"), cache_modifier=".cg")
        top_M = tl.maximum(top_M, lse_M)
    finite_M = tl.where(top_M == float("-inf"), 0.0, top_M)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, chunks, CHUNKS):
        for i in tl.static_range(CHUNKS):
            mine_M = real_M & (start + i + tl.zeros([BLOCK_M], tl.int32) < chunks)
            part_M = first_M + (start + i) * stride
            lse_M = tl.load(lse_WKM + part_M, mask=mine_M, other=float("-inf"), cache_modifier=".cg")
            weight_M = tl.exp(lse_M - finite_M)
            inside = (mine_M & (weight_M > 0))[:, None] & (d < D)[None, :]
            place = part_WKMD + part_M[:, None] * D + d[None, :]
            acc_MD += weight_M[:, None] * tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
            total_M += weight_M
    return acc_MD / tl.where(total_M == 0, 1.0, total_M)[:, None]


@triton.jit(do_not_specialize=["table_BM", "prefix_len_B", "key_start_B", "ancestors_T", "table_stride"])
def _attend_kernel(
    q_THD,
    k_NPKD,
    v_NPKD,
    pieces_W8,
    table_BM,
    prefix_len_B,
    key_start_B,
    ancestors_T,
    out_THD,
    part_WKMD,
    lse_WKM,
    arrived_WK,
    scale_log2,
    q_token_stride,
    q_head_stride,
    page_stride,
    position_stride,
    head_stride,
    table_stride,
    D: tl.constexpr,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Attend one piece of the plan for one key-value head, and merge its tile if it is the tile's last piece to end."""
    head, w = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    piece = pieces_W8 + w * 8
    rows = tl.load(piece + 2)
    if rows <= 0:
        return
    chunks = tl.load(piece + 7)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real_M = (m // G) < rows
    whole_MD = real_M[:, None] & (d < D)[None, :]
    token_M = (tl.load(piece + 1) + m // G).to(tl.int64)
    head_M = head * G + m % G
    place_M = token_M * kv_heads * G + head_M
    if chunks == 0:
        tl.store(out_THD + place_M[:, None] * D + d[None, :], tl.zeros([BLOCK_M, BLOCK_D], tl.float32), mask=whole_MD)
        return
    sequence = tl.load(piece).to(tl.int64)
    own_row_M = tl.load(piece + 3) + m // G
    begin, end = tl.load(piece + 4), tl.load(piece + 5)
    prefix = tl.load(prefix_len_B + sequence).to(tl.int32)
    start = tl.load(key_start_B + sequence).to(tl.int32)
    ancestors_M = tl.load(ancestors_T + token_M, mask=real_M, other=0)
    query_M = token_M * q_token_stride + head_M * q_head_stride
    q_MD = tl.load(q_THD + query_M[:, None] + d[None, :], mask=whole_MD, other=0.0)
    table = table_BM + sequence * table_stride
    k_head, v_head = k_NPKD + head.to(tl.int64) * head_stride, v_NPKD + head.to(tl.int64) * head_stride
    n = tl.arange(0, BLOCK_N)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)

    # Blocks that all rows see completely (the prefix after its start) need no mask, and their loads are pipelined.
    clear = tl.minimum(tl.maximum(begin, (start + BLOCK_N - 1) // BLOCK_N), end)
    masked = tl.minimum(tl.maximum(clear, prefix // BLOCK_N), end)
    for block in tl.range(clear, masked):
        key_N = block * BLOCK_N + n
        page_N = tl.load(table + key_N // PAGE).to(tl.int64)
        row_N = page_N * page_stride + (key_N % PAGE) * position_stride
        k_ND = _read(k_head, row_N, d, D, BLOCK_D)
        v_ND = _read(v_head, row_N, d, D, BLOCK_D)
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
        acc_MD, sum_M, top_M = _softmax_step(scores_MN, v_ND, acc_MD, sum_M, top_M, PRECISION)

    # The remaining blocks hold the start or the end of the prefix, or the suffix. Keys that no row sees are not read,
    # because a weight of zero times garbage may be NaN.
    for i in tl.range(begin, end - (masked - clear), num_stages=1):
        block = tl.where(i < clear, i, i + masked - clear)
        key_N = block * BLOCK_N + n
        visible_MN = _visible(key_N, prefix, start, ancestors_M, own_row_M, real_M)
        seen_N = tl.max(visible_MN.to(tl.int32), 0) > 0
        page_N = tl.load(table + key_N // PAGE, mask=seen_N, other=0).to(tl.int64)
        row_N = page_N * page_stride + (key_N % PAGE) * position_stride
        inside = (d < D)[None, :] & seen_N[:, None]
        k_ND = tl.load(k_head + row_N[:, None] + d[None, :], mask=inside, other=0.0)
        v_ND = tl.load(v_head + row_N[:, None] + d[None, :], mask=inside, other=0.0)
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
        scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        acc_MD, sum_M, top_M = _softmax_step(scores_MN, v_ND, acc_MD, sum_M, top_M, PRECISION)

    values_MD = acc_MD / tl.where(sum_M == 0, 1.0, sum_M)[:, None]
    if chunks == 1:
        tl.store(out_THD + place_M[:, None] * D + d[None, :], values_MD.to(out_THD.dtype.element_ty), mask=whole_MD)
    else:
        # Convert log2 to the natural logarithm: 0.6931... is log 2.
        lse_M = tl.where(sum_M == 0, float("-inf"), (top_M + tl.math.log2(sum_M)) * 0.6931471805599453)
        part_M = (w.to(tl.int64) * kv_heads + head) * BLOCK_M + m
        tl.store(part_WKMD + part_M[:, None] * D + d[None, :], values_MD, mask=whole_MD)
        tl.store(lse_WKM + part_M, lse_M, mask=real_M)
        # All threads must have written before the count says so, and the count must be read before their results.
        tl.debug_barrier()
        first = w - tl.load(piece + 6)
        arrived = arrived_WK + first * kv_heads + head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == chunks - 1:
            tl.store(arrived, 0)  # for the next layer
            first_M = (first.to(tl.int64) * kv_heads + head) * BLOCK_M + m
            merged_MD = _merged(
                part_WKMD, lse_WKM, first_M, chunks, kv_heads * BLOCK_M, real_M, d, D, BLOCK_M, BLOCK_D, CHUNKS
            )
            place_MD = out_THD + place_M[:, None] * D + d[None, :]
            tl.store(place_MD, merged_MD.to(out_THD.dtype.element_ty), mask=whole_MD)


def attend(q_THD: Tensor, cache_2NPKD: Tensor, plan: Plan) -> Tensor:
    """Compute attended values [T, H, D] of every packed query; queries without a visible key yield zeros.

    Sums are fp32. ``cache_2NPKD`` is the cache of one layer and already holds the keys and values of this pass. Rows of
    D must be contiguous in it and in ``q_THD``. Head dimensions up to 256 are supported.
    """
    tokens, heads, size = q_THD.shape
    _, _, page, kv_heads, _ = cache_2NPKD.shape
    assert heads == kv_heads * plan.groups, "the plan was made for another grouping of heads"
    assert q_THD.stride(2) == cache_2NPKD.stride(4) == 1, "rows of D must be contiguous"
    assert page == plan.block_size, "the plan was made for another block size"
    block_m = max(triton.next_power_of_2(plan.tile_queries * plan.groups), 16)
    block_d = max(triton.next_power_of_2(size), 16)
    pieces = len(plan.pieces_W8)
    assert plan.pieces_W8.shape[1] == FIELDS
    out_THD = torch.empty(tokens, heads, size, dtype=q_THD.dtype, device=q_THD.device)
    part_WKMD = torch.empty(pieces, kv_heads, block_m, size, dtype=torch.float32, device=q_THD.device)
    lse_WKM = torch.empty(pieces, kv_heads, block_m, dtype=torch.float32, device=q_THD.device)
    wide = q_THD.dtype == torch.float32
    _attend_kernel[(kv_heads, pieces)](
        q_THD,
        cache_2NPKD[0],
        cache_2NPKD[1],
        plan.pieces_W8,
        plan.block_table_BM,
        plan.prefix_len_B,
        plan.key_start_B,
        plan.ancestors_T,
        out_THD,
        part_WKMD,
        lse_WKM,
        plan.arrived_WK,
        size**-0.5 * 1.4426950408889634,
        *q_THD.stride()[:2],
        *cache_2NPKD.stride()[1:4],
        plan.block_table_BM.stride(0),
        D=size,
        G=plan.groups,
        PAGE=page,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        PRECISION="tf32x3" if wide else "tf32",
        CHUNKS=max(_CHUNKS_AT_ONCE * 16 // block_m, 1),
        num_warps=4,
        num_stages=_WIDE_STAGES if wide else _STAGES,
    )
    return out_THD
