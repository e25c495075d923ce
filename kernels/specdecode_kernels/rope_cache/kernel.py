"""Rotary embedding and KV cache write on a GPU: each query, key and value is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dependent import options, release, wait
from specdecode_kernels.quantised_linear.scaled_kernel import _to_fp8
from specdecode_kernels.rope_cache.reference import FP8, UNSCALED, Scales

_HEADS = 8
"""Number of heads that a program handles."""


@triton.jit
def _stored(x, inverse, dtype: tl.constexpr):
    """Return keys or values as the cache stores them: for fp8 the bits, divided by their scale, up to the largest."""
    if dtype == tl.uint8:
        return _to_fp8(tl.clamp(x.to(tl.float32) * inverse, -448.0, 448.0)).to(dtype)
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize=["positions_T", "slots_T"])
def _rope_cache_kernel(
    q_THD,
    k_TKD,
    v_TKD,
    cos_PD,
    sin_PD,
    positions_T,
    slots_T,
    k_NPKD,
    v_NPKD,
    out_THD,
    key_inverse,
    value_inverse,
    heads,
    kv_heads,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    position_stride,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process some heads of a token, counted through its queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    half = d < D // 2
    wait(DEPENDENT)
    release(DEPENDENT)
    slot = tl.load(slots_T + token)
    row = (slot // PAGE) * block_stride + (slot % PAGE) * position_stride
    place = tl.load(positions_T + token) * D + d
    cos = tl.load(cos_PD + place, mask=half, other=0.0).to(tl.float32)
    sin = tl.load(sin_PD + place, mask=half, other=0.0).to(tl.float32)

    query = (head < heads) & half
    key_head = head - heads
    key = (key_head >= 0) & (key_head < kv_heads) & half
    q_at = q_THD + token * q_stride + head * D + d
    k_at = k_TKD + token * k_stride + key_head * D + d
    a = tl.load(q_at, mask=query, other=0.0).to(tl.float32) + tl.load(k_at, mask=key, other=0.0).to(tl.float32)
    b = tl.load(q_at + D // 2, mask=query, other=0.0).to(tl.float32)
    b += tl.load(k_at + D // 2, mask=key, other=0.0).to(tl.float32)
    first, second = a * cos - b * sin, b * cos + a * sin
    out_at = out_THD + (token * heads + head) * D + d
    tl.store(out_at, first.to(out_THD.dtype.element_ty), mask=query)
    tl.store(out_at + D // 2, second.to(out_THD.dtype.element_ty), mask=query)
    cache_at = k_NPKD + row + key_head * D + d
    dtype: tl.constexpr = k_NPKD.dtype.element_ty
    tl.store(cache_at, _stored(first.to(k_TKD.dtype.element_ty), key_inverse, dtype), mask=key)
    tl.store(cache_at + D // 2, _stored(second.to(k_TKD.dtype.element_ty), key_inverse, dtype), mask=key)

    value_head = head - heads - kv_heads
    value = (value_head >= 0) & (value_head < kv_heads) & half
    v_at = v_TKD + token * v_stride + value_head * D + d
    cache_at = v_NPKD + row + value_head * D + d
    tl.store(cache_at, _stored(tl.load(v_at, mask=value, other=0.0), value_inverse, dtype), mask=value)
    v_second = tl.load(v_at + D // 2, mask=value, other=0.0)
    tl.store(cache_at + D // 2, _stored(v_second, value_inverse, dtype), mask=value)


def rope_cache(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache_2NPKD: Tensor,
    scales: Scales = UNSCALED,
) -> Tensor:
    """Return the rotated queries; write rotated keys, and values, to the cache.

    The heads of a token must be contiguous, in the cache as in q, k and v, which may be parts of one wider tensor. D is
    even.
    """
    tokens, heads, size = q_THD.shape
    kv_heads, page = k_TKD.shape[1], cache_2NPKD.shape[2]
    for x in (q_THD, k_TKD, v_TKD, cache_2NPKD):
        assert x.stride()[-2:] == (size, 1), "heads of a token must lie behind each other"
    assert cos_PD.is_contiguous(), "tables are contiguous"
    assert sin_PD.is_contiguous(), "tables are contiguous"
    stored_2NPKD = cache_2NPKD.view(torch.uint8) if cache_2NPKD.dtype == FP8 else cache_2NPKD
    out_THD = torch.empty(tokens, heads, size, dtype=q_THD.dtype, device=q_THD.device)
    if tokens:
        _rope_cache_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
            q_THD,
            k_TKD,
            v_TKD,
            cos_PD,
            sin_PD,
            positions_T,
            slots_T,
            stored_2NPKD[0],
            stored_2NPKD[1],
            out_THD,
            1 / scales.key,
            1 / scales.value,
            heads,
            kv_heads,
            q_THD.stride(0),
            k_TKD.stride(0),
            v_TKD.stride(0),
            *cache_2NPKD.stride()[1:3],
            D=size,
            PAGE=page,
            HEADS=_HEADS,
            BLOCK=triton.next_power_of_2(size // 2),
            num_warps=2,
            **options(q_THD),
        )
    return out_THD
