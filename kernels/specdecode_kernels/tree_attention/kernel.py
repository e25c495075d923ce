"""Tree attention on a GPU: a launch over the pieces of a plan (plan.py), and one that merges the chunks of a tile.

Keys and values, including those of the tree, are read from the paged cache; see README.md. Tensor suffixes as in
reference.py; W pieces of a plan, G query heads per key-value head, M rows of a tile, N keys of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.dependent import options, release, wait
from specdecode_kernels.quantised_linear.kernel import _levels
from specdecode_kernels.rope_cache.reference import FP8, UNSCALED, Scales
from specdecode_kernels.tree_attention.plan import BLOCK_N, FIELDS, Plan

STAGES = 3
"""Pipeline stages: two blocks of keys and values are in flight. Tiles of 64 rows and more have a third on a Hopper."""
_WIDE_STAGES = 1
"""Stages of fp32: a GPU of compute capability 8.9 has 99 KiB of shared memory for a program."""
WIDE_WARPS = 8
"""Warps of a program whose tile has more than 64 rows; the others have 4."""
CHUNKS = 16
"""Number of chunks that a program merges at a time."""
MERGE_WARPS = 4


@triton.jit
def _pages(table, block, n, end, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Load the cache block [N] of each key of a block, 0 from key ``end`` on."""
    page_N = tl.load(table + block * (BLOCK_N // PAGE) + n // PAGE, mask=block * BLOCK_N + n < end, other=0)
    return page_N.to(tl.int32)


@triton.jit
def _softmax_step(scores_MN, v_ND, acc_MD, sum_MS, top_M, PRECISION: tl.constexpr):
    """Add one block of keys to the running softmax and return (weighted values, sums of weights, maximum).

    All three are rescaled to the new maximum. A row that has not seen a key yet keeps a maximum of -inf and sums of
    zero. The sums of a row are one number, or one for each key of a block if they are not to be added up yet.
    """
    new_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    weights_MN = tl.math.exp2(scores_MN - finite_M[:, None])
    shrink_M = tl.math.exp2(top_M - finite_M)
    acc_MD = acc_MD * shrink_M[:, None]
    acc_MD = tl.dot(weights_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
    added_MS = weights_MN if sum_MS.shape[1] == weights_MN.shape[1] else tl.sum(weights_MN, 1, keep_dims=True)
    return acc_MD, sum_MS * shrink_M[:, None] + added_MS, new_M


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
def _highest_bit(word):
    """Return the number of the highest bit of a 64-bit word that is set, 0 if none is."""
    word = word.to(tl.uint64, bitcast=True)
    bit = 0
    for i in tl.static_range(6):
        bit = tl.where((word >> (bit + (32 >> i)).to(tl.uint64)) != 0, bit + (32 >> i), bit)
    return bit


@triton.jit(do_not_specialize=["tile_m"])
def _merge_chunks_kernel(
    pieces_WF,
    part_WKMD,
    lse_WKM,
    out_THD,
    tile_m,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Merge the rows of a tile that fall to piece w; the pieces of a cut tile share them evenly.

    Log-sum-exps and values of CHUNKS chunks are loaded together, 16 KiB a warp, and around the L1 cache: they are read
    once.
    """
    head, w = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    piece = pieces_WF + w * FIELDS
    wait(DEPENDENT)
    release(DEPENDENT)
    token, rows, chunk, chunks = tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 6), tl.load(piece + 7)
    if chunks <= 1:
        return
    begin = ((w - chunk).to(tl.int64) * kv_heads + head) * tile_m
    lse_CKM, part_CKMD = lse_WKM + begin, part_WKMD + begin * D
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, CHUNKS)
    for row in range(chunk * ROWS, rows * G, chunks * ROWS):
        row_R = row + tl.arange(0, ROWS)
        real_R = row_R < rows * G
        acc_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
        sum_R = tl.zeros([ROWS], tl.float32)
        top_R = tl.full([ROWS], float("-inf"), tl.float32)
        for start in range(0, chunks, CHUNKS):
            real_RC = real_R[:, None] & (start + c < chunks)[None, :]
            place_RC = row_R[:, None] + (start + c)[None, :] * (kv_heads * tile_m)
            place_RCD = place_RC[:, :, None] * D + d[None, None, :]
            inside = real_RC[:, :, None] & (d < D)[None, None, :]
            lse_RC = tl.load(lse_CKM + place_RC, mask=real_RC, other=float("-inf"), cache_modifier=".cg")
            part_RCD = tl.load(part_CKMD + place_RCD, mask=inside, other=0.0, cache_modifier=".cg")
            new_R = tl.maximum(top_R, tl.max(lse_RC, 1))
            finite_R = tl.where(new_R == float("-inf"), 0.0, new_R)
            weight_RC = tl.exp(lse_RC - finite_R[:, None])
            shrink_R = tl.exp(top_R - finite_R)
            acc_RD = acc_RD * shrink_R[:, None] + tl.sum(weight_RC[:, :, None] * part_RCD, 1)
            sum_R = sum_R * shrink_R + tl.sum(weight_RC, 1)
            top_R = new_R
        merged_RD = acc_RD / tl.where(sum_R == 0, 1.0, sum_R)[:, None]
        place_R = (token + row_R // G).to(tl.int64) * kv_heads * G + head * G + row_R % G
        place_RD = out_THD + place_R[:, None] * D + d[None, :]
        tl.store(place_RD, merged_RD.to(out_THD.dtype.element_ty), mask=real_R[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["table_BM", "ancestors_T", "table_stride"])
def _attend_kernel(
    q_THD,
    k_NPKD,
    v_NPKD,
    pieces_WF,
    table_BM,
    ancestors_T,
    out_THD,
    part_WKMD,
    lse_WKM,
    scale_log2,
    value_scale,
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
    TILE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend one piece of the plan for one key-value head."""
    # GPUs that know no fp8 get the bits.
    BITS: tl.constexpr = k_NPKD.dtype.element_ty == tl.uint8
    head, w = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    piece = pieces_WF + w * FIELDS
    wait(DEPENDENT)
    sequence, token, rows, row = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    begin, end, chunk, chunks = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7)
    prefix, start = tl.load(piece + 8), tl.load(piece + 9)
    # No field is negative; the test of all keeps the compiler from loading others after the first was waited for.
    any_negative = (sequence | token | row | begin | end | chunk | chunks | prefix | start) < 0
    first = tl.program_id(2) * BLOCK_M if BLOCK_M < TILE_M else 0
    if (rows * G <= first) | any_negative:
        return
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real_M = (m // G) < rows
    whole_MD = real_M[:, None] & (d < D)[None, :]
    token_M = (token + m // G).to(tl.int64)
    head_M = head * G + m % G
    place_M = token_M * kv_heads * G + head_M
    if chunks == 0:
        tl.store(out_THD + place_M[:, None] * D + d[None, :], tl.zeros([BLOCK_M, BLOCK_D], tl.float32), mask=whole_MD)
        return
    own_row_M = row + m // G
    ancestors_M = tl.load(ancestors_T + token_M, mask=real_M, other=0)
    query_M = token_M * q_token_stride + head_M * q_head_stride
    q_MD = tl.load(q_THD + query_M[:, None] + d[None, :], mask=whole_MD, other=0.0)
    table = table_BM + sequence.to(tl.int64) * table_stride
    k_head, v_head = k_NPKD + head.to(tl.int64) * head_stride, v_NPKD + head.to(tl.int64) * head_stride
    n = tl.arange(0, BLOCK_N)
    page_N, offset_N = _pages(table, begin, n, end, BLOCK_N, PAGE), (n % PAGE) * position_stride
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The keys of a small tile are spread over the warps, so that a sum within the loop would cost three barriers.
    sum_MS = tl.zeros([BLOCK_M, BLOCK_N if BLOCK_M <= 16 else 1], tl.float32)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)

    # Keys behind the last one that a row of the tile sees are not read: a weight of zero times garbage may be NaN.
    # The rows of a tile are all nodes of a tree or all of a chunk, which has no ancestors.
    anyone = tl.reduce_or(ancestors_M, 0)
    limit = prefix + tl.where(anyone == 0, row + rows, _highest_bit(anyone) + 1)
    for block in tl.range(begin, tl.cdiv(end, BLOCK_N)):
        key_N = block * BLOCK_N + n
        inside = (d < D)[None, :] & ((key_N >= start) & (key_N < limit))[:, None]
        row_N = page_N.to(tl.int64) * page_stride + offset_N
        # Numbers in fp8 are exact in the types of queries; their scales are those of scores and results.
        k_ND = _levels(tl.load(k_head + row_N[:, None] + d[None, :], mask=inside, other=0.0), q_MD.dtype, BITS)
        v_ND = _levels(tl.load(v_head + row_N[:, None] + d[None, :], mask=inside, other=0.0), q_MD.dtype, BITS)
        # The address of the next block, so that its loads need not wait for another load.
        page_N = _pages(table, block + 1, n, end, BLOCK_N, PAGE)
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
        # All rows see the whole of the other blocks.
        if (block * BLOCK_N < start) | ((block + 1) * BLOCK_N > prefix):
            visible_MN = _visible(key_N, prefix, start, ancestors_M, own_row_M, real_M)
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        acc_MD, sum_MS, top_M = _softmax_step(scores_MN, v_ND, acc_MD, sum_MS, top_M, PRECISION)

    release(DEPENDENT)
    sum_M = tl.sum(sum_MS, 1)
    values_MD = acc_MD / tl.where(sum_M == 0, 1.0, sum_M)[:, None]
    if k_NPKD.dtype.element_ty != q_THD.dtype.element_ty:
        values_MD *= value_scale
    if chunks == 1:
        tl.store(out_THD + place_M[:, None] * D + d[None, :], values_MD.to(out_THD.dtype.element_ty), mask=whole_MD)
    else:
        # Convert log2 to the natural logarithm: 0.6931... is log 2.
        lse_M = tl.where(sum_M == 0, float("-inf"), (top_M + tl.math.log2(sum_M)) * 0.6931471805599453)
        part_M = (w.to(tl.int64) * kv_heads + head) * TILE_M + m
        tl.store(part_WKMD + part_M[:, None] * D + d[None, :], values_MD, mask=whole_MD)
        tl.store(lse_WKM + part_M, lse_M, mask=real_M)


def attend(q_THD: Tensor, cache_2NPKD: Tensor, plan: Plan, scales: Scales = UNSCALED) -> Tensor:
    """Compute attended values [T, H, D] of every packed query; queries without a visible key yield zeros.

    Sums are fp32. ``cache_2NPKD`` is the cache of one layer and already holds the keys and values of this pass. Rows of
    D must be contiguous in it and in ``q_THD``. ``scales`` are those of a cache in fp8.
    """
    tokens, heads, size = q_THD.shape
    _, _, page, kv_heads, _ = cache_2NPKD.shape
    assert heads == kv_heads * plan.groups, "the plan was made for another grouping of heads"
    assert q_THD.stride(2) == cache_2NPKD.stride(4) == 1, "rows of D must be contiguous"
    assert page == plan.block_size, "the plan was made for another block size"
    assert BLOCK_N % page == 0, "a block of keys must be whole blocks of the cache"
    tile_m = max(triton.next_power_of_2(plan.tile_queries * plan.groups), 16)
    wide = q_THD.dtype == torch.float32
    block_m = min(tile_m, 64 if wide or not dispatch.is_hopper(q_THD) else 128)
    block_d = max(triton.next_power_of_2(size), 16)
    pieces = len(plan.pieces_WF)
    out_THD = torch.empty(tokens, heads, size, dtype=q_THD.dtype, device=q_THD.device)
    part_WKMD = torch.empty(pieces, kv_heads, tile_m, size, dtype=torch.float32, device=q_THD.device)
    lse_WKM = torch.empty(pieces, kv_heads, tile_m, dtype=torch.float32, device=q_THD.device)
    warps = WIDE_WARPS if block_m > 64 else 4
    shape = {"D": size, "G": plan.groups, "BLOCK_D": block_d, "FIELDS": FIELDS, **options(q_THD)}
    bits = cache_2NPKD.dtype == FP8 and not dispatch.has_fp8(q_THD)
    stored_2NPKD = cache_2NPKD.view(torch.uint8) if bits else cache_2NPKD
    _attend_kernel[(kv_heads, pieces, tile_m // block_m)](
        q_THD,
        stored_2NPKD[0],
        stored_2NPKD[1],
        plan.pieces_WF,
        plan.block_table_BM,
        plan.ancestors_T,
        out_THD,
        part_WKMD,
        lse_WKM,
        size**-0.5 * 1.4426950408889634 * scales.key,
        scales.value,
        *q_THD.stride()[:2],
        *cache_2NPKD.stride()[1:4],
        plan.block_table_BM.stride(0),
        PAGE=page,
        BLOCK_M=block_m,
        TILE_M=tile_m,
        BLOCK_N=BLOCK_N,
        PRECISION="tf32x3" if wide else "tf32",
        **shape,
        num_warps=warps,
        num_stages=_WIDE_STAGES if wide else STAGES,
    )
    rows = min(max(MERGE_WARPS * 32 * 128 // (CHUNKS * block_d), 1), 8)  # at most 128 registers of a thread
    _merge_chunks_kernel[(kv_heads, pieces)](
        plan.pieces_WF, part_WKMD, lse_WKM, out_THD, tile_m, ROWS=rows, CHUNKS=CHUNKS, **shape, num_warps=MERGE_WARPS
    )
    return out_THD
